"""Every operation on formulas by its name in formula strings, composed of the primitives.

The parameters annotated `Node` are formulas, the others integers and lists of integers.
"""

from __future__ import annotations

import functools
import math
import operator
import string
from collections.abc import Callable, Sequence

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
from torchweft.reductions.formula.node import (
    PRIMITIVES,
    Node,
    broadcast,
    concat,
    const,
    expand,
    extract,
    node,
    place,
    power,
    product,
    total,
)

__all__ = ["COMPOSED", "operations", "raised"]


def operations() -> dict[str, Callable[..., Node]]:
    """Every operation by its name in formula strings: named primitives, and COMPOSED."""
    rows = PRIMITIVES.items()
    return {p.name: _primitive(op, p.arity) for op, p in rows if p.name} | COMPOSED


@functools.cache
def _primitive(op: str, arity: int | None) -> Callable[..., Node]:
    """The primitive as a function of one, two, three or any number of formulas."""

    def unary(f: Node) -> Node:
        return node(op, f)

    def binary(f: Node, g: Node) -> Node:
        return node(op, f, g)

    def ternary(f: Node, g: Node, h: Node) -> Node:
        return node(op, f, g, h)

    def variadic(*parts: Node) -> Node:
        return node(op, *parts)

    functions: dict[int, Callable[..., Node]] = {1: unary, 2: binary, 3: ternary}
    return functions.get(arity or 0, variadic)


# Scalar operations, on each component


def raised(f: Node, exponent: Node | float) -> Node:
    """f^e: an integer power, a root, or for f > 0 any power."""
    if isinstance(exponent, Node) and exponent.op == "const":
        exponent = float(exponent.data)
    if isinstance(exponent, Node):
        return node("powf", f, exponent)
    if float(exponent).is_integer():
        return power(f, int(exponent))
    root = {0.5: "sqrt", -0.5: "rsqrt"}.get(exponent)
    return node(root, f) if root else node("powf", f, const(exponent))


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
    return node("sinxdivx", math.pi * f)


def _not_equal(f: Node, g: Node) -> Node:
    return 1 - node("equal", f, g)


def _greater(f: Node, g: Node) -> Node:
    return node("less", g, f)


def _greater_equal(f: Node, g: Node) -> Node:
    return node("less_equal", g, f)


def _select(condition: Node, a: Node, b: Node) -> Node:
    """a where the condition is 0, b where it is 1."""
    return node("ifelse", -condition, a, b)


def _relu(f: Node) -> Node:
    """max(f, 0), of slope 1 at 0."""
    return _select(node("less", f, const(0)), f, const(0))


def _clamp(f: Node, low: Node, high: Node) -> Node:
    """f within low and high, of slope 1 at both."""
    below_high = _select(node("less", high, f), f, high)
    return _select(node("less", f, low), below_high, low)


def _clamp_integers(f: Node, low: int, high: int) -> Node:
    return _clamp(f, const(low), const(high))


def _clamp_slope(f: Node, low: int, high: int) -> Node:
    """1 where low ≤ f ≤ high, else 0."""
    return node("less_equal", const(low), f) * node("less_equal", f, const(high))


def _mod(f: Node, modulus: Node, offset: Node | None = None) -> Node:
    """f − m ⌊(f − d) / m⌋: from d on, below d + m."""
    return f - modulus * node("floor", (f - (offset or const(0))) / modulus)


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
    return node("sqrt", _sqnorm2(f))


def _normalize(f: Node) -> Node:
    """f / |f|, 0 at 0."""
    return f * node("rsqrt", _sqnorm2(f))


def _sqdist(f: Node, g: Node) -> Node:
    """|f − g|²."""
    return node("sqdist", *_together(f, g, "sqdist"))


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
    return _picked(f, node("argmin", f)) if f.dim > 1 else f


def _max(f: Node) -> Node:
    """The largest component; its derivative is the first such component's."""
    return _picked(f, node("argmax", f)) if f.dim > 1 else f


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
    values = node("less_equal", left, x) * node("less", x, right)
    for k in range(1, order + 1):
        left, right = extract(knots, 0, knots.dim - k), extract(knots, k, knots.dim - k)
        width = right - left
        safe = width + node("less_equal", width, const(0))
        w = node("less", left, right) * ((x - left) / safe)
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
    shares = total(node("exp", (smallest - paths) / gamma))
    return smallest - gamma * node("log", shares)


# Products of matrices and tensors, whose components lie row after row


def _columns(matrix: Node, vector: Node) -> int:
    """How many vectors of that dimension the matrix holds."""
    if matrix.dim % vector.dim:
        raise ShapeError(
            f"a product of a matrix and a vector is given formulas of dimensions {matrix.dim} and "
            f"{vector.dim}: the first must be a multiple of the second. Extract the components "
            "that match."
        )
    return matrix.dim // vector.dim


def matrix_vector(matrix: Node, vector: Node) -> Node:
    """Σ_l A_kl b_l."""
    rows = _columns(matrix, vector)
    return product(matrix, vector, (rows, vector.dim), "ab", (vector.dim,), "b", "a")


def vector_matrix(vector: Node, matrix: Node) -> Node:
    """Σ_k b_k A_kl."""
    columns = _columns(matrix, vector)
    return product(vector, matrix, (vector.dim,), "a", (vector.dim, columns), "ab", "b")


def tensor_product(f: Node, g: Node) -> Node:
    """f_k g_l."""
    return product(f, g, (f.dim,), "a", (g.dim,), "b", "ab")


def tensordot(
    f: Node,
    g: Node,
    dimfa: Sequence[int],
    dimfb: Sequence[int],
    contfa: Sequence[int],
    contfb: Sequence[int],
    permute: Sequence[int] | None = None,
) -> Node:
    """The product of tensors of shapes dimfa and dimfb, summed over pairs of axes.

    Axis contfa[n] of f is paired with contfb[n] of g.  The axes that remain, f's before g's, go to
    the places that `permute` says.
    """
    rank = len(dimfa) + len(dimfb) - 2 * len(contfa)
    places = list(range(rank) if permute is None else permute)
    if (
        len(contfa) != len(contfb)
        or not set(contfa) <= set(range(len(dimfa)))
        or not set(contfb) <= set(range(len(dimfb)))
        or sorted(places) != list(range(rank))
    ):
        raise ShapeError(
            f"a product of tensors of shapes {tuple(dimfa)} and {tuple(dimfb)} pairs axes "
            f"{tuple(contfa)} with {tuple(contfb)} and permutes by {permute}: it needs axes that "
            f"are there, in pairs, and a permutation of the {rank} that remain. Change the lists."
        )
    labels_a = list(string.ascii_lowercase[: len(dimfa)])
    labels_b = list(string.ascii_uppercase[: len(dimfb)])
    for a, b in zip(contfa, contfb, strict=True):
        labels_b[b] = labels_a[a]
    kept = [label for label in labels_a + labels_b if (labels_a + labels_b).count(label) == 1]
    out = "".join(label for _, label in sorted(zip(places, kept, strict=True)))
    return product(f, g, dimfa, "".join(labels_a), dimfb, "".join(labels_b), out)


def kron(f: Node, g: Node, dimfa: Sequence[int], dimfb: Sequence[int]) -> Node:
    """The Kronecker product of tensors of equal rank."""
    if len(dimfa) != len(dimfb):
        raise ShapeError(
            f"the Kronecker product is given shapes {tuple(dimfa)} and {tuple(dimfb)}: they must "
            "be of one rank. Add axes of length 1."
        )
    rank = len(dimfa)
    places = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
    return tensordot(f, g, dimfa, dimfb, [], [], places)


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
    "Add": _add,
    "AutoFactorize": _auto_factorize,
    "BSpline": _bspline,
    "Clamp": _clamp,
    "ClampInt": _clamp_integers,
    "Concat": _concat,
    "Diff": diff,
    "DiffClampInt": _clamp_slope,
    "Divergence": divergence,
    "Divide": _divide,
    "Elem": _elem,
    "ElemT": _elem_t,
    "Extract": _extract,
    "ExtractT": _extract_t,
    "Factorize": _factorize,
    "Grad": gradient,
    "GradMatrix": grad_matrix,
    "Grad_WithSavedForward": _gradient_of_reduction,
    "IntInv": _inverse_of_integer,
    "Kron": kron,
    "Laplacian": laplacian,
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
    "Scalprod": _dot,
    "Sinc": _sinc,
    "SoftDTW_SqDist": _softdtw_sqdist,
    "SqDist": _sqdist,
    "SqNorm2": _sqnorm2,
    "SqNormDiag": _diagonal_sqnorm,
    "SqNormIso": _isotropic_sqnorm,
    "Square": _square,
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
    **COMPLEX,
}
"""The operators, and the operations that are composed.

Their arguments, where the name leaves doubt:

BSpline(knots, x, k); Clamp(f, low, high); ClampInt and DiffClampInt(f, integers low, high);
Diff(f, v, direction); Elem(f, index); ElemT(f, dim, index); Extract(f, start, dim);
ExtractT(f, start, dim); Grad(f, v, cotangent); IfElse(c, a, b): a where c ≥ 0; Kron(f, g, shape_f,
shape_g); MatVecMult(A, b); Mod(f, modulus, offset = 0); OneHot(f, dim); Pow(f, integer); Powf(f,
g); Round(f, decimals = 0); Sinc: of πf; SoftDTW_SqDist(f, g, γ); SumT(f, dim); SymSqNorm(A, f);
TensorDot(f, g, shape_f, shape_g, axes_f, axes_g, permutation = None); VecMatMult(b, A);
WeightedSqDist(s, f, g); WeightedSqNorm, SqNormIso and SqNormDiag(s, f).
"""
