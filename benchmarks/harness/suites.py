"""Finds suites and peers: modules of the folders beside this one."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

from benchmarks.harness.case import Case, Peer
from torchweft.errors import WeftError

__all__ = ["FOLDER", "Suite", "load_peers", "load_suite", "suite_names"]

FOLDER = Path(__file__).parents[1]
"""The folder `benchmarks`."""

PEERS = (
    "torch_eager",
    "torch_compile",
    "torch_segments",
    "cuequivariance",
    "openequivariance",
    "luna",
    "fastmace",
    "e3nn",
    "flash_clifford",
    "gatr",
    "lgatr",
    "spconv",
    "spconv_triton",
    "flexgemm",
    "pykeops",
    "flashlib",
    "flash_sinkhorn",
)
"""In the order in which tables show them."""


class Suite(NamedTuple):
    """Cases of one family."""

    name: str
    family: str
    cases: tuple[Case, ...]


def suite_names(device: str | None = None) -> list[str]:
    """The suites that there are, or those for a type of device: files of benchmarks/suites."""
    names = sorted(path.stem for path in (FOLDER / "suites").glob("*.py"))
    return [n for n in names if device is None or n.endswith("cpu") == (device == "cpu")]


def load_suite(name: str, only: str | None = None) -> Suite:
    """A suite, or those of its cases whose name contains `only`.

    Raises:
        WeftError: there is no such suite or case.
    """
    if name not in suite_names():
        raise WeftError(
            f"the suite is {name!r}: it must be one of {', '.join(suite_names())}, or all. "
            "Name one of these; a part of a suite is chosen by --case."
        )
    module = importlib.import_module(f"benchmarks.suites.{name}")
    all_cases: Sequence[Case] = module.CASES
    cases = tuple(case for case in all_cases if only is None or only in case.name)
    if not cases:
        raise WeftError(
            f"no case of suite {name!r} has {only!r} in its name: its cases are "
            f"{', '.join(case.name for case in all_cases)}. Name one of these, or a part."
        )
    return Suite(name, module.FAMILY, cases)


def load_peers() -> list[Peer]:
    """The adapters in benchmarks/peers."""
    return [cast(Peer, importlib.import_module(f"benchmarks.peers.{name}")) for name in PEERS]
