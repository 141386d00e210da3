"""Device code that printed reductions share: scalar functions, lists of the smallest, merges.

A reduction is cut into tasks: some rows by some columns.  A task stores partial results, of float32
or float64, and a merge adds the results of one tile of rows in the order of its tasks, so the bits
do not depend on the order in which tasks ran:

    sums      (tasks, E, rows of a tile)              Σ
    shifted   (tasks, 1 + E, rows of a tile)          maximum m, Σ exp(f − m) w
    smallest  (tasks, rows of a tile, K)              values and indices, ascending
"""

import triton
import triton.language as tl

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

    best, index  # [BLOCK_M, KEPT]: the entries so far, in any order
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
def insert_nan_first(best, index, f, j):
    """`insert` into lists of one entry, where NaN comes before −∞ with the index j − 2³¹ or − 2⁶³.

    The value of such an entry is −∞ and its index negative, so entries are still in (value, index)
    order.
    """
    lowest: tl.constexpr = -2147483648 if index.dtype == tl.int32 else -9223372036854775808
    at = tl.where(f == f, 0, j | lowest)
    nan = tl.min(tl.min(at, 0), 1)[:, None]
    best, index = insert(best, index, f, j)
    replaced = nan < tl.minimum(index, 0)
    return tl.where(replaced, float("-inf"), best), tl.where(replaced, nan, index)


@triton.jit
def empty_lists(
    BLOCK_M: tl.constexpr,
    KEPT: tl.constexpr,
    K: tl.constexpr,
    dtype: tl.constexpr,
    indices: tl.constexpr,
):
    """Lists of K entries that any term precedes, and slots beyond K that no term precedes."""
    last: tl.constexpr = 2147483647 if indices == tl.int32 else 9223372036854775807
    used = tl.zeros([BLOCK_M, 1], tl.int32) + tl.arange(0, KEPT)[None, :] < K
    best = tl.where(used, float("inf"), float("-inf")).to(dtype)
    return best, tl.where(used, last, -1).to(indices)


@triton.jit
def store_sorted(
    best, index, values_ptr, indices_ptr, at, mask, stride, K: tl.constexpr, SIGN: tl.constexpr,
    NAN_FIRST: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """The K entries of each list in (value, index) order; empty entries have index −1.

    Values are multiplied by the sign, and not stored if it is 0.  Where NaN comes first, see
    `insert_nan_first`, results say so; partial ones keep its negative index, in int64.
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
        shown = found.to(tl.int64)
        if NAN_FIRST:
            nan = found < 0
            shown = tl.where(nan, (found & last).to(tl.int64), shown)
            if PARTIAL:
                shown = tl.where(nan, shown | -9223372036854775808, shown)
            else:
                value = tl.where(nan, float("nan"), value)
        if SIGN:
            tl.store(values_ptr + at + k * stride, SIGN * value, mask=mask)
        shown = tl.where(found == last, -1, shown)
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
    """Σ_t exp(m_t − m) s_te of a tile, for its maximum m, or 0 where that is infinite."""
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
    """m = max over the tasks of m_t, s_e = Σ_t exp(m_t − m) s_te, or their ending."""
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
    RANGED: tl.constexpr, SIGN: tl.constexpr, NAN_FIRST: tl.constexpr, BLOCK_M: tl.constexpr,
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
            j = tl.where(j == -1, 9223372036854775807, j)
            best, index = insert(best, index, f[None, :, :], j[None, :, :])
    i = row + lanes
    at = (batch * rows + i) * (K * TOTAL) + FIRST
    present = i < last_row
    store_sorted(best, index, best_ptr, out_ptr, at, present, TOTAL, K, SIGN, NAN_FIRST, False)
