"""Generators of voxels, by the names that data pipelines import."""

from torchweft.compat.lacking import lacking

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
