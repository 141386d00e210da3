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
MOST_PLACES = 2**12
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


class _Part(NamedTuple):
    """A box that still has to be divided, and the number of ranks for it."""

    box: Box
    ranks: int


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

    Cost: a pass over the rows for each doubling of the parts, for which the host waits.
    """
    low, end = (-END,) * rows.shape[1], (END,) * rows.shape[1]
    if parts == 1:
        return [Box(low, end)]
    given = rows, group, spread
    lows, highs = _extremes(*given)
    cutter = _Cutter.over(lows, highs, tuple(steps), tuple(blocks))
    found, owner = [_Part(Box(low, end), parts)], rows.new_zeros(len(rows))
    while max(part.ranks for part in found) > 1:
        counts = cutter.counts(*given, owner, len(found))
        pairs = zip(found, counts, strict=True)
        cuts = [cutter.cut(each, part.ranks) if part.ranks > 1 else None for part, each in pairs]
        divided = [_divided(part, cut) for part, cut in zip(found, cuts, strict=True)]
        owner = _moved(rows, owner, cuts, [len(each) for each in divided])
        found = [part for each in divided for part in each]
    return [part.box for part in found]


Cut = tuple[int, int]
"""A column, and the first value above the cut."""


def _divided(part: _Part, cut: Cut | None) -> list[_Part]:
    """A part on both sides of a cut; without one, ranks that are left over have empty boxes."""
    box, ranks = part
    if ranks == 1:
        return [part]
    few = ranks // 2
    if cut is None:
        return [_Part(box, few), *[_Part(Box(box.end, box.end), 1)] * (ranks - few)]
    below, above = box.divided(*cut)
    return [_Part(below, few), _Part(above, ranks - few)]


def _moved(rows: Tensor, owner: Tensor, cuts: Sequence[Cut | None], sizes: Sequence[int]) -> Tensor:
    """The part of each row after parts were divided into so many."""
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    columns, places = zip(*[(0, END) if cut is None else cut for cut in cuts], strict=True)
    of_parts = torch.tensor([first, columns, places], device=rows.device)
    begin, column, place = of_parts[:, owner]
    above: Tensor = rows.gather(1, column[:, None]).squeeze(1) >= place
    found: Tensor = begin + above
    return found


def _extremes(rows: Tensor, group: Group | None, spread: bool) -> tuple[list[int], list[int]]:
    """The least and the largest value of each column; crossed where there are no rows."""
    columns = rows.shape[1]
    if len(rows):
        found = torch.cat([-rows.amin(0), rows.amax(0)])
    else:
        found = rows.new_full((2 * columns,), -END)
    if spread:
        found = largest(found, group)
    numbers = found.tolist()
    return [-n for n in numbers[:columns]], numbers[columns:]


class _Cutter(NamedTuple):
    """Blocks of values of each column, between which cuts are tried.

    Args:
        steps: distance of neighbouring voxels.
        blocks: values of a block.
        first: number of the first block.
        many: number of blocks, none where a column has no place for a cut.
    """

    steps: tuple[int, ...]
    blocks: tuple[int, ...]
    first: tuple[int, ...]
    many: tuple[int, ...]

    @classmethod
    def over(
        cls,
        lows: Sequence[int],
        highs: Sequence[int],
        steps: tuple[int, ...],
        blocks: Sequence[int],
    ) -> _Cutter:
        """Blocks from the least to the largest value, at most MOST_PLACES."""
        wide = list(blocks)
        for column, (low, high) in enumerate(zip(lows, highs, strict=True)):
            while high // wide[column] - low // wide[column] >= MOST_PLACES:
                wide[column] *= 2
        first = tuple(low // block for low, block in zip(lows, wide, strict=True))
        last = [high // block for high, block in zip(highs, wide, strict=True)]
        many = tuple(max(b - a + 1, 0) for a, b in zip(first, last, strict=True))
        return cls(steps, tuple(wide), first, tuple(n if n > 1 else 0 for n in many))

    def counts(
        self, rows: Tensor, group: Group | None, spread: bool, owner: Tensor, parts: int
    ) -> Tensor:
        """(parts, blocks of all columns, 4) rows by block, and by the sides that they are beside.

        Neither side, the low one, the high one, both.
        """
        every, before = sum(self.many), 0
        places = [owner.new_empty(0)]
        for column, many in enumerate(self.many):
            if many:
                values, block, step = rows[:, column], self.blocks[column], self.steps[column]
                place = values.div(block, rounding_mode="floor") - self.first[column] + before
                inside = values % block
                sides = (inside < step) + 2 * (inside >= block - step)  # may be beside two cuts
                places.append(4 * (every * owner + place) + sides)
                before += many
        found = torch.bincount(torch.cat(places), minlength=4 * every * parts)
        if spread:
            found = all_sum(found, group)
        return found.cpu().view(parts, every, 4)

    def cut(self, counts: Tensor, ranks: int) -> Cut | None:
        """The cheapest cut of a part with (blocks, 4) rows; None where they are in one block."""
        few = ranks // 2
        best: tuple[float, int, int] | None = None
        for column, found in enumerate(torch.split(counts, list(self.many))):
            used = found.sum(1).nonzero().squeeze(1).tolist()
            if len(used) < 2:
                continue
            neither, low, high, both = found[used[0] : used[-1] + 1].unbind(1)
            below = (neither + low + high + both).cumsum(0)
            beside = (high + both)[:-1] + (low + both)[1:]
            above = below[-1] - below[:-1]
            cost = torch.maximum(below[:-1] / few, above / (ranks - few)) + beside
            at = int(cost.argmin())
            place = (self.first[column] + used[0] + 1 + at) * self.blocks[column]
            mine = float(cost[at]), column, place
            best = mine if best is None else min(best, mine)
        return None if best is None else best[1:]
