"""Every operation on formulas by its name in formula strings, composed of the primitives.

The parameters annotated `Node` are formulas, the others integers and lists of integers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

from torchweft.errors import ShapeError
from torchweft.reductions.formula.complex_operations import COMPLEX
from torchweft.reductions.formula.derivatives import (
    diff,
    divergence,
    grad_matrix,
    gradient,
    laplacian,
    trace_operator,
)
from torchweft.reductions.formula.dimensions import broadcast
from torchweft.reductions.formula.node import Node, const, expand, node, total
from torchweft.reductions.formula.primitives import apply, concat, extract, place, power, product
from torchweft.reductions.formula.tensor_operations import (
    kron,
    matrix_vector,
    tensor_product,
    tensordot,
    vector_matrix,
)

__all__ = ["COMPOSED", "raised"]


def _primitive(op: str, count: int = 1) -> Callable[..., Node]:
    """The primitive as a function of one, two or three formulas."""

    def unary(f: Node) -> Node:
        return apply(op, f)

    def binary(f: Node, g: Node) -> Node:
        return apply(op, f, g)

    def ternary(f: Node, g: Node, h: Node) -> Node:
        return apply(op, f, g, h)

    return (unary, binary, ternary)[count - 1]


# Scalar operations, on each component


def raised(f: Node, exponent: Node | float) -> Node:
    """f^e: an integer power, a root, or for f > 0 any power."""
    if isinstance(exponent, Node) and exponent.op == "const":
        exponent = float(exponent.data)
    if isinstance(exponent, Node):
        return apply("powf", f, exponent)
    if float(exponent).is_integer():
        return power(f, int(exponent))
    root = {0.5: "sqrt", -0.5: "rsqrt"}.get(exponent)
    return apply(root, f) if root else apply("powf", f, const(exponent))


def _power(f: Node, exponent: int) -> Node:
    return power(f, exponent)


def _square(f: Node) -> Node:
    return power(f, 2)


def _minus(f: Node) -> Node:
    return -f


def _add(f: Node, g: Node) -> Node:
    return f + g


def _subtract(f: Node, g: Node) -> Node:
    return f - g


def _multiply(f: Node, g: Node) -> Node:
    return f * g


def _divide(f: Node, g: Node) -> Node:
    return f / g


def _inverse_of_integer(k: int) -> Node:
    return const(1) / k


def _sinc(f: Node) -> Node:
    """sin(πf) / (πf), 1 at 0."""
    return apply("sinxdivx", math.pi * f)


def _not_equal(f: Node, g: Node) -> Node:
    return 1 - apply("equal", f, g)


def _greater(f: Node, g: Node) -> Node:
    return apply("less", g, f)


def _greater_equal(f: Node, g: Node) -> Node:
    return apply("less_equal", g, f)


def _select(condition: Node, a: Node, b: Node) -> Node:
    """a where the condition is 0, b where it is 1."""
    return node("ifelse", -condition, a, b)


def _relu(f: Node) -> Node:
    """max(f, 0), of slope 1 at 0."""
    return _select(apply("less", f, const(0)), f, const(0))


def _clamp(f: Node, low: Node, high: Node) -> Node:
    """f within low and high, of slope 1 at both."""
    below_high = _select(apply("less", high, f), f, high)
    return _select(apply("less", f, low), below_high, low)


def _clamp_integers(f: Node, low: int, high: int) -> Node:
    return _clamp(f, const(low), const(high))


def _clamp_slope(f: Node, low: int, high: int) -> Node:
    """1 where low ≤ f ≤ high, else 0."""
    return apply("less_equal", const(low), f) * apply("less_equal", f, const(high))


def _mod(f: Node, modulus: Node, offset: Node | None = None) -> Node:
    """f − m ⌊(f − d) / m⌋: from d on, below d + m."""
    return f - modulus * apply("floor", (f - (offset or const(0))) / modulus)


def _round(f: Node, decimals: int = 0) -> Node:
    return node("round", f, data=operator.index(decimals))


# Vectors


def _together(f: Node, g: Node, op: str) -> tuple[Node, Node]:
    """Both of one dimension."""
    dim = broadcast(op, [f.dim, g.dim])
    return expand(f, dim), expand(g, dim)


def _dot(f: Node, g: Node) -> Node:
    """Σ_k f_k g_k."""
    f, g = _together(f, g, "a scalar product")
    return product(f, g, (f.dim,), "a", (g.dim,), "a", "")


def _sqnorm2(f: Node) -> Node:
    return _dot(f, f)


def _norm2(f: Node) -> Node:
    return apply("sqrt", _sqnorm2(f))


def _normalize(f: Node) -> Node:
    """f / |f|, 0 at 0."""
    return f * apply("rsqrt", _sqnorm2(f))


def _sqdist(f: Node, g: Node) -> Node:
    """|f − g|²."""
    return apply("sqdist", *_together(f, g, "sqdist"))


def _weighted_sqnorm(weight: Node, f: Node) -> Node:
    """s |f|², Σ s_k f_k² or Σ s_kl f_k f_l, as s is of dimension 1, D or D·D."""
    if weight.dim == 1:
        return weight * _sqnorm2(f)
    if weight.dim == f.dim:
        return _dot(weight, power(f, 2))
    if weight.dim != f.dim**2:
        raise ShapeError(
            f"a weighted squared norm is given a weight of dimension {weight.dim} for a formula of "
            f"dimension {f.dim}: it must be of dimension 1, D = {f.dim} or D·D = {f.dim**2}. "
            "Change the weight, or extract components of it."
        )
    return _symmetric_sqnorm(weight, f)


def _symmetric_sqnorm(matrix: Node, f: Node) -> Node:
    """Σ s_kl f_k f_l."""
    return _dot(matrix_vector(matrix, f), f)


def _weighted_sqdist(weight: Node, f: Node, g: Node) -> Node:
    if weight.dim == 1:
        return weight * _sqdist(f, g)
    return _weighted_sqnorm(weight, f - g)


def _isotropic_sqnorm(weight: Node, f: Node) -> Node:
    return weight * _sqnorm2(f)


def _diagonal_sqnorm(weight: Node, f: Node) -> Node:
    return _dot(weight, power(f, 2))


def _elem(f: Node, index: int) -> Node:
    return extract(f, index, 1)


def _elem_t(f: Node, dim: int, index: int) -> Node:
    """f of dimension 1 as component `index` of `dim`, zeros around."""
    expand(f, 1)
    return place(f, index, dim)


def _extract(f: Node, start: int, dim: int) -> Node:
    return extract(f, start, dim)


def _extract_t(f: Node, start: int, dim: int) -> Node:
    """f as the components from `start` of `dim`, zeros around."""
    return place(f, start, dim)


def _concat(*parts: Node) -> Node:
    return concat(*parts)


def _sum_t(f: Node, dim: int) -> Node:
    return expand(f, dim)


def _sum(f: Node) -> Node:
    return total(f)


def _one_hot(f: Node, dim: int) -> Node:
    return node("one_hot", f, data=operator.index(dim))


def _picked(f: Node, index: Node) -> Node:
    """The component of f of that index; the others do not enter, infinite ones neither."""
    return total(node("ifelse", _one_hot(index, f.dim) - 1, f, const(0)))


def _min(f: Node) -> Node:
    """The smallest component; its derivative is the first such component's."""
    return _picked(f, apply("argmin", f)) if f.dim > 1 else f


def _max(f: Node) -> Node:
    """The largest component; its derivative is the first such component's."""
    return _picked(f, apply("argmax", f)) if f.dim > 1 else f


def _bspline(knots: Node, x: Node, order: int) -> Node:
    """The B-splines B_i(x) of an order on knots t, K − order − 1 of them.

    B_i of order 0 is 1 for t_i ≤ x < t_{i+1}; with w_i = (x − t_i) / (t_{i+k} − t_i), that of order
    k is w_i B_i + (1 − w_{i+1}) B_{i+1}, both of order k − 1.  Equal knots have w = 0.
    """
    count = knots.dim - 1
    if x.dim != 1 or order < 0 or count < order + 1:
        raise ShapeError(
            f"BSpline of order {order} is given {knots.dim} knots and points of dimension {x.dim}: "
            f"it needs an order of 0 or more, {max(order, 0) + 2} knots or more, and points of "
            "dimension 1. Add knots, lower the order, or take one component with elem."
        )
    left, right = extract(knots, 0, count), extract(knots, 1, count)
    values = apply("less_equal", left, x) * apply("less", x, right)
    for k in range(1, order + 1):
        left, right = extract(knots, 0, knots.dim - k), extract(knots, k, knots.dim - k)
        width = right - left
        safe = width + apply("less_equal", width, const(0))
        w = apply("less", left, right) * ((x - left) / safe)
        count = values.dim - 1
        values = extract(w, 0, count) * extract(values, 0, count) + extract(
            1 - w, 1, count
        ) * extract(values, 1, count)
    return values


def _softdtw_sqdist(f: Node, g: Node, gamma: Node) -> Node:
    """Soft dynamic time warping of squared differences, of smoothness γ.

    r_kl = (f_k − g_l)² + softmin(r_{k−1,l−1}, r_{k−1,l}, r_{k,l−1}), with
    softmin(r) = −γ log Σ exp(−r / γ); the last one is the distance.
    """
    before: list[Node] = []
    for k in range(f.dim):
        row: list[Node] = []
        for l_ in range(g.dim):
            cost = power(extract(f, k, 1) - extract(g, l_, 1), 2)
            paths = before[max(l_ - 1, 0) : l_ + 1] + row[-1:]
            if len(paths) == 3:
                cost = cost + _softmin(concat(*paths), gamma)
            elif paths:
                cost = cost + paths[0]
            row.append(cost)
        before = row
    return before[-1]


def _softmin(paths: Node, gamma: Node) -> Node:
    smallest = _min(paths)
    shares = total(apply("exp", (smallest - paths) / gamma))
    return smallest - gamma * apply("log", shares)


# Symbolic operations


def _gradient_of_reduction(f: Node, v: Node, cotangent: Node, saved: Node) -> Node:
    """The gradient; a sum's does not need the saved result."""
    return gradient(f, v, cotangent)


def _factorize(f: Node, g: Node) -> Node:
    """f itself: what is equal is one node, and computed once."""
    return f


def _auto_factorize(f: Node) -> Node:
    """f itself: what is equal is one node, and computed once."""
    return f


COMPOSED: dict[str, Callable[..., Node]] = {
    "+": _add,
    "-": _subtract,
    "*": _multiply,
    "/": _divide,
    "|": _dot,
    "**": raised,
    "==": _primitive("equal", 2),
    "!=": _not_equal,
    "<": _primitive("less", 2),
    "<=": _primitive("less_equal", 2),
    ">": _greater,
    ">=": _greater_equal,
    "Abs": _primitive("abs"),
    "Acos": _primitive("acos"),
    "Add": _add,
    "ArgMax": _primitive("argmax"),
    "ArgMin": _primitive("argmin"),
    "Asin": _primitive("asin"),
    "Atan": _primitive("atan"),
    "Atan2": _primitive("atan2", 2),
    "AutoFactorize": _auto_factorize,
    "BSpline": _bspline,
    "Clamp": _clamp,
    "ClampInt": _clamp_integers,
    "Concat": _concat,
    "Cos": _primitive("cos"),
    "Diff": diff,
    "DiffClampInt": _clamp_slope,
    "Divergence": divergence,
    "Divide": _divide,
    "Elem": _elem,
    "ElemT": _elem_t,
    "Equal": _primitive("equal", 2),
    "Exp": _primitive("exp"),
    "Extract": _extract,
    "ExtractT": _extract_t,
    "Factorize": _factorize,
    "Floor": _primitive("floor"),
    "Grad": gradient,
    "GradMatrix": grad_matrix,
    "Grad_WithSavedForward": _gradient_of_reduction,
    "IfElse": _primitive("ifelse", 3),
    "IntInv": _inverse_of_integer,
    "Inv": _primitive("reciprocal"),
    "Kron": kron,
    "Laplacian": laplacian,
    "LessOrEqual": _primitive("less_equal", 2),
    "LessThan": _primitive("less", 2),
    "Log": _primitive("log"),
    "MatVecMult": matrix_vector,
    "Max": _max,
    "Min": _min,
    "Minus": _minus,
    "Mod": _mod,
    "Mult": _multiply,
    "Norm2": _norm2,
    "Normalize": _normalize,
    "NotEqual": _not_equal,
    "OneHot": _one_hot,
    "Pow": _power,
    "Powf": raised,
    "ReLU": _relu,
    "Round": _round,
    "Rsqrt": _primitive("rsqrt"),
    "Scalprod": _dot,
    "Sign": _primitive("sign"),
    "Sin": _primitive("sin"),
    "SinXDivX": _primitive("sinxdivx"),
    "Sinc": _sinc,
    "SoftDTW_SqDist": _softdtw_sqdist,
    "SqDist": _sqdist,
    "SqNorm2": _sqnorm2,
    "SqNormDiag": _diagonal_sqnorm,
    "SqNormIso": _isotropic_sqnorm,
    "Sqrt": _primitive("sqrt"),
    "Square": _square,
    "Step": _primitive("step"),
    "Subtract": _subtract,
    "Sum": _sum,
    "SumT": _sum_t,
    "SymSqNorm": _symmetric_sqnorm,
    "TensorDot": tensordot,
    "TensorProd": tensor_product,
    "TraceOperator": trace_operator,
    "VecMatMult": vector_matrix,
    "WeightedSqDist": _weighted_sqdist,
    "WeightedSqNorm": _weighted_sqnorm,
    "XLogX": _primitive("xlogx"),
    **COMPLEX,
}
"""The operators and the names of formula strings.  Their arguments, where the name leaves doubt:

BSpline(knots, x, k); Clamp(f, low, high); ClampInt and DiffClampInt(f, integers low, high);
Diff(f, v, direction); Elem(f, index); ElemT(f, dim, index); Extract(f, start, dim);
ExtractT(f, start, dim); Grad(f, v, cotangent); IfElse(c, a, b): a where c ≥ 0; Kron(f, g, shape_f,
shape_g); MatVecMult(A, b); Mod(f, modulus, offset = 0); OneHot(f, dim); Pow(f, integer); Powf(f,
g); Round(f, decimals = 0); Sinc: of πf; SoftDTW_SqDist(f, g, γ); SumT(f, dim); SymSqNorm(A, f);
TensorDot(f, g, shape_f, shape_g, axes_f, axes_g, permutation = None); VecMatMult(b, A);
WeightedSqDist(s, f, g); WeightedSqNorm, SqNormIso and SqNormDiag(s, f).
"""
