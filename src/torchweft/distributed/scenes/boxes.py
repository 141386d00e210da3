"""A box of a scene for each rank, cut by recursive bisection of the voxels' coordinates.

A cut costs what the larger side gives each of its ranks, and the rows next to the cut, which the
other side reads: it is made where that is least, along any column.  Between samples nothing is
read.  Boxes reach to the ends of space, so that every voxel of every stride is in one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.collectives import Group, all_sum, largest

__all__ = ["END", "Box", "bisected"]

END = 2**62
"""Beyond every coordinate."""
MOST_PLACES = 2**14
"""Most places along a column where a cut is tried."""


class Box(NamedTuple):
    """Voxels low ≤ v < end, by column: the sample, then the axes."""

    low: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Whether no voxel is inside."""
        return any(a >= b for a, b in zip(self.low, self.end, strict=True))

    def at(self, stride: Sequence[int]) -> Box:
        """The voxels of a stride whose lowest corner is in this box of finest voxels."""
        steps = (1, *stride)
        low, end = (
            tuple(n if abs(n) == END else -(-n // s) for n, s in zip(side, steps, strict=True))
            for side in self
        )
        return Box(low, end)

    def meets(self, other: Box) -> bool:
        """Whether a voxel can be in both."""
        lows, ends = zip(self.low, other.low, strict=True), zip(self.end, other.end, strict=True)
        return not Box(tuple(map(max, lows)), tuple(map(min, ends))).empty

    def holds(self, rows: Tensor) -> Tensor:
        """(n,) bool: which rows (n, 1 + d) are inside."""
        inside = rows.new_full((len(rows),), not self.empty, dtype=torch.bool)
        for values, low, end in zip(rows.unbind(1), *self, strict=True):
            if low > -END:
                inside &= values >= low
            if end < END:
                inside &= values < end
        return inside

    def divided(self, column: int, at: int) -> tuple[Box, Box]:
        """Below and from a place on."""
        low, end = list(self.low), list(self.end)
        low[column] = end[column] = at
        return Box(self.low, tuple(end)), Box(tuple(low), self.end)


def bisected(
    rows: Tensor,
    parts: int,
    steps: Sequence[int],
    blocks: Sequence[int],
    group: Group | None,
    spread: bool,
) -> list[Box]:
    """A box for each of `parts` ranks.

    Args:
        rows: (n, columns) int64, voxels of the finest stride.
        parts: number of boxes; those that are left over are empty.
        steps: distance of neighbouring voxels by column, 0 where none is read.
        blocks: cuts lie at multiples, by column.
        group: the ranks.
        spread: whether each rank has other rows, all of which are cut.
    """
    everywhere = Box((-END,) * rows.shape[1], (END,) * rows.shape[1])
    return _Cutter(tuple(steps), tuple(blocks), group, spread).boxes(rows, everywhere, parts)


class _Cutter(NamedTuple):
    steps: tuple[int, ...]
    blocks: tuple[int, ...]
    group: Group | None
    spread: bool

    def boxes(self, rows: Tensor, box: Box, parts: int) -> list[Box]:
        if parts == 1:
            return [box]
        few = parts // 2
        cut = self._cut(rows, few, parts - few)
        if cut is None:
            return [*self.boxes(rows, box, few), *[Box(box.end, box.end)] * (parts - few)]
        column, at = cut
        below = rows[:, column] < at
        first, second = box.divided(column, at)
        return [
            *self.boxes(rows[below], first, few),
            *self.boxes(rows[~below], second, parts - few),
        ]

    def _cut(self, rows: Tensor, few: int, more: int) -> tuple[int, int] | None:
        """The cheapest (column, place); None where all rows are in one block."""
        best: tuple[float, int, int] | None = None
        lows, highs = self._extremes(rows)
        for column, (low, high) in enumerate(zip(lows, highs, strict=True)):
            block = self.blocks[column]
            while high // block - low // block >= MOST_PLACES:
                block *= 2
            first, last = low // block, high // block
            if first >= last:
                continue
            below, beside = self._counts(rows[:, column], block, first, last, self.steps[column])
            above = below[-1] - below[:-1]
            cost = torch.maximum(below[:-1] / few, above / more) + beside
            at = int(cost.argmin())
            found = float(cost[at]), column, (first + 1 + at) * block
            best = found if best is None else min(best, found)
        return None if best is None else best[1:]

    def _extremes(self, rows: Tensor) -> tuple[list[int], list[int]]:
        """The least and the largest value of each column; crossed where there are no rows."""
        if len(rows):
            found = torch.cat([-rows.amin(0), rows.amax(0)])
        else:
            found = rows.new_full((2 * rows.shape[1],), -END)
        if self.spread:
            found = largest(found, self.group)
        lows, highs = found.tolist()[: rows.shape[1]], found.tolist()[rows.shape[1] :]
        return [-n for n in lows], highs

    def _counts(
        self, values: Tensor, block: int, first: int, last: int, step: int
    ) -> tuple[Tensor, Tensor]:
        """(blocks,) rows up to the end of each, and (blocks − 1,) rows beside each cut."""
        place, many = values.div(block, rounding_mode="floor") - first, last - first + 1
        inside = values % block
        sides = (inside < step) + 2 * (inside >= block - step)  # a row may be beside two cuts
        counts = torch.bincount(4 * place + sides, minlength=4 * many)
        if self.spread:
            counts = all_sum(counts, self.group)
        neither, low, high, both = counts.cpu().view(many, 4).unbind(1)
        below = (neither + low + high + both).cumsum(0)
        return below, (high + both)[:-1] + (low + both)[1:]
