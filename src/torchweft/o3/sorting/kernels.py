"""Triton kernels: entries sorted by their row, and the elements of nodes."""
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["columns_of_rows", "count_digits", "place_entries", "sort_rows"]


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


@triton.jit
def _digits(
    rows_ptr, order_ptr, first, start, entries, size, shift,
    STEP: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """STEP entries, which of them there are, their rows, and which digit each has."""
    p = start + tl.arange(0, STEP)
    live = p < entries
    e = p if order_ptr is None else tl.load(order_ptr + first + p, mask=live, other=0)
    row = tl.minimum(tl.load(rows_ptr + first + e, mask=live, other=0), size)
    digit = row >> shift & (DIGITS - 1)
    return e, live, row, (digit[:, None] == tl.arange(0, DIGITS)[None, :]) & live[:, None]


@triton.jit(do_not_specialize=["entries", "stride", "size1", "size2", "blocks", "shift"])
def count_digits(
    rows_ptr, order_ptr, counts_ptr, entries, stride, size1, size2, blocks, shift,
    BLOCK_E: tl.constexpr, STEP: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """counts[l, d, b]: the entries of list l, block b, whose row has the digit d from bit `shift`.

    Rows >= size count as row `size`.  Bound: memory, 4 bytes an entry, 8 where there is an order.
    """
    block, own = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    first, size = own.to(tl.int64) * stride, tl.where(own == 0, size1, size2)
    found = tl.zeros((STEP, DIGITS), tl.int32)
    begin = block * BLOCK_E
    for start in range(begin, tl.minimum(begin + BLOCK_E, entries), STEP):
        _, _, _, own_digit = _digits(
            rows_ptr, order_ptr, first, start, entries, size, shift, STEP, DIGITS
        )  # fmt: skip
        found += own_digit.to(tl.int32)
    at = (own * DIGITS + tl.arange(0, DIGITS)) * blocks + block
    tl.store(counts_ptr + at, tl.sum(found, 0))


@triton.jit(do_not_specialize=["entries", "stride", "size1", "size2", "blocks", "shift"])
def place_entries(
    rows_ptr, order_ptr, counts_ptr, upto_ptr, placed_ptr, sorted_ptr,
    entries, stride, size1, size2, blocks, shift,
    BLOCK_E: tl.constexpr, STEP: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """placed: the entries in the order of their digits, else as before.   sorted: their rows.

    `upto` holds the running sums of `counts` over both lists.  A product with a triangle of ones
    counts, for each of STEP entries and each digit, those up to it.
    Bound: memory, 16 bytes an entry.
    """
    block, own = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    first, size = own.to(tl.int64) * stride, tl.where(own == 0, size1, size2)
    at = (own * DIGITS + tl.arange(0, DIGITS)) * blocks + block
    # where the digits of this block begin, in the list
    starts = tl.load(upto_ptr + at) - tl.load(counts_ptr + at) - own * entries
    begin, step = block * BLOCK_E, tl.arange(0, STEP)
    triangle = (step[None, :] <= step[:, None]).to(tl.float16)
    for start in range(begin, tl.minimum(begin + BLOCK_E, entries), STEP):
        e, live, row, own_digit = _digits(
            rows_ptr, order_ptr, first, start, entries, size, shift, STEP, DIGITS
        )  # fmt: skip
        upto = tl.dot(triangle, own_digit.to(tl.float16)).to(tl.int32)
        place = tl.sum(tl.where(own_digit, starts[None, :] + upto, 0), 1) - 1
        tl.store(placed_ptr + first + place, e, mask=live)
        tl.store(sorted_ptr + first + place, row, mask=live)
        starts += tl.sum(own_digit.to(tl.int32), 0)


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
