"""Modules of jitted functions by their text, which is run only when Triton has to compile them.

Generated modules are real files, as Triton needs them: readable, cached on disk, written at once.

The compiler gets Gluon kernels `outlined`: the body of each long loop is a function of its own.
Triton visits the body of a loop twice, first to find what it carries, and so the body of a nested
loop four times; a function it visits once, and then inlines it.  For kernels of a thousand lines
this is most of their compilation.  The machine code stays as long; of Triton's own kernels some of
AMD's grew.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from torchweft.core.files import home, write

__all__ = [
    "Jitted",
    "as_loaded",
    "imported",
    "load",
    "outlined",
    "printed",
    "state",
    "text",
    "written",
]


as_loaded: dict[str, dict[str, object]] = {}
"""The state of each module right after it was loaded for a jitted function."""


@functools.cache
def load(name: str, source: str) -> ModuleType:
    """The module of a generated source, a file of the disk cache.

    The file is in $TORCHWEFT_CACHE_DIR or ~/.cache/torchweft, under its name and the source's hash.
    """
    module_name = f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    path = home() / "generated" / f"{module_name}.py"
    if not path.exists():
        write(path, source.encode())
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be read as a module: remove it, it will be made again")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # numba's cache looks up the module of a function
    spec.loader.exec_module(module)
    as_loaded[module_name] = state(module)
    return module


class Jitted:
    """A jitted function by its text; its module is imported when Triton has to compile.

    If its machine code is on disk, the module is not imported: the import of Triton takes longer
    than all other parts of a first call.

    Args:
        function: its name.
        source: returns the text of its module.
        module: imports its module.
        origin: makes the same function in another process; None: it cannot go there.
    """

    def __init__(
        self,
        function: str,
        source: Callable[[], str],
        module: Callable[[], ModuleType],
        origin: Callable[[], Jitted] | None = None,
    ) -> None:
        self.__name__ = function
        self._source, self._module, self.origin = source, module, origin

    @property
    def src(self) -> str:
        """The present text of its module."""
        return self._source()

    def function(self) -> Any:
        """The function that Triton compiles."""
        return _noted(self._module).__dict__[self.__name__]

    def run(self, *arguments: Any, **options: Any) -> Any:
        """Compile and launch by Triton."""
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
        """The names of its parameters."""
        return [p.arg for p in self._parameters]

    @functools.cached_property
    def constexprs(self) -> list[int]:
        """Positions of the parameters that are constants of the machine code."""
        annotations = [p.annotation and ast.unparse(p.annotation) for p in self._parameters]
        return [i for i, text in enumerate(annotations) if text and "constexpr" in text]

    @functools.cached_property
    def loose(self) -> frozenset[int]:
        """Positions of the parameters of `do_not_specialize`, given there by name or position."""
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
    """A function of a generated module, which is compiled `outlined` if it is Gluon.

    One object for each source: caches of machine code identify a function by its id.
    """

    def module() -> ModuleType:
        return load(name, outlined(source) if "gluon" in source else source)

    origin = functools.partial(printed, name, source, function)
    return Jitted(function, lambda: source, module, origin)


@functools.cache
def written(module: str, function: str) -> Jitted:
    """A function of a module of torchweft that need not be imported."""
    origin = functools.partial(written, module, function)
    return Jitted(function, lambda: text(module), lambda: importlib.import_module(module), origin)


def imported(module: str) -> ModuleType:
    """A module of torchweft, imported so that the code of its functions keeps its key on disk."""
    return sys.modules.get(module) or _noted(lambda: importlib.import_module(module))


def _noted(make: Callable[[], ModuleType]) -> ModuleType:
    before = set(sys.modules)
    module = make()
    for name in sys.modules.keys() - before:
        if name.startswith("torchweft."):
            as_loaded[name] = state(sys.modules[name])
    return module


def text(module: str) -> str:
    """The text of a module that need not be imported.

    Raises:
        ImportError: there is no such module, or it is a package.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or spec.submodule_search_locations is not None:
        raise ImportError(f"{module} is no module: name the file that holds the function")
    return pathlib.Path(spec.origin).read_text()


def state(module: ModuleType) -> dict[str, object]:
    """The contents of a module, to detect what was replaced or changed in it."""
    return {
        name: (id(value), getattr(value, "src", None), repr(getattr(value, "value", None)))
        for name, value in vars(module).items()
        if not name.startswith("__")
    }


LONG = 16
"""Fewest statements of a body that becomes a function."""


def outlined(source: str) -> str:
    """The text of a module of jitted functions, with functions for the bodies of their loops."""
    module = ast.parse(source)
    found: list[ast.stmt] = []
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef):
            found += _Outline(statement).functions
        found.append(statement)
    return ast.unparse(ast.Module(found, []))


class _Outline:
    """Functions for the bodies of the loops of a kernel, whose tree is changed in place.

    Attributes:
        functions: the functions, each after those that it calls.
    """

    def __init__(self, kernel: ast.FunctionDef) -> None:
        self.functions: list[ast.stmt] = []
        self._name = kernel.name
        (decorator,) = kernel.decorator_list
        self._decorator = decorator.func if isinstance(decorator, ast.Call) else decorator
        parameters = kernel.args.args
        self._constants = {p.arg for p in parameters if _constexpr(p.annotation)}
        self._visit(kernel.body, {p.arg for p in parameters})

    def _visit(self, statements: Sequence[ast.stmt], known: set[str]) -> None:
        """Outline the loops among statements; `known` are the names defined before."""
        for statement in statements:
            if isinstance(statement, ast.For | ast.While):
                self._loop(statement, known)
            elif isinstance(statement, ast.If):
                self._visit(statement.body, set(known))
                self._visit(statement.orelse, set(known))
            elif isinstance(statement, ast.AnnAssign) and _constexpr(statement.annotation):
                self._constants |= _stored([statement])
            known |= _stored([statement])

    def _loop(self, loop: ast.For | ast.While, known: set[str]) -> None:
        target = _stored([loop.target]) if isinstance(loop, ast.For) else set()
        unrolled = isinstance(loop, ast.For) and "static_range" in ast.unparse(loop.iter)
        if unrolled:
            self._constants |= target
        self._visit(loop.body, known | target)
        if unrolled or sum(isinstance(n, ast.stmt) for s in loop.body for n in ast.walk(s)) < LONG:
            return
        stored = _stored(loop.body) & known  # passed in, as a branch may not assign them
        given = sorted(stored | _loaded(loop.body) & (known | target))
        carried = ", ".join(sorted(stored))
        name = f"{self._name}_loop{len(self.functions)}"
        parameters = ", ".join(f"{n}: tl.constexpr" if n in self._constants else n for n in given)
        function = _parsed(
            f"def {name}({parameters}): {f'return {carried}' if carried else 'pass'}"
        )
        assert isinstance(function, ast.FunctionDef)
        function.decorator_list = [self._decorator]
        function.body[:0] = loop.body
        self.functions.append(function)
        call = f"{name}({', '.join(given)})"
        loop.body = [_parsed(f"{carried} = {call}" if carried else call)]


def _parsed(text: str) -> ast.stmt:
    (statement,) = ast.parse(text).body
    return statement


def _constexpr(annotation: ast.expr | None) -> bool:
    return annotation is not None and "constexpr" in ast.unparse(annotation)


def _names(nodes: Sequence[ast.AST]) -> Iterator[ast.Name]:
    return (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name))


def _stored(nodes: Sequence[ast.AST]) -> set[str]:
    return {n.id for n in _names(nodes) if isinstance(n.ctx, ast.Store)}


def _loaded(nodes: Sequence[ast.AST]) -> set[str]:
    return {n.id for n in _names(nodes) if isinstance(n.ctx, ast.Load)}
