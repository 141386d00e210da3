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
from torch.nn.functional import pad

from torchweft.core.tables.tensor_cache import TensorCache
from torchweft.reductions.call import Blocks

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
    limits = before.index_select(0, indptr)
    most = len(starts) + rows // height
    tile_before = _before((ends - starts + (height - 1)) // height)
    of_blocks = (starts, ends, tile_before[:-1], limits[:-1], limits[1:])
    tile, real, (start, stop, tile_first, begin, end) = _owned(tile_before, most, of_blocks)
    first_row = start + (tile - tile_first) * height
    last_row = torch.minimum(first_row + height, stop)
    first_row, last_row, work = first_row * real, last_row * real, (end - begin) * real
    piece = ((work.sum() + (share - 1)) // share).clamp(min=least)
    task_before = _before(((work + (piece - 1)) // piece).clamp(min=1) * real)
    tiles = torch.stack((task_before[:-1], task_before[1:], first_row, last_row), 1)

    of_tiles = (first_row, last_row, begin, end, task_before[:-1])
    task, real, (*rows_, begin, end, task_first) = _owned(task_before, most + share, of_tiles)
    place = begin + (task - task_first) * piece
    last_place = torch.minimum(place + piece, end)
    first_interval = torch.searchsorted(before, place, right=True) - 1
    last_interval = torch.searchsorted(before, last_place)
    columns = (*rows_, first_interval, last_interval, place, last_place)
    table = torch.stack(columns, 1) * real.unsqueeze(1)
    return Tasks(tiles, table, torch.stack((first, last, before[:-1]), 1))


def _joined(blocks: Blocks) -> Blocks:
    """The same pairs with intervals that touch made one; what is left over is empty, at the end."""
    starts, ends, indptr, first, last = blocks
    count = len(first)
    if count < 2:
        return blocks
    begins = torch.ones(count + 1, dtype=torch.bool, device=first.device)
    torch.ne(first[1:], last[:-1], out=begins[1:-1])
    begins = begins.index_fill_(0, indptr, True)[:-1]
    runs = begins.cumsum(0)
    empty = torch.zeros_like(first)
    return Blocks(
        starts,
        ends,
        pad(runs, (1, 0)).index_select(0, indptr),
        empty.scatter_reduce(0, runs - 1, first, "amin", include_self=False),
        empty.scatter_reduce(0, runs - 1, last, "amax", include_self=False),
    )


def _before(counts: Tensor) -> Tensor:
    """How many come before each, and before the end."""
    return pad(counts.cumsum(0), (1, 0))


def _owned(
    before: Tensor, most: int, columns: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Numbers 0 to `most`, whether each belongs to any owner, and the columns of its owner."""
    number = torch.arange(most, device=before.device)
    owner = torch.searchsorted(before[1:], number, right=True).clamp_(max=len(before) - 2)
    found = torch.stack(columns, 1).index_select(0, owner).unbind(1)
    return number, number < before[-1], found
