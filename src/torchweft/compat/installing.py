"""The import hook: `import NAME` gives the stand-in, the same module object as torchweft's own."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

from torchweft.errors import WeftError

__all__ = ["install", "names", "uninstall"]

PACKAGE = __name__.rpartition(".")[0]

STAND_INS = {
    "MinkowskiEngine": ("MinkowskiEngine",),
    "pykeops": ("pykeops", "keopscore"),
    "spconv": ("spconv", "cumm"),
    "torch_scatter": ("torch_scatter",),
    "torchsparse": ("torchsparse",),
}
"""By the name to install, the top-level modules that it stands in for."""


def names() -> list[str]:
    """The libraries that have a stand-in.

    Returns:
        A sorted list of names, for `install`.

    Example:
        >>> import torchweft
        >>> torchweft.compat.names()
        ['MinkowskiEngine', 'pykeops', 'spconv', 'torch_scatter', 'torchsparse']
    """
    return sorted(STAND_INS)


def install(*names: str) -> None:
    """Makes `import NAME` give torchweft's stand-in, from now on and in this process.

    The stand-in comes before the original, installed or not.  Processes that are forked have it
    too; processes that start anew (`spawn`) call `install` themselves.

    Args:
        *names: of `torchweft.compat.names()`, such as "spconv".

    Raises:
        WeftError: a name without a stand-in; the original was imported already.

    Example:
        >>> import torchweft
        >>> torchweft.compat.install("spconv")
        >>> import spconv.pytorch as spconv
        >>> spconv.SubMConv3d(4, 16, 3).weight.shape
        torch.Size([16, 3, 3, 3, 4])
        >>> torchweft.compat.uninstall("spconv")
    """
    modules = _modules(names)
    for module in modules:
        found = sys.modules.get(module)
        if found is not None and not _ours(found):
            where = getattr(found, "__file__", None) or "memory"
            raise WeftError(
                f"{module} was imported already, from {where}: what uses it would not get the "
                f"stand-in. Call torchweft.compat.install({module!r}) before the first "
                f"`import {module}`, or run python -m torchweft.compat {module} -- script.py."
            )
    _finder.installed.update(modules)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def uninstall(*names: str) -> None:
    """Undoes `install`: `import NAME` finds the original again.

    Modules and objects that use the stand-in keep it.

    Args:
        *names: of `torchweft.compat.names()`.

    Raises:
        WeftError: a name without a stand-in.

    Example:
        >>> import torchweft
        >>> torchweft.compat.install("torch_scatter")
        >>> torchweft.compat.uninstall("torch_scatter")
    """
    for module in _modules(names):
        _finder.installed.discard(module)
        for name in [n for n in sys.modules if n == module or n.startswith(f"{module}.")]:
            if _ours(sys.modules[name]):
                del sys.modules[name]
    if not _finder.installed and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _modules(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in STAND_INS:
            raise WeftError(
                f"{name!r} has no stand-in: there are {', '.join(sorted(STAND_INS))}. Pass one of "
                "these names."
            )
    return [module for name in names for module in STAND_INS[name]]


def _ours(module: ModuleType) -> bool:
    return module.__name__.startswith(f"{PACKAGE}.")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the installed names among the modules of this package."""

    def __init__(self) -> None:
        self.installed: set[str] = set()

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        library = fullname.partition(".")[0]
        if library not in self.installed:
            return None
        if importlib.util.find_spec(f"{PACKAGE}.{fullname}") is None:
            raise ModuleNotFoundError(
                f"torchweft's stand-in for {library} has no module {fullname}; what it lacks is "
                f"listed in help({PACKAGE}.{library}). Call "
                f"torchweft.compat.uninstall({library!r}) for the original.",
                name=fullname,
            )
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"{PACKAGE}.{spec.name}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which ran before, its own description back."""
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state


_finder = _Finder()
