"""Formula strings, such as "Exp(-SqDist(x, y) / s) * b" with aliases "x = Vi(3)".

A formula string is a Python expression of + - * / | ** and comparisons, numbers, the names of
`torchweft.reductions.formula.named.operations`, aliases, and the variables
Var(index, dim, category), Vi(index, dim), Vj(index, dim), Pm(index, dim).
IntCst(k), RatCst(p, q) and Zero(dim) are constants, Ind(…) and […] lists of integers.  It is
parsed, never executed.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torchweft.errors import WeftError
from torchweft.reductions.formula.named import INTEGERS, LISTS, operations
from torchweft.reductions.formula.node import Node, const, var, variables, zeros

__all__ = ["Declaration", "FormulaError", "parse", "parse_aliases", "parse_variable"]


class FormulaError(WeftError, ValueError):
    """A formula string or an alias that cannot be read."""


class Declaration(NamedTuple):
    """The declaration of an alias.

    Args:
        name: its name in formulas, or None.
        position: of the tensor among the arguments; None if the alias does not give it.
        dim: dimension.
        cat: 0 (i), 1 (j) or 2 (parameter).
    """

    name: str | None
    position: int | None
    dim: int
    cat: int


_CATEGORIES = {"Vi": 0, "Vj": 1, "Pm": 2, "Vx": 0, "Vy": 1}
_ALIAS = re.compile(
    r"\s*(?:(?P<name>[^\W\d]\w*)\s*=)?\s*(?P<kind>Var|Vi|Vj|Pm|Vx|Vy)\s*"
    r"\(\s*(?P<numbers>\d+(?:\s*,\s*\d+)*)\s*\)\s*"
)


def parse_variable(text: str) -> Declaration:
    """The variable of "x = Vi(3)", "x = Vi(0, 3)", "Vi(3)" or "Var(0, 3, 0)"."""
    found = _ALIAS.fullmatch(text) if isinstance(text, str) else None
    numbers = [int(n) for n in found["numbers"].split(",")] if found else []
    if found and found["kind"] == "Var" and len(numbers) == 3:
        return Declaration(found["name"], *numbers)
    if found and found["kind"] != "Var" and len(numbers) in (1, 2):
        position = numbers[0] if len(numbers) == 2 else None
        return Declaration(found["name"], position, numbers[-1], _CATEGORIES[found["kind"]])
    raise FormulaError(
        f"{text!r} is given as a variable: it must read like 'x = Vi(3)', 'x = Vi(0, 3)', 'Vi(3)' "
        "or 'x = Var(0, 3, 0)', with Vi, Vj or Pm for data that varies with i, with j, or not at "
        "all. Write the dimension in the parentheses, behind the position if there is one."
    )


def parse_aliases(aliases: Sequence[str]) -> dict[str, Node]:
    """The variables by name; an alias without a position has its place in the list."""
    named: dict[str, Node] = {}
    for place, alias in enumerate(aliases):
        name, position, dim, cat = parse_variable(alias)
        if name in named:
            raise FormulaError(
                f"the aliases {list(aliases)} declare {name!r} twice: each name must be declared "
                "once. Rename or remove one."
            )
        if name is not None:
            named[name] = var(place if position is None else position, dim, cat)
    return named


def parse(text: str, names: dict[str, Node] | None = None) -> Node:
    """The formula of a formula string.

    Args:
        text: the formula string.
        names: formulas by name, see `parse_aliases`.

    Raises:
        FormulaError: the string is no formula.
    """
    flat = re.sub(r"\s", " ", text).strip()
    try:
        tree = ast.parse(flat, mode="eval")
    except SyntaxError as error:
        at_end = not error.lineno or not error.offset
        position = len(flat) if at_end else len(flat[: error.offset]) - 1
        raise FormulaError(
            f"a syntax error at position {position} of the formula {flat!r}: it "
            "must be one expression of operators, numbers, names and calls. Check parentheses, "
            "commas and operators there."
        ) from None
    formula = _Reader(flat, names or {}).formula(tree.body)
    _check_variables(flat, variables(formula))
    return formula


def _check_variables(text: str, found: Sequence[Node]) -> None:
    for v, w in itertools.pairwise(found):
        if v.data[0] == w.data[0]:
            raise FormulaError(
                f"the formula {text!r} has Var{v.data} and Var{w.data}: one position must have one "
                "dimension and one category. Change the aliases or the positions."
            )


_BINARY: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Pow: "**",
    ast.BitOr: "|",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}


def _variable(cat: int) -> Callable[..., Node]:
    return lambda index, dim: var(index, dim, cat)


_LEAVES: dict[str, Callable[..., Node]] = {
    **{kind: _variable(cat) for kind, cat in _CATEGORIES.items()},
    "Var": var,
    "IntCst": lambda integer: const(integer),
    "RatCst": lambda p, q: const(p) / q,
    "Zero": zeros,
}


class _Reader:
    """Reads the syntax tree of a formula string, which errors quote."""

    def __init__(self, text: str, names: dict[str, Node]) -> None:
        self.text, self.names = text, names
        self.functions = operations() | _LEAVES

    def at(self, tree: ast.expr) -> str:
        position = len(self.text.encode()[: tree.col_offset].decode())
        return f"at position {position} of the formula {self.text!r}"

    def error(self, tree: ast.expr, given: str, needed: str) -> FormulaError:
        return FormulaError(f"{given} {self.at(tree)}: {needed}")

    def formula(self, tree: ast.expr) -> Node:
        """The formula of an expression."""
        number = self.number(tree)
        if number is not None:
            return const(number)
        if isinstance(tree, ast.Name):
            return self.name(tree)
        if isinstance(tree, ast.Call):
            return self.call(tree)
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub | ast.UAdd):
            inside = self.formula(tree.operand)
            return -inside if isinstance(tree.op, ast.USub) else inside
        if isinstance(tree, ast.BinOp) and type(tree.op) in _BINARY:
            return self.apply(tree, _BINARY[type(tree.op)], [tree.left, tree.right])
        if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and type(tree.ops[0]) in _BINARY:
            operands = [tree.left, *tree.comparators]
            return self.apply(tree, _BINARY[type(tree.ops[0])], operands)
        part = ast.get_source_segment(self.text, tree)
        raise self.error(
            tree,
            f"{part!r}",
            "formulas are made of names, numbers, calls, one comparison and the operators "
            "+ - * / | **. Write it with the named operations.",
        )

    def number(self, tree: ast.expr) -> float | None:
        """The number, if the expression is one."""
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            inside = self.number(tree.operand)
            return None if inside is None else -inside
        if isinstance(tree, ast.Constant) and type(tree.value) in (int, float):
            return tree.value  # type: ignore[return-value]
        return None

    def name(self, tree: ast.Name) -> Node:
        if tree.id in self.names:
            return self.names[tree.id]
        if tree.id in self.functions:
            raise self.error(
                tree, f"the bare operation {tree.id!r}", f"it needs arguments, {tree.id}(…)."
            )
        known = sorted(self.names)
        raise self.error(
            tree,
            f"the unknown name {tree.id!r}",
            f"the variables are {', '.join(known) or 'none'}. Add the alias '{tree.id} = Vi(dim)', "
            f"with Vj or Pm as it varies{self.similar(tree.id, known)}.",
        )

    def similar(self, name: str, known: Sequence[str]) -> str:
        folded = {k.lower(): k for k in known}
        close = difflib.get_close_matches(name.lower(), folded, n=1)
        return f", or write {folded[close[0]]!r}" if close else ""

    def call(self, tree: ast.Call) -> Node:
        name = tree.func.id if isinstance(tree.func, ast.Name) else None
        if name is None or name not in self.functions:
            named = ast.get_source_segment(self.text, tree.func)
            raise self.error(
                tree,
                f"the unknown operation {named!r}",
                "operations have the names of KeOps, in its capitals, such as Exp or SqDist. "
                f"Compose it of those{self.similar(str(named), sorted(self.functions))}.",
            )
        if tree.keywords:
            raise self.error(
                tree, f"keywords in {name}", "arguments have no names here. Write them in order."
            )
        return self.apply(tree, name, tree.args)

    def apply(self, tree: ast.expr, name: str, operands: Sequence[ast.expr]) -> Node:
        """The function `name` of its operands, read as the names of its parameters say."""
        function = self.functions[name]
        signature = inspect.signature(function)
        try:
            bound = signature.bind(*operands)
        except TypeError:
            counts = ", ".join(signature.parameters)
            raise self.error(
                tree,
                f"{len(operands)} arguments of {name}",
                f"it takes ({counts}). Give these in order.",
            ) from None
        arguments: list[Any] = []
        for key, operand in bound.arguments.items():
            parameter = signature.parameters[key]
            parts = operand if parameter.kind is parameter.VAR_POSITIONAL else (operand,)
            arguments.extend(self.argument(p, key) for p in parts)
        try:
            return function(*arguments)
        except WeftError as error:
            raise type(error)(f"{error} It is {name} {self.at(tree)}.") from None

    def argument(self, tree: ast.expr, parameter: str) -> Any:
        if parameter in INTEGERS:
            return self.integer(tree)
        return self.integers(tree) if parameter in LISTS else self.formula(tree)

    def integer(self, tree: ast.expr) -> int:
        number = self.number(tree)
        if not isinstance(number, int):
            part = ast.get_source_segment(self.text, tree)
            raise self.error(tree, f"{part!r}", "an integer must stand there. Write it in digits.")
        return number

    def integers(self, tree: ast.expr) -> list[int]:
        if isinstance(tree, ast.List | ast.Tuple):
            return [self.integer(e) for e in tree.elts]
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "Ind":
            return [self.integer(e) for e in tree.args]
        return [self.integer(tree)]
