"""The family's programs: which expressions of the blades each operation computes.

x, y are (B, row, feature), weights (P, feature), results (B, row, feature).  A key is the name of a
builder, the metric, and its words: "product 1,1,1 geometric weighted", "rms_norm 1,1,1 euclidean
0x1.0c6f7a0b5ed8dp-20" (eps to the last bit).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from torchweft.clifford.algebra import Algebra
from torchweft.core.expressions.expr import (
    SHRINK,
    Expr,
    Form,
    add,
    apply,
    const,
    contract,
    count,
    multiply,
    total,
)
from torchweft.core.expressions.program import Operand, Output, Program, derive

__all__ = ["LEAST_EPS", "form", "key", "pairs", "program"]

ROWS = ("row", "feature")
FEATURES = ("feature",)

LEAST_EPS = 2.0**-125 / SHRINK**2
"""The smallest eps of a norm that shrinks numbers before it squares them: 2.8e-14.

(2⁻⁴⁰)² times this is a normal float32 number.
"""


def key(builder: str, algebra: Algebra, *words: object) -> str:
    """The key of a program that is not derived from another."""
    return " ".join([builder, algebra.signature, *map(str, words)])


@functools.lru_cache(maxsize=1024)
def program(name: str) -> Program:
    """The program with a key, derived from its builder."""
    return derive(name, _root)


def _root(name: str) -> Program:
    builder, signature, *words = name.split(" ")
    algebra = Algebra.from_signature(signature)
    return _BUILDERS[builder](name, algebra, *words)


_PRODUCT_PATHS: dict[str, Callable[[int, int, int], bool]] = {
    "geometric": lambda left, out, right: True,
    "wedge": lambda left, out, right: out == left + right,
    "inner": lambda left, out, right: out == abs(left - right),
    "left_contraction": lambda left, out, right: out == right - left,
    "right_contraction": lambda left, out, right: out == left - right,
}
"""The paths that each product has, of those of the geometric product."""


@functools.cache
def form(algebra: Algebra, kind: str = "geometric", weighted: bool = False) -> Form:
    """Q(x, y, w, z) = Σ sign · x_i y_k w[path] z_j, over the paths that the product keeps."""
    if kind == "regressive":
        return _regressive(algebra)
    terms = [
        (sign, i, k, algebra.path_of[algebra.grades_of(term)], j)
        for term in algebra.terms
        for i, j, k, sign in [term]
        if _PRODUCT_PATHS[kind](*algebra.grades_of(term))
    ]
    size = algebra.num_blades
    return Form(kind, (size, size, len(algebra.paths) if weighted else 0, size), terms)


def _regressive(algebra: Algebra) -> Form:
    """dual(x ∨ y) = dual(x) ∧ dual(y), read back."""
    size, place = algebra.num_blades, algebra.duals
    back = {position: (j, sign) for j, (position, sign) in enumerate(place)}
    terms = []
    for sign, a, b, _, c in form(algebra, "wedge").terms:
        (i, sign_i), (k, sign_k), (j, sign_j) = back[a], back[b], back[c]
        terms.append((sign * sign_i * sign_k * sign_j, i, k, 0, j))
    return Form("regressive", (size, size, 0, size), terms)


@functools.cache
def pairs(algebra: Algebra) -> tuple[Form, tuple[list[int], ...]]:
    """Q(x, y, z) = Σ sign · x_i y_k z[path, j], and the paths of each out grade.

    The components stand by out grade, then path, then blade.
    """
    of_grade = tuple(
        [p for p, (_, out, _) in enumerate(algebra.paths) if out == grade]
        for grade in range(algebra.n + 1)
    )
    order = [
        (p, j)
        for paths, blades in zip(of_grade, algebra.of_grade, strict=True)
        for p in paths
        for j in blades
    ]
    places = {pair: c for c, pair in enumerate(order)}
    terms = [
        (sign, i, k, 0, places[algebra.path_of[algebra.grades_of(term)], j])
        for term in algebra.terms
        for i, j, k, sign in [term]
    ]
    size = algebra.num_blades
    return Form("pairs", (size, size, 0, len(order)), terms), of_grade


def _operands(algebra: Algebra, weighted: bool) -> tuple[Operand, ...]:
    x, y = (Operand(name, algebra.num_blades, ROWS) for name in "xy")
    return (x, y, Operand("w", len(algebra.paths), FEATURES)) if weighted else (x, y)


def _multiplied(algebra: Algebra, kind: str, operands: tuple[Operand, ...]) -> tuple[Expr, ...]:
    weighted = len(operands) == 3
    x, y, w = (*(o.leaves() for o in operands), None)[:3]
    return contract(form(algebra, kind, weighted), "out", (x, y, w, None))


def _result(algebra: Algebra, components: tuple[Expr, ...]) -> tuple[Output, ...]:
    return (Output(Operand("z", algebra.num_blades, ROWS), components),)


def _product(name: str, algebra: Algebra, kind: str, weighted: str = "") -> Program:
    """z_j = Σ sign · x_i y_k, or Σ sign · w[path] x_i y_k."""
    operands = _operands(algebra, bool(weighted))
    return Program(name, operands, _result(algebra, _multiplied(algebra, kind, operands)))


def _pairs(name: str, algebra: Algebra, gated: str = "") -> Program:
    """z[path, j] = Σ sign · x_i y_k: what the fully connected product multiplies by matrices."""
    table, _ = pairs(algebra)
    x, y = operands = _operands(algebra, weighted=False)
    components = contract(table, "out", (x.leaves(), y.leaves(), None, None))
    if gated:
        components = tuple(_gate(*(o.leaves() for o in operands)) * e for e in components)
    return Program(name, operands, (Output(Operand("z", table.sizes[3], ROWS), components),))


def _turned(name: str, algebra: Algebra, *words: str) -> Program:
    """z_j = sign · x_(place of j): words are "place:sign", 0 for no term."""
    x = Operand("x", algebra.num_blades, ROWS)
    read = [map(int, word.split(":")) for word in words]
    return Program(name, (x,), _result(algebra, tuple(const(s) * x.leaves()[i] for i, s in read)))


def _magnitude(name: str, algebra: Algebra) -> Program:
    """z = √|Σ q_j x_j²|, q_j the product of the blade's metric entries."""
    x = Operand("x", algebra.num_blades, ROWS)
    terms = [const(q) * e * e for q, e in zip(algebra.squares, x.leaves(), strict=True)]
    size = apply("sqrt", apply("abs", add(*terms)))
    return Program(name, (x,), (Output(Operand("z", 1, ROWS), (size,)),))


def _gate(*multivectors: tuple[Expr, ...]) -> Expr:
    """Φ(x₀), or the product of those of several multivectors."""
    return multiply(*(apply("normal_cdf", blades[0]) for blades in multivectors))


def _gelu(name: str, algebra: Algebra) -> Program:
    """z = x Φ(x₀)."""
    x = Operand("x", algebra.num_blades, ROWS)
    gate = _gate(x.leaves())
    return Program(name, (x,), _result(algebra, tuple(gate * e for e in x.leaves())))


def _normalised(
    o: tuple[Expr, ...], gate: Expr, algebra: Algebra, norm: str, eps: str
) -> tuple[Expr, ...]:
    """(gate o)_j / √(s_g + eps), s_g the mean over features of gate² |Σ_(j∈g) q_j o_j²|.

    q = 1 for the euclidean norm, the blades' squares for the metric one.  The gate stays outside
    of the sum over the blades: a thread stores one value a grade, not one a blade.  Squares are
    shrunk where eps allows it, √(s + eps) = √(κ²s + κ²eps) / κ: those of 10³¹ are finite, so that
    a gate of 0 meets no infinite one.
    """
    found: list[Expr] = []
    epsilon = float.fromhex(eps)
    shrinks = epsilon >= LEAST_EPS
    least = const(SHRINK**2 * epsilon if shrinks else epsilon)
    for blades in algebra.of_grade:
        signs = [1 if norm == "euclidean" else algebra.squares[j] for j in blades]
        if not any(signs):  # nothing to rescale by
            found += [gate * o[j] for j in blades]
            continue
        parts = [apply("shrunk_square", o[j]) if shrinks else o[j] * o[j] for j in blades]
        squares = add(*(const(q) * part for q, part in zip(signs, parts, strict=True)))
        if norm == "metric":
            squares = apply("abs", squares)
        mean = apply("reciprocal", count("feature")) * total(gate * gate * squares, FEATURES)
        root = apply("rsqrt", mean + least)
        scale = (apply("shrunk", root) if shrinks else root) * gate
        found += [scale * o[j] for j in blades]
    return tuple(found)


def _rms_norm(name: str, algebra: Algebra, norm: str, eps: str) -> Program:
    """z = x over its size, grade by grade."""
    x = Operand("x", algebra.num_blades, ROWS)
    components = _normalised(x.leaves(), const(1), algebra, norm, eps)
    return Program(name, (x,), _result(algebra, components))


def _layer_norm(name: str, algebra: Algebra, eps: str, gains: str = "") -> Program:
    """z = x / √max(eps, mean over the features of Σ_g |⟨x̃_g x_g⟩₀|), times w[g]."""
    x, w = Operand("x", algebra.num_blades, ROWS), Operand("w", algebra.n + 1, FEATURES)
    size = add(*(apply("abs", square) for square in _of_grades(x.leaves(), algebra)))
    mean = apply("reciprocal", count("feature")) * total(size, FEATURES)
    least = const(float.fromhex(eps))
    larger = const(0.5) * (mean + least + apply("abs", mean - least))
    scale = apply("rsqrt", larger)
    factors = [gain * scale for gain in w.leaves()] if gains else (algebra.n + 1) * [scale]
    z = tuple(factors[g] * e for g, e in zip(algebra.grades, x.leaves(), strict=True))
    return Program(name, (x, w) if gains else (x,), _result(algebra, z))


def _scalar_norm(name: str, algebra: Algebra, eps: str, gains: str = "") -> Program:
    """z = (x − m) / √(mean of (x − m)² + eps) over the features, m the mean of x, times w."""
    x, w = Operand("x", 1, ROWS), Operand("w", 1, FEATURES)
    each = apply("reciprocal", count("feature"))
    centred = x.leaves()[0] - each * total(x.leaves()[0], FEATURES)
    variance = each * total(centred * centred, FEATURES)
    z = apply("rsqrt", variance + const(float.fromhex(eps))) * centred
    operands = (x, w) if gains else (x,)
    return Program(name, operands, _result(algebra, (w.leaves()[0] * z if gains else z,)))


def _gelu_tanh(name: str, algebra: Algebra) -> Program:
    """z = x times GELU of x₀ by its tanh formula, ½ t (1 + tanh u) = t σ(2u)."""
    x = Operand("x", algebra.num_blades, ROWS)
    t = x.leaves()[0]
    cubic = t + multiply(const(0.044715), t, t, t)
    gate = t * apply("sigmoid", const(2 * math.sqrt(2 / math.pi)) * cubic)
    return Program(name, (x,), _result(algebra, tuple(gate * e for e in x.leaves())))


def _bilinear(name: str, algebra: Algebra) -> Program:
    """p = a b and q = r · join(c, d), r a number for each position."""
    a, b, c, d = (Operand(letter, algebra.num_blades, ROWS) for letter in "abcd")
    r = Operand("r", 1, ROWS)
    product = _multiplied(algebra, "geometric", (a, b))
    met = _multiplied(algebra, "regressive", (c, d))
    signs = [(-1) ** g if algebra.n % 2 == 0 else 1 for g in algebra.grades]
    joined = tuple(const(s) * r.leaves()[0] * e for s, e in zip(signs, met, strict=True))
    outputs = (
        Output(Operand(letter, algebra.num_blades, ROWS), components)
        for letter, components in (("p", product), ("q", joined))
    )
    return Program(name, (a, b, c, d, r), tuple(outputs))


def _attention(name: str, algebra: Algebra, side: str, eps: str, weighted: str = "") -> Program:
    """Features whose products, summed, are ⟨q̃k⟩₀ − w d²: of "queries", with w, or "keys".

    With one null vector, p ↦ p p₀/(p₀² + eps) are points and φ(q)·ψ(k) = −Σ (q_i k₀ − q₀ k_i)²,
    φ(q) = (Σ q_i², q₀², q₀q_i), ψ(k) = (−k₀², −Σ k_i², 2k₀k_i).
    """
    x = Operand("x", algebra.num_blades, ROWS)
    of_points = algebra.of_grade[algebra.n - 1] if algebra.metric.count(0) == 1 else ()
    found = [
        const(square if side == "queries" else 1) * e
        for j, (square, e) in enumerate(zip(algebra.squares, x.leaves(), strict=True))
        if square and j not in of_points
    ]
    if of_points:
        (body,) = (j for j in of_points if algebra.squares[j])
        weight = x.leaves()[body]
        scale = weight * apply("reciprocal", weight * weight + const(float.fromhex(eps)))
        point = [scale * x.leaves()[j] for j in of_points if j != body]
        own = scale * weight
        squares = add(*(e * e for e in point))
        if side == "queries":
            found += [squares, own * own, *(own * e for e in point)]
        else:
            found += [-(own * own), -squares, *(const(2) * own * e for e in point)]
    w = Operand("w", 1, FEATURES)
    if weighted:
        distances = algebra.n + 1
        found = [*found[:-distances], *(w.leaves()[0] * e for e in found[-distances:])]
    operands = (x, w) if weighted else (x,)
    return Program(name, operands, (Output(Operand("z", len(found), ROWS), tuple(found)),))


def _chain(name: str, algebra: Algebra, *ending: str) -> Program:
    """GELU of x and y, weighted product, norm."""
    operands = _operands(algebra, weighted=True)
    x, y, w = (o.leaves() for o in operands)
    components = _chained(algebra, x, y, w, ending)
    return Program(name, operands, _result(algebra, components))


def _layer(name: str, algebra: Algebra, *ending: str) -> Program:
    """The chain of x and y + bias, the bias on the scalar: it costs no pass of its own."""
    x, y, w = _operands(algebra, weighted=True)
    bias = Operand("b", 1, FEATURES)
    scalar, *others = y.leaves()
    shifted = (scalar + bias.leaves()[0], *others)
    components = _chained(algebra, x.leaves(), shifted, w.leaves(), ending)
    return Program(name, (x, y, bias, w), _result(algebra, components))


def _chained(
    algebra: Algebra,
    x: tuple[Expr, ...],
    y: tuple[Expr, ...],
    w: tuple[Expr, ...],
    ending: tuple[str, ...],
) -> tuple[Expr, ...]:
    """The product is bilinear: the gates are outside."""
    gate = _gate(x, y)
    o = contract(form(algebra, weighted=True), "out", (x, y, w, None))
    return _normalised(o, gate, algebra, *ending) if ending else tuple(gate * e for e in o)


def _of_grades(x: Sequence[Expr], algebra: Algebra) -> list[Expr]:
    """⟨x̃_g x_g⟩₀ = Σ_(j∈g) q_j x_j² of each grade."""
    return [
        add(*(multiply(const(algebra.squares[j]), x[j], x[j]) for j in blades))
        for blades in algebra.of_grade
    ]


def _smooth_root(square: Expr) -> Expr:
    """|square|^½, smooth at 0: (square² + 1e-16)^¼."""
    return apply("sqrt", apply("sqrt", square * square + const(1e-16)))


def _silu(name: str, algebra: Algebra) -> Program:
    """z_j = σ(a[g] t_g + b[g]) x_j, t_0 = x₀ and t_g = ⟨x̃_g x_g⟩₀."""
    x = Operand("x", algebra.num_blades, ROWS)
    a, b = (Operand(name, algebra.n + 1, FEATURES) for name in "ab")
    invariants = [x.leaves()[0], *_of_grades(x.leaves(), algebra)[1:]]
    gates = [
        apply("sigmoid", scale * t + shift)
        for scale, t, shift in zip(a.leaves(), invariants, b.leaves(), strict=True)
    ]
    components = tuple(gates[g] * e for g, e in zip(algebra.grades, x.leaves(), strict=True))
    return Program(name, (x, a, b), _result(algebra, components))


def _balanced(r: Sequence[Expr], s: Operand, algebra: Algebra) -> tuple[Expr, ...]:
    """r_j / (σ(s[g]) ‖r_g‖ + σ(−s[g]) + 1e-6): by something between 1 and the grade's own norm."""
    divisors = [
        apply("sigmoid", scale) * _smooth_root(square) + (apply("sigmoid", -scale) + const(1e-6))
        for scale, square in zip(s.leaves(), _of_grades(r, algebra), strict=True)
    ]
    scales = [apply("reciprocal", divisor) for divisor in divisors]
    return tuple(scales[g] * e for g, e in zip(algebra.grades, r, strict=True))


def _grade_normalization(name: str, algebra: Algebra) -> Program:
    """z = x, balanced by s."""
    x, s = Operand("x", algebra.num_blades, ROWS), Operand("s", algebra.n + 1, FEATURES)
    return Program(name, (x, s), _result(algebra, _balanced(x.leaves(), s, algebra)))


def _steerable(name: str, algebra: Algebra, norm: str = "") -> Program:
    """o = (l + x · y) / √2, y is r balanced by s; with a norm, a o / (mean of ‖o‖ + 1e-6).

    The product is weighted by path, the mean is over the features.
    """
    x, left, right = (Operand(name, algebra.num_blades, ROWS) for name in ("x", "l", "r"))
    w, s = Operand("w", len(algebra.paths), FEATURES), Operand("s", algebra.n + 1, FEATURES)
    y = _balanced(right.leaves(), s, algebra)
    product = contract(form(algebra, "geometric", True), "out", (x.leaves(), y, w.leaves(), None))
    o = tuple(const(0.5**0.5) * (e + p) for e, p in zip(left.leaves(), product, strict=True))
    operands: tuple[Operand, ...] = (x, left, right, w, s)
    if norm:
        a = Operand("a", 1, FEATURES)
        size = total(_smooth_root(add(*_of_grades(o, algebra))), FEATURES)
        mean = apply("reciprocal", count("feature")) * size
        scale = a.leaves()[0] * apply("reciprocal", mean + const(1e-6))
        o, operands = tuple(scale * e for e in o), (*operands, a)
    return Program(name, operands, _result(algebra, o))


_BUILDERS: dict[str, Callable[..., Program]] = {
    "silu": _silu,
    "grade_normalization": _grade_normalization,
    "steerable": _steerable,
    "product": _product,
    "pairs": _pairs,
    "chain": _chain,
    "layer": _layer,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "bilinear": _bilinear,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "scalar_norm": _scalar_norm,
    "attention": _attention,
    "magnitude": _magnitude,
    "turned": _turned,
}
