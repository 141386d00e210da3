"""Planted bugs, one text of the sources exchanged for another, that the short suite must catch.

A mutant names the tests that are known to fail with it, so that it takes seconds.  Its text is
looked for in all of src/torchweft and must stand there exactly once: files may move.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Mutant"]


class Mutant(NamedTuple):
    """One planted bug."""

    name: str
    old: str  # stands once in the sources
    new: str
    tests: str  # arguments of pytest: files, -k
    kernels: bool = False  # whether the tests run in Triton's interpreter
