"""Features on a dense grid."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchweft.compat.torchsparse.tensor import SparseTensor

__all__ = ["to_dense"]


def to_dense(feats: Tensor, coords: Tensor, spatial_range: Sequence[int]) -> Tensor:
    """(batch, x, y, z, C), contiguous, 0 where there is no voxel, with gradients.

    Args:
        feats: (N, C).
        coords: (N, 4) integers (batch, x, y, z).
        spatial_range: the sizes of the first four axes.
    """
    return SparseTensor(feats, coords, spatial_range=spatial_range).dense()
