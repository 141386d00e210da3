"""Tiles of the product kernels: a rule by shape for each kernel.

Sums are split by these rules too, so results depend on shapes, never on the machine's load.
They are evaluated when the steps of a call are planned, not at every call.
"""

from __future__ import annotations

import functools
import math

import torch

from torchweft.core.gpu.launcher import Tile, has_tf32

__all__ = [
    "LEAST_DOT",
    "batch_tile",
    "group_tile",
    "has_wgmma",
    "num_parts",
    "outer_tile",
    "power_of_two",
    "precision",
    "rows_tile",
    "takes_dot",
]

LEAST_DOT = 16
"""The least size of each side of `tl.dot`: smaller matrices go to the rows kernel."""

SMALL_MATRIX = 1024
"""Elements of a matrix that is too small for a program of its own."""

ENOUGH_PROGRAMS = 1024
"""Programs that fill a current GPU; sums over n are split until there are as many."""

LEAST_ITEMS = 128
"""Fewest items that are worth a partial row of their own."""

ONE_WAVE = 2**18
"""Elements of a result that a current GPU computes at once."""

MANY_ITEMS = 256
"""Items of a long row, whose entries a program spreads over its lanes instead of other rows."""


def power_of_two(size: int) -> int:
    """The least power of two >= size, at least 1."""
    return 1 << max(size - 1, 0).bit_length()


def takes_dot(matrix: tuple[int, ...], items: float) -> bool:
    """Whether a program with dots pays for matrices with `items` items each."""
    worthwhile = items >= LEAST_DOT or math.prod(matrix) > SMALL_MATRIX
    return min(matrix) >= LEAST_DOT and worthwhile


def rows_tile(op: str, channels: int, items: int, rows: int, itemsize: int, inner: int = 1) -> Tile:
    """(BLOCK_R, BLOCK_T, BLOCK_C) of `rows_kernel`: `rows` that sum about `items` each.

    Two (one for single items) 16-byte loads per thread and operand: enough loads in flight, few
    enough registers to fill the GPU.  Where all rows fit in one wave, latency dominates: a whole
    segment in one step, twice the average length since segments are uneven.  All `inner` rows of a
    matrix are read in one step, by fewer threads, since the other operand is small.
    """
    numbers = (8192 if items * inner > 1 else 4096) // itemsize
    block_c = min(power_of_two(channels), (4096 if op == "outer" else 512) // itemsize)
    most = max(4, power_of_two(inner)) if items < MANY_ITEMS else 128
    block_t = min(power_of_two(items * inner), most)
    if 1 < items < MANY_ITEMS and rows * channels <= ONE_WAVE:
        block_t = 2 * power_of_two(items * inner)
    block_t = min(block_t, numbers // block_c)
    block_r = min(numbers // (block_c * block_t), power_of_two(rows))
    bytes_of_warp = {"outer": 2048, "vecmat": 4096}.get(op, 1024)
    warps = max(1, min(4, block_r * block_t * block_c * itemsize // bytes_of_warp))
    return Tile((block_r, block_t, block_c), warps)


def num_parts(batch: int, items: int, programs: int) -> int:
    """Parts that a sum over `batch` n's is split into, for `programs` programs a part.

    `items` counts the entries of one row at one n.
    """
    worthwhile = -(-batch * max(items, 1) // LEAST_ITEMS)
    parts = max(1, min(-(-ENOUGH_PROGRAMS // programs), worthwhile, batch))
    part = -(-batch // parts)
    return -(-batch // part)


def batch_tile(batch: int, inner: int, columns: int, itemsize: int, wgmma: bool) -> Tile:
    """(BLOCK_N, BLOCK_K, BLOCK_C) of `vecmat_batch_kernel`."""
    block_n = _dot_side(batch, 64 if itemsize >= 4 else 128, itemsize)
    block_c = _dot_side(columns, 128 if wgmma else 64, itemsize)
    block_k = _dot_side(inner, 128 // itemsize, itemsize)
    return Tile((block_n, block_k, block_c), 8 if block_n * block_c > 8192 else 4, 2)


def group_tile(entries: int, inner: int, columns: int, itemsize: int) -> Tile:
    """(BLOCK_R, BLOCK_K, BLOCK_C) of `vecmat_group_kernel` for `entries` that share a matrix.

    With few, the matrix is streamed: small blocks of it, many programs.
    """
    block_r = _dot_side(entries, 64 if itemsize >= 4 else 128, itemsize)
    few = block_r == LEAST_DOT
    block_c = _dot_side(columns, 64 if few else 128, itemsize)
    block_k = _dot_side(inner, 64 // itemsize if few else 128 // itemsize, itemsize)
    warps = 2 if few else 8 if block_r * block_c > 8192 else 4
    return Tile((block_r, block_k, block_c), warps)


def outer_tile(channels1: int, channels2: int, items: int, itemsize: int, wgmma: bool) -> Tile:
    """(BLOCK_K, BLOCK_C, BLOCK_D) of `outer_kernel`; BLOCK_K = 1, no dot, for a few items."""
    if items < LEAST_DOT:
        medium = min(channels1, channels2) >= 64 and max(channels1, channels2) < 128
        if wgmma and medium and 4 <= items < 8 and itemsize == 4:
            return Tile((1, 16, 64), 1)  # the fastest in measurements on an H200
        return Tile((1, _dot_side(channels1, 64, 4), _dot_side(channels2, 64, 4)), 2)
    side, depth = (128, 64) if wgmma else (64, 32)
    block_c, block_d = (_dot_side(c, side, itemsize) for c in (channels1, channels2))
    block_k = LEAST_DOT if itemsize >= 4 else _dot_side(items, depth, itemsize)
    return Tile((block_k, block_c, block_d), 8 if block_c * block_d > 8192 else 4)


def _dot_side(size: int, most: int, itemsize: int) -> int:
    """A side of a dot's tile; in fp64 the tensor cores' share is small, and so are tiles."""
    return max(LEAST_DOT, min(power_of_two(size), most if itemsize < 8 else 32))


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Whether dots run by warp groups, which take larger tiles without spilling registers."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def precision(dtype: torch.dtype, device: torch.device, inner: int, tf32: bool) -> str:
    """How dots form products of this dtype, `inner` or more of them summed.

    Three TF32 products keep 2⁻²¹ of each term, within the error bound where many are summed; six
    in bf16 keep 2⁻²⁴.
    """
    if dtype != torch.float32 or not has_tf32(device):
        return "ieee"
    if tf32:
        return "tf32"
    return "tf32x3" if inner >= 2 * LEAST_DOT else "bf16x6"
