"""Printed kernels for the compiler: the body of each long loop is a function of its own.

Triton visits the body of a loop twice, first to find what it carries, and so that of a loop in a
loop four times; a function it visits once, then inlines it.  For kernels of a thousand lines that
is most of their compilation.

For Gluon, whose machine code stays as long.  Of Triton's kernels some of AMD's grew.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

__all__ = ["outlined"]

LONG = 16
"""Statements of a body from which on it is worth a function."""


def outlined(source: str) -> str:
    """The text of a module of jitted functions, with the bodies of their loops before them."""
    module = ast.parse(source)
    found: list[ast.stmt] = []
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef):
            found += _Outline(statement).functions
        found.append(statement)
    return ast.unparse(ast.Module(found, []))


class _Outline:
    """The functions that stand for bodies of loops of a kernel, which is changed.

    Attributes:
        functions: in the order in which they need each other.
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
        """Loops among statements that begin with these names known."""
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
        stored = _stored(loop.body) & known  # a branch may leave them as they were
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
