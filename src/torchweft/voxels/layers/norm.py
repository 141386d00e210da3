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

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from torchweft.core.collectives import all_sum, world
from torchweft.core.operators.operands import widened
from torchweft.errors import ShapeError
from torchweft.voxels.convolution.epilogue import Epilogue
from torchweft.voxels.layers.module import SparseModule, feats_of
from torchweft.voxels.layers.pooling import apart, lengths, samples_of, together, wide
from torchweft.voxels.maps.tensor import SparseTensor
from torchweft.voxels.norms.functions import batch_norm, by_batch, rank_norm

__all__ = ["SparseBatchNorm", "SparseGroupNorm", "SparseInstanceNorm", "SparseLayerNorm"]


class SparseBatchNorm(SparseModule, _NormBase):
    """Batch normalisation of the voxels' features, with torch.nn.BatchNorm1d's arguments and state.

    `norm(tensor, residual, activation)` adds a skip connection and applies an activation in the
    same pass.

    Args:
        num_features: number of channels C.
        eps: added to the variance.
        momentum: the weight of a new value in the running statistics; None: the mean of all.
        affine: whether there are parameters weight and bias (C,).
        track_running_stats: whether evaluation uses running statistics.
        device: of the parameters.
        dtype: of the parameters.
        bias: whether an affine norm has a bias.
        backend: "triton" (features of 16 bits or float32), "torch", or None for the fastest that
            can serve.

    Raises:
        ShapeError: at a call, a single voxel in training, or other channels.
        BackendError: at a call, a backend that is not available for it.

    In training with torch.distributed, mean and variance are those of the voxels of all ranks, each
    counted once; of a tensor of `shard_voxels`, those of the ranks that it is spread over.  A batch
    without voxels does not change the running statistics.  Sums run in row order, in float32:
    another order of the rows changes the last bits.

    Cost: on a GPU one pass over the features for the statistics of training and one for the
    result, two in the backward pass.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> norm = voxels.SparseBatchNorm(1)
        >>> norm(x, residual=x, activation="relu").F.round(decimals=2).tolist()
        [[0.0], [4.0]]
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
        self.backend = backend

    def forward(
        self,
        tensor: SparseTensor,
        residual: SparseTensor | None = None,
        activation: str | None = None,
    ) -> SparseTensor:
        """act(norm(tensor) + residual), in the tensor's dtype.

        Args:
            tensor: of C channels.
            residual: on the same voxels, of C channels, in the tensor's dtype.
            activation: "relu", "silu" or "gelu".
        """
        self.check(tensor, self.num_features)
        feats = None if residual is None else feats_of(residual, tensor)
        shards, after = tensor.coordinates.shards, (feats, activation, self.backend)
        group, valid = None if shards is None else shards.group, tensor.coordinates.num_unpadded
        if world(group)[1] > 1 and (self.training or (shards is not None and by_batch(self))):
            y = rank_norm(self, tensor.feats, *after, group=group, valid=valid)
        else:
            y = self._normalised(tensor.feats, *after, valid)
        return tensor.replace(y)

    def _normalised(
        self,
        x: Tensor,
        residual: Tensor | None,
        activation: str | None,
        backend: str | None,
        valid: Tensor | None,
    ) -> Tensor:
        if by_batch(self):
            if not x.shape[0]:
                y = _affine(x, self.weight, self.bias).to(x.dtype)
                return Epilogue(residual=residual, activation=activation)(y)
            if x.shape[0] == 1:
                raise ShapeError(
                    "SparseBatchNorm was given 1 voxel to take a variance of: it needs at least 2, "
                    "or running statistics. Use a larger batch, or eval()."
                )
        return batch_norm(self, x, residual, activation, backend, valid)

    def _check_input_dim(self, input: Tensor) -> None:
        """Called by torch's norm; `check` has seen the features."""


class SparseLayerNorm(SparseModule, nn.LayerNorm):
    """Layer normalisation over the channels of each voxel, as torch.nn.LayerNorm.

    Args:
        num_features: number of channels C.
        eps: added to the variance.
        elementwise_affine: whether there are parameters weight and bias (C,).
        bias: whether there is a bias.
        backend: "torch" or None, which are the same; another raises BackendError.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4], [1, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8))
        >>> voxels.SparseLayerNorm(4)(x)
        SparseTensor(3 voxels, 4 channels, d=3, torch.float32, on cpu)
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
    """Group normalisation, as torch.nn.GroupNorm, over the active voxels of each sample.

    Args:
        num_groups: number of groups of channels.
        num_channels: number of channels C.
        eps: added to the variance.
        affine: whether there are parameters weight and bias (C,).
        device: of the parameters.
        dtype: of the parameters.
        bias: whether an affine norm has a bias.
        backend: "torch" or None, which are the same; another raises BackendError.

    Sums run over a sample's voxels in ascending order: features, and gradients of features, have
    the same bits for every order of the rows.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4], [1, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8))
        >>> voxels.SparseGroupNorm(2, 4)(x)
        SparseTensor(3 voxels, 4 channels, d=3, torch.float32, on cpu)
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
    """Instance normalisation, as torch.nn.InstanceNorm: by channel and sample, over active voxels.

    Args:
        num_features: number of channels C.
        eps: added to the variance.
        affine: whether there are parameters weight and bias (C,).
        backend: "torch" or None, which are the same; another raises BackendError.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> voxels.SparseInstanceNorm(1)(x).F.round(decimals=4)
        tensor([[-1.],
                [ 1.]])
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
    shards = tensor.coordinates.shards

    def of_ranks(part: Tensor) -> Tensor:
        return part if shards is None else all_sum(part, shards.group)

    terms = of_ranks(lengths(owner, order, size)).clamp(min=1).unsqueeze(1) * channels

    def mean_of(rows: Tensor) -> Tensor:
        """(batch, C): the mean of each channel's group."""
        total = of_ranks(together(rows, owner, order, size)).view(size, groups, channels).sum(2)
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
