"""torchweft: fast, differentiable sparse kernels for geometric deep learning, for PyTorch.

z[M] = Σ_{t ∈ terms of M} s[t] · x[i(t)] ∘ y[j(t)]
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchweft import (
        clifford,
        compat,
        distributed,
        o3,
        products,
        reductions,
        testing,
        voxels,
    )
    from torchweft.capturing.functions import capture
    from torchweft.core.explain import explain
    from torchweft.core.table_copies import constant
    from torchweft.errors import (
        BackendError,
        CaptureError,
        DeviceError,
        DTypeError,
        IndexRangeError,
        RankError,
        ShapeError,
        WeftError,
    )

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "CaptureError",
    "DTypeError",
    "DeviceError",
    "IndexRangeError",
    "RankError",
    "ShapeError",
    "WeftError",
    "capture",
    "clifford",
    "compat",
    "constant",
    "distributed",
    "explain",
    "o3",
    "products",
    "reductions",
    "testing",
    "voxels",
]

if not TYPE_CHECKING:  # type checkers know the names above, and no others
    _FUNCTIONS = {
        "capture": "capturing.functions",
        "constant": "core.table_copies",
        "explain": "core.explain",
    }

    def __getattr__(name: str) -> object:
        """Namespaces and names are loaded when first used: `import torchweft` costs nothing."""
        if name not in __all__:
            raise AttributeError(f"module 'torchweft' has no attribute {name!r}")
        if name.endswith("Error"):
            return getattr(importlib.import_module("torchweft.errors"), name)
        if name in _FUNCTIONS:
            return getattr(importlib.import_module(f"torchweft.{_FUNCTIONS[name]}"), name)
        return importlib.import_module(f"torchweft.{name}")


def __dir__() -> list[str]:
    return __all__
