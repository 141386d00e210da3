"""What all modules on sparse tensors share: they take a SparseTensor, others take its features."""

from __future__ import annotations

from torch import nn

from torchweft.errors import DTypeError, ShapeError
from torchweft.voxels.maps.tensor import SparseTensor

__all__ = ["SparseModule"]


class SparseModule(nn.Module):
    """A module that takes a SparseTensor; in SparseSequential any other acts on feats."""

    def check(self, tensor: SparseTensor, channels: int | None = None) -> None:
        """Raise unless it is a SparseTensor, with these channels if given.

        Raises:
            DTypeError, ShapeError: it is not.
        """
        name = type(self).__name__
        if not isinstance(tensor, SparseTensor):
            raise DTypeError(
                f"{name} was given a {type(tensor).__name__}: it takes a "
                "torchweft.voxels.SparseTensor. "
                "Chain modules with SparseSequential, or wrap feats with tensor.replace(feats)."
            )
        if channels is not None and tensor.feats.shape[1] != channels:
            raise ShapeError(
                f"feats are {tuple(tensor.feats.shape)} but {name} was built for {channels} "
                f"channels: feats must be (N, {channels}). Build it for {tensor.feats.shape[1]}, "
                "or correct the layer before it."
            )
