"""Scalars of primitives: each component as an expression of core's, for both printers.

A pointwise primitive is lowered component by component; the others are given the node, and all
components of their arguments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torchweft.core.expressions.expr import (
    FUNCTIONS,
    Expr,
    add,
    apply,
    const,
    is_zero,
    leaf,
    multiply,
)

if TYPE_CHECKING:
    from torchweft.reductions.formula.node import Node

__all__ = [
    "AXES",
    "best",
    "divided",
    "einsum",
    "exponential",
    "factors_of",
    "function",
    "integer_power",
    "one_hot",
    "operand",
    "placed",
    "product",
    "rounded",
    "selected",
    "squared_distance",
    "summed",
    "variable",
]

LOG2E = 1 / math.log(2)

SUMMED_IN_CHAIN = 8
"""Terms of a sum that are added one after the other."""

AXES = ({"i"}, {"j"}, set[str]())
"""Axes of the variables of each category."""

Components = tuple[Expr, ...]


def operand(index: int) -> str:
    """The name of a variable's leaves: component c is printed as `v<index>_<c>`."""
    return f"v{index}_"


def function(name: str, *args: Expr) -> Expr:
    """The function `name` of core; of numbers, the number."""
    if all(a.kind == "const" for a in args):
        try:
            return const(FUNCTIONS[name].value(*(a.data for a in args)))
        except (ArithmeticError, ValueError):
            return const(math.nan)
    return apply(name, *args)


def divided(a: Expr, b: Expr) -> Expr:
    """a / b; by a number, or by what varies with less than a does, a · (1/b)."""
    if b.axes < a.axes:
        return multiply(a, function("reciprocal", b))
    return function("divide", a, b)


def integer_power(exponent: int, x: Expr) -> Expr:
    """x^n by squaring."""
    if exponent < 0:
        return function("reciprocal", integer_power(-exponent, x))
    if exponent < 2:
        return x if exponent else const(1)
    half = integer_power(exponent // 2, x)
    return multiply(half, half, x) if exponent % 2 else multiply(half, half)


def rounded(decimals: int, x: Expr) -> Expr:
    """x to so many decimals."""
    scale = 10.0**decimals
    result = function("round", multiply(const(scale), x))
    return result if scale == 1 else divided(result, const(scale))


def selected(c: Expr, a: Expr, b: Expr) -> Expr:
    """a where c ≥ 0, else b."""
    if c.kind == "const":
        return a if c.data >= 0 else b
    if a is b:
        return a
    if a.kind == b.kind == "const" and math.isfinite(a.data - b.data):
        # languages round a choice between numbers; 1 − chosen could be reassociated
        chosen = apply("step", c)
        return multiply(a, chosen) + multiply(b, apply("equal", chosen, const(0)))
    return apply("ifelse", c, a, b)


def exponential(x: Expr) -> Expr:
    """2^(log₂e · x), each term of x scaled where it is made.

    What a value is taken off is not: scaled apart, a score and its maximum would no longer cancel.
    """
    terms = x.args if x.kind == "add" else (x,)
    if any(_is_value(term) for term in terms) and len(x.axes) == 2:
        return function("exp2", multiply(const(LOG2E), apply("same", x)))
    return function("exp2", add(*(_scaled(LOG2E, term) for term in terms)))


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
    return product(kept, *outside[1:], *(f for f in factors if len(f.axes) == 2))


def product(*factors: Expr) -> Expr:
    """What varies with j alone first, with i alone last: a common beginning is computed once."""
    flat = [e for factor in factors for e in factors_of(factor)]
    columns = [e for e in flat if e.axes == {"j"}]
    rows = [e for e in flat if e.axes <= {"i"}]
    pairs = [e for e in flat if len(e.axes) == 2]
    return multiply(multiply(*columns), *pairs, multiply(*rows))


def factors_of(e: Expr) -> list[Expr]:
    """The factors that it is a product of."""
    return [f for a in e.args for f in factors_of(a)] if e.kind == "mul" else [e]


def variable(node: Node) -> Components:
    """The components of a variable."""
    index, dim, cat = node.data
    return tuple(leaf(operand(index), c, AXES[cat]) for c in range(dim))


def placed(node: Node, a: Components) -> Components:
    """The components of a, zeros around them."""
    start, size = node.data
    after = size - start - len(a)
    return (*[const(0)] * start, *a, *[const(0)] * after)


def squared_distance(node: Node, a: Components, b: Components) -> Components:
    """Σ_k (a_k − b_k)²."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    return (summed([multiply(d, d) for d in differences]),)


def summed(terms: Sequence[Expr]) -> Expr:
    """Their sum, of many by halves: the error of one chain of additions grows with its length."""
    terms = [e for e in terms if not is_zero(e)]
    if len(terms) <= SUMMED_IN_CHAIN:
        return add(*terms)
    half = len(terms) // 2
    return apply("plus", summed(terms[:half]), summed(terms[half:]))


def einsum(node: Node, a: Components, b: Components) -> Components:
    """Both operands are row-major tensors; labels that are not among the result's are summed."""
    shape_a, labels_a, shape_b, labels_b, labels_out = node.data
    sizes = dict(zip(labels_a + labels_b, shape_a + shape_b, strict=True))
    order = [*labels_out, *(label for label in sizes if label not in labels_out)]
    terms: dict[tuple[int, ...], list[Expr]] = {}
    for values in itertools.product(*(range(sizes[label]) for label in order)):
        at = dict(zip(order, values, strict=True))
        x, y = (
            components[_flat([at[label] for label in labels], shape)]
            for components, labels, shape in ((a, labels_a, shape_a), (b, labels_b, shape_b))
        )
        terms.setdefault(values[: len(labels_out)], []).append(product(x, y))
    return tuple(summed(products) for products in terms.values())


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    flat = 0
    for i, size in zip(index, shape, strict=True):
        flat = flat * size + i
    return flat


def best(better: Callable[[Expr, Expr], Expr], a: Components) -> Components:
    """The position of the first of the best components."""
    value, position = a[0], const(0)
    for k, x in enumerate(a[1:], start=1):
        worse = function("less", const(0), better(value, x)) - const(1)  # ≥ 0 where x is better
        value, position = selected(worse, x, value), selected(worse, const(k), position)
    return (position,)


def one_hot(node: Node, a: Components) -> Components:
    """1 in the component of the rounded value, else 0."""
    nearest = function("floor", a[0] + const(0.5))  # as in torch: "round" takes the even of two
    return tuple(function("equal", nearest, const(k)) for k in range(node.data))
