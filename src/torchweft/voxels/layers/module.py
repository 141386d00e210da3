"""The base class of modules on sparse tensors, and what several of them check."""

from __future__ import annotations

from torch import Tensor, nn

from torchweft.core.backend import check_torch_only
from torchweft.errors import DTypeError, ShapeError
from torchweft.voxels.maps.tensor import SparseTensor, cat
from torchweft.voxels.norms.functions import by_batch

__all__ = ["SparseModule", "check_statistics", "feats_of"]


class SparseModule(nn.Module):
    """A base class of modules that take a SparseTensor.

    In SparseSequential, modules that do not derive from it are applied to the features.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> class Twice(voxels.SparseModule):
        ...     def forward(self, tensor):
        ...         self.check(tensor)
        ...         return tensor.replace(2 * tensor.F)
        >>> x = voxels.SparseTensor(torch.ones(1, 1), torch.tensor([[0, 4]]))
        >>> Twice()(x).F
        tensor([[2.]])
    """

    def check(self, tensor: SparseTensor, channels: int | None = None) -> None:
        """Raise unless the argument is a SparseTensor, with these channels if given.

        Raises:
            DTypeError: it is not a SparseTensor.
            ShapeError: it has other channels.
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
        """Set the backend of a module that only torch's operations compute.

        Raises:
            BackendError: another than "torch" is requested.
        """
        check_torch_only(self, backend)
        self.backend = backend


def feats_of(tensor: SparseTensor, on: SparseTensor) -> Tensor:
    """A residual's features on the voxels of another tensor, in its order."""
    if not isinstance(tensor, SparseTensor):
        raise DTypeError(
            f"residual is a {type(tensor).__name__}: it must be a torchweft.voxels.SparseTensor. "
            "Pass tensor.replace(feats)."
        )
    if tensor.coordinates is on.coordinates:
        return tensor.feats
    return cat([on, tensor]).feats[:, on.feats.shape[1] :]


def check_statistics(module: nn.Module, tensor: SparseTensor) -> None:
    """Raise where torch's batch norm would see the voxels of this rank alone.

    Raises:
        ShapeError: a batch norm of torch by the statistics of its batch, on voxels that are spread
            over ranks.
    """
    if tensor.coordinates.shards is None or not isinstance(module, nn.BatchNorm1d):
        return
    if by_batch(module):
        raise ShapeError(
            "torch.nn.BatchNorm1d was given voxels that are spread over ranks: its statistics "
            "would be of this rank's voxels alone. Use SparseBatchNorm, which has its state."
        )
