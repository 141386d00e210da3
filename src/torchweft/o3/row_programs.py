"""Programs of functions of a row: harmonics, radial functions, activations.

A function is a program, known by its key, and its derivatives of every order are programs too:

harmonics  u = x s, s = 1/|x| (0 where x is 0), or u = x;  Y_l^m(u) as in layers.harmonics
bessel     √(2/R) sin(nθ) / r = √(2/R) (π/R) u_n,  θ = π r/R,  u_n = 2 cos θ u_{n-1} - u_{n-2}
cutoff     a³ Σ_{k<p} (k+1)(k+2)/2 (1-a)^k,  a = max(1 - r/R, 0)
radial     each Bessel function times the cutoff
length     √(x²+y²+z²), with gradients 0 at 0
edge       two results: harmonics of a vector, and radial of its length
silu       c t σ(t),  t = a x,  for numbers a and c;  likewise sigmoid, c σ(t), and tanh, c tanh t

On the unit sphere r² is 1 and needs no derivative; at x = 0 only the first step of the ladder m = 0
depends on it, and it alone takes r² from s.  cos θ and u_1 = sin θ / θ are functions of θ², smooth
at 0, and so are all their derivatives.

Keys hold float(number): torch.compile takes a module's attribute as a constant after that only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from torchweft.core.expressions.expr import Expr, add, apply, const
from torchweft.core.expressions.program import Operand, Output, Program, derive
from torchweft.errors import ShapeError

__all__ = [
    "MOST_HARMONICS_DEGREE",
    "activation_key",
    "bessel_key",
    "cutoff_key",
    "edge_key",
    "harmonics_key",
    "harmonics_scale",
    "ladder_factors",
    "ladder_seed",
    "radial_basis_key",
    "result_shapes",
    "row_program",
    "varying",
]

MOST_HARMONICS_DEGREE = 6
"""Highest degree of one program."""


def harmonics_key(degrees: Sequence[int], normalize: bool, normalization: str) -> str:
    """The key of spherical harmonics."""
    return f"harmonics {','.join(map(str, degrees))} {int(normalize)} {normalization}"


def _harmonics(
    x: Expr, y: Expr, z: Expr, listed: str, normalize: str, normalization: str
) -> list[Expr]:
    degrees = [int(degree) for degree in listed.split(",")]
    u = [x, y, z]
    square, unit = _square(x, y, z), normalize == "1"
    if unit:
        s = apply("rsqrt", square)
        u, square = [a * s for a in u], apply("sign", s)
    rows = _components(max(degrees), u, square, unit, normalization)
    return [y for degree in degrees for y in rows[degree]]


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
    """q_mm, where the ladder of m begins."""
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
    """The key of the first `number` Bessel functions."""
    return f"bessel {float(r_max)!r} {number}"


def cutoff_key(r_max: float, p: int) -> str:
    """The key of a cutoff of degree p + 2."""
    return f"cutoff {float(r_max)!r} {p}"


def radial_basis_key(r_max: float, number: int, p: int) -> str:
    """The key of the first `number` Bessel functions, each times a cutoff of degree p + 2."""
    return f"radial {float(r_max)!r} {number} {p}"


def edge_key(harmonics: str, radial: str) -> str:
    """The key of harmonics of a vector and radial functions of its length, by the keys of both."""
    return " ".join(["edge", *harmonics.split(" ")[1:], *radial.split(" ")[1:]])


def activation_key(function: str, before: float, after: float) -> str:
    """The key of after f(before x), f one of silu, sigmoid and tanh."""
    return f"{function} {float(before)!r} {float(after)!r}"


def _bessel(square: Expr, r_max: str, number: str) -> list[Expr]:
    """Of a length by its square."""
    root = math.pi / float(r_max)
    square = const(root * root) * square
    twice = const(2) * apply("wave0", square)
    before, now = const(0), apply("wave1", square)
    found = []
    for _ in range(int(number)):
        found.append(const(math.sqrt(2 / float(r_max)) * root) * now)
        before, now = now, twice * now - before
    return found


def _cutoff(r: Expr, r_max: str, p: str) -> list[Expr]:
    a = apply("ramp", const(1 / float(r_max)) * (const(float(r_max)) - r))
    t, total = const(1) - a, const(int(p) * (int(p) + 1) / 2)
    for k in reversed(range(int(p) - 1)):
        total = total * t + const((k + 1) * (k + 2) / 2)
    return [a * a * a * total]


def _radial_basis(r: Expr, square: Expr, r_max: str, number: str, p: str) -> list[Expr]:
    (cutoff,) = _cutoff(r, r_max, p)
    return [function * cutoff for function in _bessel(square, r_max, number)]


def _square(*x: Expr) -> Expr:
    return add(*(a * a for a in x))


def _edge(x: Expr, y: Expr, z: Expr, *keys: str) -> tuple[list[Expr], list[Expr]]:
    square = _square(x, y, z)
    radial = _radial_basis(apply("sqrt", square), square, *keys[3:])
    return _harmonics(x, y, z, *keys[:3]), radial


def _activation(function: str, x: Expr, before: str, after: str) -> list[Expr]:
    t = const(float(before)) * x
    value = t * apply("sigmoid", t) if function == "silu" else apply(function, t)
    return [const(float(after)) * value]


_VECTOR, _LENGTH, _NUMBER = (
    Operand(name, size, ("row",)) for name, size in (("x", 3), ("r", 1), ("x", 1))
)

_ROOTS: dict[str, tuple[Operand, Callable[..., Sequence[list[Expr]]]]] = {
    "harmonics": (_VECTOR, lambda *given: [_harmonics(*given)]),
    "bessel": (_LENGTH, lambda r, *given: [_bessel(r * r, *given)]),
    "cutoff": (_LENGTH, lambda r, *given: [_cutoff(r, *given)]),
    "radial": (_LENGTH, lambda r, *given: [_radial_basis(r, r * r, *given)]),
    "length": (_VECTOR, lambda *x: [[apply("sqrt", _square(*x))]]),
    "edge": (_VECTOR, _edge),
    **{
        name: (_NUMBER, lambda *given, name=name: [_activation(name, *given)])
        for name in ("silu", "sigmoid", "tanh")
    },
}
"""The operand of each function, and the components of its results."""


@functools.lru_cache(maxsize=1024)
def row_program(name: str) -> Program:
    """The program with a key, or derived from it."""

    def root(key: str) -> Program:
        function, *arguments = key.split(" ")
        operand, components = _ROOTS[function]
        results = [tuple(found) for found in components(*operand.leaves(), *arguments)]
        outputs = [
            Output(Operand("yz"[n], len(found), ("row",)), found) for n, found in enumerate(results)
        ]
        return Program(key, (operand,), tuple(outputs))

    return derive(name, root)


def varying(program: Program) -> Program:
    """The program with 0 in place of constant results, which no step computes."""
    return program._replace(
        outputs=tuple(
            Output(of, tuple(const(0) if e.kind == "const" else e for e in components))
            for of, components in program.outputs
        )
    )


def result_shapes(program: Program, rows: int, width: int) -> list[tuple[int, int]]:
    """Of each result: (rows, components), or (rows, any) where all have one component.

    Args:
        program: with a first operand (rows, width).
        rows: number of rows.
        width: numbers in each.
    """
    here = width // program.inputs[0].size
    return [(rows, here * output.operand.size) for output in program.outputs]
