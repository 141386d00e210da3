"""Segments: the entries of each output row, and how long segments are cut.

A segmented table has its entries sorted by output row; `indptr` (M + 1) holds the first entry of
each row.  All functions here run once, when a plan is built; they may synchronise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["SLICE", "Slices", "cut", "greedy_group", "indptr_of", "narrow", "rows_of", "sort_rows"]

SLICE = 4096
"""Most entries that one program sums sequentially; longer segments are cut (see `cut`)."""


def narrow(index: Tensor, limit: int) -> Tensor:
    """The same integers as a contiguous int32 tensor where all are below 2^31, else int64."""
    return index.to(torch.int32 if limit < 2**31 else torch.int64).contiguous()


def sort_rows(rows: Tensor) -> Tensor:
    """The stable permutation that sorts entries by row: the order within a row is kept."""
    return torch.argsort(rows, stable=True)


def indptr_of(sorted_rows: Tensor, num_rows: int) -> Tensor:
    """indptr[m] = number of entries in rows below m; rows >= num_rows are left out."""
    bounds = torch.arange(num_rows + 1, device=sorted_rows.device, dtype=sorted_rows.dtype)
    return torch.searchsorted(sorted_rows, bounds)


def rows_of(indptr: Tensor, num_entries: int) -> Tensor:
    """The row of each of `num_entries` entries; entries no segment covers get row M."""
    entries = torch.arange(num_entries, device=indptr.device, dtype=indptr.dtype)
    rows = torch.searchsorted(indptr, entries, right=True) - 1
    return torch.where(rows < 0, indptr.numel() - 1, rows)


class Slices(NamedTuple):
    """Segments cut into pieces of at most `SLICE` entries.

    Piece p holds the entries indptr[p] .. indptr[p+1]-1 of segment owner[p]; segment m is the sum
    of the pieces owner_indptr[m] .. owner_indptr[m+1]-1, added in this order.
    """

    indptr: Tensor  # (P + 1,)
    owner: Tensor  # (P,)
    owner_indptr: Tensor  # (M + 1,)
    num_pieces: int


def cut(indptr: Tensor, limit: int, keep_empty: bool = True) -> Slices:
    """Segments cut into pieces of at most `limit` entries; an empty one gets a piece if kept.

    One segment of 100,000 terms among segments of one becomes 25 pieces of 4096 among pieces of
    one, so that no program walks more than `limit` entries and the order of the sum is fixed.
    """
    lengths = indptr.diff()
    pieces = ((lengths + limit - 1) // limit).clamp(min=int(keep_empty))
    owner_indptr = torch.cat([pieces.new_zeros(1), pieces.cumsum(0)])
    total = int(owner_indptr[-1])
    owner = torch.repeat_interleave(pieces, output_size=total)
    rank = torch.arange(total, device=indptr.device) - owner_indptr[owner]
    begin = indptr[owner] + rank.to(indptr.dtype) * limit
    piece_indptr = torch.cat([begin, indptr[-1:]])
    dtype = indptr.dtype
    return Slices(piece_indptr.to(dtype), owner.to(dtype), owner_indptr.to(dtype), total)


def greedy_group(sizes: list[int], alignment: int, limit: int) -> list[list[int]]:
    """Neighbouring items packed in order into groups of at most `limit` units.

    Each size counts rounded up to `alignment`; an item larger than `limit` is a group of its own.
    """
    groups: list[list[int]] = []
    room = 0
    for item, size in enumerate(sizes):
        units = -(-size // alignment) * alignment
        if not groups or units > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= units
    return groups
