"""Device code that generated reductions share: scalar functions, lists of the smallest, merges.

A reduction is cut into tasks: some rows by some columns.  A task stores partial results, of float32
or float64, and a merge adds those of one tile of rows in the order of its tasks, so the bits do not
depend on the order in which they ran:

    sums      (tasks, E, rows of a tile)              Σ
    shifted   (tasks, 1 + E, rows of a tile)          maximum m, Σ exp(f − m) w
    smallest  (tasks, rows of a tile, K)              values and indices, ascending
"""

import triton
import triton.language as tl

from torchweft.core.backend import interpreted

LOG2E = tl.constexpr(1.4426950408889634)
PI = tl.constexpr(3.141592653589793)


@triton.jit
def nearest(x):
    """The nearest integer, of two the even one."""
    low = tl.floor(x)
    part = x - low
    odd = low - 2 * tl.floor(low * 0.5)
    return low + tl.where((part > 0.5) | ((part == 0.5) & (odd == 1)), 1.0, 0.0)


@triton.jit
def xlogx(x):
    """x log x, 0 at 0."""
    return x * tl.log(tl.where(x == 0, 1.0, x))


@triton.jit
def sinxdivx(x):
    """sin(x) / x, 1 at 0."""
    return tl.where(x == 0, 1.0, tl.sin(x) / tl.where(x == 0, 1.0, x))


@triton.jit
def power(a, b, dtype: tl.constexpr):
    """a^b as IEEE's pow, by float64: the exponent multiplies the error of a logarithm."""
    zero = tl.zeros_like(a == b).to(tl.float64)  # a tensor, where one of them is a number
    wide, exponent = zero + a, zero + b
    size = tl.exp2(exponent * tl.log2(tl.abs(wide)))
    integral = tl.floor(exponent) == exponent
    odd = integral & (exponent - 2 * tl.floor(exponent * 0.5) == 1)
    signed = tl.where(odd, -size, size)
    found = tl.where(wide < 0, tl.where(integral, signed, float("nan")), size)
    return tl.where((exponent == 0) | (wide == 1), 1.0, found).to(dtype)


@triton.jit
def atan(x):
    """Inverted where |x| > 1, halved, then a series to the 39th power on |t| ≤ tan(π/8)."""
    size = tl.abs(x)
    t = tl.where(size > 1, 1 / tl.where(size == 0, 1.0, size), size)
    t = t / (1 + tl.sqrt(1 + t * t))
    s = t * t
    series = tl.zeros_like(s)
    for k in tl.static_range(20):
        series = 1.0 / (39 - 2 * k) - s * series
    angle = 2 * t * series
    angle = tl.where(size > 1, PI / 2 - angle, angle)
    return tl.where(x < 0, -angle, angle)


@triton.jit
def atan2(y, x):
    """The angle of the point (x, y), in (−π, π]; 0 at the origin."""
    big, small = tl.maximum(tl.abs(x), tl.abs(y)), tl.minimum(tl.abs(x), tl.abs(y))
    angle = atan(small / tl.where(big == 0, 1.0, big))
    angle = tl.where(tl.abs(y) > tl.abs(x), PI / 2 - angle, angle)
    angle = tl.where(x < 0, PI - angle, angle)
    return tl.where(y < 0, -angle, angle)


@triton.jit
def asin(x):
    """The angle of the point (√(1 − x²), x)."""
    return atan2(x, tl.sqrt((1 - x) * (1 + x)))


@triton.jit
def acos(x):
    """The angle of the point (x, √(1 − x²))."""
    return atan2(tl.sqrt((1 - x) * (1 + x)), x)


@triton.jit
def _bounds(best, index):
    """The worst entry of each list: its value, and the largest index that has it, [BLOCK_M, 1]."""
    worst = tl.max(best, 1)[:, None]
    return worst, tl.max(tl.where(best == worst, index, -1), 1)[:, None]


@triton.jit
def insert(best, index, f, j):
    """Replace entries of the lists by the terms that come before them, in (value, index) order.

    best, index  # [BLOCK_M, KEPT]: kept so far, in any order
    f, j         # [*, BLOCK_M, *]: terms and their indices, all different
    One term a row at a time: after the first tiles, few rows of a tile have any.
    """
    last: tl.constexpr = 2147483647 if index.dtype == tl.int32 else 9223372036854775807
    slots = tl.arange(0, best.shape[1])[None, :]
    worst, bound = _bounds(best, index)
    passing = (f < worst[None, :, :]) | ((f == worst[None, :, :]) & (j < bound[None, :, :]))
    while tl.max(passing.to(tl.int32)) > 0:
        value = tl.min(tl.min(tl.where(passing, f, float("inf")), 0), 1)[:, None]
        first = passing & (f == value[None, :, :])
        at = tl.min(tl.min(tl.where(first, j, last), 0), 1)[:, None]
        place = tl.max(tl.where((best == worst) & (index == bound), slots, -1), 1)[:, None]
        replaced = (slots == place) & (at < last)
        best = tl.where(replaced, value, best)
        index = tl.where(replaced, at, index)
        worst, bound = _bounds(best, index)
        passing = passing & ((f != value[None, :, :]) | (j != at[None, :, :]))
        before = (f < worst[None, :, :]) | ((f == worst[None, :, :]) & (j < bound[None, :, :]))
        passing = passing & before
    return best, index


@triton.jit
def empty_lists(
    BLOCK_M: tl.constexpr,
    KEPT: tl.constexpr,
    K: tl.constexpr,
    dtype: tl.constexpr,
    indices: tl.constexpr,
):
    """Lists of K entries that every term comes before, and slots beyond K that none does."""
    last: tl.constexpr = 2147483647 if indices == tl.int32 else 9223372036854775807
    used = tl.zeros([BLOCK_M, 1], tl.int32) + tl.arange(0, KEPT)[None, :] < K
    best = tl.where(used, float("inf"), float("-inf")).to(dtype)
    return best, tl.where(used, last, -1).to(indices)


@triton.jit
def store_sorted(
    best, index, values_ptr, indices_ptr, at, mask, stride, K: tl.constexpr, SIGN: tl.constexpr
):
    """The K entries of each list in (value, index) order; an entry that is none has index −1.

    Values are stored times the sign, if it is not 0.
    """
    last: tl.constexpr = 2147483647 if index.dtype == tl.int32 else 9223372036854775807
    slots = tl.arange(0, best.shape[1])[None, :]
    waiting = slots + tl.zeros_like(index) < K
    for k in range(K):
        value = tl.min(tl.where(waiting, best, float("inf")), 1)[:, None]
        found = tl.min(tl.where(waiting & (best == value), index, last), 1)[:, None]
        place = tl.max(tl.where(waiting & (best == value) & (index == found), slots, -1), 1)[
            :, None
        ]
        waiting = waiting & (slots != place)
        if SIGN:
            tl.store(values_ptr + at + k * stride, SIGN * value, mask=mask)
        shown = tl.where(found == last, -1, found.to(tl.int64))
        tl.store(indices_ptr + at + k * stride, shown, mask=mask)


@triton.jit
def _tile(pid, tiles, parts, rows, tiles_ptr, RANGED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Batch entry, tasks and rows of a tile, whose number is pid."""
    batch = pid // tiles
    tile = pid % tiles
    if RANGED:
        first_task = batch * parts + tl.load(tiles_ptr + tile * 4)
        last_task = batch * parts + tl.load(tiles_ptr + tile * 4 + 1)
        first_row = tl.load(tiles_ptr + tile * 4 + 2)
        last_row = tl.load(tiles_ptr + tile * 4 + 3)
    else:
        first_task = pid * parts
        last_task = first_task + parts
        first_row = tile * BLOCK_M
        last_row = rows
    return batch, first_task, last_task, first_row, last_row


@triton.jit(do_not_specialize=["tiles", "parts", "rows"])
def merge_sums_kernel(
    partial_ptr, out_ptr, tiles_ptr, guard_ptr, tiles, parts, rows, E: tl.constexpr,
    TOTAL: tl.constexpr, FIRST: tl.constexpr, RANGED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """out[row, FIRST + e] = Σ over the tasks of its tile of partial[task, e, row]."""
    if guard_ptr is not None and tl.load(guard_ptr) != 0:
        return
    pid = tl.program_id(0).to(tl.int64)
    e = pid % E
    batch, task, last_task, row, last_row = _tile(
        pid // E, tiles, parts, rows, tiles_ptr, RANGED, BLOCK_M
    )
    lanes = tl.arange(0, BLOCK_M)
    total = tl.zeros([BLOCK_M], partial_ptr.dtype.element_ty)
    for t in range(task, last_task):
        total += tl.load(partial_ptr + (t * E + e) * BLOCK_M + lanes)
    i = row + lanes
    tl.store(out_ptr + (batch * rows + i) * TOTAL + FIRST + e, total, mask=i < last_row)


@triton.jit
def _shifted_total(partial_ptr, finite, task, last_task, e, E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Σ_t exp(m_t − m) s_te of a tile, for its maximum, 0 in the place of one that is infinite."""
    lanes = tl.arange(0, BLOCK_M)
    size: tl.constexpr = (1 + E) * BLOCK_M
    total = tl.zeros([BLOCK_M], partial_ptr.dtype.element_ty)
    for t in range(task, last_task):
        shift = tl.load(partial_ptr + t * size + lanes) - finite
        s = tl.load(partial_ptr + t * size + (1 + e) * BLOCK_M + lanes)
        total += tl.exp2(shift * LOG2E) * s
    return total


@triton.jit
def ended(m, s, total, ENDING: tl.constexpr):
    """m + log s, −∞ for nothing; or s / total, 0 for nothing."""
    if ENDING == "log":
        s = tl.log(s) + m
    elif ENDING == "mean":  # the largest of all terms is 1, or there is none
        total = tl.maximum(total, 0.5)
        s = tl.div_rn(s, total) if s.dtype == tl.float32 else s / total
    return s


@triton.jit(do_not_specialize=["tiles", "parts", "rows"])
def merge_shifted_kernel(
    partial_ptr, top_ptr, out_ptr, tiles_ptr, guard_ptr, tiles, parts, rows, E: tl.constexpr,
    TOTAL: tl.constexpr, FIRST: tl.constexpr, RANGED: tl.constexpr, ENDING: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """m = max over the tasks of m_t, s_e = Σ_t exp(m_t − m) s_te; or what becomes of them."""
    if guard_ptr is not None and tl.load(guard_ptr) != 0:
        return
    pid = tl.program_id(0).to(tl.int64)
    batch, task, last_task, row, last_row = _tile(
        pid, tiles, parts, rows, tiles_ptr, RANGED, BLOCK_M
    )
    lanes = tl.arange(0, BLOCK_M)
    size: tl.constexpr = (1 + E) * BLOCK_M
    top = tl.full([BLOCK_M], float("-inf"), partial_ptr.dtype.element_ty)
    for t in range(task, last_task):
        top = tl.maximum(top, tl.load(partial_ptr + t * size + lanes))
    i = row + lanes
    present = i < last_row
    if ENDING == "":
        tl.store(top_ptr + batch * rows + i, top, mask=present)
    finite = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    last = _shifted_total(partial_ptr, finite, task, last_task, E - 1, E, BLOCK_M)
    for e in range(E - 1 if ENDING == "mean" else E):
        total = _shifted_total(partial_ptr, finite, task, last_task, e, E, BLOCK_M)
        total = ended(top, total, last, ENDING)
        tl.store(out_ptr + (batch * rows + i) * TOTAL + FIRST + e, total, mask=present)


@triton.jit(do_not_specialize=["tiles", "parts", "rows"])
def merge_smallest_kernel(
    values_ptr, indices_ptr, best_ptr, out_ptr, tiles_ptr, guard_ptr, tiles, parts, rows,
    K: tl.constexpr, KEPT: tl.constexpr, TOTAL: tl.constexpr, FIRST: tl.constexpr,
    RANGED: tl.constexpr, SIGN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The K smallest of the K smallest of each task, ascending; index −1 where there are fewer."""
    if guard_ptr is not None and tl.load(guard_ptr) != 0:
        return
    pid = tl.program_id(0).to(tl.int64)
    batch, task, last_task, row, last_row = _tile(
        pid, tiles, parts, rows, tiles_ptr, RANGED, BLOCK_M
    )
    lanes = tl.arange(0, BLOCK_M)[:, None]
    best, index = empty_lists(BLOCK_M, KEPT, K, values_ptr.dtype.element_ty, tl.int64)
    for t in range(task, last_task):
        for k in range(K):  # one at a time: a list may hold an index twice
            at = (t * BLOCK_M + lanes) * K + k
            f, j = tl.load(values_ptr + at), tl.load(indices_ptr + at)
            j = tl.where(j < 0, 9223372036854775807, j)
            best, index = insert(best, index, f[None, :, :], j[None, :, :])
    i = row + lanes
    at = (batch * rows + i) * (K * TOTAL) + FIRST
    store_sorted(best, index, best_ptr, out_ptr, at, i < last_row, TOTAL, K, SIGN)


def _mixed() -> str:
    """2^x of four numbers: of the last by a polynomial, which the unit for 2^x is spared.

    x = n + r with |r| ≤ ½; the polynomial of degree 5 in r errs by 1.7e-7, and n goes into the
    exponent: x must be at most 127; below −126 it is 2⁻¹²⁶.
    """
    lines = [
        "{ .reg .f32 n, r, p; .reg .b32 e, f;",
        "ex2.approx.ftz.f32 $0, $4;",
        "max.f32 r, $7, 0fC2FC0000;",
        "add.f32 n, r, 0f4B400000;",  # 1.5 · 2²³: n stands in the low bits
        "sub.f32 p, n, 0f4B400000;",
        "sub.f32 r, r, p;",
        "fma.rn.f32 p, r, 0f3AADDD07, 0f3C1E7544;",
        "fma.rn.f32 p, p, r, 0f3D635BA9;",
        "fma.rn.f32 p, p, r, 0f3E75FCDE;",
        "fma.rn.f32 p, p, r, 0f3F317215;",
        "fma.rn.f32 p, p, r, 0f3F800000;",
        "ex2.approx.ftz.f32 $1, $5; ex2.approx.ftz.f32 $2, $6;",
        "mov.b32 e, n; mov.b32 f, p; shl.b32 e, e, 23; add.s32 f, f, e; mov.b32 $3, f; }",
    ]
    return " ".join(lines)


INTERPRETED = tl.constexpr(interpreted())
MIXED, NUMBERS = tl.constexpr(_mixed()), tl.constexpr(",".join(["=f"] * 4 + ["f"] * 4))


@triton.jit
def exp2(x, MIXES: tl.constexpr):
    """2^x, if asked for of one in four numbers by a polynomial."""
    if MIXES and not INTERPRETED:
        y = tl.inline_asm_elementwise(MIXED, NUMBERS, [x], tl.float32, True, 4)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def rows_of(x_ptr, row, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """x_i of a tile; of two parts, the high and the low ones."""
    x_ptr += row[:, None] * (PARTS * WIDTH) + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr)
    return x, tl.load(x_ptr + WIDTH) if PARTS == 2 else x


@triton.jit
def product_of_parts(a, al, b, bl, PARTS: tl.constexpr):
    """⟨a, b⟩; of two parts, without the product of the low ones, and small ones first."""
    if PARTS == 2:
        s = tl.dot(a, bl)
        s = tl.dot(al, b, s)
        s = tl.dot(a, b, s)
    else:
        s = tl.dot(a, b)
    return s


@triton.jit
def exponents(
    x, xl, y_ptr, a, b_ptr, at, WIDTH: tl.constexpr, APART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """⟨x_i, y_j⟩ + a_i + b_j of a tile; of two parts, x and y are high parts, then low parts."""
    lanes = tl.arange(0, BLOCK_N)
    k = tl.arange(0, WIDTH)
    y_ptr += at * (PARTS * WIDTH) + lanes[None, :] * (PARTS * WIDTH) + k[:, None]
    y = tl.load(y_ptr)
    s = product_of_parts(x, xl, y, tl.load(y_ptr + WIDTH) if PARTS == 2 else y, PARTS)
    if APART:
        s += a[:, None] + tl.load(b_ptr + at + lanes)[None, :]
    return s


@triton.jit(do_not_specialize=["rows", "columns", "tiles"])
def split_sums_kernel(
    x_ptr, y_ptr, a_ptr, b_ptr, r_ptr, w_ptr, guard_ptr, out_ptr, rows, columns, tiles,
    WIDTH: tl.constexpr, APART: tl.constexpr, PARTS: tl.constexpr, MIXES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """out[i] = r_i Σ_j 2^(⟨x_i, y_j⟩ + a_i + b_j) w_j, where the guard is 1; see tensor_cores.

    x, a, r  # (B, rows, PARTS · WIDTH), (B, rows), (B, rows)
    y, b, w  # (B, columns, PARTS · WIDTH), (B, columns), (B, columns): whole tiles of columns
    Unless they are APART, a and b are in the product or in r and w.
    One product, one exponential and one multiplication a pair.  Where exponentials
    are mixed, sums are of the columns that a thread has: then fewer instructions count.
    """
    if tl.load(guard_ptr) == 0:
        return
    pid = tl.program_id(0).to(tl.int64)
    batch = pid // tiles
    i = pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_N)
    held = tl.minimum(i, rows - 1)
    x, xl = rows_of(x_ptr, batch * rows + held, WIDTH, PARTS)
    y_ptr += batch * columns * (PARTS * WIDTH)
    w_ptr += batch * columns
    a = tl.load(a_ptr + batch * rows + held) if APART else 0
    b_ptr = b_ptr + batch * columns if APART else 0
    sums: tl.constexpr = 8 if MIXES else 1
    total = tl.zeros([BLOCK_M, sums], tl.float32)
    for block in range(0, columns, TILES * BLOCK_N):
        part = tl.zeros([BLOCK_M, sums], tl.float32)
        for start in range(block, tl.minimum(block + TILES * BLOCK_N, columns), BLOCK_N):
            at = tl.cast(start, tl.int64)
            w = tl.load(w_ptr + at + lanes)
            s = exponents(x, xl, y_ptr, a, b_ptr, at, WIDTH, APART, PARTS, BLOCK_N)
            e = exp2(s, MIXES) * w[None, :]
            part += tl.sum(tl.reshape(e, [BLOCK_M, BLOCK_N // sums, sums]), 1)
        total += part
    total = tl.sum(total, 1) * tl.load(r_ptr + batch * rows + held)
    tl.store(out_ptr + batch * rows + i, total, mask=i < rows)


@triton.jit(do_not_specialize=["rows", "columns", "tiles"])
def split_shifted_kernel(
    x_ptr, y_ptr, a_ptr, b_ptr, w_ptr, guard_ptr, top_ptr, out_ptr, rows, columns, tiles,
    WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, APART: tl.constexpr, PARTS: tl.constexpr,
    MIXES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """m_i = max_j s_ij ln 2 and Σ_j 2^s_ij exp(−m_i) w_j, s_ij as in split_sums_kernel.

    Each thread of a product has a maximum of its own.
    """
    if tl.load(guard_ptr) == 0:
        return
    pid = tl.program_id(0).to(tl.int64)
    batch = pid // tiles
    i = pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_N)
    held = tl.minimum(i, rows - 1)
    x, xl = rows_of(x_ptr, batch * rows + held, WIDTH, PARTS)
    y_ptr += batch * columns * (PARTS * WIDTH)
    w_ptr += batch * columns
    a = tl.load(a_ptr + batch * rows + held) if APART else 0
    b_ptr = b_ptr + batch * columns if APART else 0
    total = tl.zeros([BLOCK_M, 4], tl.float32)
    top = tl.full([BLOCK_M, 4], -1e30, tl.float32)
    block_top = top
    for block in range(0, columns, TILES * BLOCK_N):
        part = tl.zeros([BLOCK_M, 4], tl.float32)
        for start in range(block, tl.minimum(block + TILES * BLOCK_N, columns), BLOCK_N):
            at = tl.cast(start, tl.int64)
            s = exponents(x, xl, y_ptr, a, b_ptr, at, WIDTH, APART, PARTS, BLOCK_N)
            s = tl.reshape(s, [BLOCK_M, BLOCK_N // 8, 4, 2])
            new = tl.maximum(top, tl.max(tl.max(s, 3), 1))
            s -= new[:, None, :, None]
            e = exp2(s, MIXES)
            if WEIGHTED:
                w = tl.load(w_ptr + at + lanes)
                e = e * tl.reshape(w, [1, BLOCK_N // 8, 4, 2])
            part = part * tl.exp2(top - new) + tl.sum(tl.sum(e, 3), 1)
            top = new
        total = total * tl.exp2(block_top - top) + part
        block_top = top
    new = tl.max(top, 1)
    total = tl.sum(total * tl.exp2(top - new[:, None]), 1)
    present = i < rows
    tl.store(top_ptr + batch * rows + i, new * 0.6931471805599453, mask=present)
    tl.store(out_ptr + batch * rows + i, total, mask=present)


@triton.jit(do_not_specialize=["count"])
def within_kernel(x_ptr, guard_ptr, count, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """guard = 0 if any |x| exceeds MOST or is NaN; else it stays as it is.

    Programs that write all write the same.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.minimum(i, count - 1))
    if tl.min((tl.abs(x) <= MOST).to(tl.int32)) == 0:
        tl.store(guard_ptr, 0)
