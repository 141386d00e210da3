"""Text of the functions of a number that programs of rows call, in Triton and in machine code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torchweft.core.expressions.expr import WAVES, wave_series

__all__ = ["functions_called"]

SERIES_BELOW = 4.0
"""Arguments below which w_n is its series: the recursion above loses digits at 0."""


def functions_called(lines: Sequence[str], wide: bool) -> dict[str, list[str]]:
    """The body of each function of x that lines of a program call, by its name.

    Args:
        lines: of the program.
        wide: whether it computes in float64.
    """
    found = {f"wave{n}": _wave(n, wide) for n in range(WAVES)}
    found |= {"sigmoid": _sigmoid(), "tanh": _tanh(wide)}
    return {
        name: list(body)
        for name, body in found.items()
        if any(f"{name}(" in line for line in lines)
    }


def _wave(n: int, wide: bool) -> Iterator[str]:
    """w_n by its series near 0, by w_0 and w_1 away from it."""
    yield f"away = tl.where(x < {SERIES_BELOW}, {SERIES_BELOW}, x)"
    yield "root = tl.sqrt(away)"
    yield "now, following = tl.cos(root), tl.sin(root) / root"
    for k in range(n):
        yield f"now, following = following, ({2.0 * k + 1} * following - now) / away"
    yield f"near = tl.where(x < {SERIES_BELOW}, x, {SERIES_BELOW})"
    *first, last = wave_series(n, 14 if wide else 8)
    yield f"series = near * {last!r} + {first[-1]!r}"
    for coefficient in reversed(first[:-1]):
        yield f"series = series * near + {coefficient!r}"
    yield f"return tl.where(x < {SERIES_BELOW}, series, now)"


def _sigmoid() -> Iterator[str]:
    """By exp(-|x|), which does not overflow."""
    yield "fallen = tl.exp(tl.where(x < 0, x, -x))"
    yield "return tl.where(x < 0, fallen, 1.0) / (1.0 + fallen)"


def _tanh(wide: bool) -> Iterator[str]:
    """sinh x / √(1 + sinh² x), sinh by its series, below 1; from there on by exp(-2|x|)."""
    yield "size = tl.where(x < 0, -x, x)"
    yield "near = tl.where(size < 1.0, x, 0.0)"
    yield "square = near * near"
    *first, last = [1 / math.factorial(2 * j + 1) for j in range(10 if wide else 6)]
    yield f"series = square * {last!r} + {first[-1]!r}"
    for coefficient in reversed(first[:-1]):
        yield f"series = series * square + {coefficient!r}"
    yield "sinh = near * series"
    yield "fallen = tl.exp(-2.0 * size)"
    yield "far = (1.0 - fallen) / (1.0 + fallen)"
    yield "far = tl.where(x < 0, -far, far)"
    yield "return tl.where(size < 1.0, sinh / tl.sqrt(1.0 + sinh * sinh), far)"
