"""Tiles of the product kernels: functions of shapes alone, remembered; what is measured overrides.

Sums are split by these rules too, so results depend on shapes, never on the machine's load.
"""

from __future__ import annotations

import functools

import torch

from weft.core.launcher import Tile

__all__ = [
    "LEAST_DOT",
    "PARTS",
    "batch_tile",
    "group_tile",
    "num_parts",
    "outer_tile",
    "power_of_two",
    "precision",
    "rows_tile",
]

LEAST_DOT = 16
"""The least size of each side of `tl.dot`: smaller matrices go to the rows kernel."""

PARTS = {"tf32x3": (2, torch.float32), "bf16x6": (3, torch.bfloat16)}
"""How many parts each fp32 factor of such a dot has, and of what dtype."""

ENOUGH_PROGRAMS = 1024
"""Programs that fill a GPU of today; sums over n are split until there are as many."""

LEAST_ITEMS = 128
"""Fewest items that are worth a partial row of their own."""


def power_of_two(size: int) -> int:
    """The least power of two >= size, at least 1."""
    return 1 << max(size - 1, 0).bit_length()


@functools.lru_cache(maxsize=4096)
def rows_tile(channels: int, items: int, rows: int, itemsize: int) -> Tile:
    """(BLOCK_R, BLOCK_T, BLOCK_C) for result rows of `channels` that sum about `items` each.

    16 to 32 numbers a thread: enough loads in flight, few enough registers to fill the GPU.
    """
    numbers = 4096 // itemsize
    block_c = min(power_of_two(channels), 512 // itemsize)
    block_t = min(power_of_two(items), 4 if items < 256 else 128, numbers // block_c)
    block_r = min(numbers // (block_c * block_t), power_of_two(rows))
    warps = max(1, min(4, block_r * block_t * block_c * itemsize // 1024))
    return Tile((block_r, block_t, block_c), warps)


@functools.lru_cache(maxsize=4096)
def num_parts(batch: int, items: int, programs: int) -> int:
    """Parts that a sum over `batch` n's is split into, for `programs` programs of `items` items.

    `items` counts the entries of one row at one n.
    """
    worthwhile = -(-batch * max(items, 1) // LEAST_ITEMS)
    parts = max(1, min(-(-ENOUGH_PROGRAMS // programs), worthwhile, batch))
    part = -(-batch // parts)
    return -(-batch // part)


@functools.lru_cache(maxsize=1024)
def batch_tile(batch: int, inner: int, columns: int, itemsize: int) -> Tile:
    """(BLOCK_N, BLOCK_K, BLOCK_C) of `vecmat_batch_kernel`."""
    block_n = _dot_side(batch, 128 if itemsize < 8 else 32)
    block_c = _dot_side(columns, 128 if itemsize < 8 else 32)
    block_k = _dot_side(inner, 128 // itemsize)
    return Tile((block_n, block_k, block_c), 8 if block_n * block_c > 8192 else 4)


@functools.lru_cache(maxsize=1024)
def group_tile(entries: int, inner: int, columns: int, itemsize: int) -> Tile:
    """(BLOCK_R, BLOCK_K, BLOCK_C) of `vecmat_group_kernel` for `entries` that share a matrix."""
    block_r = _dot_side(entries, 128 if itemsize < 8 else 32)
    block_c = _dot_side(columns, 128 if itemsize < 8 else 32)
    block_k = _dot_side(inner, 128 // itemsize)
    return Tile((block_r, block_k, block_c), 8 if block_r * block_c > 8192 else 4)


@functools.lru_cache(maxsize=1024)
def outer_tile(channels1: int, channels2: int, items: int, itemsize: int) -> Tile:
    """(BLOCK_K, BLOCK_C, BLOCK_D) of `outer_kernel`; BLOCK_K = 1, no dot, for a few items."""
    if items < LEAST_DOT:
        return Tile((1, _dot_side(channels1, 64), _dot_side(channels2, 64)))
    side = 128 if itemsize < 8 else 32
    block_c, block_d = _dot_side(channels1, side), _dot_side(channels2, side)
    return Tile((128 // itemsize, block_c, block_d), 8 if block_c * block_d > 8192 else 4)


def _dot_side(size: int, most: int) -> int:
    return max(LEAST_DOT, min(power_of_two(size), most))


@functools.cache
def _has_tf32(device: torch.device) -> bool:
    if device.type != "cuda":
        return True  # the interpreter
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def precision(dtype: torch.dtype, device: torch.device, inner: int, tf32: bool) -> str:
    """How dots form products of this dtype, `inner` or more of them summed.

    Three TF32 products keep 2⁻²¹ of each term, within the error bound where many are summed; six
    in bf16 keep 2⁻²⁴.
    """
    if dtype != torch.float32 or not _has_tf32(device):
        return "ieee"
    if tf32:
        return "tf32"
    return "tf32x3" if inner >= 2 * LEAST_DOT else "bf16x6"
