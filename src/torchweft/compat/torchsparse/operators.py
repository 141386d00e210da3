"""Tensors put together: channels side by side, and sums on all voxels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchweft import voxels
from torchweft.compat.torchsparse.tensor import SparseTensor, check_same_voxels
from torchweft.compat.voxels import rows_of
from torchweft.errors import ShapeError

__all__ = ["cat", "generative_add"]


def cat(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """The channels of tensors on the same voxels, concatenated to (N, ΣC).

    Raises:
        ShapeError: no tensor, or tensors whose rows are different voxels.
    """
    if not inputs:
        raise ShapeError("cat was given no tensor: it needs at least one. Pass a list of them.")
    check_same_voxels(inputs, "cat")
    return inputs[0].derived(torch.cat([x.feats for x in inputs], 1))


def generative_add(a: SparseTensor, b: SparseTensor) -> SparseTensor:
    """Sums of features on every voxel that one of two tensors has, ascending.

    Raises:
        ShapeError: tensors of different strides or channels.
    """
    if a.stride != b.stride:
        raise ShapeError(
            f"generative_add was given tensors at strides {a.stride} and {b.stride}: both must be "
            "at one stride. Resample one of them first."
        )
    first = a if len(a.feats) >= len(b.feats) else b
    found = voxels.union([a.sparse(), b.sparse()])
    output = SparseTensor(found.F, rows_of(found.coordinates), first.stride, first.spatial_range)
    output._caches = first._caches
    return output
