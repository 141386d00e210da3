"""Triton kernels: entries sorted by their row, and the elements of nodes."""
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["columns_of_rows", "sort_rows"]


@triton.jit
def _entries(rows_ptr, start, entries, first, size, BLOCK_E: tl.constexpr, FIELDS: tl.constexpr):
    """Numbers and rows of BLOCK_E entries, where their field begins, and 1 in it if they have one.

    Row first + r has the field r of 16 bits: one sum counts the entries of FIELDS rows.
    """
    e = start + tl.arange(0, BLOCK_E)
    row = tl.load(rows_ptr + e, mask=e < entries, other=2147483647).to(tl.int32)
    own = (row >= first) & (row < first + FIELDS) & (row < size)
    shift = 16 * tl.where(own, row - first, 0).to(tl.int64)
    return e, row, shift, tl.where(own, 1 << shift, 0)


@triton.jit
def _sort(
    rows_ptr, copy_ptr, indptr_ptr, order_ptr, entries, size, block,
    BLOCK_E: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """The entries of FIELDS rows: count these and those of rows below, then store each in place."""
    first, blocks = block * FIELDS, tl.cdiv(size + 1, FIELDS)
    below, counts = tl.zeros((BLOCK_E,), tl.int32), tl.zeros((BLOCK_E,), tl.int64)
    for start in range(0, entries, BLOCK_E):
        e, row, _, one = _entries(rows_ptr, start, entries, first, size, BLOCK_E, FIELDS)
        below += (row < first).to(tl.int32)
        counts += one
        if start // BLOCK_E % blocks == block:
            tl.store(copy_ptr + e, row, mask=e < entries)
    begin, total = tl.sum(below, 0), tl.sum(counts, 0)
    before = (total << 16) + (total << 32) + (total << 48)  # each field: of those before it
    r = tl.arange(0, FIELDS)
    starts = begin + (before >> (16 * r).to(tl.int64) & 65535).to(tl.int32)
    tl.store(indptr_ptr + first + r, starts, mask=first + r <= size)
    for start in range(0, entries, BLOCK_E):
        e, row, shift, one = _entries(rows_ptr, start, entries, first, size, BLOCK_E, FIELDS)
        upto = before + tl.cumsum(one, 0)
        tl.store(order_ptr + begin + (upto >> shift & 65535).to(tl.int32) - 1, e, mask=one != 0)
        before += tl.sum(one, 0)


@triton.jit(do_not_specialize=["entries", "size1", "size2"])
def sort_rows(
    rows1_ptr, copy1_ptr, indptr1_ptr, order1_ptr, rows2_ptr, copy2_ptr, indptr2_ptr, order2_ptr,
    entries, size1, size2, BLOCK_E: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """order: the entries by their row, each row's in ascending order; indptr: where rows begin.

    Of one list of rows, or of two in one launch; copies of the lists are in int32.  A program owns
    FIELDS rows, 4, and reads all entries, fewer than 2^16, twice, BLOCK_E at a time.
    Bound: arithmetic, entries · size / 2 steps.
    """
    block = tl.program_id(0)
    if rows2_ptr is None:
        _sort(
            rows1_ptr, copy1_ptr, indptr1_ptr, order1_ptr, entries, size1, block, BLOCK_E, FIELDS
        )  # fmt: skip
    else:
        first = tl.cdiv(size1 + 1, FIELDS)
        if block < first:
            _sort(
                rows1_ptr, copy1_ptr, indptr1_ptr, order1_ptr, entries, size1, block,
                BLOCK_E, FIELDS,
            )  # fmt: skip
        else:
            _sort(
                rows2_ptr, copy2_ptr, indptr2_ptr, order2_ptr, entries, size2, block - first,
                BLOCK_E, FIELDS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def columns_of_rows(
    x_ptr, column_ptr, marked_ptr, rows,
    COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """column: of the 1 in each row of x (rows, COLUMNS).   marked: x, NaN in rows not one-hot.

    Bound: memory, x read and written once.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    live = (n[:, None] < rows) & (k < COLUMNS)  # [BLOCK_N, BLOCK_K]
    at = n[:, None].to(tl.int64) * COLUMNS + k
    x = tl.load(x_ptr + at, mask=live, other=0.0)
    x = x if x.dtype == tl.float64 else x.to(tl.float32)
    ranked = tl.where((k < COLUMNS) & (x == x), x, -float("inf"))  # rows of NaN have column 0
    largest, column = tl.max(ranked, 1), tl.argmax(ranked, 1)
    one_hot = (largest == 1) & (tl.sum(tl.abs(x), 1) == 1)
    tl.store(column_ptr + n, column.to(tl.int64), mask=n < rows)
    tl.store(marked_ptr + at, tl.where(one_hot[:, None], x, float("nan")), mask=live)
