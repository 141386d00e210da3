"""The base of all modules on sparse tensors, and their sequence."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchweft.core.backend import check_torch_only
from torchweft.errors import DTypeError, ShapeError
from torchweft.voxels.maps.tensor import SparseTensor

__all__ = ["SparseModule", "SparseSequential"]


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

    def _use_torch(self, backend: str | None) -> None:
        """Set the backend of a module that torch's own operations compute.

        Raises:
            BackendError: another than "torch" is requested.
        """
        check_torch_only(self, backend)
        self.backend = backend


class SparseSequential(nn.Sequential, SparseModule):
    """Modules one after the other: sparse ones take the tensor, all others its features.

    SparseSequential(SubMConv3d(4, 16, 3), SparseBatchNorm(16), nn.ReLU())

    A module of your own that takes a SparseTensor derives from SparseModule.  Behind a GlobalPool,
    whose result is dense, every module takes that result.
    """

    def forward(self, x: Any) -> Any:
        """A SparseTensor, or what the last module makes of it."""
        self.check(x)
        for module in self:
            whole = isinstance(module, SparseModule) or not isinstance(x, SparseTensor)
            x = module(x) if whole else x.replace(module(x.feats))
        return x
