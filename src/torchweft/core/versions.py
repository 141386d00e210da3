"""Tested versions of other packages.  Imports none of them: `torchweft doctor` needs none."""

from __future__ import annotations

import re

__all__ = ["FAST_LAUNCH", "RANGES", "is_tested", "launches_fast"]

RANGES = {
    "torch": ((2, 11), (2, 13)),
    "triton": ((3, 6), (3, 9)),
    "numba": ((0, 68), (0, 68)),
}
"""First and last tested version, (major, minor).  `.ci/newest` tests the newest Triton."""

FAST_LAUNCH = ((3, 6),)
"""Triton versions whose stages and machine code core/gpu supports: kernels are compiled without
Triton's driver, cached on disk by torchweft and launched through CUDA's driver.  Other versions of
Triton compile, cache and launch themselves: the same results, later."""


def is_tested(package: str, version: str) -> bool:
    """Whether a version of a package is within the range that was tested."""
    first, last = RANGES[package]
    return first <= _minor(version) <= last


def launches_fast(triton: str) -> bool:
    """Whether kernels are launched without Triton's own launcher, for a version of Triton."""
    return _minor(triton) in FAST_LAUNCH


def _minor(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)
