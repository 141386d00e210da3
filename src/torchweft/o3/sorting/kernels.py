"""Triton kernels: entries sorted by their row, and the elements of nodes."""
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["columns_of_rows", "sort_rows"]


@triton.jit
def _sort(
    rows_ptr, copy_ptr, indptr_ptr, order_ptr, entries, size, block,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The entries of BLOCK_M rows: count those of rows below, then store each at its place."""
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
    lower = tl.zeros((BLOCK_M, BLOCK_E), tl.int32)
    for start in range(0, entries, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)[None, :]  # [1, BLOCK_E]
        row = tl.load(rows_ptr + e, mask=e < entries, other=2147483647).to(tl.int32)
        lower += (row < m).to(tl.int32)
        if start // BLOCK_E % tl.cdiv(size + 1, BLOCK_M) == block:
            tl.store(copy_ptr + e, row, mask=e < entries)
    begin = tl.sum(lower, 1)[:, None]  # [BLOCK_M, 1]
    tl.store(indptr_ptr + m, begin, mask=m <= size)
    for start in range(0, entries, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)[None, :]
        row = tl.load(rows_ptr + e, mask=e < entries, other=2147483647).to(tl.int32)
        own = ((row == m) & (m < size)).to(tl.int32)  # [BLOCK_M, BLOCK_E]
        found = tl.sum(own, 1)[:, None]
        if tl.max(found) > 0:
            place = begin + tl.cumsum(own, 1) - 1
            tl.store(order_ptr + place, e + tl.zeros_like(own), mask=own > 0)
            begin += found


@triton.jit(do_not_specialize=["entries", "size1", "size2"])
def sort_rows(
    rows1_ptr, copy1_ptr, indptr1_ptr, order1_ptr, rows2_ptr, copy2_ptr, indptr2_ptr, order2_ptr,
    entries, size1, size2,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """order: the entries by their row, each row's in ascending order; indptr: where rows begin.

    Of one list of rows, or of two in one launch; copies of the lists are in int32.  A program owns
    BLOCK_M rows and reads all entries twice, BLOCK_E at a time.
    Bound: arithmetic, 2 · entries · size comparisons.
    """
    block = tl.program_id(0)
    if rows2_ptr is None:
        _sort(
            rows1_ptr, copy1_ptr, indptr1_ptr, order1_ptr, entries, size1, block, BLOCK_M, BLOCK_E
        )  # fmt: skip
    else:
        first = tl.cdiv(size1 + 1, BLOCK_M)
        if block < first:
            _sort(
                rows1_ptr, copy1_ptr, indptr1_ptr, order1_ptr, entries, size1, block,
                BLOCK_M, BLOCK_E,
            )  # fmt: skip
        else:
            _sort(
                rows2_ptr, copy2_ptr, indptr2_ptr, order2_ptr, entries, size2, block - first,
                BLOCK_M, BLOCK_E,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def columns_of_rows(
    x_ptr, column_ptr, number_ptr, rows,
    COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """column, number: of the largest number of each row of x (rows, COLUMNS).

    The number is NaN where the row holds another but 0.   Bound: memory, x read once.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    live = (n[:, None] < rows) & (k < COLUMNS)  # [BLOCK_N, BLOCK_K]
    x = tl.load(x_ptr + n[:, None].to(tl.int64) * COLUMNS + k, mask=live, other=0.0)
    x = x if x.dtype == tl.float64 else x.to(tl.float32)
    ranked = tl.where((k < COLUMNS) & (x == x), x, -float("inf"))  # rows of NaN have column 0
    largest, column = tl.max(ranked, 1), tl.argmax(ranked, 1)
    number = tl.where(largest == tl.sum(tl.abs(x), 1), largest, float("nan"))
    tl.store(column_ptr + n, column.to(tl.int64), mask=n < rows)
    tl.store(number_ptr + n, number, mask=n < rows)
