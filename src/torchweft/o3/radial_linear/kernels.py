"""Triton kernels that split float32 into parts of 16 bits, and products of such parts.

A row of numbers is 2^e Σ parts: e brings the largest to [2^13, 2^14), the first part is the nearest
number of 11 bits, each other part the nearest to the remainder.  Parts end at 2^-24, so that
numbers are right to 2^-38 of the row's largest.  Infinite numbers become NaN.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["column_parts", "formed_weights", "row_parts", "summed_products"]


@triton.jit
def _powers(size):
    """2^-e, which brings a size to [2^13, 2^14), and 2^e; both finite for every size."""
    e = ((size.to(tl.int32, bitcast=True) >> 23) & 255) - 13
    e = tl.minimum(tl.maximum(e, 15), 240)
    return ((254 - e) << 23).to(tl.float32, bitcast=True), (e << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_parts(to, v, mask, PARTS: tl.constexpr, DEPTH: tl.constexpr):
    for part in tl.static_range(PARTS):
        nearest = v.to(tl.float16)
        tl.store(to + part * DEPTH, nearest, mask=mask)
        v -= nearest.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def row_parts(
    h_ptr, y_ptr, order_ptr, parts_ptr, scaled_ptr, powers_ptr, rows,
    WIDTH: tl.constexpr, Y_WIDTH: tl.constexpr, SIDE: tl.constexpr, PARTS: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Split rows of h (rows, WIDTH) into parts (rows, PARTS, DEPTH), in an order; bound: memory.

    Also store 2^e, or rows of y multiplied by it.  SIDE is a power of 2, no less than Y_WIDTH.
    """
    to = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    live = to < rows
    row = to
    if order_ptr is not None:
        row = tl.load(order_ptr + to, mask=live, other=0).to(tl.int64)
    k = tl.arange(0, DEPTH)[None, :]
    h = tl.load(h_ptr + row * WIDTH + k, mask=live & (k < WIDTH), other=0.0)
    scale, power = _powers(tl.max(tl.abs(h), 1, keep_dims=True))
    _store_parts(parts_ptr + to * (PARTS * DEPTH) + k, h * scale, live, PARTS, DEPTH)
    if y_ptr is None:
        tl.store(powers_ptr + to, power, mask=live)
    else:
        c = tl.arange(0, SIDE)[None, :]
        mask = live & (c < Y_WIDTH)
        y = tl.load(y_ptr + row * Y_WIDTH + c, mask=mask, other=0.0)
        tl.store(scaled_ptr + to * Y_WIDTH + c, y * power, mask=mask)


@triton.jit(do_not_specialize=["count"])
def column_parts(
    a_ptr, columns_ptr, factors_ptr, parts_ptr, powers_ptr, count,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, BESIDE: tl.constexpr, PARTS: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Split columns of A (HIDDEN, WIDTH) times factors into parts (count, PARTS, DEPTH).

    Also store their 2^e.  columns and factors are (BESIDE, count): a column, and those that share e
    with it; without them all columns are split, unscaled.
    """
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    k = tl.arange(0, DEPTH)[None, :]
    live = n < count
    size = tl.zeros((BLOCK, 1), tl.float32)
    a = tl.zeros((BLOCK, DEPTH), tl.float32)
    for each in range(BESIDE):
        column = n
        if columns_ptr is not None:
            at = (BESIDE - 1 - each) * count + n
            column = tl.load(columns_ptr + at, mask=live, other=0)
        a = tl.load(a_ptr + k * WIDTH + column, mask=live & (k < HIDDEN), other=0.0)
        if columns_ptr is not None:
            a *= tl.load(factors_ptr + at, mask=live, other=0.0)
        size = tl.maximum(size, tl.max(tl.abs(a), 1, keep_dims=True))
    scale, power = _powers(size)
    to = parts_ptr + n.to(tl.int64) * (PARTS * DEPTH) + k
    _store_parts(to, a * scale, live, PARTS, DEPTH)
    tl.store(powers_ptr + n, power, mask=live)


@triton.jit(do_not_specialize=["rows"])
def formed_weights(
    h_ptr, of_h_ptr, a_ptr, of_a_ptr, w_ptr, rows,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """w = h A from two parts of each and their 2^e; bound: memory, w is written once."""
    ACROSS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    row = (pid // ACROSS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid % ACROSS * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, DEPTH)[None, :]
    live, inside = row < rows, n < WIDTH
    h = h_ptr + row[:, None] * (2 * DEPTH) + k
    a = a_ptr + n[:, None] * (2 * DEPTH) + k
    h_high = tl.load(h, mask=live[:, None], other=0.0)
    a_high = tl.load(a, mask=inside[:, None], other=0.0).T
    w = tl.dot(tl.load(h + DEPTH, mask=live[:, None], other=0.0), a_high)
    w = tl.dot(h_high, tl.load(a + DEPTH, mask=inside[:, None], other=0.0).T, w)
    w = tl.dot(h_high, a_high, w)
    w *= tl.load(of_h_ptr + row, mask=live, other=0.0)[:, None]
    w *= tl.load(of_a_ptr + n, mask=inside, other=0.0)[None, :]
    to = w_ptr + row[:, None] * WIDTH + n[None, :]
    tl.store(to, w, mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows", "piece"])
def summed_products(
    h_ptr, of_h_ptr, g_ptr, sums_ptr, rows, piece,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """sums[p] = Σ h^T g over the rows of a piece, h in two parts.   [pieces, HIDDEN, WIDTH]

    Columns of a tile of g are split here, each with its own power of two.
    """
    ACROSS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    part = pid // ACROSS
    n = pid % ACROSS * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, DEPTH)
    inside = (n < WIDTH)[None, :]
    acc = tl.zeros((DEPTH, BLOCK_N), tl.float32)
    first = part * piece
    last = tl.minimum(first + piece, rows)
    for begin in tl.range(first, last, BLOCK_E, num_stages=STAGES):
        row = begin + tl.arange(0, BLOCK_E)
        live = row < last
        at = row.to(tl.int64)[:, None]
        g = tl.load(g_ptr + at * WIDTH + n[None, :], mask=live[:, None] & inside, other=0.0)
        h = h_ptr + at * (2 * DEPTH) + k[None, :]
        h_high = tl.load(h, mask=live[:, None], other=0.0).T
        h_low = tl.load(h + DEPTH, mask=live[:, None], other=0.0).T
        g *= tl.load(of_h_ptr + row, mask=live, other=0.0)[:, None]
        scale, power = _powers(tl.max(tl.abs(g), 0, keep_dims=True))
        g *= scale
        g_high = g.to(tl.float16)
        g_low = (g - g_high.to(tl.float32)).to(tl.float16)
        some = tl.dot(h_low, g_high)
        some = tl.dot(h_high, g_low, some)
        acc += tl.dot(h_high, g_high, some) * power
    to = sums_ptr + (part.to(tl.int64) * HIDDEN + k[:, None]) * WIDTH + n[None, :]
    tl.store(to, acc, mask=(k < HIDDEN)[:, None] & inside)
