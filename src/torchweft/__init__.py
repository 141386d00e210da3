"""torchweft: fast, differentiable sparse kernels for geometric deep learning, for PyTorch.

z[M] = Σ_{t ∈ terms of M} s[t] · x[i(t)] ∘ y[j(t)]
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_ERRORS = (
    "BackendError",
    "CaptureError",
    "DTypeError",
    "DeviceError",
    "IndexRangeError",
    "RankError",
    "ShapeError",
    "WeftError",
)
_NAMESPACES = (
    "clifford",
    "compat",
    "distributed",
    "o3",
    "products",
    "reductions",
    "testing",
    "voxels",
)

__all__ = [*_ERRORS, *_NAMESPACES, "capture", "constant", "explain"]


def __getattr__(name: str) -> Any:
    """Namespaces and names are loaded when first used: `import torchweft` costs nothing."""
    if name in _NAMESPACES:
        return importlib.import_module(f"torchweft.{name}")
    if name in _ERRORS:
        return getattr(importlib.import_module("torchweft.errors"), name)
    if name == "capture":
        return importlib.import_module("torchweft.capturing.functions").capture
    if name == "constant":
        return importlib.import_module("torchweft.core.table_copies").constant
    if name == "explain":
        return importlib.import_module("torchweft.core.explain").explain
    raise AttributeError(f"module 'torchweft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
