"""Formulas as scalar expressions of core, and the lines of source that compute them.

Each component of a formula is one expression whose axes say what it varies with: {"i"} with the
rows, {"j"} with the columns, {} with nothing (parameters, numbers).  Expressions are shared, so
whatever two components have in common is computed once, and whatever depends on i or j alone is
computed outside the loop over pairs.  Triton kernels and numba loops print the same expressions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
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
from torchweft.core.expressions.program import Operand, Output, Program
from torchweft.core.expressions.rewrite import rebuilt
from torchweft.core.printing.dialect import Dialect
from torchweft.core.printing.schedule import schedule
from torchweft.reductions.formula.node import PRIMITIVES, Node
from torchweft.reductions.formula.node import reachable as nodes_of

__all__ = [
    "CATEGORY_AXES",
    "FORMATS",
    "LOG2E",
    "Components",
    "assign",
    "assigned",
    "count",
    "factored",
    "function",
    "loads",
    "operand",
    "scalars",
    "separated",
    "text",
]

LOG2E = 1 / math.log(2)

SUMMED_IN_CHAIN = 8
"""Terms of a sum that are added one after the other."""

CATEGORY_AXES = ({"i"}, {"j"}, set[str]())
"""Axes of the variables of each category."""

Components = tuple[Expr, ...]


# Primitives.  A pointwise primitive takes one component of each argument; the others take the node,
# and all components of each argument.


def function(name: str, *args: Expr) -> Expr:
    """The function `name` of core; of numbers, the number."""
    if all(a.kind == "const" for a in args):
        try:
            return const(FUNCTIONS[name].value(*(a.data for a in args)))
        except (ArithmeticError, ValueError):
            return const(math.nan)
    return apply(name, *args)


def divided(a: Expr, b: Expr) -> Expr:
    """a / b; a · (1 / b) where b is a number or lacks an axis of a."""
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
    """x rounded to a number of decimals."""
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
    """2^(log₂e · x), where each term of x is scaled when it is computed.

    An x that subtracts a variable is scaled as a whole: a score and its maximum, scaled separately,
    would not cancel exactly.
    """
    terms = x.args if x.kind == "add" else (x,)
    if any(_is_value(term) for term in terms) and len(x.axes) == 2:
        return function("exp2", multiply(const(LOG2E), apply("same", x)))
    return function("exp2", add(*(_scaled(LOG2E, term) for term in terms)))


def _is_value(e: Expr) -> bool:
    """Whether it is a component of a variable, or minus one."""
    return e.kind == "leaf" or (e.kind == "mul" and e.args[0] == const(-1) and _is_value(e.args[1]))


def _scaled(number: float, e: Expr) -> Expr:
    """number · e; the number multiplies a factor that does not vary with pairs, if there is one."""
    factors = _factors(multiply(const(number), e))
    outside = [f for f in factors if len(f.axes) < 2 and f.axes]
    numbers = [f for f in factors if not f.axes]
    if len(e.axes) < 2 or all(f.kind == "const" for f in (*outside, *numbers)):
        return multiply(const(number), e)
    kept = apply("same", multiply(*numbers, *outside[:1]))
    return product(kept, *outside[1:], *(f for f in factors if len(f.axes) == 2))


def product(*factors: Expr) -> Expr:
    """The product, factors of j first, of i last: products that begin alike share their start."""
    flat = [e for factor in factors for e in _factors(factor)]
    columns = [e for e in flat if e.axes == {"j"}]
    rows = [e for e in flat if e.axes <= {"i"}]
    pairs = [e for e in flat if len(e.axes) == 2]
    return multiply(multiply(*columns), *pairs, multiply(*rows))


def _factors(e: Expr) -> list[Expr]:
    return [f for a in e.args for f in _factors(a)] if e.kind == "mul" else [e]


def operand(index: int) -> str:
    """The operand of a variable: component c is printed as `v<index>_<c>`."""
    return f"v{index}_"


def variable(node: Node) -> Components:
    """The components of a variable."""
    index, dim, cat = node.data
    return tuple(leaf(operand(index), c, CATEGORY_AXES[cat]) for c in range(dim))


def placed(node: Node, a: Components) -> Components:
    """The components of a between zeros."""
    start, size = node.data
    after = size - start - len(a)
    return (*[const(0)] * start, *a, *[const(0)] * after)


def squared_distance(node: Node, a: Components, b: Components) -> Components:
    """Σ_k (a_k − b_k)²."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    return (summed([multiply(d, d) for d in differences]),)


def summed(terms: Sequence[Expr]) -> Expr:
    """The sum; many terms by halves, since the error of a chain grows with its length."""
    terms = [e for e in terms if not is_zero(e)]
    if len(terms) <= SUMMED_IN_CHAIN:
        return add(*terms)
    half = len(terms) // 2
    return apply("plus", summed(terms[:half]), summed(terms[half:]))


def einsum(node: Node, a: Components, b: Components) -> Components:
    """The product of two row-major tensors, summed over labels that the result lacks."""
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
    """The position of the first of the best components: `better(x, y)` > 0 where y is better."""
    value, position = a[0], const(0)
    for k, x in enumerate(a[1:], start=1):
        worse = function("less", const(0), better(value, x)) - const(1)  # ≥ 0 where x is better
        value, position = selected(worse, x, value), selected(worse, const(k), position)
    return (position,)


def one_hot(node: Node, a: Components) -> Components:
    """1 in the component of the rounded value, else 0."""
    nearest = function("floor", a[0] + const(0.5))  # as in torch; "round" rounds halves to even
    return tuple(function("equal", nearest, const(k)) for k in range(node.data))


# Formulas


@functools.lru_cache(maxsize=256)
def scalars(f: Node) -> Components:
    """The components.  exp is written by exp2, with log₂e among the constants of its argument."""
    found: dict[Node, Components] = {}
    for node in nodes_of(f):
        found[node] = _lowered(node, [found[a] for a in node.args])
    return found[f]


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


@functools.lru_cache(maxsize=256)
def count(f: Node) -> int:
    """About the number of scalar terms that `scalars` would make."""
    return sum(_terms(node) for node in nodes_of(f))


def _terms(node: Node) -> int:
    if node.op == "einsum":
        shape_a, labels_a, shape_b, labels_b, _ = node.data
        sizes = dict(zip(labels_a + labels_b, shape_a + shape_b, strict=True))
        return math.prod(sizes.values())
    return max([node.dim, *(a.dim for a in node.args)])


def factored(e: Expr) -> tuple[Expr, Expr]:
    """The factor of e that does not vary with j, and the remaining factor."""
    factors = _factors(e)
    outer = multiply(*(f for f in factors if "j" not in f.axes))
    return outer, multiply(*(f for f in factors if "j" in f.axes))


class Parts(NamedTuple):
    """Expressions in their order of evaluation; results of a part are leaves of the later ones.

    Args:
        constant: (leaf, expression) of what depends on parameters alone.
        rows: the same of what depends on i (and parameters).
        columns: the same of what depends on j (and parameters).
        pairs: the expressions themselves.
    """

    constant: tuple[tuple[Expr, Expr], ...]
    rows: tuple[tuple[Expr, Expr], ...]
    columns: tuple[tuple[Expr, Expr], ...]
    pairs: Components

    def leaves(self, axis: str | None) -> tuple[Expr, ...]:
        """The leaves that a part reads and that vary with the axis, or with none."""
        read = [e for _, e in (*self.constant, *self.rows, *self.columns)]
        axes = {axis} if axis else set()
        every = reachable([*read, *self.pairs])
        return tuple(e for e in every if e.kind == "leaf" and e.axes == axes)


def separated(expressions: Iterable[Expr]) -> Parts:
    """Expressions split by what they vary with: the loop over pairs computes only `pairs`."""
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
    """Computed expressions of exactly these axes that are roots or arguments of more axes."""
    used = [_unsigned(a) for e in reachable(roots) if e.axes > axes for a in e.args]
    found = dict.fromkeys(e for e in (*used, *map(_unsigned, roots)) if e.axes == axes)
    return [e for e in found if e.kind not in ("leaf", "const")]


def _unsigned(e: Expr) -> Expr:
    """e without a factor −1, which is printed as a subtraction."""
    return e.args[1] if e.kind == "mul" and e.args[0] is const(-1) else e


# Lines of source

FORMATS = {
    "same": "({})",
    "plus": "({} + {})",
    "exp2": "tl.exp2({})",
    "log": "tl.log({})",
    "cos": "tl.cos({})",
    "sin": "tl.sin({})",
    "asin": "asin({})",
    "acos": "acos({})",
    "atan": "atan({})",
    "sqrt": "tl.sqrt({})",
    "rsqrt": "tl.rsqrt(tl.where({0} == 0, float('inf'), {0}))",
    "reciprocal": "(1.0 / {})",
    "abs": "tl.abs({})",
    "sign": "(({0} > 0).to(NUMBER) - ({0} < 0).to(NUMBER))",
    "floor": "tl.floor({})",
    "round": "nearest({})",
    "step": "({} >= 0).to(NUMBER)",
    "xlogx": "xlogx({})",
    "sinxdivx": "sinxdivx({})",
    "divide": "({} / {})",
    "power": "power({}, {}, NUMBER)",
    "atan2": "atan2({}, {})",
    "equal": "({} == {}).to(NUMBER)",
    "less": "({} < {}).to(NUMBER)",
    "less_equal": "({} <= {}).to(NUMBER)",
    "ifelse": "tl.where({} >= 0, {}, {})",
}
"""Functions in Triton; NUMBER is the dtype of a formula."""


def text(e: Expr) -> str:
    """The name of a leaf, or a number."""
    return "{}{}".format(*e.data) if e.kind == "leaf" else repr(e.data)


def assigned(expressions: Iterable[Expr], dialect: Dialect) -> tuple[list[str], list[str]]:
    """The lines that compute expressions, and the name or number of each of them."""
    wanted = list(expressions)
    # the schedule names only values that have an axis
    free = [e for e in reachable(wanted) if e.kind == "leaf" and not e.axes]
    found = rebuilt(wanted, {e: leaf(e.data[0], e.data[1], {"i"}) for e in free})
    computed = [found[e] for e in wanted if found[e].kind not in ("leaf", "const")]
    output = Output(Operand("z", len(computed), ("row",)), tuple(computed))
    steps, (result,) = schedule(Program("", (), (output,)))
    lines = [line for step in steps for line in step.lines(dialect)]
    names = dict(zip(computed, result.names, strict=True))
    return lines, [names.get(found[e]) or text(found[e]) for e in wanted]


def assign(part: Iterable[tuple[Expr, Expr]], dialect: Dialect) -> Iterator[str]:
    """The lines that compute the expressions of (leaf, expression) and assign them to leaves."""
    targets, expressions = [a for a, _ in part], [e for _, e in part]
    lines, names = assigned(expressions, dialect)
    yield from lines
    yield from (f"{text(a)} = {name}" for a, name in zip(targets, names, strict=True))


def loads(
    variables: Iterable[Node],
    cat: int,
    expressions: Iterable[Expr],
    at: str,
    number: str,
    apart: Container[int] = (),
) -> Iterator[str]:
    """The lines that load the components of a category's variables that expressions read.

    Args:
        variables: variables of all categories.
        cat: the category.
        expressions: the expressions.
        at: the index of a row or column; "" for a parameter.
        number: the dtype, as the kernel spells it.
        apart: indices of variables that are stored component by component.
    """
    leaves = {e.data for e in reachable(expressions) if e.kind == "leaf"}
    for v in variables:
        index, dim, own = v.data
        for c in range(dim):
            if own == cat and (operand(index), c) in leaves:
                place = f"{at} * {dim} + {c}" if at else f"{c}"
                if index in apart:
                    place = f"{c} * v{index}_pitch + {'lanes' if cat == 1 else at}"
                yield f"v{index}_{c} = tl.load(v{index}_ptr + {place}).to({number})"
