"""Formulas f(x_i, y_j, p): vector-valued expressions of variables, built, shared, printed and read.

A formula is a graph of primitive operations.  Nodes are interned: equal ones are one object, so
whatever is equal is computed once, and formulas compare by identity.  Each node has a dimension:
dimensions 1 and D broadcast in pointwise operations, everything else must fit.

`str(f)` is a canonical text, one primitive after another, that `read` turns into the same node.
The operators + - * / fold constants and drop zeros; `node` makes exactly what it is told.
"""

from __future__ import annotations

import ast
import operator
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torchweft.reductions.formula.dimensions import broadcast, dimension

__all__ = [
    "Node",
    "const",
    "expand",
    "is_zero",
    "node",
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
        op: a name of `torchweft.reductions.formula.primitives.OPERATIONS`.
        args: the arguments.
        data: what else the operation needs, hashable and printable.
        dim: how many components the value has.
        cats: the categories of the variables that it depends on: 0 (i), 1 (j), 2 (parameters).
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


_CATS = {"inner": frozenset((0, 1))}
"""What leaves but variables depend on."""

_interned: weakref.WeakValueDictionary[Hashable, Node] = weakref.WeakValueDictionary()
_lock = threading.RLock()  # backward passes run in threads: two nodes for one formula would differ


def _new_lock() -> None:
    """A process that forked while another thread held the lock would wait for ever."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def node(op: str, *args: Node, data: Hashable = None) -> Node:
    """The node `op` with `data` on `args`; dimensions that do not fit raise ShapeError."""
    if op == "const":
        key: Hashable = (op, float(data).hex())  # type: ignore[arg-type]  # keeps -0 and nan apart
    else:
        key = (op, args, data)
    found = _interned.get(key)
    if found is None:
        dim = dimension(op, [a.dim for a in args], data)
        cats = frozenset((data[2],)) if op == "var" else _CATS.get(op, frozenset[int]())  # type: ignore[index]
        cats = cats.union(*(a.cats for a in args))
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
    """Every node that the formulas need, arguments first, in an order that repeats."""
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
    """The variables that it depends on, by index."""
    found = [n for n in reachable(f) if n.op == "var"]
    return tuple(sorted(found, key=lambda n: n.data))


def substitute(f: Node, replacements: Mapping[Node, Node]) -> Node:
    """The formula with nodes replaced."""
    new = dict(replacements)
    for n in reachable(f):
        if n not in new:
            args = tuple(new[a] for a in n.args)
            new[n] = n if args == n.args else node(n.op, *args, data=n.data)
    return new[f]


def swap(f: Node) -> Node:
    """The formula with the roles of i and j exchanged."""
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


# The operators: constants first and folded, signs last, zeros dropped, expansions left to broadcast


def _same(f: Node, other: Node) -> Node:
    """f, expanded to the dimension that it has beside the other."""
    return expand(f, broadcast("add", [f.dim, other.dim]))


def _narrow(a: Node, b: Node) -> tuple[Node, Node]:
    """The arguments without an `expand` that broadcasting makes up for."""
    if a.op == "expand" and a.dim == b.dim:
        return a.args[0], b
    if b.op == "expand" and a.dim == b.dim:
        return a, b.args[0]
    return a, b


def _repeated(a: Node, b: Node) -> tuple[Node, Node] | None:
    """What they repeat in each component, where both do and one is an `expand`."""
    if "expand" not in (a.op, b.op):
        return None
    a, b = (f.args[0] if f.op == "expand" else f for f in (a, b))
    return (a, b) if a.dim == b.dim == 1 else None


def _split(f: Node) -> tuple[float, Node]:
    """Its constant factor, and the rest of it."""
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
