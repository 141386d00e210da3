"""Blocks of pairs cut into tasks for the programs of a kernel, on the device and without waiting.

    tiles      rows of one block, at most so many: (first task, last task, first row, last row)
    tasks      a tile by a stretch of its list of columns: (first row, last row, first interval,
               last interval, first place, last place)
    intervals  (first column, last column, place)

A place counts columns through all lists, one list after the other.  Neighbouring intervals of a
list that touch become one.  How many tiles and tasks there are is known to the device alone: tables
have the length that is enough, what is left over has no rows.  Lists are cut so that no task is
longer than its share of all columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft.core.cache import TensorCache
from weft.reductions.ranges import Blocks

__all__ = ["Tasks", "tasks"]


class Tasks(NamedTuple):
    """int64 tables, contiguous: (tiles, 4), (tasks, 6), (intervals, 3)."""

    tiles: Tensor
    tasks: Tensor
    intervals: Tensor


_cache: TensorCache[Tasks] = TensorCache()


def tasks(blocks: Blocks, rows: int, height: int, share: int, least: int) -> Tasks:
    """The tasks of blocks, kept as long as these.

    Args:
        blocks: the pairs.
        rows: of the result.
        height: rows of a tile.
        share: tasks that there should be, for work that is not cut by its tiles already.
        least: columns of a task that is cut.
    """
    key = (rows, height, share, least)
    return _cache.get(tuple(blocks), key, lambda: _cut(blocks, *key))


def _cut(blocks: Blocks, rows: int, height: int, share: int, least: int) -> Tasks:
    starts, ends, indptr, first, last = _joined(blocks)
    before = _before(last - first)
    most = len(starts) + rows // height
    tile_before = _before((ends - starts + height - 1) // height)
    tile, block, real = _owners(tile_before, most)
    first_row = torch.where(real, starts[block] + (tile - tile_before[block]) * height, 0)
    last_row = torch.where(real, torch.minimum(first_row + height, ends[block]), 0)
    begin, end = before[indptr[block]], before[indptr[block + 1]]
    work = torch.where(real, end - begin, 0)
    piece = ((work.sum() + share - 1) // share).clamp(min=least)
    task_before = _before(torch.where(real, ((work + piece - 1) // piece).clamp(min=1), 0))
    tiles = torch.stack((task_before[:-1], task_before[1:], first_row, last_row), 1)

    task, tile, real = _owners(task_before, most + share)
    place = begin[tile] + (task - task_before[tile]) * piece
    last_place = torch.minimum(place + piece, end[tile])
    first_interval = torch.searchsorted(before, place, right=True) - 1
    last_interval = torch.searchsorted(before, last_place)
    columns = (first_row[tile], last_row[tile], first_interval, last_interval, place, last_place)
    table = torch.where(real[:, None], torch.stack(columns, 1), 0)
    return Tasks(tiles, table.contiguous(), torch.stack((first, last, before[:-1]), 1))


def _joined(blocks: Blocks) -> Blocks:
    """The same pairs with intervals that touch made one; what is left over is empty, at the end."""
    starts, ends, indptr, first, last = blocks
    count = len(first)
    if count < 2:
        return blocks
    number = torch.arange(count, device=first.device)
    owner = torch.searchsorted(indptr[1:], number, right=True)
    begins = torch.ones_like(number, dtype=torch.bool)
    begins[1:] = (owner[1:] != owner[:-1]) | (first[1:] != last[:-1])
    run = begins.cumsum(0) - 1
    empty = torch.zeros_like(first)
    return Blocks(
        starts,
        ends,
        _before(begins)[indptr],
        empty.scatter_reduce(0, run, first, "amin", include_self=False),
        empty.scatter_reduce(0, run, last, "amax", include_self=False),
    )


def _before(counts: Tensor) -> Tensor:
    """How many come before each, and before the end."""
    return torch.cat((counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0)))


def _owners(before: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers 0 to `most`, which of the owners each belongs to, and whether it belongs to any."""
    number = torch.arange(most, device=before.device)
    owner = torch.searchsorted(before[1:], number, right=True)
    return number, owner.clamp(max=max(len(before) - 2, 0)), number < before[-1]
