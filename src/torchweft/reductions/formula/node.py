"""Formulas f(x_i, y_j, p): graphs of vector-valued operations on variables.

Nodes are interned: equal nodes are one object, so a common part is computed once, and formulas
compare by identity.  Each node has a dimension: dimensions 1 and D broadcast in pointwise
operations, all others must match.

`str(f)` is a canonical text, one primitive after another, and `read` returns the node of a text.
The operators + - * / fold constants and drop zeros; `node` simplifies nothing.
"""

from __future__ import annotations

import ast
import operator
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torchweft.errors import ShapeError

__all__ = [
    "PRIMITIVES",
    "Node",
    "Primitive",
    "broadcast",
    "concat",
    "const",
    "expand",
    "extract",
    "is_zero",
    "node",
    "place",
    "power",
    "product",
    "reachable",
    "read",
    "substitute",
    "swap",
    "total",
    "var",
    "variables",
    "zeros",
]


class Node:
    """A primitive operation `op` on the nodes `args`, with `data` that is not a formula.

    Args:
        op: a name of `PRIMITIVES`.
        args: the arguments.
        data: non-formula arguments of the operation, hashable and printable.
        dim: number of components.
        cats: categories of the variables that it depends on: 0 (i), 1 (j), 2 (parameters).
    """

    __slots__ = ("__weakref__", "args", "cats", "data", "dim", "op")

    data: Any

    def __init__(
        self, op: str, args: tuple[Node, ...], data: Hashable, dim: int, cats: frozenset[int]
    ) -> None:
        self.op, self.args, self.data, self.dim, self.cats = op, args, data, dim, cats

    def __add__(self, other: Node | float) -> Node:
        return _add(self, _formula(other))

    def __radd__(self, other: float) -> Node:
        return _add(const(other), self)

    def __sub__(self, other: Node | float) -> Node:
        return _subtract(self, _formula(other))

    def __rsub__(self, other: float) -> Node:
        return _subtract(const(other), self)

    def __mul__(self, other: Node | float) -> Node:
        return _multiply(self, _formula(other))

    def __rmul__(self, other: float) -> Node:
        return _multiply(const(other), self)

    def __truediv__(self, other: Node | float) -> Node:
        return _divide(self, _formula(other))

    def __rtruediv__(self, other: float) -> Node:
        return _divide(const(other), self)

    def __neg__(self) -> Node:
        return _negate(self)

    def __reduce__(self) -> tuple[Callable[[str], Node], tuple[str]]:
        return read, (str(self),)

    def __repr__(self) -> str:
        return _text(self)


class Primitive(NamedTuple):
    """One primitive operation.

    A derivative takes the operation's node n and the cotangent g, of n's dimension, and returns
    Σ_k g_k ∂n_k/∂a for each argument a; None where it is zero.  A derivative of n's dimension for
    an argument that was broadcast means its sum.

    Args:
        doc: what it computes.
        value: in torch, of values with components last, and of `data` where a node has some.
        derivative: of the node and the cotangent.
        scalars: components as expressions of core.  A pointwise primitive takes one component of
            each argument, after `data` where a node has some; the others take the node and all
            components of each argument.
        name: in formula strings; empty where a function of `named` prepares the arguments.
        arity: number of arguments in formula strings.
        dimension: of the arguments' dimensions and `data`; None: pointwise, 1 and D broadcast.
        view: whether the value may share memory with an argument.
    """

    doc: str
    value: Callable[..., Any]
    derivative: Callable[[Node, Node], tuple[Node | None, ...]]
    scalars: Callable[..., Any]
    name: str = ""
    arity: int = 1
    dimension: Callable[[Sequence[int], Any], int] | None = None
    view: bool = False

    @property
    def pointwise(self) -> bool:
        """Whether it is computed component by component; dimensions 1 and D broadcast."""
        return self.dimension is None


PRIMITIVES: dict[str, Primitive] = {}
"""The primitive operations by name; `primitives` defines them."""


def broadcast(op: str, dims: Sequence[int]) -> int:
    """D, for arguments of dimensions 1 and D; raises ShapeError for others."""
    dim = max(dims)
    if any(d not in (1, dim) for d in dims):
        raise ShapeError(
            f"{op} is given formulas of dimensions {_listed(dims)}: they must be equal, or 1. "
            "Reduce one with sum or elem, or take the components that match with extract."
        )
    return dim


def _listed(dims: Sequence[int]) -> str:
    return ", ".join(map(str, dims[:-1])) + f" and {dims[-1]}"


_interned: weakref.WeakValueDictionary[Hashable, Node] = weakref.WeakValueDictionary()
_lock = threading.RLock()  # backward passes run in threads: one formula must be one node


def _new_lock() -> None:
    """Replace the lock in a forked process, where the thread that held it does not exist."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def node(op: str, *args: Node, data: Hashable = None) -> Node:
    """The node `op` of `args` with `data`; raises ShapeError where dimensions do not match."""
    if op == "const":
        key: Hashable = (op, float(data).hex())  # type: ignore[arg-type]  # keeps -0 and nan apart
    else:
        key = (op, args, data)
    found = _interned.get(key)
    if found is None:
        rule, dims = PRIMITIVES[op].dimension, [a.dim for a in args]
        dim = broadcast(op, dims) if rule is None else rule(dims, data)
        own = data[2:] if op == "var" else (0, 1) if op == "inner" else ()  # type: ignore[index]
        cats = frozenset[int](own).union(*(a.cats for a in args))
        with _lock:
            found = _interned.get(key)
            if found is None:
                found = _interned[key] = Node(op, args, data, dim, cats)
    return found


def var(index: int, dim: int, cat: int) -> Node:
    """Variable number `index`, of category 0 (varies with i), 1 (with j) or 2 (a parameter)."""
    return node("var", data=(int(index), int(dim), int(cat)))


def const(number: float) -> Node:
    """A number, exact to float64."""
    return node("const", data=float(number))


def expand(f: Node, dim: int) -> Node:
    """`f` of dimension 1 in each of `dim` components."""
    return f if f.dim == dim else node("expand", f, data=operator.index(dim))


def zeros(dim: int) -> Node:
    """0 in each of `dim` components."""
    return expand(const(0), dim)


def total(f: Node) -> Node:
    """Σ_k f_k."""
    if f.op == "expand":
        return f.args[0] * f.dim
    return f if f.dim == 1 else node("sum", f)


def is_zero(f: Node) -> bool:
    """Whether it is the constant 0, in any dimension."""
    return (f.args[0] if f.op == "expand" else f) is const(0)


def reachable(*formulas: Node) -> list[Node]:
    """All nodes of the formulas, arguments first, in a deterministic order."""
    order: dict[Node, None] = {}
    stack = [(f, False) for f in reversed(formulas)]
    while stack:
        current, done = stack.pop()
        if done:
            order[current] = None
        elif current not in order:
            stack.append((current, True))
            stack.extend((a, False) for a in reversed(current.args) if a not in order)
    return list(order)


def variables(f: Node) -> tuple[Node, ...]:
    """The variables of a formula, by index."""
    found = [n for n in reachable(f) if n.op == "var"]
    return tuple(sorted(found, key=lambda n: n.data))


def substitute(f: Node, replacements: Mapping[Node, Node]) -> Node:
    """The formula with the keys of `replacements` replaced by their values."""
    new = dict(replacements)
    for n in reachable(f):
        if n not in new:
            args = tuple(new[a] for a in n.args)
            new[n] = n if args == n.args else node(n.op, *args, data=n.data)
    return new[f]


def swap(f: Node) -> Node:
    """The formula with i and j exchanged."""
    return substitute(
        f, {v: var(v.data[0], v.dim, 1 - v.data[2]) for v in variables(f) if v.data[2] < 2}
    )


def _text(f: Node) -> str:
    numbers: dict[Node, int] = {}
    steps = []
    for number, n in enumerate(reachable(f)):
        numbers[n] = number
        data = "" if n.data is None else f"[{n.data!r}]"
        steps.append(f"{n.op}{data}({','.join(str(numbers[a]) for a in n.args)})")
    return ";".join(steps)


def read(text: str) -> Node:
    """The formula of a canonical text: `read(str(f)) is f`."""
    nodes: list[Node] = []
    for step in text.split(";"):
        head, _, arguments = step[:-1].rpartition("(")
        op, bracket, data = head.partition("[")
        number = ast.literal_eval if op != "const" else float
        args = [nodes[int(number)] for number in arguments.split(",") if number]
        nodes.append(node(op, *args, data=number(data[:-1]) if bracket else None))
    return nodes[-1]


def _formula(value: Node | float) -> Node:
    return value if isinstance(value, Node) else const(value)


# Operators: constants are folded and come first, signs are taken out, zeros are dropped, and
# `expand` is left out where an operation broadcasts.


def _same(f: Node, other: Node) -> Node:
    """f, expanded to the dimension of its sum with the other."""
    return expand(f, broadcast("add", [f.dim, other.dim]))


def _narrow(a: Node, b: Node) -> tuple[Node, Node]:
    """The arguments, without an `expand` that broadcasting replaces."""
    if a.op == "expand" and a.dim == b.dim:
        return a.args[0], b
    if b.op == "expand" and a.dim == b.dim:
        return a, b.args[0]
    return a, b


def _repeated(a: Node, b: Node) -> tuple[Node, Node] | None:
    """The two numbers, where both arguments repeat one and at least one is an `expand`."""
    if "expand" not in (a.op, b.op):
        return None
    a, b = (f.args[0] if f.op == "expand" else f for f in (a, b))
    return (a, b) if a.dim == b.dim == 1 else None


def _split(f: Node) -> tuple[float, Node]:
    """The constant factor of f, and the remaining factor."""
    if f.op == "neg":
        number, rest = _split(f.args[0])
        return -number, rest
    if f.op == "mul" and f.args[0].op == "const":
        return f.args[0].data, f.args[1]
    return 1.0, f


def _add(a: Node, b: Node) -> Node:
    if is_zero(b):
        return _same(a, b)
    if is_zero(a):
        return _same(b, a)
    if a.op == b.op == "const":
        return const(a.data + b.data)
    if repeated := _repeated(a, b):
        return expand(repeated[0] + repeated[1], broadcast("add", [a.dim, b.dim]))
    (m, rest_a), (n, rest_b) = _split(a), _split(b)
    if rest_a is rest_b:
        return const(m + n) * rest_a
    a, b = _narrow(a, b)
    if b.op == "neg":
        return node("sub", a, b.args[0])
    return node("sub", b, a.args[0]) if a.op == "neg" else node("add", a, b)


def _subtract(a: Node, b: Node) -> Node:
    if is_zero(b):
        return _same(a, b)
    if b.op in ("neg", "const") or (b.op == "mul" and b.args[0].op == "const") or a is b:
        return _add(a, -b)
    if repeated := _repeated(a, b):
        return expand(repeated[0] - repeated[1], broadcast("sub", [a.dim, b.dim]))
    return _same(-b, a) if is_zero(a) else node("sub", *_narrow(a, b))


def _negate(f: Node) -> Node:
    if f.op == "const":
        return const(-f.data)
    if f.op == "neg":
        return f.args[0]
    if f.op == "expand":
        return expand(-f.args[0], f.dim)
    number, rest = _split(f)
    return const(-number) * rest if number != 1 else node("neg", f)


def _multiply(a: Node, b: Node) -> Node:
    if is_zero(a) or is_zero(b):
        return zeros(broadcast("mul", [a.dim, b.dim]))
    if repeated := _repeated(a, b):
        return expand(repeated[0] * repeated[1], broadcast("mul", [a.dim, b.dim]))
    a, b = _narrow(a, b)
    m, rest_a = (a.data, None) if a.op == "const" else _split(a)
    n, rest_b = (b.data, None) if b.op == "const" else _split(b)
    if rest_a is None or rest_b is None:
        rest = rest_a or rest_b
    else:
        rest = node("pow", rest_a, data=2) if rest_a is rest_b else node("mul", rest_a, rest_b)
    return _times(m * n, rest)


def _times(number: float, f: Node | None) -> Node:
    if f is None or f.op == "const":
        return const(number if f is None else number * f.data)
    if f.op == "expand":
        return expand(_times(number, f.args[0]), f.dim)
    if abs(number) != 1:
        return node("mul", const(number), f)
    return f if number == 1 else node("neg", f)


def _divide(a: Node, b: Node) -> Node:
    if is_zero(a):
        return zeros(broadcast("div", [a.dim, b.dim]))
    if b.op == "const" and (a.op == "const" or abs(b.data) == 1):
        return const(_quotient(a.data, b.data)) if a.op == "const" else _times(b.data, a)
    if repeated := _repeated(a, b):
        return expand(repeated[0] / repeated[1], broadcast("div", [a.dim, b.dim]))
    return node("div", *_narrow(a, b))


def _quotient(a: float, b: float) -> float:
    """a / b as IEEE has it."""
    try:
        return a / b
    except ZeroDivisionError:
        return float("nan") if a != a else a * float("inf") * (1 if str(b)[0] != "-" else -1)


# Constructors that drop operations without effect


def power(f: Node, exponent: int) -> Node:
    """f^n of an integer n."""
    if exponent == 0:
        return expand(const(1), f.dim)
    if exponent == -1:
        return node("reciprocal", f)
    return f if exponent == 1 else node("pow", f, data=operator.index(exponent))


def extract(f: Node, start: int, dim: int) -> Node:
    """Components start to start + dim; raises IndexRangeError where f lacks some."""
    whole = node("extract", f, data=(operator.index(start), operator.index(dim)))
    if dim == f.dim:
        return f
    if f.op == "expand":
        return expand(f.args[0], dim)
    if f.op == "extract":
        return extract(f.args[0], f.data[0] + start, dim)
    if f.op in ("concat", "place"):
        first = f.data[0] if f.op == "place" else 0
        for part in f.args:
            if first <= start and start + dim <= first + part.dim:
                return extract(part, start - first, dim)
            first += part.dim
        if f.op == "place" and (start + dim <= f.data[0] or start >= first):
            return zeros(dim)
    return whole


def place(f: Node, start: int, dim: int) -> Node:
    """f at components start to start + f.dim of dim, between zeros."""
    whole = node("place", f, data=(operator.index(start), operator.index(dim)))
    if dim == f.dim:
        return f
    return zeros(dim) if is_zero(f) else whole


def concat(*parts: Node) -> Node:
    """The components of all parts, one part after the other."""
    found: list[Node] = []
    for part in (p for whole in parts for p in (whole.args if whole.op == "concat" else (whole,))):
        joined = _joined(found[-1], part) if found else None
        found[-1:] = [part] if not found else [joined] if joined else [found[-1], part]
    return node("concat", *found) if len(found) > 1 else found[0]


def _joined(a: Node, b: Node) -> Node | None:
    """Both as one `extract`, where they are adjacent components of one formula."""
    if a.op != "extract" or b.op != "extract" or a.args != b.args:
        return None
    start = a.data[0]
    return extract(a.args[0], start, a.dim + b.dim) if start + a.dim == b.data[0] else None


def product(
    a: Node,
    b: Node,
    shape_a: Sequence[int],
    labels_a: str,
    shape_b: Sequence[int],
    labels_b: str,
    labels_out: str,
) -> Node:
    """Σ a[labels_a] · b[labels_b] over the labels that labels_out lacks, row-major.

    Each label is in at least two of the three, and at most once in each.
    """
    shape_a, shape_b = tuple(map(operator.index, shape_a)), tuple(map(operator.index, shape_b))
    data = (shape_a, labels_a, shape_b, labels_b, labels_out)
    whole = node("einsum", a, b, data=data)  # raises where shapes do not match
    if is_zero(a) or is_zero(b):
        return zeros(whole.dim)
    (shape_a, labels_a), (shape_b, labels_b) = _axes(shape_a, labels_a), _axes(shape_b, labels_b)
    inside = dict.fromkeys(labels_a + labels_b)
    letter = {label: chr(ord("a") + k) for k, label in enumerate(inside)}
    labels_a, labels_b, labels_out = (
        "".join(letter[label] for label in labels if label in letter)
        for labels in (labels_a, labels_b, labels_out)
    )
    if {labels_a, labels_b} in ({labels_out}, {"", labels_out}):
        return a * b
    if labels_a == labels_b and "expand" in (a.op, b.op):
        return total(a * b)
    return node("einsum", a, b, data=(shape_a, labels_a, shape_b, labels_b, labels_out))


def _axes(shape: Sequence[int], labels: str) -> tuple[tuple[int, ...], str]:
    """The axes that are longer than 1."""
    long = [(size, label) for size, label in zip(shape, labels, strict=True) if size > 1]
    return tuple(size for size, _ in long), "".join(label for _, label in long)
