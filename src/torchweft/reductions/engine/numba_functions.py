"""Functions that all printed loops of reductions call: compiled once, and cached on disk.

The compiler fills vector lanes with them: exp2 calls nothing, maxima are taken by halves.
"""

from __future__ import annotations

import math

import numba
import numpy as np

__all__ = ["insert", "jit", "largest", "lowest", "plus"]

jit = numba.njit(
    cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
)


@numba.njit(cache=True, nogil=True, fastmath=False)
def plus(a, b):  # type: ignore[no-untyped-def]
    """a + b in this order, which fast-math would change."""
    return a + b


LOG2 = math.log(2)
SINGLE = tuple(np.float32(LOG2**k / math.factorial(k)) for k in range(8))
DOUBLE = tuple(LOG2**k / math.factorial(k) for k in range(14))
"""Taylor coefficients of 2^r for |r| ≤ ½: the remainders are 5e-9 and 4e-18."""


@jit
def exp2_single(x):  # type: ignore[no-untyped-def]
    """2^x = 2^n 2^r with n the integer nearest to x; 0 below the smallest normal number."""
    s = (
        np.float32(-126)
        if x < np.float32(-126)
        else (np.float32(128) if x > np.float32(128) else x)
    )
    n = np.int32(s + np.float32(127.5)) - np.int32(127)
    r = s - np.float32(n)
    p = SINGLE[7]
    for k in (6, 5, 4, 3, 2, 1, 0):
        p = p * r + SINGLE[k]
    scaled = p * np.int32((n + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0) if x < np.float32(-126) else scaled


@jit
def exp2_double(x):  # type: ignore[no-untyped-def]
    """The same in float64."""
    s = -1022.0 if x < -1022.0 else (1024.0 if x > 1024.0 else x)
    n = np.int64(s + 1023.5) - np.int64(1023)
    r = s - np.float64(n)
    p = DOUBLE[13]
    for k in (12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0):
        p = p * r + DOUBLE[k]
    scaled = p * np.int64((n + np.int64(1023)) << np.int64(52)).view(np.float64)
    return 0.0 if x < -1022.0 else scaled


@jit
def largest(values, scratch, width):  # type: ignore[no-untyped-def]
    """The largest of the first values, by halves; scratch is overwritten."""
    half = (width + 1) // 2
    scratch[half - 1] = values[half - 1]
    for j in range(width - half):
        other = values[half + j]
        scratch[j] = other if other > values[j] else values[j]
    while half > 1:
        width, half = half, (half + 1) // 2
        for j in range(width - half):
            other = scratch[half + j]
            scratch[j] = other if other > scratch[j] else scratch[j]
    return scratch[0]


@jit
def lowest(values, scratch, width, instead):  # type: ignore[no-untyped-def]
    """The smallest of the first values, by halves; `instead` takes the place of NaN.

    scratch is overwritten.
    """
    half = (width + 1) // 2
    middle = values[half - 1]
    scratch[half - 1] = middle if middle == middle else instead
    for j in range(width - half):
        one, other = values[j], values[half + j]
        one = one if one == one else instead
        other = other if other == other else instead
        scratch[j] = other if other < one else one
    while half > 1:
        width, half = half, (half + 1) // 2
        for j in range(width - half):
            other = scratch[half + j]
            scratch[j] = other if other < scratch[j] else scratch[j]
    return scratch[0]


@jit
def insert(best, index, values, first, width, instead):  # type: ignore[no-untyped-def]
    """Keep, in (value, index) order, the smallest of a list and of values numbered from `first`.

    `instead`, −∞ or +∞, takes the place of NaN.  In that of −∞ it has an index less 2⁶³, so that
    it comes first.
    """
    last = len(best) - 1
    for n in range(width):
        value, j = values[n], np.int64(first + n)
        if value != value:
            value = instead
            j += np.int64(-(2**63)) if instead < 0 else np.int64(0)
        if value < best[last] or (value == best[last] and j < index[last]):
            place = last
            while place > 0 and (
                value < best[place - 1] or (value == best[place - 1] and j < index[place - 1])
            ):
                best[place], index[place] = best[place - 1], index[place - 1]
                place -= 1
            best[place], index[place] = value, j
