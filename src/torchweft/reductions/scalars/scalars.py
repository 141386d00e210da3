"""A formula's components as scalar expressions of core.expr, by what each of them varies with.

Axes: {"i"} varies with the rows, {"j"} with the columns, {} with nothing (parameters, numbers).
Expressions are shared, so whatever two components have in common is computed once, and whatever
depends on i or j alone is told from what depends on the pair.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torchweft.core.expressions.expr import (
    FUNCTIONS,
    Expr,
    add,
    apply,
    const,
    is_zero,
    leaf,
    multiply,
    reachable,
)
from torchweft.core.expressions.hoist import rebuilt
from torchweft.reductions.formula.node import Node
from torchweft.reductions.formula.node import reachable as nodes_of

__all__ = ["MOST", "Parts", "count", "factored", "operand", "scalars", "separated"]

LOG2E = 1 / math.log(2)

MOST = 4096
"""Scalar terms of a formula: more would take long to print, and longer to compile."""

CHAIN = 8
"""Terms of a sum that are added one after the other."""

AXES = ({"i"}, {"j"}, set[str]())
"""Of the categories of variables."""

Components = tuple[Expr, ...]


def operand(index: int) -> str:
    """The name of a variable's leaves: component c is printed as `v<index>_<c>`."""
    return f"v{index}_"


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
    if node.op in _WHOLE:
        return _WHOLE[node.op](node, *args)
    rule = _POINTWISE.get(node.op) or functools.partial(_function, _NAMES.get(node.op, node.op))
    if node.op in ("pow", "round"):
        rule = functools.partial(rule, node.data)
    return tuple(rule(*(a[k if len(a) > 1 else 0] for a in args)) for k in range(node.dim))


# Pointwise operations


def _function(name: str, *args: Expr) -> Expr:
    """A function of FUNCTIONS; of numbers, the number."""
    if all(a.kind == "const" for a in args):
        try:
            return const(FUNCTIONS[name].value(*(a.data for a in args)))
        except (ArithmeticError, ValueError):
            return const(math.nan)
    return apply(name, *args)


def _divided(a: Expr, b: Expr) -> Expr:
    """a / b; by a number, or by what varies with less than a does, a · (1/b)."""
    if b.axes < a.axes:
        return multiply(a, _function("reciprocal", b))
    return _function("divide", a, b)


def _integer_power(exponent: int, x: Expr) -> Expr:
    """x^n by squaring."""
    if exponent < 0:
        return _function("reciprocal", _integer_power(-exponent, x))
    if exponent < 2:
        return x if exponent else const(1)
    half = _integer_power(exponent // 2, x)
    return multiply(half, half, x) if exponent % 2 else multiply(half, half)


def _rounded(decimals: int, x: Expr) -> Expr:
    scale = 10.0**decimals
    rounded = _function("round", multiply(const(scale), x))
    return rounded if scale == 1 else _divided(rounded, const(scale))


def _selected(c: Expr, a: Expr, b: Expr) -> Expr:
    if c.kind == "const":
        return a if c.data >= 0 else b
    if a is b:
        return a
    if a.kind == b.kind == "const" and math.isfinite(a.data - b.data):
        # languages round a choice between numbers; 1 − chosen could be reassociated
        chosen = apply("step", c)
        return multiply(a, chosen) + multiply(b, apply("equal", chosen, const(0)))
    return apply("ifelse", c, a, b)


def _exponential(x: Expr) -> Expr:
    """2^(log₂e · x), each term of x scaled where it is made.

    What a value is taken off is not: scaled apart, a score and its maximum would no longer cancel.
    """
    terms = x.args if x.kind == "add" else (x,)
    if any(_is_value(term) for term in terms) and len(x.axes) == 2:
        return _function("exp2", multiply(const(LOG2E), apply("same", x)))
    return _function("exp2", add(*(_scaled(LOG2E, term) for term in terms)))


def _is_value(e: Expr) -> bool:
    """Whether it is a component of a variable, with its sign."""
    return e.kind == "leaf" or (e.kind == "mul" and e.args[0] == const(-1) and _is_value(e.args[1]))


def _scaled(number: float, e: Expr) -> Expr:
    """A multiple of a term; its number goes to a factor that is not of pairs, if there is one."""
    factors = factors_of(multiply(const(number), e))
    outside = [f for f in factors if len(f.axes) < 2 and f.axes]
    numbers = [f for f in factors if not f.axes]
    if len(e.axes) < 2 or all(f.kind == "const" for f in (*outside, *numbers)):
        return multiply(const(number), e)
    kept = apply("same", multiply(*numbers, *outside[:1]))
    return _product(kept, *outside[1:], *(f for f in factors if len(f.axes) == 2))


def _product(*factors: Expr) -> Expr:
    """What varies with j alone first, with i alone last: a common beginning is computed once."""
    flat = [e for factor in factors for e in factors_of(factor)]
    columns = [e for e in flat if e.axes == {"j"}]
    rows = [e for e in flat if e.axes <= {"i"}]
    pairs = [e for e in flat if len(e.axes) == 2]
    return multiply(multiply(*columns), *pairs, multiply(*rows))


def factors_of(e: Expr) -> list[Expr]:
    """The factors that it is a product of."""
    return [f for a in e.args for f in factors_of(a)] if e.kind == "mul" else [e]


def factored(e: Expr) -> tuple[Expr, Expr]:
    """Its factor that no column changes, and the rest of it."""
    factors = factors_of(e)
    outer = multiply(*(f for f in factors if "j" not in f.axes))
    return outer, multiply(*(f for f in factors if "j" in f.axes))


_NAMES = {"powf": "power"}

_POINTWISE: dict[str, Callable[..., Expr]] = {
    "add": add,
    "sub": lambda a, b: a - b,
    "mul": _product,
    "div": _divided,
    "neg": lambda a: -a,
    "exp": _exponential,
    "pow": _integer_power,
    "round": _rounded,
    "ifelse": _selected,
}


# Operations on vectors


def _variable(node: Node) -> Components:
    index, dim, cat = node.data
    return tuple(leaf(operand(index), c, AXES[cat]) for c in range(dim))


def _placed(node: Node, a: Components) -> Components:
    start, size = node.data
    after = size - start - len(a)
    return (*[const(0)] * start, *a, *[const(0)] * after)


def _squared_distance(node: Node, a: Components, b: Components) -> Components:
    differences = [x - y for x, y in zip(a, b, strict=True)]
    return (_summed([multiply(d, d) for d in differences]),)


def _summed(terms: Sequence[Expr]) -> Expr:
    """Their sum, of many by halves: the error of one chain of additions grows with its length."""
    terms = [e for e in terms if not is_zero(e)]
    if len(terms) <= CHAIN:
        return add(*terms)
    half = len(terms) // 2
    return apply("plus", _summed(terms[:half]), _summed(terms[half:]))


def _einsum(node: Node, a: Components, b: Components) -> Components:
    """Both operands are row-major tensors; labels that are not among the result's are summed."""
    shape_a, labels_a, shape_b, labels_b, labels_out = node.data
    sizes = dict(zip(labels_a + labels_b, shape_a + shape_b, strict=True))
    summed = [label for label in sizes if label not in labels_out]
    order = [*labels_out, *summed]
    terms: dict[tuple[int, ...], list[Expr]] = {}
    for values in itertools.product(*(range(sizes[label]) for label in order)):
        at = dict(zip(order, values, strict=True))
        x, y = (
            components[_flat([at[label] for label in labels], shape)]
            for components, labels, shape in ((a, labels_a, shape_a), (b, labels_b, shape_b))
        )
        terms.setdefault(values[: len(labels_out)], []).append(_product(x, y))
    return tuple(_summed(products) for products in terms.values())


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    flat = 0
    for i, size in zip(index, shape, strict=True):
        flat = flat * size + i
    return flat


def _best(better: Callable[[Expr, Expr], Expr], a: Components) -> Components:
    """The position of the first of the best components."""
    value, position = a[0], const(0)
    for k, x in enumerate(a[1:], start=1):
        worse = _function("less", const(0), better(value, x)) - const(1)  # ≥ 0 where x is better
        value, position = _selected(worse, x, value), _selected(worse, const(k), position)
    return (position,)


def _one_hot(node: Node, a: Components) -> Components:
    rounded = _function("floor", a[0] + const(0.5))  # as in torch: "round" takes the even of two
    return tuple(_function("equal", rounded, const(k)) for k in range(node.data))


_WHOLE: dict[str, Callable[..., Components]] = {
    "var": _variable,
    "const": lambda node: (const(node.data),),
    "inner": lambda node: (leaf("s", node.data, {"i", "j"}),),
    "sum": lambda node, a: (_summed(a),),
    "expand": lambda node, a: a * node.dim,
    "extract": lambda node, a: a[node.data[0] : node.data[0] + node.data[1]],
    "place": _placed,
    "concat": lambda node, *args: tuple(itertools.chain(*args)),
    "einsum": _einsum,
    "sqdist": _squared_distance,
    "argmin": lambda node, a: _best(lambda value, x: value - x, a),
    "argmax": lambda node, a: _best(lambda value, x: x - value, a),
    "one_hot": _one_hot,
}


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
