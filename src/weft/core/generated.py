"""Generated modules are real files, as Triton needs them: readable, cached on disk, atomic."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import pathlib
import sys
import tempfile
from types import ModuleType

__all__ = ["load"]


@functools.cache
def load(name: str, source: str) -> ModuleType:
    """The module of a generated source, from the disk cache.

    $WEFT_CACHE_DIR or ~/.cache/weft holds it, under its name and a hash of the source.
    """
    home = os.environ.get("WEFT_CACHE_DIR") or pathlib.Path.home() / ".cache" / "weft"
    folder = pathlib.Path(home) / "generated"
    module_name = f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    path = folder / f"{module_name}.py"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(source)
        pathlib.Path(file.name).replace(path)
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be read as a module: remove it, it will be made again")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # numba's own cache looks for the module of a function
    spec.loader.exec_module(module)
    return module
