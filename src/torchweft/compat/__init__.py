"""Run what was written for another library: modules with its names, over torchweft's families.

    import torchweft
    torchweft.compat.install("spconv")
    import spconv.pytorch as spconv        # torchweft.compat.spconv.pytorch

A script runs unmodified by `python -m torchweft.compat spconv -- script.py …`.  The stand-ins are
plain modules too: `import torchweft.compat.spconv.pytorch as spconv`.  Each says in its docstring
what of the original it lacks; what it lacks raises NotImplementedError with the nearest way.
"""

import importlib
from typing import TYPE_CHECKING

from torchweft.compat.installing import install, names, uninstall

if TYPE_CHECKING:
    from torchweft.compat import MinkowskiEngine as MinkowskiEngine
    from torchweft.compat import pykeops as pykeops
    from torchweft.compat import spconv as spconv
    from torchweft.compat import torch_scatter as torch_scatter
    from torchweft.compat import torchsparse as torchsparse

__all__ = ["install", "names", "uninstall"]

if not TYPE_CHECKING:  # type checkers know the names above, and no others

    def __getattr__(name: str) -> object:
        """A stand-in is loaded when first used."""
        if name in names():
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
