"""Axes and categories, and what else programs import of pykeops.common.utils."""

from torchweft.compat.lacking import lacking
from torchweft.errors import ShapeError

__all__ = ["axis2cat", "cat2axis"]


def axis2cat(axis: int) -> int:
    """The category of the result of a reduction over an axis: 1 for 0, 0 for 1."""
    if axis not in (0, 1):
        raise ShapeError(
            f"axis is {axis!r}: it must be 0 (over i) or 1 (over j). Pass one of them."
        )
    return 1 - axis


def cat2axis(cat: int) -> int:
    """The axis over which a result of a category is reduced: 1 for 0, 0 for 1."""
    if cat not in (0, 1):
        raise ShapeError(f"cat is {cat!r}: it must be 0 (Vi) or 1 (Vj). Pass one of them.")
    return 1 - cat


_MESSAGES = "Use print, or the module warnings."

__getattr__ = lacking(
    __name__,
    {
        "WarmUpGpu": "Call pykeops.numpy.utils.WarmUpGpu().",
        "c_type": "There is no C++: use the dtypes of torch.",
        "check_broadcasting": "Use torch.broadcast_shapes.",
        "get_tools": "Use torch or numpy themselves.",
        "max_tuple": "Use torch.broadcast_shapes.",
        "pyKeOps_Message": _MESSAGES,
        "pyKeOps_Print": _MESSAGES,
        "pyKeOps_Warning": _MESSAGES,
    },
)
