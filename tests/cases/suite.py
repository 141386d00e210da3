"""What a family registers: its cases, by the promises they are checked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchweft.testing.contract import Case

__all__ = ["Suite", "joined"]


class Suite(NamedTuple):
    """The contract cases of one family."""

    cases: list[Case]  # values and derivatives, in every dtype
    full: list[Case]  # every promise of a body: layouts, repeatability, subsets, index types
    small: list[Case]  # numerical gradients
    doors: list[Case]  # compile, export, transforms, ...
    large: tuple[Callable[[str], None], ...]  # offsets past 2^31, many edges: on a GPU
    single: Sequence[Case] = ()  # values and derivatives, in float32 alone
    backends: tuple[str, ...] = ("numba", "torch")  # of the CPU
    autocast: bool = True  # whether it computes in the low precision under autocast


def joined(*suites: Suite) -> Suite:
    """The cases of several parts of a family; how they are run is said by the first."""
    return suites[0]._replace(
        cases=[case for s in suites for case in s.cases],
        full=[case for s in suites for case in s.full],
        small=[case for s in suites for case in s.small],
        doors=[case for s in suites for case in s.doors],
        large=tuple(check for s in suites for check in s.large),
        single=[case for s in suites for case in s.single],
    )
