"""Rows on their way to L2 before they are read: no register waits for them.

A warp computes an edge for microseconds and first waits for its weights, which come from memory;
few warps are there to take turns, since each holds hundreds of numbers.  So it asks for those of
the next edge before: one instruction for 32 lines, one a thread.  Where rows have few edges, it
waits for the row itself, which each path reads as it comes: it asks for that at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchweft.o3.channelwise.gpu.lane_sums import LANES
from torchweft.o3.channelwise.structure import Block

__all__ = ["Fetch", "asked", "covered", "fetches", "places"]

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


def covered(blocks: Sequence[Block], channels: int) -> tuple[int, ...]:
    """Where lines begin that cover blocks: `channels` of them if neighbours, or what they share."""
    steps = {block.channel_step for block in blocks}
    begins = [b.offset + c * b.step for b in blocks for c in range(b.components)]
    if steps == {1}:
        return tuple(begin + n for begin in begins for n in range(0, channels, LINE))
    return tuple(range(begins[0], begins[-1] + 1, LINE)) if steps == {0} else ()


def fetches(tensor: str, width: int, columns: Sequence[int], own: bool) -> Iterator[Fetch]:
    """The instructions for lines of a row."""
    for first in range(0, len(columns), LANES):
        yield Fetch(tensor, width, tuple(columns[first : first + LANES]), own)


def places(found: Sequence[Fetch]) -> Iterator[str]:
    """Lines of a kernel that tell each thread its column, once, by its number `thread`."""
    for n, fetch in enumerate(found):
        yield f"fetch{n} = thread * 0 + {fetch.columns[0]}"
        for thread, column in enumerate(fetch.columns[1:], 1):
            yield f"fetch{n} = tl.where(thread >= {thread}, {column}, fetch{n})"
        if fetch.own:
            yield f"fetch{n} = fetch{n} + block * BLOCK"


def asked(found: Sequence[Fetch], row: str) -> Iterator[str]:
    """Lines of a kernel that ask for a row."""
    for n, fetch in enumerate(found):
        yield f"fetched({fetch.tensor} + {row} * {fetch.width} + fetch{n})"
