"""Operations on formulas by their names in formula strings, composed of the primitives.

The name of a parameter says what formula strings read for it: INTEGERS an integer, LISTS a list of
integers, any other name a formula.

Complex numbers are pairs of components, (re f_0, im f_0, re f_1, im f_1, …).  Dimensions 2 and 2D
broadcast, as one complex number and D.
"""

from __future__ import annotations

import math
import operator
import string
from collections.abc import Callable, Sequence

from torchweft.errors import ShapeError
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
    zeros,
)

__all__ = ["COMPOSED", "INTEGERS", "LISTS", "operations"]

INTEGERS = frozenset(
    ("cat", "decimals", "dim", "first", "index", "integer", "last", "order", "p", "q", "start")
)
"""Names of parameters that are integers."""

LISTS = frozenset(("dimfa", "dimfb", "contfa", "contfb", "permute"))
"""Names of parameters that are lists of integers."""


def operations() -> dict[str, Callable[..., Node]]:
    """All operations by their names in formula strings: named primitives, and COMPOSED."""
    rows = PRIMITIVES.items()
    return {p.name: _primitive(op, p.arity) for op, p in rows if p.name} | COMPOSED


def _primitive(op: str, arity: int) -> Callable[..., Node]:
    """The primitive as a function of one, two or three formulas."""
    functions: tuple[Callable[..., Node], ...] = (
        lambda f: node(op, f),
        lambda f, g: node(op, f, g),
        lambda f, g, h: node(op, f, g, h),
    )
    return functions[arity - 1]


# Numbers, in each component


def _raised(f: Node, exponent: Node) -> Node:
    """f^e: an integer power, a root, or for f > 0 any power."""
    if exponent.op != "const":
        return node("powf", f, exponent)
    if float(exponent.data).is_integer():
        return power(f, int(exponent.data))
    root = {0.5: "sqrt", -0.5: "rsqrt"}.get(exponent.data)
    return node(root, f) if root else node("powf", f, exponent)


def _select(condition: Node, a: Node, b: Node) -> Node:
    """a where the condition is 0, b where it is 1."""
    return node("ifelse", -condition, a, b)


def _clamp(f: Node, low: Node, high: Node) -> Node:
    """f between low and high, with slope 1 at both."""
    below_high = _select(node("less", high, f), f, high)
    return _select(node("less", f, low), below_high, low)


def _mod(f: Node, modulus: Node, offset: Node | None = None) -> Node:
    """f − m ⌊(f − d) / m⌋, in [d, d + m)."""
    return f - modulus * node("floor", (f - (offset or const(0))) / modulus)


# Vectors


def _together(f: Node, g: Node, op: str) -> tuple[Node, Node]:
    """Both formulas, expanded to one dimension."""
    dim = broadcast(op, [f.dim, g.dim])
    return expand(f, dim), expand(g, dim)


def _dot(f: Node, g: Node) -> Node:
    """Σ_k f_k g_k."""
    f, g = _together(f, g, "a scalar product")
    return product(f, g, (f.dim,), "a", (g.dim,), "a", "")


def _sqnorm2(f: Node) -> Node:
    return _dot(f, f)


def _sqdist(f: Node, g: Node) -> Node:
    return node("sqdist", *_together(f, g, "sqdist"))


def _diagonal_sqnorm(weight: Node, f: Node) -> Node:
    return _dot(weight, power(f, 2))


def _symmetric_sqnorm(matrix: Node, f: Node) -> Node:
    return _dot(_matrix_vector(matrix, f), f)


def _weighted_sqnorm(weight: Node, f: Node) -> Node:
    """s |f|², Σ s_k f_k² or Σ s_kl f_k f_l, as s is of dimension 1, D or D·D."""
    if weight.dim == 1:
        return weight * _sqnorm2(f)
    if weight.dim == f.dim:
        return _diagonal_sqnorm(weight, f)
    if weight.dim != f.dim**2:
        raise ShapeError(
            f"a weighted squared norm is given a weight of dimension {weight.dim} for a formula of "
            f"dimension {f.dim}: it must be of dimension 1, D = {f.dim} or D·D = {f.dim**2}. "
            "Change the weight, or extract components of it."
        )
    return _symmetric_sqnorm(weight, f)


def _weighted_sqdist(weight: Node, f: Node, g: Node) -> Node:
    if weight.dim == 1:
        return weight * _sqdist(f, g)
    return _weighted_sqnorm(weight, f - g)


def _elem_t(f: Node, dim: int, index: int) -> Node:
    """f of dimension 1 as component `index` of `dim`, zeros elsewhere."""
    expand(f, 1)  # raises for another dimension
    return place(f, index, dim)


def _best(position: str, f: Node) -> Node:
    """The first smallest or largest component; its derivative is that component's."""
    return _picked(f, node(position, f)) if f.dim > 1 else f


def _picked(f: Node, index: Node) -> Node:
    """The component of f at an index; the others are not read, so they may be infinite."""
    chosen = node("one_hot", index, data=f.dim)
    return total(node("ifelse", chosen - 1, f, const(0)))


def _bspline(knots: Node, x: Node, order: int) -> Node:
    """The K − order − 1 B-splines B_i(x) of an order on K knots t.

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
    softmin(r) = −γ log Σ exp(−r / γ); the last r is the distance.
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
    smallest = _best("argmin", paths)
    shares = total(node("exp", (smallest - paths) / gamma))
    return smallest - gamma * node("log", shares)


# Matrices and tensors, whose components are row-major


def _columns(matrix: Node, vector: Node) -> int:
    """The number of vectors of that dimension in the matrix."""
    if matrix.dim % vector.dim:
        raise ShapeError(
            f"a product of a matrix and a vector is given formulas of dimensions {matrix.dim} and "
            f"{vector.dim}: the first must be a multiple of the second. Extract the components "
            "that match."
        )
    return matrix.dim // vector.dim


def _matrix_vector(matrix: Node, vector: Node) -> Node:
    rows = _columns(matrix, vector)
    return product(matrix, vector, (rows, vector.dim), "ab", (vector.dim,), "b", "a")


def _vector_matrix(vector: Node, matrix: Node) -> Node:
    columns = _columns(matrix, vector)
    return product(vector, matrix, (vector.dim,), "a", (vector.dim, columns), "ab", "b")


def _tensordot(
    f: Node,
    g: Node,
    dimfa: Sequence[int],
    dimfb: Sequence[int],
    contfa: Sequence[int],
    contfb: Sequence[int],
    permute: Sequence[int] | None = None,
) -> Node:
    """The product of tensors of shapes dimfa and dimfb, summed over pairs of axes.

    Axis contfa[n] of f is paired with contfb[n] of g.  The axes that remain, f's before g's, are
    permuted: axis k becomes axis permute[k].
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


def _kron(f: Node, g: Node, dimfa: Sequence[int], dimfb: Sequence[int]) -> Node:
    """The Kronecker product of tensors of equal rank."""
    if len(dimfa) != len(dimfb):
        raise ShapeError(
            f"the Kronecker product is given shapes {tuple(dimfa)} and {tuple(dimfb)}: they must "
            "be of one rank. Add axes of length 1."
        )
    rank = len(dimfa)
    places = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
    return _tensordot(f, g, dimfa, dimfb, [], [], places)


# Complex numbers


def _every_second(f: Node, start: int) -> Node:
    """The real (0) or imaginary (1) parts."""
    if f.dim % 2:
        raise ShapeError(
            f"a complex operation is given a formula of dimension {f.dim}: it must be even, pairs "
            "of real and imaginary parts. Make complex numbers of real ones with Real2Complex."
        )
    return concat(*(extract(f, k, 1) for k in range(start, f.dim, 2)))


def _parts(f: Node) -> tuple[Node, Node]:
    return _every_second(f, 0), _every_second(f, 1)


def _pairs(real: Node, imag: Node) -> Node:
    """The complex numbers of these parts."""
    dim = max(real.dim, imag.dim)
    real, imag = expand(real, dim), expand(imag, dim)
    return concat(*(extract(part, k, 1) for k in range(dim) for part in (real, imag)))


def _square_abs(f: Node) -> Node:
    real, imag = _parts(f)
    return real * real + imag * imag


def _conj(f: Node) -> Node:
    real, imag = _parts(f)
    return _pairs(real, -imag)


def _complex_exp(f: Node) -> Node:
    real, imag = _parts(f)
    radius = node("exp", real)
    return _pairs(radius * node("cos", imag), radius * node("sin", imag))


def _by_parts(combine: Callable[[Node, Node], Node]) -> Callable[[Node, Node], Node]:
    """A sum or difference of complex numbers, part by part where they broadcast."""

    def apply(f: Node, g: Node) -> Node:
        if f.dim == g.dim:
            return combine(f, g)
        return _pairs(*map(combine, _parts(f), _parts(g)))

    return apply


def _complex_multiply(f: Node, g: Node) -> Node:
    (a, b), (c, d) = _parts(f), _parts(g)
    return _pairs(a * c - b * d, a * d + b * c)


def _complex_divide(f: Node, g: Node) -> Node:
    square = _square_abs(g)
    real, imag = _parts(_complex_multiply(f, _conj(g)))
    return _pairs(real / square, imag / square)


def _complex_scale(f: Node, g: Node) -> Node:
    """The product of complex numbers and one real number, in either order."""
    if f.dim > 1 and g.dim > 1:
        raise ShapeError(
            f"ComplexRealScal is given formulas of dimensions {f.dim} and {g.dim}: one must be 1, "
            "a real number. Use ComplexMult for two complex formulas."
        )
    return f * g


def _complex_repeated(f: Node, dim: int) -> Node:
    """A complex number, repeated to dimension `dim`."""
    if f.dim != 2 or dim % 2:
        raise ShapeError(
            f"ComplexSumT repeats a formula of dimension {f.dim} to {dim}: the first must be 2, "
            "one complex number, the second even. Take one number with extract."
        )
    real, imag = _parts(f)
    return _pairs(expand(real, dim // 2), imag)


COMPOSED: dict[str, Callable[..., Node]] = {
    # operators
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "|": _dot,
    "**": _raised,
    "==": _primitive("equal", 2),
    "!=": lambda f, g: 1 - node("equal", f, g),
    "<": _primitive("less", 2),
    "<=": _primitive("less_equal", 2),
    ">": lambda f, g: node("less", g, f),
    ">=": lambda f, g: node("less_equal", g, f),
    # numbers, in each component
    "Add": operator.add,
    "Clamp": _clamp,
    "ClampInt": lambda f, first, last: _clamp(f, const(first), const(last)),
    # 1 where first ≤ f ≤ last, else 0
    "DiffClampInt": lambda f, first, last: (
        node("less_equal", const(first), f) * node("less_equal", f, const(last))
    ),
    "Divide": operator.truediv,
    "IntInv": lambda integer: const(1) / integer,
    "Minus": operator.neg,
    "Mod": _mod,
    "Mult": operator.mul,
    "NotEqual": lambda f, g: 1 - node("equal", f, g),
    "Pow": lambda f, integer: power(f, integer),
    "Powf": _raised,
    # max(f, 0), with slope 1 at 0
    "ReLU": lambda f: _select(node("less", f, const(0)), f, const(0)),
    "Round": lambda f, decimals=0: node("round", f, data=operator.index(decimals)),
    # sin(πf) / (πf), 1 at 0
    "Sinc": lambda f: node("sinxdivx", math.pi * f),
    "Square": lambda f: power(f, 2),
    "Subtract": operator.sub,
    # vectors
    "BSpline": _bspline,
    "Concat": concat,
    "Elem": lambda f, index: extract(f, index, 1),
    "ElemT": _elem_t,
    "Extract": lambda f, start, dim: extract(f, start, dim),
    "ExtractT": lambda f, start, dim: place(f, start, dim),
    "Max": lambda f: _best("argmax", f),
    "Min": lambda f: _best("argmin", f),
    "Norm2": lambda f: node("sqrt", _sqnorm2(f)),
    # f / |f|, 0 at 0
    "Normalize": lambda f: f * node("rsqrt", _sqnorm2(f)),
    "OneHot": lambda f, dim: node("one_hot", f, data=operator.index(dim)),
    "Scalprod": _dot,
    "SoftDTW_SqDist": _softdtw_sqdist,
    "SqDist": _sqdist,
    "SqNorm2": _sqnorm2,
    "SqNormDiag": _diagonal_sqnorm,
    "SqNormIso": lambda weight, f: weight * _sqnorm2(f),
    "Sum": lambda f: total(f),
    "SumT": lambda f, dim: expand(f, dim),
    "WeightedSqDist": _weighted_sqdist,
    "WeightedSqNorm": _weighted_sqnorm,
    # matrices and tensors
    "Kron": _kron,
    "MatVecMult": _matrix_vector,
    "SymSqNorm": _symmetric_sqnorm,
    "TensorDot": _tensordot,
    "TensorProd": lambda f, g: product(f, g, (f.dim,), "a", (g.dim,), "b", "ab"),
    "VecMatMult": _vector_matrix,
    # derivatives
    "Diff": diff,
    "Divergence": divergence,
    "Grad": gradient,
    "GradMatrix": grad_matrix,
    # the gradient of a sum does not need the saved result
    "Grad_WithSavedForward": lambda f, v, cotangent, saved: gradient(f, v, cotangent),
    "Laplacian": laplacian,
    "TraceOperator": trace_operator,
    # a common part is one node already
    "AutoFactorize": lambda f: f,
    "Factorize": lambda f, g: f,
    # complex numbers
    "ComplexAbs": lambda f: node("sqrt", _square_abs(f)),
    "ComplexAdd": _by_parts(operator.add),
    "ComplexAngle": lambda f: node("atan2", _every_second(f, 1), _every_second(f, 0)),
    "ComplexDivide": _complex_divide,
    "ComplexExp": _complex_exp,
    # exp(i f) of a real f
    "ComplexExp1j": lambda f: _pairs(node("cos", f), node("sin", f)),
    "ComplexImag": lambda f: _every_second(f, 1),
    "ComplexMult": _complex_multiply,
    "ComplexReal": lambda f: _every_second(f, 0),
    "ComplexRealScal": _complex_scale,
    "ComplexSquareAbs": _square_abs,
    "ComplexSubtract": _by_parts(operator.sub),
    "ComplexSum": lambda f: concat(*map(total, _parts(f))),
    "ComplexSumT": _complex_repeated,
    "Conj": _conj,
    "Imag2Complex": lambda f: _pairs(zeros(f.dim), f),
    "Real2Complex": lambda f: _pairs(f, zeros(f.dim)),
}
"""The operators of formula strings, and the operations that are composed.

Arguments whose meaning the names do not say: Diff(f, v, direction); ElemT(f, dim, index);
Grad(f, v, cotangent); IfElse(c, a, b), a where c ≥ 0; Kron(f, g, shape_f, shape_g);
SymSqNorm(matrix, f); TensorDot(f, g, shape_f, shape_g, axes_f, axes_g, permutation = None);
WeightedSqNorm, SqNormIso and SqNormDiag(weight, f).
"""
