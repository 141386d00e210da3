"""Libraries that import what torchweft stands in for."""

import importlib
import importlib.util
from types import ModuleType

import pytest

import torchweft

__all__ = ["import_over"]


def import_over(stand_in: str, library: str) -> ModuleType:
    """A library on a stand-in; the file is skipped, with no hook left, where it is not installed.

    Args:
        stand_in: of `torchweft.compat.names()`.
        library: which was not imported before.
    """
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: pip install {library}", allow_module_level=True)
    torchweft.compat.install(stand_in)
    return importlib.import_module(library)
