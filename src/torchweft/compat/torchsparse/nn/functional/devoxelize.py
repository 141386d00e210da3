"""From voxels to points: the eight voxels around a point, and their trilinear shares."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.voxels.layers.voxelize import weighted_rows

__all__ = ["calc_ti_weights", "spdevoxelize"]


@torch.no_grad()
def calc_ti_weights(coords: Tensor, idx_query: Tensor, scale: float = 1) -> Tensor:
    """(N, 8) w_v / Σ w over the corners that exist, w = Π (1 − distance of the axis in voxels).

    The place of a corner counts its steps along x, y and z, z fastest; 0 for one that is missing.

    Args:
        coords: (N, 3) or more columns, positions x, y, z.
        idx_query: (N, 8), −1 for a corner that is missing.
        scale: edge of a voxel.
    """
    part = coords[:, :3] / scale - torch.floor(coords[:, :3] / scale)
    x, y, z = torch.stack([1 - part, part], 2).unbind(1)  # (N, 2) each: lower and upper corner
    shares = torch.einsum("ni,nj,nk->nijk", x, y, z).flatten(1)
    shares = shares.masked_fill(idx_query == -1, 0)
    return shares / (shares.sum(1, keepdim=True) + 1e-8)


def spdevoxelize(feats: Tensor, coords: Tensor, weights: Tensor) -> Tensor:
    """(N, C) Σ_v weights[n, v] · feats[coords[n, v]].

    Args:
        feats: (M, C) of voxels.
        coords: (N, 8) integers below M, −1 for none.
        weights: (N, 8), through which gradients do not flow, as there.
    """
    return weighted_rows(feats, coords.long(), weights.detach())
