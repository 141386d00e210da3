"""Parts that lie in columns of the gradient of weights which later kernels write.

What an edge adds to its row of x waits in memory until it is summed.  Where several kernels share
the paths, each writes columns of its own in every row of the gradient of weights: until the last
one has run, some are free.

    kernel 1 writes its columns of w, and parts in those of kernels 2 and 3;  its parts are summed
    kernel 2 writes its own, and parts in those of kernel 3;  …

Only the parts that find no room have memory of their own: mostly those of the last kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["Room", "lend"]


class Room(NamedTuple):
    """Where the parts of a kernel lie.

    Args:
        kernel: its number.
        begins: the first column of each part.
        lent: whether they are columns of the gradient of weights, not of memory of their own.
    """

    kernel: int
    begins: tuple[int, ...]
    lent: bool


def lend(wanted: Sequence[Sequence[int]], given: Sequence[Iterable[int]]) -> list[Room]:
    """The rooms of kernels in the order in which they run, those in memory of their own last.

    Args:
        wanted: for each kernel, how many columns each of its parts takes, side by side.
        given: for each, the columns that it writes.
    """
    columns = [frozenset(own) for own in given]
    left = list(range(len(wanted)))
    found: list[Room] = []
    while left:
        rooms = []
        for n in left:
            begins = _placed(wanted[n], (c for k in left if k != n for c in columns[k]))
            rooms += [] if begins is None else [Room(n, begins, True)]
        if not rooms:
            break
        found.append(max(rooms, key=lambda room: sum(wanted[room.kernel])))
        left.remove(found[-1].kernel)
    end = 0
    for n in left:
        ends = list(itertools.accumulate(wanted[n], initial=end))
        found.append(Room(n, tuple(ends[:-1]), False))
        end = ends[-1]
    return found


def _placed(sizes: Iterable[int], free: Iterable[int]) -> tuple[int, ...] | None:
    """Where parts begin in free columns; None: there is no room for all."""
    rooms = list(_runs(free))
    begins = []
    for size in sizes:
        at = next((i for i, (begin, end) in enumerate(rooms) if end - begin >= size), None)
        if at is None:
            return None
        begin, end = rooms[at]
        begins.append(begin)
        rooms[at] = begin + size, end
    return tuple(begins)


def _runs(columns: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(begin, end) of columns that stand side by side."""
    for _, same in itertools.groupby(enumerate(sorted(columns)), lambda item: item[1] - item[0]):
        run = [column for _, column in same]
        yield run[0], run[-1] + 1
