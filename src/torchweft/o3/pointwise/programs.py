"""Functions of a row as programs, known by their keys; derivatives of every order are programs too.

harmonics  u = x s, s = 1/|x| (0 where x is 0), or u = x;  Y_l^m(u) as in layers.harmonics
bessel     √(2/R) sin(nθ) / r = √(2/R) (π/R) u_n,  θ = π r/R,  u_n = 2 cos θ u_{n-1} - u_{n-2}
cutoff     a³ Σ_{k<p} (k+1)(k+2)/2 (1-a)^k,  a = max(1 - r/R, 0)

On the unit sphere r² is 1 and needs no derivative; at x = 0 only the first step of the ladder m = 0
depends on it, and it alone takes r² from s.  cos θ and u_1 = sin θ / θ are functions of θ², smooth
at 0, and so are all their derivatives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from torchweft.core.expressions.expr import Expr, add, apply, const
from torchweft.core.expressions.program import Operand, Output, Program, derive
from torchweft.errors import ShapeError

__all__ = [
    "MOST_HARMONICS_DEGREE",
    "bessel_key",
    "cutoff_key",
    "harmonics_key",
    "harmonics_scale",
    "ladder_factors",
    "ladder_seed",
    "row_program",
]


MOST_HARMONICS_DEGREE = 6
"""Highest degree of one program."""


def harmonics_key(degrees: Sequence[int], normalize: bool, normalization: str) -> str:
    """The key of a program."""
    return f"harmonics {','.join(map(str, degrees))} {int(normalize)} {normalization}"


def _harmonics(name: str) -> Program:
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
        before, q = const(0), const(ladder_seed(m, normalization))
        for degree in range(m, lmax + 1):
            if degree > m:
                a, b = ladder_factors(degree, m, normalization)
                length = const(1) if unit and degree > 2 else square
                before, q = q, const(a) * y * q - const(b) * length * before
            rows[degree][degree - m] = q * sin
            rows[degree][degree + m] = q * cos
    return rows


def ladder_seed(m: int, normalization: str) -> float:
    """q_mm."""
    root = math.sqrt((2 if m else 1) * (2 * m + 1) * math.comb(2 * m, m))
    return math.ldexp(root, -m) * harmonics_scale(normalization, m)


def ladder_factors(degree: int, m: int, normalization: str) -> tuple[float, float]:
    """a_lm = √((4l²-1) / (l²-m²)) and b_lm = a_lm / a_{l-1,m}, for the scales of degrees."""
    width, old = degree * degree - m * m, (degree - 1) ** 2 - m * m
    here = harmonics_scale(normalization, degree)
    a = (
        math.sqrt((4 * degree * degree - 1) / width)
        * here
        / harmonics_scale(normalization, degree - 1)
    )
    if not old:
        return a, 0.0
    b = math.sqrt((2 * degree + 1) * old / ((2 * degree - 3) * width)) * here
    return a, b / harmonics_scale(normalization, degree - 2)


def harmonics_scale(normalization: str, degree: int) -> float:
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


def bessel_key(r_max: float, number: int) -> str:
    """The key of the first so many functions."""
    return f"bessel {r_max!r} {number}"


def cutoff_key(r_max: float, p: int) -> str:
    """The key of a cutoff of degree p + 2."""
    return f"cutoff {r_max!r} {p}"


def _bessel(name: str) -> Program:
    """The program with a key."""
    _, r_max, number = name.split(" ")
    root = math.pi / float(r_max)
    operand = Operand("r", 1, ("row",))
    (r,) = operand.leaves()
    square = const(root * root) * r * r
    twice = const(2) * apply("wave0", square)
    before, now = const(0), apply("wave1", square)
    found = []
    for _ in range(int(number)):
        found.append(const(math.sqrt(2 / float(r_max)) * root) * now)
        before, now = now, twice * now - before
    return Program(name, (operand,), (Output(Operand("y", len(found), ("row",)), tuple(found)),))


def _cutoff(name: str) -> Program:
    """The program with a key."""
    _, given, p = name.split(" ")
    r_max = float(given)
    operand = Operand("r", 1, ("row",))
    (r,) = operand.leaves()
    a = apply("ramp", const(1 / r_max) * (const(r_max) - r))
    t, total = const(1) - a, const(int(p) * (int(p) + 1) / 2)
    for k in reversed(range(int(p) - 1)):
        total = total * t + const((k + 1) * (k + 2) / 2)
    return Program(name, (operand,), (Output(Operand("y", 1, ("row",)), (a * a * a * total,)),))


_ROOTS = {
    "harmonics": _harmonics,
    "bessel": _bessel,
    "cutoff": _cutoff,
}


@functools.lru_cache(maxsize=1024)
def row_program(name: str) -> Program:
    """The program with a key, or derived from it."""
    return derive(name, lambda key: _ROOTS[key.partition(" ")[0]](key))
