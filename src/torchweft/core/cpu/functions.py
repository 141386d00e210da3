"""Functions of numbers, written as LLVM's instructions.

`exp2` calls nothing, so that the compiler fills vector lanes with it; logarithms, angles and powers
are the library's of mathematics, one number at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir

__all__ = ["FLAGS", "FUNCTIONS", "call"]

FLAGS = ("reassoc", "contract", "nsz")
"""Of arithmetic on numbers: sums in vector lanes, products and sums in one instruction."""

LOG2 = math.log(2)


def exp2(builder: Any, x: Any) -> Any:
    """2^x = 2^n 2^r with n the integer nearest to x; 0 below the smallest normal number.

    2^r is a Taylor polynomial: for |r| ≤ ½ the remainders of degree 7 and 13 are 5e-9 and 4e-18.
    """
    real = x.type
    bits, bias, degree = (23, 127, 7) if real == ir.FloatType() else (52, 1023, 13)
    integer = ir.IntType(32 if bits == 23 else 64)
    least, most = real(1 - bias), real(1 + bias)
    tiny = builder.fcmp_ordered("<", x, least)
    large = builder.fcmp_ordered(">", x, most)
    s = builder.select(tiny, least, builder.select(large, most, x))
    # a sum so large is an integer, whose last bits are n
    shifter = real(1.5 * 2**bits)
    shifted = builder.fadd(s, shifter)
    r = builder.fsub(s, builder.fsub(shifted, shifter))
    p = real(LOG2**degree / math.factorial(degree))
    for k in reversed(range(degree)):
        product = builder.fmul(p, r, flags=FLAGS)
        p = builder.fadd(product, real(LOG2**k / math.factorial(k)), flags=FLAGS)
    n = builder.shl(builder.bitcast(shifted, integer), integer(bits))
    power = builder.bitcast(builder.add(n, integer(bias << bits)), real)
    return builder.select(tiny, real(0), builder.fmul(p, power, flags=FLAGS))


def plus(builder: Any, a: Any, b: Any) -> Any:
    """a + b in this order, which the flags would change."""
    return builder.fadd(a, b)


def _intrinsic(name: str) -> Callable[..., Any]:
    def function(builder: Any, *given: Any) -> Any:
        return builder.call(
            builder.module.declare_intrinsic(f"llvm.{name}", [given[0].type]), given
        )

    return function


def _library(name: str) -> Callable[..., Any]:
    def function(builder: Any, *given: Any) -> Any:
        kind = given[0].type
        symbol = name if kind == ir.DoubleType() else f"{name}f"
        found = builder.module.globals.get(symbol)
        if found is None:
            found = ir.Function(builder.module, ir.FunctionType(kind, [kind] * len(given)), symbol)
            found.attributes.add("nounwind")
            found.attributes.add("readnone")
        return builder.call(found, given)

    return function


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": _intrinsic("fabs"),
    "exp2": exp2,
    "floor": _intrinsic("floor"),
    "plus": plus,
    "round": _intrinsic("rint"),
    "sqrt": _intrinsic("sqrt"),
    **{name: _intrinsic(name) for name in ("cos", "exp", "log", "pow", "sin")},
    **{name: _library(name) for name in ("acos", "asin", "atan", "atan2")},
}
"""What a text may call, by name; of numbers of one type."""


def call(builder: Any, name: str, given: list[Any]) -> Any:
    """A call of a function.

    Raises:
        ValueError: there is no such function.
    """
    if name not in FUNCTIONS:
        raise ValueError(
            f"the text of machine code calls {name!r}, which is none of {', '.join(FUNCTIONS)}: "
            "call one of these, or write it in `core/cpu/functions.py`."
        )
    return FUNCTIONS[name](builder, *given)
