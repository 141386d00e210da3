"""Normalisation of the features of active voxels.

    y = (x − mean) / √(var + eps) · weight + bias

Mean and variance are taken over

    batch      all voxels of a channel, of all ranks in distributed training
    layer      the channels of a voxel
    group      the voxels of a sample and the channels of a group
    instance   the voxels of a sample, by channel
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _NormBase

from torchweft.core.operators.operands import widened
from torchweft.errors import ShapeError
from torchweft.voxels.layers.convolution import SparseModule
from torchweft.voxels.layers.pooling import apart, lengths, samples_of, together, wide
from torchweft.voxels.maps.tensor import SparseTensor

__all__ = ["SparseBatchNorm", "SparseGroupNorm", "SparseInstanceNorm", "SparseLayerNorm"]


class SparseBatchNorm(SparseModule, _NormBase):
    """torch.nn.BatchNorm1d on the voxels' features: its arguments, state and modes.

    In training with torch.distributed, mean and variance are those of the voxels of all ranks, each
    counted once.  A batch without voxels does not change the running statistics.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: weight of a new value in the running statistics; None averages all.
        affine: whether there are weight and bias.
        track_running_stats: whether evaluation uses running statistics.
        device: of the parameters.
        dtype: of the parameters.
        bias: whether an affine norm has a bias.
        backend: "torch" or None, which are the same; another raises BackendError.

    Raises:
        ShapeError: a single voxel in training.

    Sums run in row order: another order of the rows changes the last bits.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-05,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        backend: str | None = None,
    ) -> None:
        given = num_features, eps, momentum, affine, track_running_stats, device, dtype
        super().__init__(*given, **_bias_of(bias))
        self._use_torch(backend)

    def forward(self, tensor: SparseTensor) -> SparseTensor:
        """The normalised tensor, in its dtype."""
        self.check(tensor, self.num_features)
        return tensor.replace(self._normalised(tensor.feats))

    def _normalised(self, x: Tensor) -> Tensor:
        if self.training and _world_size() > 1:
            return self._synchronised(x)
        if self.training or self.running_mean is None:
            if not x.shape[0]:
                return _affine(x, self.weight, self.bias).to(x.dtype)
            if x.shape[0] == 1:
                raise ShapeError(
                    "SparseBatchNorm was given 1 voxel to take a variance of: it needs at least 2, "
                    "or running statistics. Use a larger batch, or eval()."
                )
        return nn.BatchNorm1d.forward(self, x)  # type: ignore[arg-type]

    def _check_input_dim(self, input: Tensor) -> None:
        """Called by torch's norm; `check` has seen the features."""

    def _synchronised(self, x: Tensor) -> Tensor:
        """By Σx, Σx² and the count of all ranks, in float64, where Σx² − n mean² is exact."""
        rows, size, channels = wide(x), x.shape[0], x.shape[1]
        total = rows.sum(0).double()
        near = (total / max(size, 1)).detach().to(rows.dtype)  # any shift gives the same sums
        squares = (rows - near).square().sum(0).double()
        near = near.double()
        squares = squares + near * (2 * total - size * near)
        sums = _all_sum(torch.cat([total, squares, total.new_full((1,), size)]))
        total, squares, count = sums[:channels], sums[channels:-1], sums[-1]
        mean = total / count.clamp(min=1)
        var = (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
        if self.track_running_stats:
            self._track(mean.detach(), var.detach(), count.detach())
        scale = (var + self.eps).rsqrt().to(rows.dtype)
        return _affine((rows - mean.to(rows.dtype)) * scale, self.weight, self.bias).to(x.dtype)

    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        factor = self._step()
        unbiased = var * count / (count - 1).clamp(min=1)
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                kept = torch.lerp(running, value.to(running.dtype), factor)
                running.copy_(torch.where(count > 0, kept, running))

    def _step(self) -> float:
        """Count this batch, and return its weight in the running statistics."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return self.momentum
        return 1.0 / float(self.num_batches_tracked)  # type: ignore[arg-type]


class SparseLayerNorm(SparseModule, nn.LayerNorm):
    """torch.nn.LayerNorm over the C channels of each voxel.

    Args:
        num_features: C.
        eps: added to the variance.
        elementwise_affine: whether there are weight and bias.
        bias: whether there is a bias.
        backend: "torch" or None, which are the same; another raises BackendError.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__(num_features, eps, elementwise_affine, bias)
        self._use_torch(backend)

    def forward(self, tensor: SparseTensor) -> SparseTensor:  # type: ignore[override]
        """The normalised tensor, in its dtype."""
        self.check(tensor, self.normalized_shape[0])
        return tensor.replace(super().forward(widened(tensor.feats)))


class SparseGroupNorm(SparseModule, nn.GroupNorm):
    """torch.nn.GroupNorm, whose positions are the active voxels of each sample.

    Args:
        num_groups: groups of channels.
        num_channels: C.
        eps: added to the variance.
        affine: whether there are weight and bias.
        device: of the parameters.
        dtype: of the parameters.
        bias: whether an affine norm has a bias.
        backend: "torch" or None, which are the same; another raises BackendError.

    Sums run over a sample's voxels in ascending order: the same bits for every order of the rows.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-05,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        backend: str | None = None,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **_bias_of(bias))
        self._use_torch(backend)

    def forward(self, tensor: SparseTensor) -> SparseTensor:  # type: ignore[override]
        """The normalised tensor, in its dtype."""
        self.check(tensor, self.num_channels)
        feats = _sample_norm(tensor, self.num_groups, self.eps)
        dtype = widened(tensor.feats).dtype
        return tensor.replace(_affine(feats, self.weight, self.bias).to(dtype))


class SparseInstanceNorm(SparseGroupNorm):
    """torch.nn.InstanceNorm: by channel and sample.

    Args:
        num_features: C.
        eps: added to the variance.
        affine: whether there are weight and bias.
        backend: "torch" or None, which are the same; another raises BackendError.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = False,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__(num_features, num_features, eps, affine, backend=backend)

    def extra_repr(self) -> str:
        """The channels and options."""
        return f"{self.num_channels}, eps={self.eps}, affine={self.affine}"


def _sample_norm(tensor: SparseTensor, groups: int, eps: float) -> Tensor:
    """(x − mean) / √(var + eps) by sample and group, in the dtype of sums."""
    x, (owner, order, size) = wide(tensor.feats), samples_of(tensor)
    channels = x.shape[1] // groups
    terms = lengths(owner, order, size).clamp(min=1).unsqueeze(1) * channels

    def mean_of(rows: Tensor) -> Tensor:
        """(batch, C): the mean of each channel's group."""
        total = together(rows, owner, order, size).view(size, groups, channels).sum(2)
        return (total / terms).repeat_interleave(channels, 1)

    centred = x - apart(mean_of(x), owner, order)
    return centred * apart((mean_of(centred.square()) + eps).rsqrt(), owner, order)


def _bias_of(bias: bool) -> dict[str, bool]:
    """An argument that norms of older versions of torch lack."""
    return {} if bias else {"bias": False}


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _world_size() -> int:
    """Number of ranks in distributed training; 1 without torch.distributed."""
    active = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if active else 1


class _AllSum(torch.autograd.Function):
    """Σ over the ranks, as is its gradient: every rank's loss depends on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _all_sum(grads[0].contiguous())


def _all_sum(x: Tensor) -> Tensor:
    found: Tensor = _AllSum.apply(x)  # type: ignore[no-untyped-call]
    return found
