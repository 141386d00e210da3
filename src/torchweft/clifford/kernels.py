"""Hand-written Triton kernels: products of linear maps by grade in 16 bits, and sums of partials.

    z_j = x_j @ W[grade of j]        dW[g] = Σ_(j ∈ g) Σ_parts P[j, part]

Why the family has a matrix product of its own: one launch takes all grades, where the library
needs one a pair of equal grades, and the next tile is loaded while the last one is stored.  H200,
Cl(3,0), bf16, µs against the library's: 4096 × 512 35 and 39, 1024 × 512 14 and 18, 1024 × 128 9
and 11; 16 blades of 4096 × 512 63 and 71; 16384 × 512 122 and 118, which the library keeps.

The library keeps the rest, too.  A product that is added to what is there: 48 and 49, and behind
beyond 4096 × 512.  The weight gradient: 33 and 31.  TF32: 67 and 75, bound by L2, but the tensor
core cuts float32 off where the library rounds, an error of 8e-4 and not 3e-4.  fp16 factors under a
power of two, made in registers: 59 and 75, added 77 and 88, weight gradient 69 and 93, but numbers
far below the largest lose bits that TF32 keeps, and to watch for them takes 12 of what is gained.
"""

import triton
import triton.language as tl

__all__ = [
    "map_weights_kernel",
    "maps_kernel",
    "meet_kernel",
    "prepare_maps_kernel",
    "rows_kernel",
    "sum_kernel",
    "sum_partials_kernel",
    "turn_kernel",
]


@triton.jit
def _grade(blade, N: tl.constexpr):
    """The grade of a blade among n vectors: C(n, g) blades have grade g."""
    size, seen, grade = 1, 0, 0
    for g in tl.static_range(N):
        seen += size
        grade += (blade >= seen).to(tl.int32)
        size = size * (N - g) // (g + 1)
    return grade


@triton.jit(do_not_specialize=["R"])
def rows_kernel(
    x_desc, w_desc, bias_ptr, z_ptr, R, F_IN, F_OUT,
    BLADES: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """z_j = x_j @ W[grade of j], and the bias on the scalar.

    A tile is some rows and columns of one blade.  Programs take tiles in turn, so that neighbours
    share rows.
    """
    across, down = tl.cdiv(F_OUT, BLOCK_N), tl.cdiv(R, BLOCK_M)
    for tile in tl.range(
        tl.program_id(0), across * down * BLADES, tl.num_programs(0), flatten=True
    ):
        blade = tile // across // down
        row = tile // across % down * BLOCK_M
        column = tile % across * BLOCK_N
        grade = _grade(blade, N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, F_IN, BLOCK_K):
            x = x_desc.load([blade, row, k]).reshape(BLOCK_M, BLOCK_K)
            if TURNED:
                w = w_desc.load([grade, column, k]).reshape(BLOCK_N, BLOCK_K).T
            else:
                w = w_desc.load([grade, k, column]).reshape(BLOCK_K, BLOCK_N)
            acc = tl.dot(x, w, acc)
        _store(acc, bias_ptr, z_ptr, blade, row, column, R, F_OUT, BLOCK_M, BLOCK_N)


@triton.jit
def _store(
    acc, bias_ptr, z_ptr, blade, row, column, R, F_OUT,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """In two halves: the whole tile would take the shared memory that the next one is loaded to."""
    HALF: tl.constexpr = BLOCK_N // 2
    halves = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
    r = row + tl.arange(0, BLOCK_M)
    z_ptr += (tl.full((), 0, tl.int64) + blade) * R * F_OUT
    for at in tl.static_range(2):
        f = column + at * HALF + tl.arange(0, HALF)
        part = halves[at]  # [BLOCK_M, HALF]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + f, mask=(f < F_OUT) & (blade == 0), other=0.0)
            part += bias.to(tl.float32)[None, :]
        address = z_ptr + r.to(tl.int64)[:, None] * F_OUT + f[None, :]
        mask = (r < R)[:, None] & (f < F_OUT)[None, :]
        tl.store(address, part.to(z_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(
    part_ptr, sum_ptr, COLUMNS, N: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """sum[g] = Σ over the blades of grade g and their parts, in this order.

    part: (blades · parts, columns), sum: (n+1, columns).  Bound: memory, each part once.
    """
    across = tl.cdiv(COLUMNS, BLOCK)
    grade = tl.program_id(0) // across
    wide = tl.full((), 0, tl.int64)
    c = (wide + tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    size, seen, first, last = 1, 0, 0, 0
    for g in tl.static_range(N + 1):
        first = tl.where(grade == g, seen, first)
        seen += size
        last = tl.where(grade == g, seen, last)
        size = size * (N - g) // (g + 1)
    total = tl.zeros((BLOCK,), part_ptr.dtype.element_ty)
    for part in range(first * PARTS, last * PARTS):
        total += tl.load(part_ptr + (wide + part) * COLUMNS + c, mask=c < COLUMNS, other=0.0)
    to = sum_ptr + (wide + grade) * COLUMNS + c
    tl.store(to, total.to(sum_ptr.dtype.element_ty), mask=c < COLUMNS)


@triton.jit
def turn_kernel(w_ptr, t_ptr, F_IN, F_OUT, BLOCK: tl.constexpr):
    """t = wᵀ, matrix by matrix, (n+1, F_in, F_out) to (n+1, F_out, F_in).

    The library's TF32 product is faster with the summed index side by side in both factors.  H200,
    µs without the turn and with it: Cl(3,0), 4096 × 512 84 and 72, 4096 × 1024 236 and 218; 16
    blades of 4096 × 512 161 and 131; but 4096 × 128 22 and 25.
    """
    across, down = tl.cdiv(F_OUT, BLOCK), tl.cdiv(F_IN, BLOCK)
    pid = tl.program_id(0)
    e = tl.full((), 0, tl.int64) + tl.arange(0, BLOCK)
    i, j = pid // across % down * BLOCK + e, pid % across * BLOCK + e
    matrix = (pid // across // down).to(tl.int64) * F_IN * F_OUT
    mask = (i < F_IN)[:, None] & (j < F_OUT)[None, :]
    w = tl.load(w_ptr + matrix + i[:, None] * F_OUT + j[None, :], mask=mask, other=0.0)
    tl.store(t_ptr + matrix + j[:, None] * F_IN + i[None, :], w.T, mask=mask.T)


@triton.jit(do_not_specialize=["R"])
def meet_kernel(
    scale_ptr, go_ptr, all_ptr, turn_ptr, pairs_ptr, weight_ptr, R,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scales of a backward pass, from those of its rows; all are powers of two.

    turn[b] = 2^BITS / (go[b] all), pairs[b] = c / go[b], weight = 1/c; c = min_b scale[b] go[b].
    One program, since c is of all rows: some bytes a row, from the cache.
    """
    e = tl.arange(0, BLOCK)
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    for first in range(0, R, BLOCK):
        mask = first + e < R
        go = tl.load(go_ptr + first + e, mask=mask, other=float("inf"))
        least = tl.minimum(least, go * tl.load(scale_ptr + first + e, mask=mask, other=1.0))
    c = tl.min(least, 0)
    tl.store(weight_ptr, tl.div_rn(1.0, c))
    shrunk = tl.load(all_ptr) / (1 << BITS)
    for first in range(0, R, BLOCK):
        mask = first + e < R
        go = tl.load(go_ptr + first + e, mask=mask, other=1.0)
        tl.store(pairs_ptr + first + e, tl.div_rn(c, go), mask=mask)
        tl.store(turn_ptr + first + e, tl.div_rn(1.0, go * shrunk), mask=mask)


@triton.jit(do_not_specialize=["count"])
def sum_partials_kernel(
    partial_ptr, z_ptr, count, columns, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    """z[c] = Σ_n partial[n, c], n < count: always in the same order.

    One program sums BLOCK_C columns, BLOCK_N rows at a time, in the partials' own dtype.  Moves
    each partial once; they were just written and lie in the L2 cache.
    """
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    lanes = tl.arange(0, BLOCK_N)[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_C], partial_ptr.dtype.element_ty)
    for start in range(0, count, BLOCK_N):
        n = start + lanes
        inside = (n < count) & (c < columns)
        sums += tl.load(partial_ptr + n.to(tl.int64) * columns + c, mask=inside, other=0.0)
    z = tl.expand_dims(tl.sum(sums, 0), 0)
    tl.store(z_ptr + c, z, mask=c < columns)


@triton.jit
def _split(x):
    """x = high + low, high the nearest number of 11 bits, which TF32 holds; of NaN itself."""
    nearest = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    high = tl.where(x == x, nearest, x)
    return high, x - high


@triton.jit
def prepare_maps_kernel(
    w_ptr, t_ptr, columns_ptr, F, G, MAPS: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """t[map, g, f] = W[map, f, g], or W[map, g, f] with TURNED: the matrices of `maps_kernel`.

    With two parts, t[0] has the nearest numbers of TF32 and t[1] what is left.  columns: for each
    column of W, over all its parts, the place of its first number and the distance to the next; see
    `matrices/mixed.py`.
    """
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = e < MAPS * F * G
    of_map, g, f = e // F // G, e // F % G, e % F
    line, at = (of_map * G + g, f) if TURNED else (of_map * F + f, g)
    column = tl.load(columns_ptr + 2 * at, mask=live, other=0)
    stride = tl.load(columns_ptr + 2 * at + 1, mask=live, other=0)
    w = tl.load(w_ptr + column + line * stride, mask=live, other=0.0)
    if PARTS == 2:
        high, low = _split(w)
        tl.store(t_ptr + e, high, mask=live)
        tl.store(t_ptr + MAPS * F * G + e, low, mask=live)
    else:
        tl.store(t_ptr + e, w, mask=live)


@triton.jit(do_not_specialize=["R"])
def maps_kernel(
    x_ptr, w_ptr, first_ptr, z_ptr, terms_ptr, starts_ptr, R, F, G,
    stride_xb, stride_xr, stride_xf, stride_fr,
    MAPS: tl.constexpr, BLADES: tl.constexpr, ENDS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """z_j[g] = Σ_t sign_t · Σ_f x_(i of t)[f] · w[map of t, g, f] over the terms t of blade j.

    x: (BLADES, R, F), z: contiguous (BLADES, R, G).  At the ends, the scalar and with ENDS = 2 the
    last blade, first[r, ENDS · g + end] is added, unless it is None.  A program computes some rows
    and features of one blade; the matrices come from the cache, see `prepare_maps_kernel`.

    With "tf32x3" each factor has two parts, and the products of three pairs of parts are as exact
    as float32; the tensor core, which cuts sums off, starts anew for each tile of f.
    """
    across = tl.cdiv(G, BLOCK_G)
    blade = tl.program_id(0) // across % BLADES
    r = tl.program_id(0) // across // BLADES * BLOCK_R + tl.arange(0, BLOCK_R)
    g = tl.program_id(0) % across * BLOCK_G + tl.arange(0, BLOCK_G)
    row = r.to(tl.int64)[:, None]
    acc = tl.zeros((BLOCK_R, BLOCK_G), tl.float32)
    for t in range(tl.load(starts_ptr + blade), tl.load(starts_ptr + blade + 1)):
        source = tl.load(terms_ptr + 3 * t).to(tl.int64)
        of_map = tl.load(terms_ptr + 3 * t + 1)
        sign = tl.load(terms_ptr + 3 * t + 2).to(tl.float32)
        for start in range(0, F, BLOCK_F):
            f = start + tl.arange(0, BLOCK_F)
            place = source * stride_xb + row * stride_xr + f.to(tl.int64)[None, :] * stride_xf
            x = tl.load(x_ptr + place, mask=(r < R)[:, None] & (f < F)[None, :], other=0.0)
            at = w_ptr + (of_map * G + g)[:, None] * F + f[None, :]
            inside = (g < G)[:, None] & (f < F)[None, :]
            w = tl.load(at, mask=inside, other=0.0).T
            if PRECISION == "tf32x3":
                w_low = tl.load(at + MAPS * G * F, mask=inside, other=0.0).T
                high, low = _split(x)
                part = tl.dot(low, w, input_precision="tf32")
                part = tl.dot(high, w_low, part, input_precision="tf32")
                # infinity and NaN come from the last product alone: low parts have any sign
                part = tl.where(tl.abs(part) < float("inf"), part, 0.0)
                part = tl.dot(high, w, part, input_precision="tf32")
            else:
                part = tl.dot(x, w, input_precision=PRECISION)
            acc += part * sign
    mask = (r < R)[:, None] & (g < G)[None, :]
    if first_ptr is not None:
        at_end = (blade == 0) | ((ENDS == 2) & (blade == BLADES - 1))
        place = row * stride_fr + (ENDS * g + (blade > 0))[None, :]
        acc += tl.load(first_ptr + place, mask=mask & at_end, other=0.0).to(tl.float32)
    to = z_ptr + (blade.to(tl.int64) * R + row) * G + g[None, :]
    tl.store(to, acc.to(z_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def map_weights_kernel(
    x_ptr, y_ptr, sums_ptr, part_ptr, terms_ptr, starts_ptr, columns_ptr, R, F, G, numbers, before,
    stride_xb, stride_xr, stride_xf, stride_yb, stride_yr, stride_yf, stride_sr,
    MAPS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """part[p, m, f, g] = Σ_t sign_t · Σ_r x_(i of t)[r, f] · y_(j of t)[r, g], terms t of map m.

    A program sums some rows, part p, for some features of one map; `sum_partials_kernel` adds the
    parts.  The numbers of a part lie as those of W of `prepare_maps_kernel`.  After them come sums
    over the rows of sums (R, numbers − before), unless it is None, by programs of their own.
    """
    across, down = tl.cdiv(G, BLOCK_G), tl.cdiv(F, BLOCK_F)
    pid = tl.program_id(0)
    part = pid % PARTS
    begin = part * tl.cdiv(tl.cdiv(R, PARTS), BLOCK_R) * BLOCK_R
    end = tl.minimum(begin + tl.cdiv(tl.cdiv(R, PARTS), BLOCK_R) * BLOCK_R, R)
    part_ptr += part.to(tl.int64) * numbers
    tile = pid // PARTS
    if tile >= MAPS * down * across:
        if sums_ptr is not None:
            column = (tile - MAPS * down * across) * BLOCK_G + tl.arange(0, BLOCK_G)
            _sum_rows(sums_ptr, part_ptr + before, column, begin, end, numbers - before, stride_sr,
                      BLOCK_R, BLOCK_G)  # fmt: skip
        return
    g = tile % across * BLOCK_G + tl.arange(0, BLOCK_G)
    f = tile // across % down * BLOCK_F + tl.arange(0, BLOCK_F)
    of_map = tile // across // down
    acc = tl.zeros((BLOCK_F, BLOCK_G), tl.float32)
    for t in range(tl.load(starts_ptr + of_map), tl.load(starts_ptr + of_map + 1)):
        source = tl.load(terms_ptr + 3 * t).to(tl.int64)
        target = tl.load(terms_ptr + 3 * t + 1).to(tl.int64)
        sign = tl.load(terms_ptr + 3 * t + 2)
        for start in range(begin, end, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            row = r.to(tl.int64)
            of_x = source * stride_xb + row[None, :] * stride_xr
            of_x += f.to(tl.int64)[:, None] * stride_xf
            of_y = target * stride_yb + row[:, None] * stride_yr
            of_y += g.to(tl.int64)[None, :] * stride_yf
            x = tl.load(x_ptr + of_x, mask=(f < F)[:, None] & (r < end)[None, :], other=0.0)
            y = tl.load(y_ptr + of_y, mask=(r < end)[:, None] & (g < G)[None, :], other=0.0)
            acc = tl.dot((x * sign).to(y.dtype), y, acc, input_precision=PRECISION)
    column = tl.load(columns_ptr + 2 * g, mask=g < G, other=0)[None, :]
    stride = tl.load(columns_ptr + 2 * g + 1, mask=g < G, other=0)[None, :]
    to = part_ptr + column + (of_map * F + f)[:, None] * stride
    tl.store(to, acc, mask=(f < F)[:, None] & (g < G)[None, :])


@triton.jit
def _sum_rows(
    x_ptr, z_ptr, column, begin, end, columns, stride_r,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """z[c] = Σ_r x[r, c], begin ≤ r < end."""
    acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(begin, end, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        mask = (r < end)[:, None] & (column < columns)[None, :]
        place = r.to(tl.int64)[:, None] * stride_r + column[None, :]
        acc += tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(z_ptr + column, tl.sum(acc, 0), mask=column < columns)
