"""The numba loops of the products; imported when the numba backend first serves a call.

All arrays are C-contiguous and in the dtype of sums: x (N or 1, R1, ·), y (N or 1, R2, ·) with
matrices as flat rows, z (parts, M, ·).  One loop serves all products: it is compiled once for
each, around the few lines that add one term.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import numba

__all__ = ["loop"]


def _mul(s, x, y, z):  # type: ignore[no-untyped-def]
    for c in range(z.shape[0]):
        z[c] += s * x[c] * y[c]


def _outer(s, x, y, z):  # type: ignore[no-untyped-def]
    for c in range(x.shape[0]):
        factor = s * x[c]
        row = z[c * y.shape[0] : (c + 1) * y.shape[0]]
        for d in range(y.shape[0]):
            row[d] += factor * y[d]


def _inner(s, x, y, z):  # type: ignore[no-untyped-def]
    total = z.dtype.type(0)
    for c in range(x.shape[0]):
        total += x[c] * y[c]
    z[0] += s * total


def _vecmat(s, x, y, z):  # type: ignore[no-untyped-def]
    for c in range(x.shape[0]):
        factor = s * x[c]
        row = y[c * z.shape[0] : (c + 1) * z.shape[0]]
        for d in range(z.shape[0]):
            z[d] += factor * row[d]


def _vecsca(s, x, y, z):  # type: ignore[no-untyped-def]
    factor = s * y[0]
    for c in range(z.shape[0]):
        z[c] += factor * x[c]


def _scale(s, x, y, z):  # type: ignore[no-untyped-def]
    for c in range(z.shape[0]):
        z[c] += s * x[c]


_ADD = {
    "mul": _mul,
    "outer": _outer,
    "inner": _inner,
    "vecmat": _vecmat,
    "vecsca": _vecsca,
    "scale": _scale,
}
"""z += s · x ∘ y for one entry."""


def _rows(x, y, s, indptr, index1, index2, term, batch, part, z):  # type: ignore[no-untyped-def]
    """z[b,m] = Σ_{n ∈ part b} Σ_{k ∈ segment m} s[t] · x[n,i] ∘ y[n,j]; s of length 0 is 1."""
    num_rows = z.shape[1]
    one = z.dtype.type(1)
    for r in numba.prange(z.shape[0] * num_rows):
        b, m = r // num_rows, r % num_rows
        z_row = z[b, m]
        z_row[:] = 0
        for n in range(b * part, min(batch, (b + 1) * part)):
            x_n, y_n = x[min(n, x.shape[0] - 1)], y[min(n, y.shape[0] - 1)]
            for k in range(indptr[m], indptr[m + 1]):
                weight = s[term[k]] if s.shape[0] else one
                add_term(weight, x_n[index1[k]], y_n[index2[k]], z_row)  # type: ignore[name-defined]  # noqa: F821


@functools.cache
def loop(op: str, parallel: bool) -> Any:
    """`_rows` around the term of one product: without the GIL, kept on disk where there is room.

    The term is a global of the function, inlined: a branch over products, or a call, would keep
    its channels out of vector lanes (three times slower).  Sums over channels may be reordered
    into lanes, the same way in every run.
    """
    jit: Any = numba.njit
    add_term = jit(_ADD[op], inline="always")
    name = f"rows_{op}_{'parallel' if parallel else 'serial'}"
    function = types.FunctionType(_rows.__code__, {**globals(), "add_term": add_term}, name)
    function.__qualname__ = name  # numba's files on disk are told apart by it, and by it alone
    options = {"nogil": True, "parallel": parallel, "fastmath": {"reassoc", "contract", "nsz"}}
    try:
        return jit(function, cache=True, **options)
    except RuntimeError:  # no folder for the cache
        return jit(function, **options)
