"""Functions of a length as programs of one row: derivatives of many orders are programs too.

bessel   √(2/R) sin(nθ) / r = √(2/R) (π/R) u_n,  θ = π r/R,  u_n = 2 cos θ u_{n-1} - u_{n-2}
cutoff   a³ Σ_{k<p} (k+1)(k+2)/2 (1-a)^k,  a = max(1 - r/R, 0)

cos θ and u_1 = sin θ / θ are functions of θ², smooth at 0, and so are all their derivatives.
"""

from __future__ import annotations

import math

from torchweft.core.expressions.expr import apply, const
from torchweft.core.expressions.program import Operand, Output, Program

__all__ = ["bessel", "bessel_key", "cutoff", "cutoff_key"]


def bessel_key(r_max: float, number: int) -> str:
    """The key of the first so many functions."""
    return f"bessel {r_max!r} {number}"


def cutoff_key(r_max: float, p: int) -> str:
    """The key of a cutoff of degree p + 2."""
    return f"cutoff {r_max!r} {p}"


def bessel(name: str) -> Program:
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


def cutoff(name: str) -> Program:
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
