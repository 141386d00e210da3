"""The numba loops of the products; imported when the numba backend first serves a call.

All arrays are C-contiguous and in the dtype of sums: x (N or 1, R1, ·), y (N or 1, R2, ·) with
matrices as flat rows, z (parts, M, ·).  One compiled loop serves all products: which one is a
branch per entry, the work is in the channels behind it.
"""

from __future__ import annotations

from typing import Any

import numba

__all__ = ["CODES", "parallel", "serial"]

CODES = {"mul": 0, "outer": 1, "inner": 2, "vecmat": 3, "vecsca": 4, "scale": 5}


def _jit(function: Any, **options: Any) -> Any:
    """Compiled without the GIL, kept on disk where a folder can be written.

    Sums over channels may be reordered into vector lanes, the same way in every run.
    """
    options |= {"nogil": True, "fastmath": {"reassoc", "contract", "nsz"}}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # no folder for the cache
        return numba.njit(function, **options)


def _add_term(code, s, x, y, z):  # type: ignore[no-untyped-def]
    """z += s · x ∘ y for one entry."""
    if code == 0:
        for c in range(z.shape[0]):
            z[c] += s * x[c] * y[c]
    elif code == 1:
        for c in range(x.shape[0]):
            factor = s * x[c]
            for d in range(y.shape[0]):
                z[c * y.shape[0] + d] += factor * y[d]
    elif code == 2:
        total = z.dtype.type(0)
        for c in range(x.shape[0]):
            total += x[c] * y[c]
        z[0] += s * total
    elif code == 3:
        for c in range(x.shape[0]):
            factor = s * x[c]
            for d in range(z.shape[0]):
                z[d] += factor * y[c * z.shape[0] + d]
    elif code == 4:
        factor = s * y[0]
        for c in range(z.shape[0]):
            z[c] += factor * x[c]
    else:
        for c in range(z.shape[0]):
            z[c] += s * x[c]


add_term = _jit(_add_term, inline="always")


def _rows(code, x, y, s, indptr, index1, index2, term, batch, part, z):  # type: ignore[no-untyped-def]
    """z[b,m] = Σ_{n ∈ part b} Σ_{k ∈ segment m} s[t] · x[n,i] ∘ y[n,j]; s of length 0 is 1."""
    num_rows = z.shape[1]
    one = z.dtype.type(1)
    for r in numba.prange(z.shape[0] * num_rows):
        b, m = r // num_rows, r % num_rows
        z[b, m, :] = 0
        for n in range(b * part, min(batch, (b + 1) * part)):
            x_n, y_n = min(n, x.shape[0] - 1), min(n, y.shape[0] - 1)
            for k in range(indptr[m], indptr[m + 1]):
                weight = s[term[k]] if s.shape[0] else one
                add_term(code, weight, x[x_n, index1[k]], y[y_n, index2[k]], z[b, m])


serial = _jit(_rows)
parallel = _jit(_rows, parallel=True)
