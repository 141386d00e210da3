"""Activations and pools of a tensor."""

from __future__ import annotations

from torch import Tensor, nn

from torchweft import voxels
from torchweft.compat.torchsparse.nn.utils import fapply
from torchweft.compat.torchsparse.tensor import SparseTensor

__all__ = ["global_avg_pool", "global_max_pool", "leaky_relu", "relu", "silu"]


def relu(input: SparseTensor, inplace: bool = True) -> SparseTensor:
    """max(x, 0)."""
    return fapply(input, nn.functional.relu, inplace=inplace)


def silu(input: SparseTensor, inplace: bool = True) -> SparseTensor:
    """x / (1 + exp(−x))."""
    return fapply(input, nn.functional.silu, inplace=inplace)


def leaky_relu(
    input: SparseTensor, negative_slope: float = 0.1, inplace: bool = True
) -> SparseTensor:
    """X where it is positive, else negative_slope · x."""
    options = {"negative_slope": negative_slope, "inplace": inplace}
    return fapply(input, nn.functional.leaky_relu, **options)


def global_avg_pool(inputs: SparseTensor) -> Tensor:
    """(batch, C): means over each sample's voxels; 0 for a sample without voxels."""
    return voxels.global_pool(inputs.sparse(), "mean")


def global_max_pool(inputs: SparseTensor) -> Tensor:
    """(batch, C): maxima over each sample's voxels; 0 for a sample without voxels."""
    return voxels.global_pool(inputs.sparse(), "max")
