"""Complex numbers as pairs of components: (re f_0, im f_0, re f_1, im f_1, …).

Dimensions 2 and 2D broadcast, as one complex number and D.
"""

from __future__ import annotations

from collections.abc import Callable

from torchweft.errors import ShapeError
from torchweft.reductions.formula.node import Node, concat, expand, extract, node, total, zeros

__all__ = ["COMPLEX"]


def _real(f: Node) -> Node:
    return _every_second(f, 0)


def _imag(f: Node) -> Node:
    return _every_second(f, 1)


def _every_second(f: Node, first: int) -> Node:
    if f.dim % 2:
        raise ShapeError(
            f"a complex operation is given a formula of dimension {f.dim}: it must be even, pairs "
            "of real and imaginary parts. Make complex numbers of real ones with Real2Complex."
        )
    return concat(*(extract(f, k, 1) for k in range(first, f.dim, 2)))


def _pairs(real: Node, imag: Node) -> Node:
    """The complex numbers of these parts."""
    dim = max(real.dim, imag.dim)
    real, imag = expand(real, dim), expand(imag, dim)
    return concat(*(extract(part, k, 1) for k in range(dim) for part in (real, imag)))


def _angle(f: Node) -> Node:
    return node("atan2", _imag(f), _real(f))


def _conj(f: Node) -> Node:
    return _pairs(_real(f), -_imag(f))


def _square_abs(f: Node) -> Node:
    real, imag = _real(f), _imag(f)
    return real * real + imag * imag


def _abs(f: Node) -> Node:
    return node("sqrt", _square_abs(f))


def _exp(f: Node) -> Node:
    return _polar(node("exp", _real(f)), _imag(f))


def _exp1j(f: Node) -> Node:
    """exp(i f) of a real f."""
    return _pairs(node("cos", f), node("sin", f))


def _polar(radius: Node, angle: Node) -> Node:
    return _pairs(radius * node("cos", angle), radius * node("sin", angle))


def _add(f: Node, g: Node) -> Node:
    return f + g if f.dim == g.dim else _pairs(_real(f) + _real(g), _imag(f) + _imag(g))


def _subtract(f: Node, g: Node) -> Node:
    return f - g if f.dim == g.dim else _pairs(_real(f) - _real(g), _imag(f) - _imag(g))


def _multiply(f: Node, g: Node) -> Node:
    a, b, c, d = _real(f), _imag(f), _real(g), _imag(g)
    return _pairs(a * c - b * d, a * d + b * c)


def _divide(f: Node, g: Node) -> Node:
    square = _square_abs(g)
    quotient = _multiply(f, _conj(g))
    return _pairs(_real(quotient) / square, _imag(quotient) / square)


def _scale(f: Node, g: Node) -> Node:
    """The product of complex numbers and one real number, in either order."""
    if f.dim > 1 and g.dim > 1:
        raise ShapeError(
            f"ComplexRealScal is given formulas of dimensions {f.dim} and {g.dim}: one must be 1, "
            "a real number. Use ComplexMult for two complex formulas."
        )
    return f * g


def _sum(f: Node) -> Node:
    return concat(total(_real(f)), total(_imag(f)))


def _sum_t(f: Node, dim: int) -> Node:
    """A complex number, repeated to dimension `dim`."""
    if f.dim != 2 or dim % 2:
        raise ShapeError(
            f"ComplexSumT repeats a formula of dimension {f.dim} to {dim}: the first must be 2, "
            "one complex number, the second even. Take one number with extract."
        )
    return _pairs(expand(_real(f), dim // 2), _imag(f))


def _real_to_complex(f: Node) -> Node:
    return _pairs(f, zeros(f.dim))


def _imag_to_complex(f: Node) -> Node:
    return _pairs(zeros(f.dim), f)


COMPLEX: dict[str, Callable[..., Node]] = {
    "ComplexAbs": _abs,
    "ComplexAdd": _add,
    "ComplexAngle": _angle,
    "ComplexDivide": _divide,
    "ComplexExp": _exp,
    "ComplexExp1j": _exp1j,
    "ComplexImag": _imag,
    "ComplexMult": _multiply,
    "ComplexReal": _real,
    "ComplexRealScal": _scale,
    "ComplexSquareAbs": _square_abs,
    "ComplexSubtract": _subtract,
    "ComplexSum": _sum,
    "ComplexSumT": _sum_t,
    "Conj": _conj,
    "Imag2Complex": _imag_to_complex,
    "Real2Complex": _real_to_complex,
}
"""The complex operations by their names in formula strings; ComplexSumT(f, dim)."""
