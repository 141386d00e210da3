"""Sums over the channels of a program of many values at once, each of which ends in its own thread.

A sum over 32 threads takes 5 exchanges.  Two sums begin with one: a thread keeps its number of the
one, hands over that of the other, and then there are half as many sums over half as many threads.
So 16 values take 16 exchanges instead of 80, and one store instead of 16.  In a tile of edges each
has threads of its own, LANES or a multiple.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["LANES", "NUMBERS", "Value", "summed"]

LANES = 32
"""Threads that have a part of a sum, and values that are summed together."""

NUMBERS = (
    "number = (thread >> 4) & 1 | (thread >> 2) & 2 | thread & 4",  # its bits in reverse
    "number = number | (thread << 2) & 8 | (thread << 4) & 16",
)
"""What `summed` needs once in a kernel, beside `thread` and `halved` of `kernels`."""


class Value(NamedTuple):
    """What is summed: its name, the pointer to the row that takes the sum, and the column there."""

    name: str
    row: str
    column: int


def summed(values: Sequence[Value], block: int, flat: bool) -> Iterator[str]:
    """Lines that sum values over `block` channels, LANES or twice as many, and store the sums.

    Values have one axis, that of channels, if `flat`, else one of edges before; then rows and
    `live`, which tells the edges that are there, have one number for each edge.
    """
    for begin in range(0, len(values), LANES):
        part = values[begin : begin + LANES]
        yield from _halved([value.name for value in part], block // LANES, flat)
        for first, last in _runs(part):
            masks = f"(number >= {first}) & (number < {last}){'' if flat else ' & live'}"
            address = f"{part[first].row} + {part[first].column - first} + number"
            yield f"tl.store({address}, total, mask={masks}, cache_modifier='.cs')"


def _halved(names: list[str], each: int, flat: bool) -> Iterator[str]:
    """total: the sum of value `number`, in those threads whose number is a value's."""
    edges, axis = ("", 0) if flat else ("EDGES, ", 1)
    if each > 1:
        shape = f"({edges}{LANES}, {each})"
        names = [f"tl.sum(tl.reshape({name}, {shape}), {axis + 1})" for name in names]
    bit = LANES // 2
    while len(names) > 1:
        pairs = list(itertools.zip_longest(names[::2], names[1::2]))
        names = [f"c{bit}_{n}" for n in range(len(pairs))]
        for name, (a, b) in zip(names, pairs, strict=True):
            yield f"{name} = halved({a}, {b or a}, thread, {bit}, {axis})"
        bit //= 2
    yield f"total = {names[0]}"
    while bit:
        yield f"total = total + tl.gather(total, thread ^ {bit}, {axis})"
        bit //= 2


def _runs(values: Sequence[Value]) -> Iterator[tuple[int, int]]:
    """(first, last) of values that stand side by side in one row."""
    places = [(value.row, value.column - n) for n, value in enumerate(values)]
    first = 0
    for _, same in itertools.groupby(places):
        last = first + len(list(same))
        yield first, last
        first = last
