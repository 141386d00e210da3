"""The loop that numba compiles, once for each dtype, and caches on disk."""

from __future__ import annotations

import numba

__all__ = ["extreme"]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def extreme(first, last, largest, indptr, order, x, values, places):  # type: ignore[no-untyped-def]
    """Fill values and places of segments first .. last-1; those without rows stay as they are."""
    for m in range(first, last):
        begin = indptr[m]
        for k in range(begin, indptr[m + 1]):
            t = order[k]
            for c in range(x.shape[1]):
                new, best = x[t, c], values[m, c]
                better = new > best if largest else new < best
                if k == begin or better or (new != new and best == best):
                    values[m, c] = new
                    places[m, c] = t
