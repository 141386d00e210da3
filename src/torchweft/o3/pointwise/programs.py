"""Programs of one row, by keys that begin with what they compute."""

from __future__ import annotations

import functools

from torchweft.core.expressions.program import Program, derive
from torchweft.o3.pointwise import harmonics as harmonics_program
from torchweft.o3.pointwise import radial as radial_programs

__all__ = ["program", "used"]

_ROOTS = {
    "harmonics": harmonics_program.root,
    "bessel": radial_programs.bessel,
    "cutoff": radial_programs.cutoff,
}


@functools.lru_cache(maxsize=1024)
def program(name: str) -> Program:
    """The program with a key, or derived from it."""
    return derive(name, lambda key: _ROOTS[key.partition(" ")[0]](key))


@functools.lru_cache(maxsize=1024)
def used(name: str) -> tuple[bool, ...]:
    """Which inputs of a program its results depend on."""
    return program(name).reads()
