"""Modules one after the other; a batch norm and an activation join the layer before them."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchweft.voxels.layers.convolution import SparseConvolution, SparseInverseConvolution
from torchweft.voxels.layers.module import SparseModule, check_statistics
from torchweft.voxels.layers.norm import SparseBatchNorm
from torchweft.voxels.maps.tensor import SparseTensor
from torchweft.voxels.norms.functions import batch_norm
from torchweft.voxels.norms.modules import taken

__all__ = ["SparseSequential"]


class SparseSequential(nn.Sequential, SparseModule):
    """Modules one after the other: sparse ones take the tensor, all others its features.

    A convolution, a SparseBatchNorm or torch.nn.BatchNorm1d, and a ReLU, SiLU or exact GELU after
    each other run as `convolution(x, norm=…, activation=…)`: one pass in inference, two in
    training.  A module with hooks runs by itself.

    Args:
        *args: modules, or one OrderedDict of modules, as torch.nn.Sequential takes.  A custom
            module that takes a SparseTensor must derive from SparseModule.  After a GlobalPool,
            whose result is dense, every module takes that result.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4], [1, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8))
        >>> network = voxels.SparseSequential(
        ...     voxels.SubMConv3d(4, 16, kernel_size=3),
        ...     voxels.SparseBatchNorm(16),
        ...     torch.nn.ReLU(),
        ...     voxels.SparseConv3d(16, 32, kernel_size=2, stride=2),
        ... )
        >>> network(x)
        SparseTensor(3 voxels, 32 channels, d=3, torch.float32, on cpu)
    """

    def forward(self, x: Any) -> Any:
        """A SparseTensor, or the result of the last module."""
        self.check(x)
        rest = list(self)[::-1]
        while rest:
            if not isinstance(x, SparseTensor):
                x = rest.pop()(x)
                continue
            module, given = taken(rest, _convolves, (SparseBatchNorm,))
            if isinstance(module, SparseModule):
                x = module(x, **given)
                continue
            check_statistics(module, x)
            if given:
                valid = x.coordinates.num_unpadded
                x = x.replace(batch_norm(module, x.feats, **given, valid=valid))
            else:
                x = x.replace(module(x.feats))
        return x


_CONVOLUTIONS = (SparseConvolution.forward, SparseInverseConvolution.forward)


def _convolves(module: nn.Module) -> bool:
    return type(module).forward in _CONVOLUTIONS
