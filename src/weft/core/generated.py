"""Generated modules are real files, as Triton needs them: readable, cached on disk, atomic."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import re
import sys
from types import ModuleType
from typing import Any

from weft.core.files import home, write

__all__ = ["Printed", "load", "printed"]


@functools.cache
def load(name: str, source: str) -> ModuleType:
    """The module of a generated source, from the disk cache.

    $WEFT_CACHE_DIR or ~/.cache/weft holds it, under its name and a hash of the source.
    """
    module_name = f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    path = home() / "generated" / f"{module_name}.py"
    if not path.exists():
        write(path, source.encode())
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be read as a module: remove it, it will be made again")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # numba's own cache looks for the module of a function
    spec.loader.exec_module(module)
    return module


class Printed:
    """A jitted function of a generated source, whose module is run when Triton has to compile.

    Where its machine code is on disk nobody asks for the module: running it takes as long as
    printing it, and Gluon's import takes longer.

    Args:
        name: of the module.
        source: its text: imports and constants, then functions.
        function: the name of the one that is launched.
    """

    def __init__(self, name: str, source: str, function: str) -> None:
        self.src, self.__name__ = source, function
        self._module_name = name

    @property
    def function(self) -> Any:
        """As Triton knows it."""
        return load(self._module_name, self.src).__dict__[self.__name__]

    def run(self, *arguments: Any, **options: Any) -> Any:
        """Triton's, which compiles and launches."""
        return self.function.run(*arguments, **options)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.function[grid]

    @functools.cached_property
    def _parameters(self) -> list[ast.arg]:
        begin = self.src.index(f"def {self.__name__}(")
        head = self.src[begin : self.src.index("):", begin)]
        (definition,) = ast.parse(f"{head}): pass").body
        return definition.args.args if isinstance(definition, ast.FunctionDef) else []

    @functools.cached_property
    def arg_names(self) -> list[str]:
        """Its parameters."""
        return [p.arg for p in self._parameters]

    @functools.cached_property
    def constexprs(self) -> list[int]:
        """Which of them are constants of the machine code."""
        annotations = [p.annotation and ast.unparse(p.annotation) for p in self._parameters]
        return [i for i, text in enumerate(annotations) if text and "constexpr" in text]

    def imported(self) -> dict[str, Any] | None:
        """What the source takes from weft, by name; None: it imports in another way."""
        head, *rest = re.split(r"^(?=@)", self.src, maxsplit=1, flags=re.M)
        if any(re.search(r"^\s*(import|from)\s", part, re.M) for part in rest):
            return None
        found: dict[str, Any] = {}
        for node in ast.parse(head).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("weft."):
                module = importlib.import_module(str(node.module))
                found.update((a.asname or a.name, getattr(module, a.name)) for a in node.names)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                modules = (
                    [node.module]
                    if isinstance(node, ast.ImportFrom)
                    else [a.name for a in node.names]
                )
                if not all(str(m).partition(".")[0] == "triton" for m in modules):
                    return None
        return found


@functools.cache
def printed(name: str, source: str, function: str) -> Printed:
    """One for each source: who keeps machine code knows a function again by its identity."""
    return Printed(name, source, function)
