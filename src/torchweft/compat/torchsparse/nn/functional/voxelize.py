"""From points to voxels: counts and means."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.core.tables import sort_rows
from torchweft.voxels.layers.pooling import together, wide

__all__ = ["spcount", "spvoxelize"]


def spcount(coords: Tensor, num: int) -> Tensor:
    """(num,) int32: how often each of 0 … num − 1 occurs.

    Args:
        coords: (N,) integers below num; negative ones are left out.
        num: of voxels.
    """
    return torch.bincount(coords[coords >= 0], minlength=int(num)).int()


def spvoxelize(feats: Tensor, coords: Tensor, counts: Tensor) -> Tensor:
    """(M, C) Σ feats / counts over the points of each voxel: means; 0 where counts is 0.

    Args:
        feats: (N, C).
        coords: (N,) integers below M, the voxel of each point; −1 for none.
        counts: (M,) as of `spcount`.
    """
    rows = (coords >= 0).nonzero().squeeze(1)
    index = coords.index_select(0, rows).long()
    terms = wide(feats.index_select(0, rows))
    total = together(terms, index, sort_rows(index), len(counts))
    numbers = counts.unsqueeze(1)
    return torch.where(numbers > 0, total / numbers.clamp(min=1), 0).to(feats.dtype)
