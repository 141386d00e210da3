"""Scalar expressions of data that varies along named axes: build, simplify, share, differentiate.

An expression stands for one number at every position of its axes: `leaf("x", 3, {"row",
"feature"})` is component 3 of x in each row and feature, `total(e, {"feature"})` its sum over the
features of a row.  Expressions are interned: equal ones are one object, so whatever is equal is
computed once.

Differentiation needs one rule beside the chain rule: a value that is used along more axes than it
has is broadcast, and the adjoint of a broadcast is a sum.  So a weight's gradient is a total over
the rows, and the gradient of a row sum needs no rule of its own.

Sums over a table of terms (Cayley, Clebsch-Gordan) are one node, a `Form`: its derivatives are sums
over the same table with other roles, to any order.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

__all__ = [
    "FUNCTIONS",
    "SHRINK",
    "SLOTS",
    "WAVES",
    "Expr",
    "Form",
    "Operands",
    "add",
    "apply",
    "const",
    "contract",
    "count",
    "gradients",
    "is_zero",
    "leaf",
    "multiply",
    "nonzero_terms",
    "operands_of",
    "reachable",
    "total",
    "wave_series",
]

Axes = frozenset[str]


class Expr:
    """A node: `kind` applied to `args`, with `data` that is not an expression.

    Kinds: "const" (data: the number), "leaf" (operand's name, component), "count" (the axis whose
    length it is), "add" of any number of args, "mul" of two, a name of FUNCTIONS, "total" (axes
    summed over), "form" (a `Contraction`: vector-valued), "part" (component of its arg, a form).
    """

    __slots__ = ("__weakref__", "args", "axes", "data", "kind")

    data: Any

    def __init__(self, kind: str, args: tuple[Expr, ...], data: Hashable, axes: Axes) -> None:
        self.kind, self.args, self.data, self.axes = kind, args, data, axes

    def __add__(self, other: Expr) -> Expr:
        return add(self, other)

    def __sub__(self, other: Expr) -> Expr:
        return add(self, multiply(const(-1), other))

    def __mul__(self, other: Expr) -> Expr:
        return multiply(self, other)

    def __neg__(self) -> Expr:
        return multiply(const(-1), self)

    def __repr__(self) -> str:
        if self.kind == "leaf":
            return "{}{}".format(*self.data)
        inside = ", ".join(map(repr, self.args))
        return f"{self.data:g}" if self.kind == "const" else f"{self.kind}({inside})"


_interned: weakref.WeakValueDictionary[Hashable, Expr] = weakref.WeakValueDictionary()


def _node(kind: str, args: tuple[Expr, ...], data: Hashable, axes: Iterable[str]) -> Expr:
    axes = frozenset(axes)
    key = (kind, args, data, axes)  # nodes compare by identity; their users keep them alive
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Expr(kind, args, data, axes)
    return found


def _union(args: Iterable[Expr]) -> Axes:
    return frozenset().union(*(a.axes for a in args))


def const(value: float) -> Expr:
    """A number."""
    return _node("const", (), float(value), ())


def is_zero(e: Expr) -> bool:
    """Whether an expression is the number 0."""
    return e.kind == "const" and not e.data


def count(axis: str) -> Expr:
    """The length of an axis, as an expression."""
    return _node("count", (), axis, ())


def leaf(operand: str, component: int, axes: Iterable[str]) -> Expr:
    """A component of an operand."""
    return _node("leaf", (), (operand, component), axes)


def add(*terms: Expr) -> Expr:
    """The sum of terms; multiples of one term are collected, zeros dropped."""
    if len(terms) == 1:
        return terms[0]
    multiples: dict[Expr | None, float] = {}
    for term in terms:
        number, rest = _split(term)
        multiples[rest] = multiples.get(rest, 0.0) + number
    found = [
        const(number) if rest is None else multiply(const(number), rest)
        for rest, number in multiples.items()
        if number
    ]
    if len(found) < 2:
        return found[0] if found else const(0)
    return _node("add", tuple(found), None, _union(found))


def multiply(*factors: Expr) -> Expr:
    """The product, from left to right; constants are collected in front."""
    number, product = 1.0, None
    for factor in factors:
        own, rest = _split(factor)
        number *= own
        if rest is not None:
            product = rest if product is None else _times(product, rest)
    if not number or product is None:
        return const(number)
    return product if number == 1 else _times(const(number), product)


def _times(a: Expr, b: Expr) -> Expr:
    return _node("mul", (a, b), None, a.axes | b.axes)


def _split(term: Expr) -> tuple[float, Expr | None]:
    """The constant factor of a term, and the remaining factor."""
    if term.kind == "const":
        return term.data, None
    if term.kind == "mul" and term.args[0].kind == "const":
        return term.args[0].data, term.args[1]
    return 1.0, term


def total(expr: Expr, axes: Iterable[str]) -> Expr:
    """The sum over axes; along an axis where the expression is constant, a multiple of it."""
    axes = frozenset(axes)
    varying = axes & expr.axes
    counts = [count(axis) for axis in sorted(axes - expr.axes)]
    if is_zero(expr):
        return expr
    if varying:
        expr = _node("total", (expr,), varying, expr.axes - varying)
    return multiply(*counts, expr) if counts else expr


def apply(function: str, *args: Expr) -> Expr:
    """A function of FUNCTIONS."""
    if len(args) != FUNCTIONS[function].arity:
        raise TypeError(f"{function} takes {FUNCTIONS[function].arity} arguments, not {len(args)}")
    return _node(function, args, None, _union(args))


class Function(NamedTuple):
    """A scalar function: its value in Python, its derivative, its number of arguments.

    The derivative takes an adjoint of the value, the argument and the value, and returns the
    argument's adjoint; it is None where a family differentiates formulas before it lowers them to
    scalars.  It multiplies by factors one after the other: 1/√x³ alone leaves float32's range where
    its product with an adjoint does not.
    """

    value: Callable[..., float]
    derivative: Callable[[Expr, Expr, Expr], Expr] | None = None
    arity: int = 1


def _sign(x: float) -> float:
    return float((x > 0) - (x < 0))


def _normal_pdf(x: Expr) -> Expr:
    return const(1 / math.sqrt(2 * math.pi)) * apply("exp", const(-0.5) * x * x)


SHRINK = 2.0**-40
"""By what `shrunk` multiplies: a square of 10³¹ fits into float32, shrunk twice."""

WAVES = 8
"""Functions in the sequence cos √x, sin √x / √x, …, which limits the order of derivatives."""


def _wave(n: int) -> Function:
    """w_n(x) = Σ_j (-x/2)^j / (j! (2j+2n-1)!!): cos √x, sin √x / √x, …;  w_n' = -w_{n+1} / 2."""

    def value(x: float) -> float:
        if x < 4:
            return math.fsum(c * x**j for j, c in enumerate(wave_series(n, 16)))
        before, now = math.cos(math.sqrt(x)), math.sin(math.sqrt(x)) / math.sqrt(x)
        for k in range(n):
            before, now = now, ((2 * k + 1) * now - before) / x
        return before

    following = f"wave{n + 1}"
    known = n + 1 < WAVES
    return Function(
        value, (lambda a, x, w: a * (const(-0.5) * apply(following, x))) if known else None
    )


def wave_series(n: int, terms: int) -> list[float]:
    """The coefficients of the powers of x in w_n."""
    odd = math.prod(range(1, 2 * n, 2))
    found = [1 / odd]
    for j in range(1, terms):
        found.append(-found[-1] / (2 * j * (2 * j + 2 * n - 1)))
    return found


FUNCTIONS: dict[str, Function] = {
    "exp": Function(math.exp, lambda a, x, e: a * e),
    "normal_cdf": Function(
        lambda x: math.erfc(-x / math.sqrt(2)) / 2, lambda a, x, c: a * _normal_pdf(x)
    ),
    "sigmoid": Function(
        lambda x: (1 + math.tanh(x / 2)) / 2, lambda a, x, s: a * (s * (const(1) - s))
    ),
    "tanh": Function(math.tanh, lambda a, x, t: a * (const(1) - t * t)),
    "reciprocal": Function(lambda x: 1 / x, lambda a, x, r: a * (const(-1) * r * r)),
    "sqrt": Function(math.sqrt, lambda a, x, s: a * (const(0.5) * apply("rsqrt", x))),
    "rsqrt": Function(
        lambda x: x**-0.5 if x else 0.0, lambda a, x, r: multiply(const(-0.5), a, r, r, r)
    ),
    "shrunk": Function(lambda x: SHRINK * x, lambda a, x, s: apply("shrunk", a)),
    "twice_shrunk": Function(lambda x: 2 * SHRINK**2 * x, lambda a, x, s: apply("twice_shrunk", a)),
    "shrunk_square": Function(
        lambda x: (SHRINK * x) ** 2, lambda a, x, s: apply("twice_shrunk", a * x)
    ),
    "abs": Function(abs, lambda a, x, s: a * apply("sign", x)),
    "sign": Function(_sign, lambda a, x, s: const(0)),
    "same": Function(lambda x: x),
    "plus": Function(lambda a, b: a + b, arity=2),
    "exp2": Function(lambda x: 2.0**x),
    "log": Function(math.log),
    "cos": Function(math.cos),
    "sin": Function(math.sin),
    "asin": Function(math.asin),
    "acos": Function(math.acos),
    "atan": Function(math.atan),
    "floor": Function(math.floor),
    "round": Function(round),
    "step": Function(lambda x: float(x >= 0), lambda a, x, s: const(0)),
    "ramp": Function(lambda x: max(x, 0.0), lambda a, x, r: a * apply("step", x)),
    **{f"wave{n}": _wave(n) for n in range(WAVES)},
    "xlogx": Function(lambda x: x * math.log(x) if x else 0.0),
    "sinxdivx": Function(lambda x: math.sin(x) / x if x else 1.0),
    "divide": Function(lambda a, b: a / b, arity=2),
    "power": Function(lambda a, b: a**b, arity=2),
    "atan2": Function(math.atan2, arity=2),
    "equal": Function(lambda a, b: float(a == b), arity=2),
    "less": Function(lambda a, b: float(a < b), arity=2),
    "less_equal": Function(lambda a, b: float(a <= b), arity=2),
    "ifelse": Function(lambda c, a, b: a if c >= 0 else b, arity=3),
}
"""Scalar functions by name.

normal_cdf is Φ(x) = ½ (1 + erf(x/√2)).  rsqrt(0) is 0, so that a norm's derivatives at 0 are 0.
shrunk is κx, κ = SHRINK, twice_shrunk 2κ²x, shrunk_square κ²x²: these factors stay where they are,
as constants do not.  round is to the nearest even, step is 1 at 0, ramp its integral, xlogx 0 and
sinxdivx 1; comparisons are 1 or 0; ifelse(c, a, b) is a where c ≥ 0, else b; same keeps a product
together, plus the two sides of a sum apart.
"""


SLOTS = ("left", "right", "weight", "out")
"""The roles of the operands of a `Form`."""

Operands = tuple[tuple[Expr, ...] | None, ...]
"""The components in each slot; None in "weight" of a form without weights."""


class Form:
    """Q(left, right, weight, out) = Σ_t c[t] · left[i] · right[k] · weight[p] · out[j].

    Linear in each slot.  The product that the table describes is ∂Q/∂out; its gradients are the
    other derivatives of Q.  Without weights, p still names the path that a term belongs to.

    Args:
        name: a Python identifier, for the printed code.
        sizes: components of left, right, weight (0: no weights) and out.
        terms: (coefficient, i, k, p, j) of each term.
    """

    __slots__ = ("name", "sizes", "terms")

    def __init__(
        self,
        name: str,
        sizes: tuple[int, int, int, int],
        terms: Iterable[tuple[float, int, int, int, int]],
    ) -> None:
        self.name, self.sizes, self.terms = name, sizes, tuple(terms)

    def __repr__(self) -> str:
        return f"Form({self.name!r}, {len(self.terms)} terms)"

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of the form: those of SLOTS, "weight" only in forms with weights."""
        return tuple(s for s, size in zip(SLOTS, self.sizes, strict=True) if s != "weight" or size)


class Contraction(NamedTuple):
    """∂Q/∂slot of a form; `own`, the operands in `slot`, tells which derivatives are grouped."""

    form: Form
    slot: str
    own: tuple[Expr, ...] | None


def contract(form: Form, slot: str, operands: Operands) -> tuple[Expr, ...]:
    """The components of ∂Q/∂slot: Σ over the terms of the operands in the other slots.

    Args:
        form: the table.
        slot: the slot whose derivative is wanted.
        operands: the components of each slot, in the order of SLOTS.  Those of `slot` do not enter
            the value: where they are given, this and the other derivatives of Q at the same
            operands are computed together.
    """
    at = SLOTS.index(slot)
    others = [o for i, o in enumerate(operands) if i != at and o is not None]
    args = tuple(e for o in others for e in o)
    data = Contraction(form, slot, operands[at])
    node = _node("form", args, data, _union(args))
    reached = {at_slot[at] for _, at_slot in nonzero_terms(form, slot, operands)}
    return tuple(
        _node("part", (node,), c, node.axes) if c in reached else const(0)
        for c in range(form.sizes[at])
    )


def nonzero_terms(
    form: Form, slot: str, operands: Operands
) -> Iterator[tuple[float, tuple[int, int, int, int]]]:
    """(coefficient, component in each of SLOTS) of the terms that no zero operand cancels."""
    at = SLOTS.index(slot)
    zeros = [
        {c for c, e in enumerate(components) if is_zero(e)} if i != at and components else ()
        for i, components in enumerate(operands)
    ]
    for coefficient, i, k, p, j in form.terms:
        components = (i, k, p, j)
        if not any(c in zero for c, zero in zip(components, zeros, strict=True)):
            yield coefficient, components


def operands_of(node: Expr) -> Operands:
    """The operands of a "form" node, slot by slot."""
    form, slot, own = node.data
    found: list[tuple[Expr, ...] | None] = []
    start = 0
    for name, size in zip(SLOTS, form.sizes, strict=True):
        if name == slot:
            found.append(own)
        elif name not in form.slots:
            found.append(None)
        else:
            found.append(node.args[start : start + size])
            start += size
    return tuple(found)


def reachable(outputs: Iterable[Expr]) -> list[Expr]:
    """All nodes on which outputs depend, arguments first, in an order fixed by the outputs."""
    order: dict[Expr, None] = {}
    stack: list[tuple[Expr, bool]] = [(o, False) for o in reversed(list(outputs))]
    while stack:
        node, done = stack.pop()
        if done:
            order[node] = None
        elif node not in order:
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args) if a not in order)
    return list(order)


class _Adjoints:
    """∂L/∂node of each node: the contributions of its users, summed over broadcast axes."""

    def __init__(self) -> None:
        self._found: dict[Expr, dict[Axes, list[Expr]]] = {}

    def give(self, node: Expr, user_axes: Axes, contribution: Expr) -> None:
        if not is_zero(contribution):
            broadcast = user_axes - node.axes
            self._found.setdefault(node, {}).setdefault(broadcast, []).append(contribution)

    def take(self, node: Expr) -> Expr:
        parts = self._found.get(node, {})
        return add(*(total(add(*terms), broadcast) for broadcast, terms in parts.items()))


def gradients(
    outputs: Sequence[Expr], cotangents: Sequence[Expr], wrt: Sequence[Expr]
) -> list[Expr]:
    """∂L/∂e for each e of `wrt`, where L = Σ_o ⟨cotangent_o, output_o⟩ over all positions."""
    adjoints = _Adjoints()
    for output, cotangent in zip(outputs, cotangents, strict=True):
        adjoints.give(output, output.axes | cotangent.axes, cotangent)
    parts: dict[Expr, dict[int, Expr]] = {}
    for node in reversed(reachable(outputs)):
        if node.kind == "form":
            _form_rule(node, parts.pop(node, {}), adjoints)
            continue
        adjoint = adjoints.take(node)
        if is_zero(adjoint):
            continue
        if node.kind == "part":
            parts.setdefault(node.args[0], {})[node.data] = adjoint
        else:
            _scalar_rule(node, adjoint, adjoints)
    return [adjoints.take(e) for e in wrt]


def _scalar_rule(node: Expr, adjoint: Expr, adjoints: _Adjoints) -> None:
    axes = node.axes
    if node.kind == "add":
        for arg in node.args:
            adjoints.give(arg, axes, adjoint)
    elif node.kind == "mul":
        a, b = node.args
        adjoints.give(a, axes, adjoint * b)
        adjoints.give(b, axes, adjoint * a)
    elif node.kind == "total":
        (arg,) = node.args
        adjoints.give(arg, arg.axes, adjoint)
    elif node.kind in FUNCTIONS:
        (arg,), derivative = node.args, FUNCTIONS[node.kind].derivative
        if derivative is None:
            raise TypeError(f"{node.kind} has no derivative among scalars")
        adjoints.give(arg, axes, derivative(adjoint, arg, node))


def _form_rule(node: Expr, adjoint: dict[int, Expr], adjoints: _Adjoints) -> None:
    """Q is linear in each slot: with the adjoint in place of `slot`, its other derivatives."""
    if not adjoint:
        return
    form, slot, _ = node.data
    at = SLOTS.index(slot)
    operands = list(operands_of(node))
    operands[at] = tuple(adjoint.get(c, const(0)) for c in range(form.sizes[at]))
    for other, components in zip(SLOTS, operands, strict=True):
        if other == slot or components is None:
            continue
        derivatives = contract(form, other, tuple(operands))
        for component, derivative in zip(components, derivatives, strict=True):
            adjoints.give(component, node.axes, derivative)
