"""Points and voxels, with spconv's names and its order of axes, z, y, x."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchweft import voxels
from torchweft.errors import DeviceError, ShapeError
from torchweft.voxels.maps.coordinates import Coordinates

__all__ = ["PointToVoxel", "gather_features_by_pc_voxel_id"]


class PointToVoxel:
    """Hard voxels of a cloud: the first points of each voxel, see voxels.point_to_voxel.

    Voxels are in the order of their first points, as in spconv on the CPU.  The voxel of a point is
    that of the exact quotient of the float64 numbers, where spconv rounds to float32: points that
    lie on the face of a voxel may fall on its other side.

    Args:
        vsize_xyz: the edges of a voxel, in the order of the points' columns.
        coors_range_xyz: (x0, y0, z0, x1, y1, z1), the box.
        num_point_features: C, columns of a point, positions first.
        max_num_voxels: the most voxels.
        max_num_points_per_voxel: P, the most points of a voxel.
        device: of the points.
    """

    def __init__(
        self,
        vsize_xyz: Sequence[float],
        coors_range_xyz: Sequence[float],
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.ndim, self.device = len(vsize_xyz), torch.device(device)
        self._size = [float(n) for n in vsize_xyz]
        self._box = [float(n) for n in coors_range_xyz]
        self.num_point_features = num_point_features
        self.max_num_voxels = max_num_voxels
        self.max_num_points_per_voxel = max_num_points_per_voxel
        low, high = self._box[: self.ndim], self._box[self.ndim :]
        self.vsize, self.coors_range = self._size[::-1], low[::-1] + high[::-1]
        axes = zip(low, high, self._size, strict=True)
        self.grid_size = [round((b - a) / size) for a, b, size in axes][::-1]

    def __call__(
        self, pc: Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """voxels (V, P, C), indices (V, d) as z, y, x, and num_per_voxel (V,), both int32.

        Args:
            pc: (N, C) points.
            clear_voxels: has no effect: what no point fills is 0.
            empty_mean: must be False.

        Raises:
            ShapeError, DeviceError: points of other columns, or on another device.
            NotImplementedError: empty_mean.
        """
        if empty_mean:
            raise NotImplementedError(
                "empty_mean=True was given: torchweft's stand-in leaves empty places 0. Leave it "
                "out, and divide voxels.sum(1) by num_per_voxel for means."
            )
        if pc.ndim != 2 or pc.shape[1] != self.num_point_features:
            raise ShapeError(
                f"pc is {tuple(pc.shape)} but num_point_features is {self.num_point_features}: "
                f"it must be (N, {self.num_point_features}). Correct one of them."
            )
        if pc.device.type != self.device.type:
            raise DeviceError(
                f"pc is on {pc.device} but PointToVoxel was built for {self.device}: both must be "
                f"on one device. Pass pc.to({str(self.device)!r})."
            )
        most = self.max_num_points_per_voxel, self.max_num_voxels
        found, coords, counts = voxels.point_to_voxel(pc.detach(), self._size, self._box, *most)
        return found, coords[:, 1:].flip(1), counts.int()

    def generate_voxel_with_id(
        self, pc: Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As a call, and pc_voxel_id (N,) int64, the voxel of each point, −1 for none."""
        found, indices, counts = self(pc, clear_voxels, empty_mean)
        places = pc.detach()[:, : self.ndim]
        rows = places.isfinite().all(1).nonzero().squeeze(1)
        low = self._box[: self.ndim]
        cells, cell = voxels.voxelize(places.index_select(0, rows), self._size, origin=low)
        kept = Coordinates(torch.nn.functional.pad(indices.flip(1), (1, 0)))
        ids = torch.full_like(pc[:, 0], -1, dtype=torch.int64)
        return found, indices, counts, ids.index_copy(0, rows, kept.find(cells.C).long()[cell])


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
