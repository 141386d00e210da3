"""Batch norms by torch's operations, and sums over the ranks of distributed training."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.core.collectives import Group, all_sum
from torchweft.voxels.convolution.epilogue import Epilogue
from torchweft.voxels.norms.launch import Running

__all__ = [
    "normalised",
    "rank_statistics",
    "statistics",
    "track",
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
    valid: Tensor | None = None,
) -> Tensor:
    """act((rows − mean) / √(var + eps) · weight + bias + residual) in the dtype of the rows.

    With `valid`, rows past the first `valid` are 0, and so are gradients there.
    """
    mean, var = statistics
    y = (_real(rows, valid) - mean.to(rows.dtype)) * (var + eps).rsqrt().to(rows.dtype)
    rest = None if residual is None else _real(residual.to(rows.dtype), valid)
    return _real(Epilogue(weight, bias, rest, activation=activation)(y), valid)


def statistics(rows: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the rows, or of the first `valid` of them."""
    if valid is None:
        var, mean = torch.var_mean(rows, 0, correction=0)
        return mean, var
    count = valid.clamp(min=1)  # of no rows, 0 and 0
    base = _real(rows[:1].detach(), valid).sum(0)  # a mean far from 0 takes no digits
    near = _real(rows - base, valid)
    mean = near.sum(0) / count
    return base + mean, _real(near - mean, valid).square().sum(0) / count


def _real(rows: Tensor, valid: Tensor | None) -> Tensor:
    """The rows, and 0 past the first `valid`."""
    if valid is None:
        return rows
    row = torch.arange(rows.shape[0], device=rows.device)
    return torch.where((row < valid)[:, None], rows, 0.0)


def rank_statistics(
    rows: Tensor, group: Group | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of the rows of all ranks, in float64.

    With `valid`, of the first `valid` rows of each.  By Σx, Σx² and the count of all ranks, where
    Σx² − n mean² is exact.
    """
    total = _real(rows, valid).sum(0).double()
    size = total.new_full((1,), rows.shape[0]) if valid is None else valid.double().view(1)
    near = (total / size.clamp(min=1)).detach().to(rows.dtype)  # any shift gives the same sums
    squares = _real(rows - near, valid).square().sum(0).double()
    near = near.double()
    squares = squares + near * (2 * total - size * near)
    channels = len(total)
    sums = all_sum(torch.cat([total, squares, size]), group)
    total, squares, count = sums[:channels], sums[channels:-1], sums[-1]
    mean = total / count.clamp(min=1)
    var = (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
    return mean, var, count.detach()


def track(running: Running, mean: Tensor, var: Tensor, count: Tensor) -> None:
    """Running statistics that follow those of a batch, unless it has no rows."""
    tracked, momentum = running.tracked, running.momentum
    if momentum is not None:
        tracked.add_(1)
    unbiased = var * count / (count - 1).clamp(min=1)
    for kept, value in ((running.mean, mean), (running.var, unbiased)):
        weight = tracked.to(kept.dtype).reciprocal() if momentum is None else momentum
        found = torch.lerp(kept, value.detach().to(kept.dtype), weight)
        kept.copy_(torch.where(count > 0, found, kept))


def wide(x: Tensor) -> Tensor:
    """In the dtype of sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
