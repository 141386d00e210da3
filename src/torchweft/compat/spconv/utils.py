"""Generators of voxels, by the names that data pipelines import."""

from __future__ import annotations

from torch import Tensor

from torchweft.compat.lacking import lacking
from torchweft.compat.spconv.pytorch.utils import PointToVoxel

__all__ = ["Point2VoxelCPU1d", "Point2VoxelCPU2d", "Point2VoxelCPU3d", "Point2VoxelCPU4d"]


class Point2VoxelCPU3d(PointToVoxel):
    """The generator of data pipelines; any number of axes, see `PointToVoxel`."""

    def point_to_voxel(
        self, points: Tensor, clear_voxels: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """voxels, indices and num_per_voxel, whose `.numpy()` programs take."""
        return self(points, clear_voxels)


Point2VoxelCPU1d = Point2VoxelCPU2d = Point2VoxelCPU4d = Point2VoxelCPU3d

_BOXES = "Use torchvision.ops.nms, or the box operations of the program's own library."

__getattr__ = lacking(
    __name__,
    dict.fromkeys(
        (
            "non_max_suppression_cpu",
            "rbbox_intersection",
            "rbbox_iou",
            "rbbox_iou_loss",
            "rotate_non_max_suppression_cpu",
        ),
        _BOXES,
    ),
)
