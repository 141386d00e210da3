"""Tiles of the sparse convolution: a rule by channels, dtype and what the GPU has.

Sums are cut by these rules too, so results depend on shapes, never on the machine's load.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from torchweft.core.gpu.launcher import Tile

__all__ = [
    "FOLDED",
    "UNIT",
    "Gpu",
    "convolve_tile",
    "depthwise_tile",
    "fold_tile",
    "gpu_of",
    "gradient_tile",
    "num_shares",
]

LEAST_DOT = 16
"""The least size of each side of `tl.dot`."""

FOLDED = 8
"""Channels up to which several offsets share a dot."""

UNIT = 64
"""Pairs that the weight gradient sums at once."""

LEAST_UNITS = 8
"""Fewest units of pairs that are worth partial sums of their own, were every pair there."""


class Gpu(NamedTuple):
    """What tiles depend on.

    Args:
        wgmma: whether dots run by warp groups, which take larger tiles without spilling registers.
        tf32: whether it has TF32.
        shared: bytes of shared memory that one block may use.
    """

    wgmma: bool
    tf32: bool
    shared: int


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a tensor; for the interpreter, an H200."""
    if device.type != "cuda":
        return Gpu(True, True, 232_448)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Gpu(False, False, 65_536)
    shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Gpu(properties.major == 9, properties.major >= 8, shared)


def convolve_tile(
    c: int, d: int, itemsize: int, along: bool, gpu: Gpu, crowded: bool = False
) -> Tile:
    """(BLOCK_M, BLOCK_N, BLOCK_K) of `convolve_kernel` for c channels to d.

    Args:
        c: channels read.
        d: channels written.
        itemsize: bytes of an element.
        along: whether a weight's numbers lie along d; turned, wide tiles are slower.
        gpu: where.
        crowded: whether what follows the sums needs as many registers as they do.
    """
    if itemsize == 8:
        return _fit(Tile((64, _side(d, 32), _side(c, 16)), 4, 2), itemsize, gpu)
    if itemsize == 4 or not gpu.wgmma:
        return _fit(Tile((64, _side(d, 64), _side(c, 32)), 4, 3), itemsize, gpu)
    if d > 64 and crowded:
        return _fit(Tile((128, 128, _side(c, 64)), 8, 3), itemsize, gpu)
    if d > 128 and c > 128 and along:
        return _fit(Tile((128, 256, 64), 8, 3), itemsize, gpu)
    if d > 64:
        return _fit(Tile((128, 128, _side(c, 64)), 4, 3), itemsize, gpu)
    if d > 32:
        return _fit(Tile((64, 64, _side(c, 64)), 4, 2), itemsize, gpu)
    return _fit(Tile((64, _side(d, 32), _side(c, 64)), 4, 3), itemsize, gpu)


def fold_tile(d: int, itemsize: int) -> Tile:
    """(BLOCK_M, BLOCK_N, BLOCK_K) of `fold_kernel` to d channels."""
    return Tile((64, _side(d, 64 if itemsize < 8 else 32), 32), 4, 2)


def depthwise_tile(channels: int, itemsize: int) -> Tile:
    """(BLOCK_M, BLOCK_N) of the depthwise kernels: 16 bytes a thread along the channels."""
    return Tile((64, _side(channels, 256 // itemsize)), 4, 2)


def gradient_tile(c: int, d: int, itemsize: int, gpu: Gpu) -> Tile:
    """(BLOCK_C, BLOCK_D) of `weight_gradient_kernel` for c channels to d."""
    if itemsize == 8:
        tile = Tile((_side(c, 32), _side(d, 32)), 4, 2)
    elif itemsize == 4 or not gpu.wgmma or max(c, d) <= 64:
        tile = Tile((_side(c, 64), _side(d, 64)), 4, 3)
    elif c > 64 and 128 < d < 512:
        tile = Tile((128, 256), 8, 3)
    else:
        tile = Tile((_side(c, 128), _side(d, 128)), 4, 3)
    blocks = (*tile.blocks, UNIT)
    return tile._replace(num_stages=_fit(tile._replace(blocks=blocks), itemsize, gpu).num_stages)


def num_shares(rows: int, offsets: int, matrix_tiles: int, tile: Tile) -> int:
    """Shares that the pairs are cut into, so that an H200 has work for some waves; 0: not at all.

    Without shares a program sums all pairs of an offset: enough programs where the matrix is large.
    """
    programs = 264 if tile.num_warps == 8 else 528
    if matrix_tiles * offsets >= 792:
        return 0
    worthwhile = rows * offsets // (LEAST_UNITS * UNIT) + 1
    return max(1, min(programs // matrix_tiles, worthwhile))


def _side(size: int, most: int) -> int:
    """The side of a dot's tile for so many numbers."""
    return max(LEAST_DOT, min(1 << max(size - 1, 0).bit_length(), most))


def _fit(tile: Tile, itemsize: int, gpu: Gpu) -> Tile:
    """The tile with as many stages as shared memory holds."""
    m, n, k = tile.blocks
    stages = gpu.shared // ((m + n) * k * itemsize)
    return tile._replace(num_stages=max(1, min(tile.num_stages, stages)))
