"""Tables of entries by their row: indptr[m] .. indptr[m + 1] − 1 of `order` are those of row m."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.gpu.ahead import noting
from torchweft.core.gpu.launcher import Kernel, Tile, current_device
from torchweft.core.printing.modules import written
from torchweft.core.tables import indptr_of, narrow, sort_rows
from torchweft.products.tiles import power_of_two

__all__ = [
    "Sorted",
    "columns_by_kernel",
    "columns_of_rows",
    "serves",
    "sorted_by_kernel",
    "sorted_by_row",
    "sorted_by_torch",
]

KERNELS = "torchweft.o3.sorting.kernels"

ENTRIES_PER_STEP, ROWS_PER_PROGRAM = 2048, 4

NODES_PER_PROGRAM = 16

MOST_TENSORS = 8  # of two lists

MOST_COMPARED, MOST_WORK = 2**16 - 1, 2**24
"""Entries, and entries · rows, up to which each entry is compared with each row, in one launch.

Some 50 µs by operations.  Of 14,340 edges of 512 nodes, torch's two sorts and what they need took
170 µs in a record (H100).
"""

DIGIT_BITS, ENTRIES_PER_BLOCK, ENTRIES_AT_ONCE = 7, 256, 32

MOST_ENTRIES = 2**17
"""Entries up to which kernels sort them by digits of their rows.

A record of MACE with 114,688 edges of 4,096 nodes, where torch sorted six such lists, had 124
launches and 0.64 ms more than the eager call.  Of two lists kernels took 0.66 ms with 262,144
entries and 2.4 ms with 917,504: by the entry, as long as torch at this number, and longer above
(H100).
"""


class Sorted(NamedTuple):
    """Entries by row, those of a row in ascending order."""

    rows: Tensor  # (E,) the row of each entry, a copy
    indptr: Tensor  # (size + 1,)
    order: Tensor  # (E,)


def serves(rows: Tensor, size: int) -> bool:
    """Whether kernels sort these entries (E,) into so many rows: on a GPU, up to MOST_ENTRIES.

    Few launches count in a record, which sorts at each replay; torch's radix sort has dozens.
    """
    return rows.is_cuda and rows.numel() <= MOST_ENTRIES and size < 2**31


def sorted_by_row(tables: Sequence[Tensor], sizes: Sequence[int], limit: int) -> list[Sorted]:
    """Of one list of rows or two of one length, by kernels where they serve, else by torch.

    Args:
        tables: (E,) each, int32 or int64.
        sizes: number of rows of each.
        limit: no number is larger.
    """
    if limit < 2**31 and all(serves(*each) for each in zip(tables, sizes, strict=True)):
        return sorted_by_kernel(tables, sizes)
    return [sorted_by_torch(*each, limit) for each in zip(tables, sizes, strict=True)]


def sorted_by_torch(rows: Tensor, size: int, limit: int) -> Sorted:
    """Of rows (E,), in int32 where all numbers are below 2^31 by `limit`, else in int64."""
    dtype = torch.int32 if limit < 2**31 else torch.int64
    copy = rows.to(dtype, copy=True, memory_format=torch.contiguous_format)
    order = sort_rows(copy)
    indptr = indptr_of(copy.index_select(0, order), size)
    return Sorted(copy, narrow(indptr, limit), narrow(order, limit))


def sorted_by_kernel(tables: Sequence[Tensor], sizes: Sequence[int]) -> list[Sorted]:
    """Of one list of rows or two, in int32, by one launch where there are few entries.

    Where launches are left out (`compile_ahead`), torch sorts: tables are cached.

    Args:
        tables: (E,) each, int32 or int64.
        sizes: number of rows of each.
    """
    entries = tables[0].shape[0]
    few = entries <= MOST_COMPARED and entries * max(sizes) <= MOST_WORK
    with current_device(tables[0]):
        found = (_by_rows if few else _by_digits)(tables, sizes)
    if noting() is not None:
        return [sorted_by_torch(*each, limit=0) for each in zip(tables, sizes, strict=True)]
    return found


def _by_rows(tables: Sequence[Tensor], sizes: Sequence[int]) -> list[Sorted]:
    """By the rows themselves: one launch that compares each entry with each row."""
    given = [rows.contiguous() for rows in tables]
    entries, like = given[0].shape[0], given[0]
    made = [
        Sorted(*(like.new_empty(n, dtype=torch.int32) for n in (entries, size + 1, entries)))
        for size in sizes
    ]
    lists = [t for rows, found in zip(given, made, strict=True) for t in (rows, *found)]
    programs = sum(size // ROWS_PER_PROGRAM + 1 for size in sizes)
    absent = (None,) * (MOST_TENSORS - len(lists))
    kernel = _kernel(like.device, *(rows.dtype for rows in given))
    kernel(programs, (*lists, *absent), (entries, sizes[0], sizes[-1]))
    return made


def _by_digits(tables: Sequence[Tensor], sizes: Sequence[int]) -> list[Sorted]:
    """By one digit of the rows after the other, the last first: three launches a digit.

    Entries of one digit stay in their order.
    """
    lists, entries, like = len(tables), tables[0].shape[0], tables[0]
    stride = -(-entries // 4) * 4  # lists begin at multiples of 16 bytes
    rows, keys = like.new_empty(2, lists, stride, dtype=torch.int32)
    for own, table in zip(rows, tables, strict=True):
        own[:entries].copy_(table)
    blocks = -(-entries // ENTRIES_PER_BLOCK)
    counts = like.new_empty(lists, blocks << DIGIT_BITS, dtype=torch.int32)
    order = None
    for shift in range(0, max(1, max(sizes).bit_length()), DIGIT_BITS):
        free = entries, stride, sizes[0], sizes[-1], blocks, shift
        count, place = _digit_kernels(like.device, order is not None)
        count(lists * blocks, (rows, order, counts), free)
        # over both lists: torch sums a single row by many programs, each of two rows by one
        upto = counts.flatten().cumsum(0, dtype=torch.int32)
        before, order = order, torch.empty_like(rows)
        place(lists * blocks, (rows, before, counts, upto, order, keys), free)
    assert order is not None
    bounds = torch.arange(max(sizes) + 1, dtype=torch.int32, device=like.device)
    found = []
    for own, key, placed, size in zip(rows, keys, order, sizes, strict=True):
        indptr = torch.searchsorted(key[:entries], bounds[: size + 1], out_int32=True)
        found.append(Sorted(own[:entries], indptr, placed[:entries]))
    return found


def columns_of_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The column (N,) of the 1 in each row of x (N, K), and x with NaN in rows not one-hot.

    In one launch on a GPU.
    """
    return columns_by_kernel(x) if x.is_cuda else _columns_by_torch(x)


def _columns_by_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    largest, column = x.max(1, keepdim=True)
    one_hot = (largest == 1) & (x.abs().sum(1, keepdim=True) == 1)
    return column[:, 0], torch.where(one_hot, x, math.nan)


def columns_by_kernel(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same by one launch."""
    rows, width = x.shape
    column, marked = x.new_empty(rows, dtype=torch.int64), x.new_empty(rows, width)
    with current_device(x):
        kernel = _columns_kernel(x.device, x.dtype, width)
        kernel(-(-rows // NODES_PER_PROGRAM), (x.contiguous(), column, marked), (rows,))
    return column, marked


@functools.lru_cache(maxsize=64)
def _columns_kernel(device: torch.device, dtype: torch.dtype, width: int) -> Kernel:
    tile = Tile((NODES_PER_PROGRAM, power_of_two(width)), 1, 1)
    return Kernel(written(KERNELS, "columns_of_rows"), (), (width,), tile)


@functools.lru_cache(maxsize=64)
def _kernel(device: torch.device, *dtypes: torch.dtype) -> Kernel:
    """It holds machine code, which depends on all arguments."""
    tile = Tile((ENTRIES_PER_STEP, ROWS_PER_PROGRAM), 8, 1)
    return Kernel(written(KERNELS, "sort_rows"), (), (), tile)


@functools.lru_cache(maxsize=64)
def _digit_kernels(device: torch.device, ordered: bool) -> tuple[Kernel, Kernel]:
    """Those that count and place entries, where there is an order or not."""
    tile = Tile((ENTRIES_PER_BLOCK, ENTRIES_AT_ONCE, 1 << DIGIT_BITS), 8, 1)
    count, place = (written(KERNELS, name) for name in ("count_digits", "place_entries"))
    return Kernel(count, (), (), tile), Kernel(place, (), (), tile)
