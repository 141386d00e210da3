"""Jitted functions by the text of their module, which is run when Triton has to compile them.

Generated modules are real files, as Triton needs them: readable, cached on disk, atomic.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from torchweft.core.files import home, write
from torchweft.core.printing.outline import outlined

__all__ = ["Jitted", "as_loaded", "imported", "load", "printed", "state", "text", "written"]


@functools.cache
def load(name: str, source: str) -> ModuleType:
    """The module of a generated source, from the disk cache.

    $TORCHWEFT_CACHE_DIR or ~/.cache/torchweft holds it, under its name and a hash of the source.
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


class Jitted:
    """A jitted function by its text; its module is run when Triton has to compile.

    Where its machine code is on disk nobody asks for the module: Triton's import takes longer than
    all the rest of a first call.

    Args:
        function: its name.
        source: the text of its module.
        module: runs it.
    """

    def __init__(
        self, function: str, source: Callable[[], str], module: Callable[[], ModuleType]
    ) -> None:
        self.__name__ = function
        self._source, self._module = source, module

    @property
    def src(self) -> str:
        """The text of its module, as it is now."""
        return self._source()

    def function(self) -> Any:
        """As Triton knows it."""
        return _noted(self._module).__dict__[self.__name__]

    def run(self, *arguments: Any, **options: Any) -> Any:
        """Triton's, which compiles and launches."""
        return self.function().run(*arguments, **options)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.function()[grid]

    @functools.cached_property
    def _head(self) -> ast.FunctionDef:
        source = self.src
        begin = source.index(f"def {self.__name__}(")
        end = re.compile(r"\):( *#.*)?$", re.M).search(source, begin)
        head = source[source.rindex("\n@", 0, begin) : None if end is None else end.start()]
        (definition,) = ast.parse(f"{head}): pass").body
        assert isinstance(definition, ast.FunctionDef)
        return definition

    @property
    def _parameters(self) -> list[ast.arg]:
        return self._head.args.args

    @functools.cached_property
    def arg_names(self) -> list[str]:
        """Its parameters."""
        return [p.arg for p in self._parameters]

    @functools.cached_property
    def constexprs(self) -> list[int]:
        """Which of them are constants of the machine code."""
        annotations = [p.annotation and ast.unparse(p.annotation) for p in self._parameters]
        return [i for i, text in enumerate(annotations) if text and "constexpr" in text]

    @functools.cached_property
    def loose(self) -> frozenset[int]:
        """Those whose numbers no code depends on, as `do_not_specialize` names or counts them."""
        (decorator,) = self._head.decorator_list
        names = self.arg_names
        for keyword in getattr(decorator, "keywords", ()):
            if keyword.arg == "do_not_specialize":
                places = (names.index(n) if isinstance(n, str) else n for n in _listed(keyword))
                return frozenset(places)
        return frozenset()


def _listed(keyword: ast.keyword) -> Iterable[str | int]:
    """A list of literals, or a range."""
    value = keyword.value
    if isinstance(value, ast.Call):
        return range(*map(ast.literal_eval, value.args))
    found: list[str | int] = ast.literal_eval(value)
    return found


@functools.cache
def printed(name: str, source: str, function: str) -> Jitted:
    """A function of a generated module, which the compiler gets as `outlined` if it is Gluon.

    One for each source: who keeps machine code knows a function again by its identity.
    """

    def module() -> ModuleType:
        return load(name, outlined(source) if "gluon" in source else source)

    return Jitted(function, lambda: source, module)


@functools.cache
def written(module: str, function: str) -> Jitted:
    """A function of a module of torchweft, which need not be imported."""
    return Jitted(function, lambda: text(module), lambda: importlib.import_module(module))


def imported(module: str) -> ModuleType:
    """A module of torchweft, so that the machine code of its functions stays known on disk."""
    return sys.modules.get(module) or _noted(lambda: importlib.import_module(module))


def _noted(make: Callable[[], ModuleType]) -> ModuleType:
    before = set(sys.modules)
    module = make()
    for name in sys.modules.keys() - before:
        if name.startswith("torchweft."):
            as_loaded[name] = state(sys.modules[name])
    return module


def text(module: str) -> str:
    """Of a module that need not be imported.

    Raises:
        ImportError: there is none, or it is a package.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or spec.submodule_search_locations is not None:
        raise ImportError(f"{module} is no module: name the file that holds the function")
    return pathlib.Path(spec.origin).read_text()


as_loaded: dict[str, dict[str, object]] = {}
"""The states of modules when they had just been run for a jitted function."""


def state(module: ModuleType) -> dict[str, object]:
    """What a module holds, as far as somebody may replace or change it."""
    return {
        name: (id(value), getattr(value, "src", None), repr(getattr(value, "value", None)))
        for name, value in vars(module).items()
        if not name.startswith("__")
    }
