"""Triton kernels that add up partial sums of one result, in a fixed order.

Also the steps by which generated kernels exchange sums between threads.

places (COUNT, width) names the columns of a partial row that add to a column of the result, −1 for
none; without it, column c is column c.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "fold_columns_kernel",
    "fold_lent_kernel",
    "fold_rows_kernel",
    "halved",
    "of_threads",
    "threads",
]


@triton.jit
def halved(a, b, thread, BIT: tl.constexpr, AXIS: tl.constexpr):
    """Sums over pairs of threads that differ in BIT: of a where it is 0, of b where it is 1."""
    high = (thread & BIT) != 0
    return tl.where(high, b, a) + tl.gather(tl.where(high, a, b), thread ^ BIT, AXIS)


@triton.jit
def threads(EDGES: tl.constexpr):
    """The numbers of the threads that share an edge.   [EDGES, 32]"""
    return tl.arange(0, EDGES)[:, None] * 0 + tl.arange(0, 32)[None, :]


@triton.jit
def of_threads(edges):
    """Edge numbers in the layout of the threads that share an edge.   [EDGES, 1]"""
    return edges


@triton.jit
def _columns(
    partial_ptr, places_ptr, e, c, live, width, partial_width,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Σ_k partial[e, places[k, c]], of the shape of `live`."""
    row_ptr = partial_ptr + e * partial_width
    if places_ptr is None:
        return tl.load(row_ptr + c, mask=live, other=0.0)
    else:
        place = tl.load(places_ptr + c, mask=c < width, other=-1)
        total = tl.load(row_ptr + place, mask=live & (place >= 0), other=0.0)
        for k in range(1, COUNT):
            place = tl.load(places_ptr + k * width + c, mask=c < width, other=-1)
            total += tl.load(row_ptr + place, mask=live & (place >= 0), other=0.0)
        return total


@triton.jit(do_not_specialize=["rows"])
def fold_columns_kernel(
    partial_ptr, out_ptr, places_ptr,
    rows, width, partial_width,
    COUNT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[r, c] = Σ_k partial[r, places[k, c]].   Bound: memory, each partial row read once."""
    blocks = tl.cdiv(width, BLOCK_C)
    pid = tl.program_id(0)
    r = (pid // blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]  # [BLOCK_R, 1]
    c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]  # [1, BLOCK_C]
    live = (r < rows) & (c < width)  # [BLOCK_R, BLOCK_C]
    total = _columns(partial_ptr, places_ptr, r, c, live, width, partial_width, COUNT)
    tl.store(out_ptr + r * width + c, total, mask=live)


@triton.jit(do_not_specialize=["length"])
def fold_rows_kernel(
    partial_ptr, out_ptr, places_ptr, indptr_ptr, entries_ptr,
    length, width, partial_width,
    COUNT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[m, c] = Σ_{e ∈ row m} Σ_k partial[e, places[k, c]].

    Row m has the entries indptr[m] .. indptr[m+1]−1 of `entries`, or these rows themselves where
    `entries` is None; without indptr there is one row, of `length`.  A program owns BLOCK_C columns
    of one row and adds BLOCK_E entries at a time.   Bound: memory, each partial row read once.
    """
    blocks = tl.cdiv(width, BLOCK_C)
    pid = tl.program_id(0)
    m = pid // blocks
    c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]  # [1, BLOCK_C]
    if indptr_ptr is None:
        first, last = m * 0, m * 0 + length
    else:
        first, last = tl.load(indptr_ptr + m), tl.load(indptr_ptr + m + 1)
    total = tl.zeros((BLOCK_E, BLOCK_C), partial_ptr.dtype.element_ty)
    for start in range(first, last, BLOCK_E):
        p = start + tl.arange(0, BLOCK_E)[:, None]  # [BLOCK_E, 1]
        e = p if entries_ptr is None else tl.load(entries_ptr + p, mask=p < last, other=0)
        live = (p < last) & (c < width)  # [BLOCK_E, BLOCK_C]
        total += _columns(
            partial_ptr, places_ptr, e.to(tl.int64), c, live, width, partial_width, COUNT
        )
    total = tl.sum(total, 0)[None, :]
    tl.store(out_ptr + m.to(tl.int64) * width + c, total, mask=c < width)


@triton.jit
def fold_lent_kernel(
    partial_ptr, out_ptr, places_ptr, columns_ptr, indptr_ptr, entries_ptr,
    count, width, partial_width,
    VECTOR: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[m, columns[c]] = Σ_{e ∈ row m} partial[e, places[c]] for c < count.

    Row m has entries as in `fold_rows_kernel`.  Columns and places form contiguous groups of
    VECTOR, each from a multiple of VECTOR on.  A program owns BLOCK_C of them in one row and adds
    BLOCK_E entries at a time.   Bound: memory, each part read once.
    """
    blocks = tl.cdiv(count, BLOCK_C)
    pid = tl.program_id(0)
    m = pid // blocks
    c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]  # [1, BLOCK_C]
    inside = c < count
    place = tl.load(places_ptr + c, mask=inside, other=0)
    place = tl.max_contiguous(tl.multiple_of(place, [1, VECTOR]), [1, VECTOR])
    column = tl.load(columns_ptr + c, mask=inside, other=0)
    column = tl.max_contiguous(tl.multiple_of(column, [1, VECTOR]), [1, VECTOR])
    first, last = tl.load(indptr_ptr + m), tl.load(indptr_ptr + m + 1)
    total = tl.zeros((BLOCK_E, BLOCK_C), partial_ptr.dtype.element_ty)
    for start in range(first, last, BLOCK_E):
        p = start + tl.arange(0, BLOCK_E)[:, None]  # [BLOCK_E, 1]
        e = p if entries_ptr is None else tl.load(entries_ptr + p, mask=p < last, other=0)
        row_ptr = partial_ptr + e.to(tl.int64) * partial_width
        total += tl.load(row_ptr + place, mask=(p < last) & inside, other=0.0)
    out_row = out_ptr + m.to(tl.int64) * width
    tl.store(out_row + column, tl.sum(total, 0)[None, :], mask=inside)
