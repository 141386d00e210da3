"""Batch norms by torch's operations, and sums over the ranks of distributed training."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.core.collectives import Group, all_sum
from torchweft.voxels.convolution.epilogue import Epilogue

__all__ = [
    "all_statistics",
    "normalised",
    "rank_statistics",
    "scale_and_shift",
    "wide",
]


def normalised(
    rows: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: tuple[Tensor, Tensor],
    activation: str | None,
    eps: float,
) -> Tensor:
    """act((rows − mean) / √(var + eps) · weight + bias + residual) in the dtype of the rows."""
    mean, var = statistics
    y = (rows - mean.to(rows.dtype)) * (var + eps).rsqrt().to(rows.dtype)
    rest = None if residual is None else residual.to(rows.dtype)
    return Epilogue(weight, bias, rest, activation)(y)


def rank_statistics(rows: Tensor, group: Group | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of the rows of all ranks, in float64.

    By Σx, Σx² and the count of all ranks, in float64, where Σx² − n mean² is exact.
    """
    size = rows.shape[0]
    total = rows.sum(0).double()
    near = (total / max(size, 1)).detach().to(rows.dtype)  # any shift gives the same sums
    squares = (rows - near).square().sum(0).double()
    near = near.double()
    squares = squares + near * (2 * total - size * near)
    return all_statistics(total, squares, size, group)


def all_statistics(
    total: Tensor, squares: Tensor, size: int, group: Group | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of rows of all ranks, from the sums of this one."""
    channels = len(total)
    sums = all_sum(torch.cat([total, squares, total.new_full((1,), size)]), group)
    total, squares, count = sums[:channels], sums[channels:-1], sums[-1]
    mean = total / count.clamp(min=1)
    var = (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
    return mean, var, count.detach()


def scale_and_shift(
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: tuple[Tensor, Tensor],
    added: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(scale, shift): (x + added − mean) / √(var + eps) · weight + bias."""
    mean, var = (wide(t) for t in statistics)
    scale = (var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = (-mean if added is None else added - mean) * scale
    return scale, shift if bias is None else shift + bias


def wide(x: Tensor) -> Tensor:
    """In the dtype of sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
