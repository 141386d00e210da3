"""Launches of the kernels of batch norms.

Blocks and parts follow from rows and channels alone, and determine the order of sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import Kernel, Tile, current_device
from torchweft.core.operators.operator import will_write
from torchweft.voxels.maps.gpu.tiles import kernel_for

__all__ = [
    "Normal",
    "Running",
    "apply",
    "gradient",
    "gradient_sums",
    "joined",
    "statistics",
    "statistics_of_rank",
]

ELEMENTS = 2048
"""Numbers in a block of rows and channels."""

MOST_CHANNELS = 64
"""Most channels in a block."""

PROGRAMS = 1024
"""About so many programs sum over parts of the rows."""

TOTAL = Tile((512, 8), 8)
"""Parts and channels that a program adds up at once."""


JOINED = Tile((MOST_CHANNELS,))
"""Channels whose statistics of ranks a program joins."""


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
        valid: () int64, how many rows are real, the first ones; results of the others, which are
            padding, are 0.  None: all.
    """

    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    mean: Tensor
    var: Tensor
    activation: str | None
    eps: float
    valid: Tensor | None = None


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


NONE_KEPT = (None, None, None, 0.0)
"""What kernels take where no running statistics are kept."""


def statistics(
    x: Tensor, running: Running | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the channels of x (N, C), N at least 1; both (C,) in float32.

    Running statistics take the mean and the variance times N / (N − 1), N at least 2.  With
    `valid`, see `Normal`, all are those of the first N = `valid` rows.
    """
    mean, var = x.new_empty((2, x.shape[1]), dtype=torch.float32).unbind(0)
    _statistics(x, (mean, var, None), running, valid)
    return mean, var


def statistics_of_rank(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """(2 C + 1,) in float64: mean and biased variance of the channels of x (N, C), then N.

    With `valid`, see `Normal`, of the first N = `valid` rows.
    """
    rows, channels = x.shape
    if not rows:
        return x.new_zeros(2 * channels + 1, dtype=torch.float64)
    found = x.new_empty(2 * channels + 1, dtype=torch.float64)
    mean, var, count = found.split_with_sizes((channels, channels, 1))
    _statistics(x, (mean, var, count), None, valid)
    return found


def joined(
    x: Tensor, of_ranks: Tensor, running: Running | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance (C,) in float32 and number, in float64, of the rows of all ranks.

    Args:
        x: (N, C), the rows of this rank.
        of_ranks: (ranks, 2 C + 1), `statistics_of_rank` of each.
        running: running statistics, see `statistics`.
    """
    ranks, channels = len(of_ranks), x.shape[1]
    calls = _calls_of(x, None if running is None else running.mean.dtype, None, None)
    mean, var = x.new_empty((2, channels), dtype=torch.float32).unbind(0)
    count = of_ranks.new_empty(())
    *kept, momentum = NONE_KEPT if running is None else running
    if running is not None:
        will_write(running[:3])
    with current_device(x):
        kind = ("joined_statistics", running is None, momentum is None)
        kernel = calls.kernels.get(kind) or calls.made(kind, (momentum is None,), JOINED)
        tensors = (of_ranks, mean, var, count, *kept)
        kernel(-(-channels // JOINED.blocks[0]), tensors, (ranks, momentum or 0.0))
    return mean, var, count


def _statistics(
    x: Tensor,
    found: tuple[Tensor, Tensor, Tensor | None],
    running: Running | None,
    valid: Tensor | None = None,
) -> None:
    """Write the mean, the variance and the number of rows; change the running statistics."""
    rows, channels = x.shape
    dtype = found[0].dtype
    *kept, momentum = NONE_KEPT if running is None else running
    if running is not None:
        will_write(running[:3])
    calls = _calls_of(x, None if running is None else running.mean.dtype, None, None)
    chunk, parts = calls.parts(rows)
    sums = x.new_empty((2, parts, channels), dtype=torch.float32)
    with current_device(x):
        kind: tuple[Any, ...] = ("statistics", valid is None)
        kernel = calls.kernels.get(kind) or calls.made(kind)
        kernel(parts * calls.columns, (x, valid, sums), (rows, chunk))
        kind = ("total_statistics", running is None, momentum is None, dtype, valid is None)
        kernel = calls.kernels.get(kind) or calls.made(kind, (momentum is None,), TOTAL)
        tensors, numbers = (x, valid, sums, *found, *kept), (rows, chunk, momentum or 0.0)
        kernel(calls.totals, tensors, numbers)


def apply(x: Tensor, normal: Normal) -> Tensor:
    """act((x − mean) / √(var + eps) · weight + bias + residual) in the dtype of x, rounded once."""
    y = torch.empty_like(x)
    weight, bias, residual, mean, var, activation, eps, valid = normal
    calls, rows = _calls_of(x, mean.dtype, weight, bias), x.shape[0]
    with current_device(x):
        kind = ("apply", activation, residual is None, valid is None)
        kernel = calls.kernels.get(kind) or calls.made(kind, (activation,))
        tensors = (x, weight, bias, residual, mean, var, valid, y)
        kernel(calls.blocks(rows), tensors, (rows, eps))
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
    if not rows:
        return x.new_zeros((2, channels), dtype=torch.float32), dz
    weight, bias, rest, mean, var, activation, eps, valid = normal
    calls = _calls_of(x, mean.dtype, weight, bias)
    chunk, parts = calls.parts(rows)
    sums = x.new_empty((2, channels), dtype=torch.float32)
    partial = x.new_empty((2, parts, channels), dtype=torch.float32)
    with current_device(x):
        kind = ("gradient_sums", activation, rest is None, dz is None, valid is None)
        kernel = calls.kernels.get(kind) or calls.made(kind, (activation,))
        tensors = (g, x, weight, bias, rest, mean, var, valid, dz, partial)
        kernel(parts * calls.columns, tensors, (rows, chunk, eps))
        kernel = calls.kernels.get("total") or calls.made("total", (), TOTAL)
        kernel(2 * calls.totals, (partial, sums), (rows, chunk))
    return sums, dz


def gradient(
    g: Tensor, x: Tensor, normal: Normal, sums: Tensor | None, count: Tensor | None
) -> Tensor:
    """∂/∂x of `apply`; sums over `count` rows of all ranks, if mean and var are those of the rows.

    count: () float64; None: the rows are those of x that are real.
    """
    dx = torch.empty_like(x)
    weight, bias, residual, mean, var, activation, eps, valid = normal
    calls, rows = _calls_of(x, mean.dtype, weight, bias), x.shape[0]
    with current_device(x):
        which = (residual is None, sums is None, count is None, valid is None)
        kind = ("gradient", activation, *which)
        kernel = calls.kernels.get(kind) or calls.made(kind, (activation,))
        tensors = (g, x, weight, bias, residual, mean, var, valid, sums, count, dx)
        kernel(calls.blocks(rows), tensors, (rows, eps))
    return dx


class _Calls:
    """The kernels of calls with tensors of one kind: made once, then found by a look-up.

    Args:
        channels: C.
        kind: the device and dtypes.
    """

    __slots__ = ("channels", "columns", "kernels", "kind", "most_parts", "rows", "tile", "totals")

    def __init__(self, channels: int, kind: tuple[Any, ...]) -> None:
        self.kind, self.channels, self.tile = kind, channels, _tile(channels)
        self.rows = self.tile.blocks[0]
        self.columns = -(-channels // self.tile.blocks[1])
        self.totals = -(-channels // TOTAL.blocks[1])
        self.most_parts = max(PROGRAMS // self.columns, 1)
        self.kernels: dict[str | tuple[Any, ...], Kernel] = {}

    def made(
        self,
        kind: str | tuple[Any, ...],
        constants: tuple[str | int | None, ...] = (),
        tile: Tile | None = None,
    ) -> Kernel:
        """A new kernel; its kind is a name, or begins with it, and says which tensors are None."""
        name = kind if isinstance(kind, str) else kind[0]
        where, tile = f"norms.kernels.{name}_kernel", tile or self.tile
        kernel = kernel_for(where, (self.channels,), constants, tile, self.kind, kind)
        self.kernels[kind] = kernel
        return kernel

    def blocks(self, rows: int) -> int:
        """Programs for all blocks of rows and channels."""
        return -(-rows // self.rows) * self.columns

    def parts(self, rows: int) -> tuple[int, int]:
        """(rows of a part, parts) of sums over rows."""
        chunk = -(-rows // (self.rows * self.most_parts)) * self.rows
        return chunk, -(-rows // chunk)


_calls: dict[tuple[Any, ...], _Calls] = {}
"""By device, channels and dtypes."""


def _calls_of(
    x: Tensor,
    dtype: torch.dtype | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> _Calls:
    """The calls for rows x, statistics of a dtype, and numbers of channels."""
    channels = x.shape[1]
    kind = (
        x.device,
        x.dtype,
        channels,
        dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
    )
    found = _calls.get(kind)
    if found is None:
        found = _calls[kind] = _Calls(channels, kind)
    return found


def _tile(channels: int) -> Tile:
    """Blocks of rows and channels: channels in a power of two that divides them, from 32 on."""
    width = channels & -channels
    if width < 32:
        width = 1 << (channels - 1).bit_length()
    width = min(width, MOST_CHANNELS)
    return Tile((ELEMENTS // width, width), 4)
