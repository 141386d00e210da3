"""Points and voxels."""

from __future__ import annotations

from torch import Tensor

__all__ = ["gather_features_by_pc_voxel_id"]


def gather_features_by_pc_voxel_id(
    seg_res_features: Tensor, pc_voxel_id: Tensor, invalid_value: float = 0
) -> Tensor:
    """(P, …): the features of each point's voxel, invalid_value where its id is −1.

    Args:
        seg_res_features: (V, …) features of voxels.
        pc_voxel_id: (P,) the voxel of each point, −1 for none.
        invalid_value: of points without a voxel.
    """
    ids = pc_voxel_id.to(seg_res_features.device)
    inside = (ids >= 0).nonzero().squeeze(1)
    found = seg_res_features.new_full((len(ids), *seg_res_features.shape[1:]), invalid_value)
    return found.index_copy(0, inside, seg_res_features.index_select(0, ids[inside].long()))
