"""Clouds cut into bricks of equally many points, and masks of the bricks that meet.

A cloud is sorted into slabs along its first coordinate, each of these along the second, each of
those along the third, so that brick k is k n ≤ i < (k + 1) n of the sorted points.  How many
bricks there are is known without waiting for the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.reductions.cluster.sparsity import BlockSparsity

__all__ = ["all_pairs", "brick_order", "kept_pairs", "partners", "parts_of"]


def parts_of(extents: Sequence[float], count: int) -> tuple[list[int], float]:
    """Into how many parts each coordinate is cut, and the edge: bricks are about cubes.

    Args:
        extents: of the cloud, by coordinate.
        count: bricks; the last coordinate is cut until there are so many.
    """
    wide = [e for e in extents if e > 0]
    edge = 0.0
    while wide:
        edge = (math.prod(wide) / count) ** (1 / len(wide))
        thin = [e for e in wide if e < edge]
        if not thin:
            break
        wide = [e for e in wide if e >= edge]
    parts = [max(1, round(e / edge)) if e in wide else 1 for e in extents[:-1]]
    return [*parts, -(-count // math.prod(parts))], edge


def brick_order(x: Tensor, size: int, parts: Sequence[int]) -> Tensor:
    """The order of the points (N, D) in bricks of `size`; points that are equal keep theirs."""
    count = len(x)
    order = torch.arange(count, device=x.device)
    for k, column in enumerate(x.unbind(1)):
        slab = size * math.prod(parts[k:])
        more = -count % slab
        keys = pad(column.index_select(0, order), (0, more), value=torch.inf).view(-1, slab)
        inside = keys.argsort(dim=1, stable=True)
        order = pad(order, (0, more)).view(-1, slab).gather(1, inside).view(-1)[:count]
    return order


def all_pairs(rows: Sequence[int], columns: Sequence[int], device: torch.device) -> BlockSparsity:
    """Each group of rows sees all of its columns.

    Args:
        rows: sizes of the groups of rows, which stand one after the other.
        columns: those of columns; the group that rows g see is that of `partners`.
        device: of the mask.
    """
    ends = torch.arange(1, len(rows) + 1, device=device)
    (one, one_seen), (other, other_seen) = (_stretches(sizes, device) for sizes in (rows, columns))
    return BlockSparsity((one, ends, other_seen, other, ends, one_seen))


def kept_pairs(keep: Tensor, bounds: Tensor, seen: Tensor) -> BlockSparsity:
    """The bricks that meet, those which follow each other as one interval.

    Args:
        keep: (G, C, C) bricks of group g by those of its partner; symmetric, so that rows and
            columns have the same lists.
        bounds: (G, C + 1) where the bricks of each group begin and end.
        seen: (G,) the partners of the groups.
    """
    rows = torch.stack((bounds[:, :-1], bounds[:, 1:]), 2).view(-1, 2)
    edges = pad(keep, (1, 0)) ^ pad(keep, (0, 1))  # [G, C, C + 1]: begins and ends by turns
    group, _, place = edges.nonzero().unbind(1)
    other = bounds.index_select(0, seen).view(-1)
    intervals = other.index_select(0, group * bounds.shape[1] + place).view(-1, 2)
    ends = edges.view(len(rows), -1).sum(1).cumsum(0) // 2
    return BlockSparsity((*(rows, ends, intervals), *(rows, ends, intervals)))


def partners(groups: int) -> list[int]:
    """The group that each one sees: the first two each other, others themselves."""
    return [1, 0, *range(2, groups)]


def _stretches(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(G, 2) where groups begin and end, and where those that they see do."""
    ends = [0, *itertools.accumulate(sizes)]
    found = [*itertools.pairwise(ends)]
    seen = [found[group] for group in partners(len(sizes))]
    return torch.tensor(found, device=device), torch.tensor(seen, device=device)
