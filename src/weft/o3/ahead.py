"""Rows of the next edge on their way to L2 while an edge is computed: no register waits for them.

A warp computes an edge for microseconds and first waits for its weights, which come from memory;
few warps are there to take turns, since each holds hundreds of numbers.  So it asks for those of
the next edge before: one instruction for 32 lines, one a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["Fetch", "asked", "fetches", "lines", "places"]

LANES = 32

LINE = 32
"""Numbers of float32 that one thread asks for."""


class Fetch(NamedTuple):
    """Lines of a row that are asked for at once.

    Args:
        tensor: the name of its pointer.
        width: numbers in a row.
        columns: where each line begins.
        own: whether each block of channels has lines of its own.
    """

    tensor: str
    width: int
    columns: tuple[int, ...]
    own: bool


def lines(begins: Iterable[int], length: int) -> tuple[int, ...]:
    """Where lines begin that cover `length` numbers from each of `begins` on."""
    return tuple(begin + n for begin in begins for n in range(0, length, LINE))


def fetches(tensor: str, width: int, columns: Sequence[int], own: bool) -> Iterator[Fetch]:
    """The instructions for lines of a row."""
    for first in range(0, len(columns), LANES):
        yield Fetch(tensor, width, tuple(columns[first : first + LANES]), own)


def places(found: Sequence[Fetch]) -> Iterator[str]:
    """Lines of a kernel that tell each thread its column, once."""
    if found:
        yield f"fetcher = tl.arange(0, {LANES})"
    for n, fetch in enumerate(found):
        yield f"fetch{n} = fetcher * 0 + {fetch.columns[0]}"
        for thread, column in enumerate(fetch.columns[1:], 1):
            yield f"fetch{n} = tl.where(fetcher >= {thread}, {column}, fetch{n})"
        if fetch.own:
            yield f"fetch{n} = fetch{n} + block * BLOCK"


def asked(found: Sequence[Fetch]) -> Iterator[str]:
    """Lines of a kernel that ask for the rows of the edge behind p, at most of the row's last."""
    if found:
        yield "ahead = tl.cast(tl.minimum(p + 1, last - 1), tl.int64)"
    for n, fetch in enumerate(found):
        yield f"fetched({fetch.tensor} + ahead * {fetch.width} + fetch{n})"
