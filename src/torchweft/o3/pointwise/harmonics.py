"""Spherical harmonics as programs of one row: derivatives of every order are programs too.

u = x s, s = 1/|x| (0 where x is 0), or u = x;   Y_l^m(u) by the ladders of o3.layers.harmonics

On the unit sphere r² is 1, which needs no derivative.  At x = 0, where u is 0 too, only the first
step of the ladder m = 0 tells: it alone takes r² from s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchweft.core.expressions.expr import Expr, add, apply, const
from torchweft.core.expressions.program import Operand, Output, Program
from torchweft.errors import ShapeError

__all__ = ["MOST_DEGREE", "factors", "key", "root", "scale", "seed"]

MOST_DEGREE = 6
"""Of one program."""


def key(degrees: Sequence[int], normalize: bool, normalization: str) -> str:
    """The key of a program."""
    return f"harmonics {','.join(map(str, degrees))} {int(normalize)} {normalization}"


def root(name: str) -> Program:
    """The program with a key, of a vector x."""
    _, listed, normalize, normalization = name.split(" ")
    degrees = [int(degree) for degree in listed.split(",")]
    x = Operand("x", 3, ("row",))
    u: Sequence[Expr] = x.leaves()
    square = add(*(a * a for a in u))
    if int(normalize):
        s = apply("rsqrt", square)
        u, square = [a * s for a in u], apply("sign", s)
    rows = _components(max(degrees), u, square, bool(int(normalize)), normalization)
    components = tuple(y for degree in degrees for y in rows[degree])
    return Program(name, (x,), (Output(Operand("y", len(components), ("row",)), components),))


def _components(
    lmax: int, u: Sequence[Expr], square: Expr, unit: bool, normalization: str
) -> list[list[Expr]]:
    """Y_l^-l … Y_l^l of each degree."""
    x, y, z = u
    rows = [[y] * (2 * degree + 1) for degree in range(lmax + 1)]
    cos, sin = const(1), const(0)  # of z + ix to the power m
    for m in range(lmax + 1):
        if m:
            cos, sin = z * cos - x * sin, z * sin + x * cos
        before, q = const(0), const(seed(m, normalization))
        for degree in range(m, lmax + 1):
            if degree > m:
                a, b = factors(degree, m, normalization)
                length = const(1) if unit and degree > 2 else square
                before, q = q, const(a) * y * q - const(b) * length * before
            rows[degree][degree - m] = q * sin
            rows[degree][degree + m] = q * cos
    return rows


def seed(m: int, normalization: str) -> float:
    """q_mm."""
    root = math.sqrt((2 if m else 1) * (2 * m + 1) * math.comb(2 * m, m))
    return math.ldexp(root, -m) * scale(normalization, m)


def factors(degree: int, m: int, normalization: str) -> tuple[float, float]:
    """a_lm = √((4l²-1) / (l²-m²)) and b_lm = a_lm / a_{l-1,m}, for the scales of degrees."""
    width, old = degree * degree - m * m, (degree - 1) ** 2 - m * m
    here = scale(normalization, degree)
    a = math.sqrt((4 * degree * degree - 1) / width) * here / scale(normalization, degree - 1)
    if not old:
        return a, 0.0
    b = math.sqrt((2 * degree + 1) * old / ((2 * degree - 3) * width)) * here
    return a, b / scale(normalization, degree - 2)


def scale(normalization: str, degree: int) -> float:
    """|Y_l| / √(2l+1) on the unit sphere."""
    match normalization:
        case "component":
            return 1.0
        case "norm":
            return 1 / math.sqrt(2 * degree + 1)
        case "integral":
            return 1 / math.sqrt(4 * math.pi)
    raise ShapeError(
        f"normalization is {normalization!r}: it must be one of integral, component, norm. "
        'Pass normalization="component".'
    )
