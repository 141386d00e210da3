"""Derivatives of formulas, as formulas: against a cotangent, along a direction, and traces."""

from __future__ import annotations

from collections.abc import Sequence

from torchweft.errors import ShapeError
from torchweft.reductions.formula.node import (
    PRIMITIVES,
    Node,
    concat,
    const,
    expand,
    extract,
    is_zero,
    place,
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
    "trace_operator",
]


def gradient(f: Node, v: Node, cotangent: Node) -> Node:
    """Σ_k cotangent_k ∂f_k/∂v, of v's dimension.

    Args:
        f: the formula.
        v: a variable, or any node of f.
        cotangent: of f's dimension, or 1 to repeat it.
    """
    return gradients(f, [v], cotangent)[0]


def gradients(f: Node, wrt: Sequence[Node], cotangent: Node) -> list[Node]:
    """`gradient` for each of several variables, sharing what they have in common."""
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
        contributions = PRIMITIVES[n.op].derivative(n, adjoints[n])
        for argument, contribution in zip(n.args, contributions, strict=True):
            if argument not in wanted or contribution is None or is_zero(contribution):
                continue
            if argument.dim < contribution.dim:
                contribution = total(contribution)
            known = adjoints.get(argument)
            adjoints[argument] = contribution if known is None else known + contribution
    return [adjoints.get(v, zeros(v.dim)) for v in wrt]


def diff(f: Node, v: Node, u: Node) -> Node:
    """∂f/∂v · u: how f changes as v moves along u."""
    if u.dim not in (1, v.dim):
        raise ShapeError(
            f"diff moves a variable of dimension {v.dim} along a formula of dimension {u.dim}: it "
            f"must be {v.dim} or 1. Change the direction, or extract components of it."
        )
    w = _new(f.dim, f, v, u)
    return gradient(gradient(f, v, w), w, u)  # the gradient is linear in w, with the same matrix


def grad_matrix(f: Node, v: Node) -> Node:
    """The matrix ∂f_k/∂v_l of f.dim rows and v.dim columns, row after row."""
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
    return _trace(gradient(f, v, w), w, expand(const(1), f.dim))  # that of the transpose


_COMPONENTWISE = frozenset(("add", "sub", "mul", "div", "neg", "ifelse"))


def _trace(f: Node, w: Node, weight: Node) -> Node:
    """Σ_k weight_k ∂f_k/∂w_k of an f that is linear in w, of w's dimension."""
    if f is w:
        return total(weight)
    if f.op not in _COMPONENTWISE:
        rows = [gradient(f, w, place(const(1), k, f.dim)) for k in range(f.dim)]
        return total(weight * concat(*(extract(row, k, 1) for k, row in enumerate(rows))))
    result = const(0)
    for arg, scaled in zip(f.args, PRIMITIVES[f.op].derivative(f, weight), strict=True):
        if scaled is None or w not in variables(arg):
            continue
        if arg.dim == f.dim:
            result = result + _trace(arg, w, scaled)
        else:  # the same number in each component
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
    """A variable that no formula has."""
    used = [v.data[0] for f in formulas for v in variables(f)]
    return var(1 + max(used, default=-1), dim, 2)
