"""Launches of the kernels of batch norms.

Blocks and parts follow from rows and channels alone, and determine the order of sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import Kernel, Tile, current_device
from torchweft.voxels.maps.tiles import kernel_for

__all__ = ["Normal", "Running", "apply", "fold", "gradient", "gradient_sums", "statistics"]

ELEMENTS = 2048
"""Numbers in a block of rows and channels."""

MOST_CHANNELS = 128
"""Most channels in a block."""

PROGRAMS = 1024
"""About so many programs sum over parts of the rows."""

TOTAL = Tile((512, 8), 8)
"""Parts and channels that a program adds up at once."""


class Normal(NamedTuple):
    """What act((x − mean) / √(var + eps) · weight + bias + residual) takes beside x.

    Args:
        weight: (C,); None is 1.
        bias: (C,); None is 0.
        residual: (N, C) in the dtype of x; None is 0.
        mean: (C,).
        var: (C,).
        activation: a name of ACTIVATIONS, or None.
        eps: is added to var.
    """

    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    mean: Tensor
    var: Tensor
    activation: str | None
    eps: float


class Running(NamedTuple):
    """Running statistics, which `statistics` changes.

    Args:
        mean: (C,).
        var: (C,).
        tracked: () the number of batches, counted already if momentum is None.
        momentum: weight of a batch; None: 1 / tracked.
    """

    mean: Tensor
    var: Tensor
    tracked: Tensor
    momentum: float | None


def statistics(x: Tensor, running: Running | None = None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the channels of x (N, C), N at least 1; both (C,) in float32.

    Running statistics take the mean and the variance times N / (N − 1), N at least 2.
    """
    rows, channels = x.shape
    chunk, parts, tile = _parts(rows, channels)
    sums = x.new_empty((2, parts, channels), dtype=torch.float32)
    found = x.new_empty((2, channels), dtype=torch.float32)
    momentum = 0.0 if running is None else running.momentum
    kept = (None, None, None) if running is None else running[:3]
    with current_device(x):
        programs = parts * _columns(channels, tile)
        _kernel("statistics", (), tile, channels, x, sums)(programs, (x, sums), (rows, chunk))
        tensors = (x, sums, found[0], found[1], *kept)
        kernel = _kernel("total_statistics", (momentum is None,), TOTAL, channels, *tensors)
        kernel(_columns(channels, TOTAL), tensors, (rows, chunk, momentum or 0.0))
    if running is not None:
        torch.autograd.graph.increment_version(running[:3])
    return found[0], found[1]


def apply(x: Tensor, normal: Normal) -> Tensor:
    """act((x − mean) / √(var + eps) · weight + bias + residual) in the dtype of x, rounded once."""
    y = torch.empty_like(x)
    tensors = (x, *normal[:5], y)
    _by_rows("apply", tensors, x, normal.activation, normal.eps)
    return y


def gradient_sums(
    g: Tensor, x: Tensor, normal: Normal, residual: bool
) -> tuple[Tensor, Tensor | None]:
    """(sums (2, C) in float32, ∂/∂residual if needed), g the gradient of `apply`'s result.

    sums[0] = Σ ∂/∂z, the gradient of bias, and sums[1] = Σ ∂/∂z (x − mean) / √(var + eps), that
    of weight; z is what `apply` gives to the activation.
    """
    rows, channels = x.shape
    dz = torch.empty_like(x) if residual else None
    sums = x.new_zeros((2, channels), dtype=torch.float32)
    if not rows:
        return sums, dz
    chunk, parts, tile = _parts(rows, channels)
    partial = x.new_empty((2, parts, channels), dtype=torch.float32)
    tensors = (g, x, *normal[:5], dz, partial)
    with current_device(x):
        kernel = _kernel("gradient_sums", (normal.activation,), tile, channels, *tensors)
        kernel(parts * _columns(channels, tile), tensors, (rows, chunk, normal.eps))
        kernel = _kernel("total", (), TOTAL, channels, partial, sums)
        kernel(2 * _columns(channels, TOTAL), (partial, sums), (rows, chunk))
    return sums, dz


def gradient(
    g: Tensor, x: Tensor, normal: Normal, sums: Tensor | None, count: Tensor | None
) -> Tensor:
    """∂/∂x of `apply`; sums over `count` rows (None: those of x) if mean and var are those of x."""
    dx = torch.empty_like(x)
    tensors = (g, x, *normal[:5], sums, count, dx)
    _by_rows("gradient", tensors, x, normal.activation, normal.eps)
    return dx


def fold(normal: Normal, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """(scale, shift) in float32: (x + added − mean) / √(var + eps) · weight + bias."""
    channels = len(normal.mean)
    folded = normal.mean.new_empty((2, channels), dtype=torch.float32)
    tensors = (normal.weight, normal.bias, normal.mean, normal.var, added, folded)
    tile = Tile((MOST_CHANNELS,))
    with current_device(folded):
        kernel = _kernel("fold", (), tile, channels, *tensors)
        kernel(_columns(channels, tile), tensors, (normal.eps,))
    return folded[0], folded[1]


def _by_rows(
    name: str, tensors: tuple[Tensor | None, ...], x: Tensor, activation: str | None, eps: float
) -> None:
    """Launch a kernel of blocks of rows."""
    rows, channels = x.shape
    tile = _tile(channels)
    with current_device(x):
        programs = -(-rows // tile.blocks[0]) * _columns(channels, tile)
        _kernel(name, (activation,), tile, channels, *tensors)(programs, tensors, (rows, eps))


def _kernel(
    name: str,
    constants: tuple[str | int | None, ...],
    tile: Tile,
    channels: int,
    *tensors: Tensor | None,
) -> Kernel:
    kinds = tuple([None if t is None else t.dtype for t in tensors])
    device = next(t.device for t in tensors if t is not None)
    return kernel_for(f"norms.kernels.{name}_kernel", (channels,), constants, tile, device, kinds)


def _tile(channels: int) -> Tile:
    """Blocks of rows and channels: channels in a power of two that divides them, from 32 on."""
    width = channels & -channels
    if width < 32:
        width = 1 << (channels - 1).bit_length()
    width = min(width, MOST_CHANNELS)
    return Tile((ELEMENTS // width, width), 4)


def _columns(channels: int, tile: Tile) -> int:
    """Blocks of channels."""
    return -(-channels // tile.blocks[-1])


def _parts(rows: int, channels: int) -> tuple[int, int, Tile]:
    """(rows of a part, parts, blocks) of sums over rows."""
    tile = _tile(channels)
    block = tile.blocks[0]
    most = max(PROGRAMS // _columns(channels, tile), 1)
    blocks = -(-rows // block)
    chunk = -(-blocks // most) * block
    return chunk, -(-rows // chunk), tile
