"""The loops that numba compiles, once for each dtype, and caches on disk."""

from __future__ import annotations

import numba

__all__ = ["extreme", "extreme_values"]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def extreme_values(first, last, largest, indptr, order, x, values):  # type: ignore[no-untyped-def]
    """Fill values as `extreme` does: channels in vector lanes, which places would break."""
    for m in range(first, last):
        begin, end = indptr[m], indptr[m + 1]
        if begin == end:
            continue
        best = values[m]
        for c in range(best.shape[0]):
            best[c] = x[order[begin], c]
        if largest:
            for k in range(begin + 1, end):
                _raise(best, x[order[k]])
        else:
            for k in range(begin + 1, end):
                _lower(best, x[order[k]])


@numba.njit(inline="always", error_model="numpy")
def _raise(best, row):  # type: ignore[no-untyped-def]
    for c in range(best.shape[0]):
        new, old = row[c], best[c]
        best[c] = new if (new > old) | (new != new) else old


@numba.njit(inline="always", error_model="numpy")
def _lower(best, row):  # type: ignore[no-untyped-def]
    for c in range(best.shape[0]):
        new, old = row[c], best[c]
        best[c] = new if (new < old) | (new != new) else old


@numba.njit(cache=True, nogil=True, error_model="numpy")
def extreme(first, last, largest, indptr, order, x, values, places):  # type: ignore[no-untyped-def]
    """Fill values and places of segments first .. last-1; those without rows stay as they are."""
    least = not largest
    for m in range(first, last):
        begin, end = indptr[m], indptr[m + 1]
        if begin == end:
            continue
        if x.shape[1] == 1:  # in registers
            best, place = x[order[begin], 0], order[begin]
            for k in range(begin + 1, end):
                t = order[k]
                new = x[t, 0]
                better = (new > best) & largest | (new < best) & least
                better |= (new != new) & (best == best)
                # without a branch: the next rows are read before this one is compared
                best = new if better else best
                place = t if better else place
            values[m, 0], places[m, 0] = best, place
            continue
        for c in range(x.shape[1]):
            values[m, c], places[m, c] = x[order[begin], c], order[begin]
        for k in range(begin + 1, end):
            t = order[k]
            for c in range(x.shape[1]):
                new, best = x[t, c], values[m, c]
                better = new > best if largest else new < best
                if better or (new != new and best == best):
                    values[m, c] = new
                    places[m, c] = t
