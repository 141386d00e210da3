"""Norms with MinkowskiEngine's names and parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchweft import voxels
from torchweft.compat.MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from torchweft.compat.MinkowskiEngine.MinkowskiSparseTensor import SparseTensor
from torchweft.compat.MinkowskiEngine.MinkowskiTensor import Tensor

__all__ = [
    "MinkowskiBatchNorm",
    "MinkowskiInstanceNorm",
    "MinkowskiStableInstanceNorm",
    "MinkowskiSyncBatchNorm",
]


class MinkowskiBatchNorm(nn.Module):
    """torch's BatchNorm1d `bn` over all rows of a SparseTensor or TensorField."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__()
        self.bn: Any = nn.BatchNorm1d(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: Tensor) -> Tensor:
        """On the same rows."""
        return input.with_features(self.bn(input.F))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.bn.extra_repr()})"


class MinkowskiSyncBatchNorm(MinkowskiBatchNorm):
    """torch's SyncBatchNorm `bn`."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
    ) -> None:
        nn.Module.__init__(self)
        options = eps, momentum, affine, track_running_stats, process_group
        self.bn = nn.SyncBatchNorm(num_features, *options)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """The module with its MinkowskiBatchNorms replaced; they keep parameters and buffers."""
        if isinstance(module, MinkowskiBatchNorm):
            old = module.bn
            options = old.eps, old.momentum, old.affine, old.track_running_stats
            found = cls(old.num_features, *options, process_group)
            found.bn._parameters.update(old._parameters)
            found.bn._buffers.update(old._buffers)
            return found.train(module.training)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_group))
        return module


class MinkowskiInstanceNorm(MinkowskiModuleBase):
    """weight · (x − mean) / √(var + eps) + bias by channel over the voxels of each sample.

    Args:
        num_features: C; weight and bias are (1, C).
    """

    eps = 1e-8

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.weight = nn.Parameter(torch.ones(1, num_features))
        self.bias = nn.Parameter(torch.zeros(1, num_features))

    def reset_parameters(self) -> None:
        """1 and 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: SparseTensor) -> SparseTensor:
        """On the same voxels."""
        norm = voxels.SparseInstanceNorm(self.num_features, self.eps)
        level = input.coordinate_manager.map_of(input.coordinate_map_key).level
        return input.with_features(norm(input.on(level)).feats * self.weight + self.bias)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nchannels={self.num_features})"


class MinkowskiStableInstanceNorm(MinkowskiInstanceNorm):
    """MinkowskiInstanceNorm with a larger eps."""

    eps = 1e-6
