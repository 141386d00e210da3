"""Formulas made cheaper without a change of meaning: constants folded, sums as products.

Σ_k (a_k − b_k)² becomes a squared distance, Σ_k a_k b_k a scalar product; what all components share
leaves the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchweft.reductions.formula.node import (
    PRIMITIVES,
    Node,
    concat,
    const,
    expand,
    extract,
    node,
    place,
    power,
    product,
    reachable,
    total,
)

__all__ = ["simplify"]


def simplify(f: Node) -> Node:
    """The formula, cheaper."""
    new: dict[Node, Node] = {}
    for n in reachable(f):
        args = tuple(new[a] for a in n.args)
        new[n] = _rebuilt(n, args)
    return new[f]


def _rebuilt(n: Node, args: tuple[Node, ...]) -> Node:
    """The node on simpler arguments, by the constructors that leave out what does nothing."""
    if PRIMITIVES[n.op].pointwise and all(a.op == "const" for a in args):
        return _folded(n, args)
    if n.op in _REBUILD:
        return _REBUILD[n.op](n, args)
    return n if args == n.args else node(n.op, *args, data=n.data)


def _folded(n: Node, args: tuple[Node, ...]) -> Node:
    values = [torch.tensor([a.data], dtype=torch.float64) for a in args]
    data = () if n.data is None else (n.data,)
    return const(PRIMITIVES[n.op].value(*values, *data).item())


def _sum(f: Node) -> Node:
    """Σ_k f_k."""
    if f.op == "neg":
        return -_sum(f.args[0])
    if f.op == "place":
        return _sum(f.args[0])
    if f.op == "pow" and f.data == 2:
        return _dot(f.args[0], f.args[0])
    if f.op == "mul":
        a, b = f.args
        if a.dim == 1 < b.dim:
            return a * _sum(b)
        return b * _sum(a) if b.dim == 1 < a.dim else _dot(a, b)
    if f.op == "div" and f.args[1].dim == 1:
        return _sum(f.args[0]) / f.args[1]
    return total(f)


def _product(a: Node, b: Node) -> Node:
    """a b; zeros around one of them stay outside."""
    for f, g in ((a, b), (b, a)):
        if f.op == "place":
            inside = f.args[0] * (g if g.dim == 1 else extract(g, f.data[0], f.args[0].dim))
            return place(inside, *f.data)
    return a * b


def _dot(a: Node, b: Node) -> Node:
    """Σ_k a_k b_k."""
    if a.dim == 1:
        return a * b
    for f, g in ((a, b), (b, a)):
        if f.op == "neg":
            return -_dot(f.args[0], g)
        if f.op == "place":
            return _dot(f.args[0], extract(g, f.data[0], f.args[0].dim))
        if f.op in ("mul", "div"):
            scale, rest = (f.args[1], f.args[0]) if f.args[1].dim == 1 else f.args
            if scale.dim == 1 and (f.op == "mul" or scale is f.args[1]):
                inside = _dot(rest, g)
                return inside * scale if f.op == "mul" else inside / scale
    if a is b and a.op == "sub":
        return node("sqdist", *(expand(arg, a.dim) for arg in a.args))
    return product(a, b, (a.dim,), "a", (b.dim,), "a", "")


def _einsum(n: Node, args: tuple[Node, ...]) -> Node:
    (a, b), (_, labels_a, _, labels_b, labels_out) = args, n.data
    if labels_a == labels_b and not labels_out:
        return _dot(a, b)
    return product(a, b, *n.data)


_REBUILD: dict[str, Callable[[Node, tuple[Node, ...]], Node]] = {
    "add": lambda n, args: args[0] + args[1],
    "sub": lambda n, args: args[0] - args[1],
    "mul": lambda n, args: _product(*args),
    "div": lambda n, args: args[0] / args[1],
    "neg": lambda n, args: -args[0],
    "pow": lambda n, args: power(args[0], n.data),
    "sum": lambda n, args: _sum(args[0]),
    "einsum": _einsum,
    "extract": lambda n, args: extract(args[0], *n.data),
    "place": lambda n, args: place(args[0], *n.data),
    "concat": lambda n, args: concat(*args),
    "expand": lambda n, args: expand(args[0], n.data),
}
