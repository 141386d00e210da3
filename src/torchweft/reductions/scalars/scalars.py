"""A formula's components as scalar expressions of core.expr, by what each of them varies with.

Axes: {"i"} varies with the rows, {"j"} with the columns, {} with nothing (parameters, numbers).
Expressions are shared, so whatever two components have in common is computed once, and whatever
depends on i or j alone is told from what depends on the pair.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchweft.core.expressions.expr import Expr, const, leaf, multiply, reachable
from torchweft.core.expressions.rewrite import rebuilt
from torchweft.reductions.formula.lowering import factors_of, operand
from torchweft.reductions.formula.node import PRIMITIVES, Node
from torchweft.reductions.formula.node import reachable as nodes_of

__all__ = ["MOST", "Parts", "count", "factored", "operand", "scalars", "separated"]

MOST = 4096
"""Scalar terms of a formula: more would take long to print, and longer to compile."""

Components = tuple[Expr, ...]


@functools.lru_cache(maxsize=256)
def scalars(f: Node) -> Components:
    """Its components.  exp is written by exp2, with log₂e among the argument's constants."""
    found: dict[Node, Components] = {}
    for node in nodes_of(f):
        found[node] = _lowered(node, [found[a] for a in node.args])
    return found[f]


@functools.lru_cache(maxsize=256)
def count(f: Node) -> int:
    """About how many scalar terms `scalars` would make, without making them."""
    return sum(_terms(node) for node in nodes_of(f))


def _terms(node: Node) -> int:
    if node.op == "einsum":
        shape_a, labels_a, shape_b, labels_b, _ = node.data
        sizes = dict(zip(labels_a + labels_b, shape_a + shape_b, strict=True))
        return math.prod(sizes.values())
    return max([node.dim, *(a.dim for a in node.args)])


def _lowered(node: Node, args: list[Components]) -> Components:
    primitive = PRIMITIVES[node.op]
    if not primitive.pointwise:
        found: Components = primitive.scalars(node, *args)
        return found
    data = () if node.data is None else (node.data,)
    components = range(node.dim)
    return tuple(
        primitive.scalars(*data, *(a[k if len(a) > 1 else 0] for a in args)) for k in components
    )


def factored(e: Expr) -> tuple[Expr, Expr]:
    """Its factor that no column changes, and the rest of it."""
    factors = factors_of(e)
    outer = multiply(*(f for f in factors if "j" not in f.axes))
    return outer, multiply(*(f for f in factors if "j" in f.axes))


# What varies with what


class Parts(NamedTuple):
    """Expressions in an order of evaluation: those of parameters, of rows, of columns, of pairs.

    In each part the results of the parts before are leaves.

    Args:
        constant: what depends on parameters alone, as (leaf, expression).
        rows: what depends on i (and parameters), likewise.
        columns: what depends on j (and parameters), likewise.
        pairs: the expressions that were asked for.
    """

    constant: tuple[tuple[Expr, Expr], ...]
    rows: tuple[tuple[Expr, Expr], ...]
    columns: tuple[tuple[Expr, Expr], ...]
    pairs: Components

    def leaves(self, axis: str | None) -> tuple[Expr, ...]:
        """The leaves that vary with an axis, or with none, and that some part reads."""
        read = [e for _, e in (*self.constant, *self.rows, *self.columns)]
        axes = {axis} if axis else set()
        return tuple(e for e in reachable([*read, *self.pairs]) if is_leaf(e) and e.axes == axes)


def is_leaf(e: Expr) -> bool:
    """Whether it is a component of a variable, or the result of an earlier part."""
    return e.kind == "leaf"


def separated(expressions: Iterable[Expr]) -> Parts:
    """The parts of expressions: whatever does not vary with both i and j leaves the pair loop."""
    pairs = tuple(expressions)
    parts: list[tuple[tuple[Expr, Expr], ...]] = []
    for name, axes in (("p", set[str]()), ("r", {"i"}), ("c", {"j"})):
        leaves = {e: leaf(name, n, axes) for n, e in enumerate(_frontier(pairs, axes))}
        found = rebuilt(pairs, leaves)
        pairs = tuple(found[e] for e in pairs)
        parts.append(tuple((a, e) for e, a in leaves.items()))
    constant, rows, columns = parts
    return Parts(constant, rows, columns, pairs)


def _frontier(roots: Sequence[Expr], axes: set[str]) -> list[Expr]:
    """The computed expressions of exactly these axes that something of more axes, or a root, is."""
    used = [_unsigned(a) for e in reachable(roots) if e.axes > axes for a in e.args]
    found = dict.fromkeys(e for e in (*used, *map(_unsigned, roots)) if e.axes == axes)
    return [e for e in found if e.kind not in ("leaf", "const")]


def _unsigned(e: Expr) -> Expr:
    """A sign is no work: it becomes a subtraction."""
    return e.args[1] if e.kind == "mul" and e.args[0] is const(-1) else e
