"""Formulas in the front end: nodes, texts while torch.compile traces, and ordinary notation.

Dynamo follows strings and folds calls of functions of strings; it cannot follow interned objects.
So every step on formulas is one `apply`, of nodes in eager mode and of their canonical texts while
compiling: whatever is built there is a constant of the compiled program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torchweft.core.operators.operator import compiling, constant_when_compiling
from torchweft.reductions.formula.named import operations
from torchweft.reductions.formula.node import (
    PRIMITIVES,
    Node,
    const,
    node,
    read,
    substitute,
    swap,
    var,
    variables,
)
from torchweft.reductions.formula.parse import parse, parse_aliases

__all__ = [
    "Formula",
    "applied",
    "apply",
    "dimension",
    "leaf",
    "number",
    "parsed",
    "renumbered",
    "shown",
    "swapped",
    "text",
    "used",
    "with_witness",
]

Formula = Node | str

KEPT = 4096
"""Answers that are kept of functions that every reduction asks again."""


def apply(name: str, *formulas: Formula, data: tuple[Any, ...] = ()) -> Any:
    """The function `name` of formulas, and of data that are constants."""
    if compiling():
        return _folded(name, tuple(map(text, formulas)), data)
    if name == "number":  # 0.0 and -0.0 are equal keys
        return _function(name)(*data)
    return _kept(name, formulas, data)


@functools.lru_cache(KEPT)
def _kept(name: str, formulas: tuple[Node, ...], data: tuple[Any, ...]) -> Any:
    return _function(name)(*formulas, *data)


def applied(
    name: str, formulas: tuple[Formula, ...], moves: tuple[Any, ...], data: tuple[Any, ...]
) -> Any:
    """`apply` of formulas whose variables are renumbered first, see `renumbered`."""
    if compiling():
        return apply(name, *map(renumbered, formulas, moves), data=data)
    return _kept_of_moved(name, formulas, moves, data)


@functools.lru_cache(KEPT)
def _kept_of_moved(
    name: str, formulas: tuple[Node, ...], moves: tuple[Any, ...], data: tuple[Any, ...]
) -> Any:
    return apply(name, *map(renumbered, formulas, moves), data=data)


def leaf(index: int, dim: int, cat: int) -> Any:
    """Variable number `index`."""
    return apply("leaf", data=(index, dim, cat))


def number(value: float) -> Any:
    """A constant."""
    return apply("number", data=(value,))


def dimension(f: Formula) -> int:
    """How many components it has."""
    return int(apply("dimension", f))


def renumbered(f: Formula, renumbering: tuple[tuple[int, int, int, int], ...]) -> Any:
    """The formula with variable k, of dimension d and category c, as number m: for (k, m, d, c)."""
    return apply("renumbered", f, data=renumbering) if renumbering else f


def swapped(f: Formula) -> Any:
    """The formula with the roles of i and j exchanged."""
    return apply("swapped", f)


def used(f: Formula, weight: Formula | None) -> tuple[tuple[int, int], ...]:
    """(number, category) of the variables of both."""
    return tuple(apply("used", *((f,) if weight is None else (f, weight))))


def with_witness(f: Formula, number: int, cat: int) -> Any:
    """f + v, of one more variable v: it is 0, and there to say how many i or j there are."""
    return apply("with_witness", f, data=(number, cat))


def parsed(formula: str, aliases: tuple[str, ...]) -> Any:
    """The formula of a formula string."""
    return apply("parsed", data=(formula, aliases))


def text(f: Formula) -> str:
    """The canonical text."""
    return f if isinstance(f, str) else _text(f)


@constant_when_compiling
def _text(f: Node) -> str:
    return _kept_text(f)


@functools.lru_cache(KEPT)
def _kept_text(f: Node) -> str:
    return str(f)


@constant_when_compiling
def _folded(name: str, texts: tuple[str, ...], data: tuple[Any, ...]) -> Any:
    result = _function(name)(*map(read, texts), *data)
    return str(result) if isinstance(result, Node) else result


def _renumbered(f: Node, *renumbering: tuple[int, int, int, int]) -> Node:
    return substitute(f, {var(k, d, c): var(m, d, c) for k, m, d, c in renumbering})


def _parsed(formula: str, aliases: tuple[str, ...]) -> Node:
    return parse(formula, parse_aliases(aliases))


@functools.lru_cache(KEPT)
def _used(*formulas: Node) -> tuple[tuple[int, int], ...]:
    found = {v for f in formulas for v in variables(f)}
    return tuple(sorted((v.data[0], v.data[2]) for v in found))


def _with_witness(f: Node, number: int, cat: int) -> Node:
    return node("add", f, var(number, 1, cat))


def _function(name: str) -> Callable[..., Any]:
    return _FUNCTIONS[name] if name in _FUNCTIONS else operations()[name]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "parsed": _parsed,
    "leaf": var,
    "number": const,
    "dimension": lambda f: f.dim,
    "renumbered": _renumbered,
    "swapped": swap,
    "used": _used,
    "with_witness": _with_witness,
}


MOST_CHARACTERS = 300
"""Characters of a text; one that is longer is cut."""


def shown(f: Formula) -> str:
    """The formula in ordinary notation, cut where it is long."""
    text, _ = _shown(read(f) if isinstance(f, str) else f, {})
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def _shown(f: Node, found: dict[Node, tuple[str, int]]) -> tuple[str, int]:
    """The text, and how strongly it binds; what occurs again and again is written once."""
    if f not in found:
        text, strength = _written(f, [_shown(a, found) for a in f.args])
        # what is cut in the end anyway must not double at each operation
        found[f] = text[: MOST_CHARACTERS + 1], strength
    return found[f]


def _written(f: Node, args: list[tuple[str, int]]) -> tuple[str, int]:
    if f.op == "var":
        index, _, cat = f.data
        return f"{'xyp'[cat]}{index}", 4
    if f.op == "const":
        return f"{f.data:g}" if isinstance(f.data, int | float) else str(f.data), 4
    if (infix := PRIMITIVES[f.op].sign) is not None:
        sign, strength = infix
        (a, weak), (b, other) = args
        left = f"({a})" if weak < strength else a
        right = f"({b})" if other <= strength else b
        return f"{left} {sign} {right}", strength
    if f.op == "neg":
        ((a, weak),) = args
        return f"-({a})" if weak < 2 else f"-{a}", 2
    data = [] if f.data is None else [str(f.data)]
    return f"{f.op}({', '.join([*(a for a, _ in args), *data])})", 4
