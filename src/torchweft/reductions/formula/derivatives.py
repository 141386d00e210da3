"""Derivatives of formulas, as formulas, and their simplification.

`simplify` folds constants.  Σ_k (a_k − b_k)² becomes a squared distance, Σ_k a_k b_k a scalar
product; a factor that all components share is taken out of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchweft.errors import ShapeError
from torchweft.reductions.formula.node import (
    PRIMITIVES,
    Node,
    concat,
    const,
    expand,
    extract,
    is_zero,
    node,
    place,
    power,
    product,
    reachable,
    total,
    var,
    variables,
    zeros,
)

__all__ = [
    "diff",
    "divergence",
    "grad_matrix",
    "gradient",
    "gradients",
    "laplacian",
    "simplify",
    "trace_operator",
]


def gradient(f: Node, v: Node, cotangent: Node) -> Node:
    """Σ_k cotangent_k ∂f_k/∂v, of v's dimension.

    Args:
        f: the formula.
        v: a variable, or any node of f.
        cotangent: of f's dimension, or of dimension 1, which is repeated.
    """
    return gradients(f, [v], cotangent)[0]


def gradients(f: Node, wrt: Sequence[Node], cotangent: Node) -> list[Node]:
    """The `gradient` in each of several variables; common parts are one node."""
    if cotangent.dim not in (1, f.dim):
        raise ShapeError(
            f"the gradient of a formula of dimension {f.dim} is given a cotangent of dimension "
            f"{cotangent.dim}: it must be {f.dim} or 1. Make it with Var(index, {f.dim}, category)."
        )
    order = reachable(f)
    wanted = set(wrt)
    for n in order:
        if wanted.intersection(n.args):
            wanted.add(n)
    adjoints: dict[Node, Node] = {f: expand(cotangent, f.dim)}
    for n in reversed(order):
        if n not in wanted or n not in adjoints or not n.args:
            continue
        if _is_branched(n):
            found = zip(wrt, _of_branches(n, wrt, adjoints[n]), strict=True)
        else:
            found = zip(n.args, PRIMITIVES[n.op].derivative(n, adjoints[n]), strict=True)
        for argument, contribution in found:
            if argument not in wanted or contribution is None or is_zero(contribution):
                continue
            if argument.dim < contribution.dim:
                contribution = total(contribution)
            known = adjoints.get(argument)
            adjoints[argument] = contribution if known is None else known + contribution
    return [adjoints.get(v, zeros(v.dim)) for v in wrt]


def _is_branched(n: Node) -> bool:
    """Whether one number decides which of two formulas is taken."""
    return n.op == "ifelse" and n.args[0].dim == 1


def _of_branches(n: Node, wrt: Sequence[Node], cotangent: Node) -> list[Node | None]:
    """The gradients of the branch that is taken; those of the other may be NaN."""
    condition, *branches = n.args
    found = (
        gradients(branch, wrt, total(cotangent) if branch.dim == 1 else cotangent)
        for branch in branches
    )
    return [
        None if is_zero(a) and is_zero(b) else node("ifelse", condition, a, b)
        for a, b in zip(*found, strict=True)
    ]


def diff(f: Node, v: Node, u: Node) -> Node:
    """∂f/∂v · u, the derivative of f in v along u."""
    if u.dim not in (1, v.dim):
        raise ShapeError(
            f"diff moves a variable of dimension {v.dim} along a formula of dimension {u.dim}: it "
            f"must be {v.dim} or 1. Change the direction, or extract components of it."
        )
    w = _new(f.dim, f, v, u)
    return gradient(gradient(f, v, w), w, u)  # the gradient is linear in w, with the same matrix


def grad_matrix(f: Node, v: Node) -> Node:
    """The matrix ∂f_k/∂v_l, row-major, of f.dim rows and v.dim columns."""
    rows = [gradient(f, v, place(const(1), k, f.dim)) for k in range(f.dim)]
    return concat(*rows)


def trace_operator(f: Node, v: Node) -> Node:
    """Σ_k ∂f_k/∂v_k: the trace of f as a linear map of v."""
    if f.dim != v.dim:
        raise ShapeError(
            f"the trace of a formula of dimension {f.dim} in a variable of dimension {v.dim}: they "
            "must be equal. Take the components that match with extract."
        )
    w = _new(f.dim, f, v)
    return _trace(gradient(f, v, w), w, expand(const(1), f.dim))  # the transpose has the same


_COMPONENTWISE = frozenset(("add", "sub", "mul", "div", "neg", "ifelse"))


def _trace(f: Node, w: Node, weight: Node) -> Node:
    """Σ_k weight_k ∂f_k/∂w_k of an f that is linear in w, of w's dimension."""
    if f is w:
        return total(weight)
    if _is_branched(f):
        condition, *branches = f.args
        traces = (_trace(expand(branch, f.dim), w, weight) for branch in branches)
        return node("ifelse", condition, *traces)
    if f.op not in _COMPONENTWISE:
        rows = [gradient(f, w, place(const(1), k, f.dim)) for k in range(f.dim)]
        return total(weight * concat(*(extract(row, k, 1) for k, row in enumerate(rows))))
    result = const(0)
    for arg, scaled in zip(f.args, PRIMITIVES[f.op].derivative(f, weight), strict=True):
        if scaled is None or w not in variables(arg):
            continue
        if arg.dim == f.dim:
            result = result + _trace(arg, w, scaled)
        else:  # arg is one number, repeated in each component
            result = result + total(scaled * gradient(arg, w, const(1)))
    return result


def divergence(f: Node, v: Node) -> Node:
    """Σ_k ∂f_k/∂v_k."""
    return trace_operator(f, v)


def laplacian(f: Node, v: Node) -> Node:
    """Σ_k ∂²f/∂v_k², for f of dimension 1."""
    if f.dim != 1:
        raise ShapeError(
            f"the laplacian is given a formula of dimension {f.dim}: it must be 1. Take one "
            "component with elem."
        )
    return divergence(gradient(f, v, const(1)), v)


def _new(dim: int, *formulas: Node) -> Node:
    """A variable whose index no formula uses."""
    used = [v.data[0] for f in formulas for v in variables(f)]
    return var(1 + max(used, default=-1), dim, 2)


def simplify(f: Node) -> Node:
    """An equal formula that is cheaper to compute."""
    new: dict[Node, Node] = {}
    for n in reachable(f):
        args = tuple(new[a] for a in n.args)
        new[n] = _rebuilt(n, args)
    return new[f]


def _rebuilt(n: Node, args: tuple[Node, ...]) -> Node:
    """The node of simpler arguments, by the constructors that drop what has no effect."""
    if PRIMITIVES[n.op].pointwise and all(a.op == "const" for a in args):
        return _folded(n, args)
    if n.op in _REBUILD:
        return _REBUILD[n.op](n, args)
    return n if args == n.args else node(n.op, *args, data=n.data)


def _folded(n: Node, args: tuple[Node, ...]) -> Node:
    values = [torch.tensor([a.data], dtype=torch.float64, device="cpu") for a in args]
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
    """a b, where zeros around a factor become zeros around the product."""
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
