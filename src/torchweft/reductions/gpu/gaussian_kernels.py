"""Kernels of Gaussian-like reductions on tensor cores: sums, shifted sums, sums of vectors."""

# ruff: noqa: N803, RUF005
# mypy: ignore-errors

import triton
import triton.language as tl

from torchweft.core.backend import interpreted

INTERPRETED = tl.constexpr(interpreted())
MIXED_EXP2 = tl.constexpr(
    "{ .reg .f32 n, r, p; .reg .b32 e, f; "
    "ex2.approx.ftz.f32 $0, $4; "
    "max.f32 r, $7, 0fC2FC0000; "
    "add.f32 n, r, 0f4B400000; "  # 1.5 · 2²³: n stands in the low bits
    "sub.f32 p, n, 0f4B400000; "
    "sub.f32 r, r, p; "
    "fma.rn.f32 p, r, 0f3AADDD07, 0f3C1E7544; "
    "fma.rn.f32 p, p, r, 0f3D635BA9; "
    "fma.rn.f32 p, p, r, 0f3E75FCDE; "
    "fma.rn.f32 p, p, r, 0f3F317215; "
    "fma.rn.f32 p, p, r, 0f3F800000; "
    "ex2.approx.ftz.f32 $1, $5; ex2.approx.ftz.f32 $2, $6; "
    "mov.b32 e, n; mov.b32 f, p; shl.b32 e, e, 23; add.s32 f, f, e; mov.b32 $3, f; }"
)
"""2^x of four numbers: of the last by a polynomial, which relieves the unit for 2^x.

x = n + r with |r| ≤ ½; the polynomial of degree 5 in r errs by 1.7e-7, and n goes into the
exponent: x must be at most 127; below −126 it is 2⁻¹²⁶.
"""
MIXED_REGISTERS = tl.constexpr(",".join(["=f"] * 4 + ["f"] * 4))


@triton.jit
def exp2(x, MIXES: tl.constexpr):
    """2^x; with MIXES, of one in four numbers by a polynomial."""
    if MIXES and not INTERPRETED:
        y = tl.inline_asm_elementwise(MIXED_EXP2, MIXED_REGISTERS, [x], tl.float32, True, 4)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def rows_of(x_ptr, row, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """x_i of a tile, as high and low parts where there are two."""
    x_ptr += row[:, None] * (PARTS * WIDTH) + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr)
    return x, tl.load(x_ptr + WIDTH) if PARTS == 2 else x


@triton.jit
def product_of_parts(a, al, b, bl, PARTS: tl.constexpr):
    """⟨a, b⟩; of two parts, without the product of the low parts, smallest products first."""
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
    """⟨x_i, y_j⟩ + a_i + b_j of a tile; where PARTS is 2, rows hold high, then low parts."""
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
    """out[i] = r_i Σ_j 2^(⟨x_i, y_j⟩ + a_i + b_j) w_j, where the guard is 1; see gaussians.

    x, a, r  # (B, rows, PARTS · WIDTH), (B, rows), (B, rows)
    y, b, w  # (B, columns, PARTS · WIDTH), (B, columns), (B, columns): whole tiles of columns
    Unless APART, a and b are in the product or in r and w.
    One product, one exponential and one multiplication a pair.  With MIXES, each thread sums its
    own columns, which takes fewer instructions.
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


@triton.jit(do_not_specialize=["rows", "columns", "tiles", "blocks"])
def few_moments_kernel(
    x_ptr, y_ptr, w_ptr, guard_ptr, out_ptr, rows, columns, tiles, blocks,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """out[e, i] = Σ_j 2^⟨x_i, y_j⟩ w_je; each column is multiplied pair by pair.

    x       # (B, rows, PARTS · WIDTH)
    y       # (B, columns, PARTS · WIDTH), whole tiles of columns
    w, out  # (B, E, columns), (B, E, rows)
    The product has columns down and rows across.  A thread then has two columns of a tile and many
    rows: it loads 2 E numbers for all of its pairs, and keeps sums of its own.
    """
    if tl.load(guard_ptr) == 0:
        return
    pid = tl.program_id(0).to(tl.int64)
    batch = pid // tiles
    i = pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, WIDTH)
    x_ptr += (batch * rows + tl.minimum(i, rows - 1))[None, :] * (PARTS * WIDTH) + k[:, None]
    x = tl.load(x_ptr)
    xl = tl.load(x_ptr + WIDTH) if PARTS == 2 else x
    down = tl.arange(0, BLOCK_N)[:, None]
    y_ptr += (batch * columns + down) * (PARTS * WIDTH) + k[None, :]
    warps: tl.constexpr = BLOCK_N // 16  # each has 16 columns, a thread of it those of two eights
    of_warp = tl.arange(0, warps)[:, None] * 16 + tl.arange(0, 8)[None, :]
    w_ptr += batch * columns * E + of_warp
    totals = ()
    zeros = ()
    for _ in tl.static_range(E):
        totals = totals + (tl.zeros([BLOCK_M], tl.float32),)
        zeros = zeros + (tl.zeros([warps, 8, BLOCK_M], tl.float32),)
    for block in range(0, columns, TILES * BLOCK_N):
        sums = zeros
        for start in range(block, tl.minimum(block + TILES * BLOCK_N, columns), BLOCK_N):
            at = tl.cast(start, tl.int64)
            tile_ptr = y_ptr + at * (PARTS * WIDTH)
            y = tl.load(tile_ptr)
            yl = tl.load(tile_ptr + WIDTH) if PARTS == 2 else y
            s = product_of_parts(y, yl, x, xl, PARTS)
            p = tl.reshape(tl.exp2(s), [warps, 2, 8, BLOCK_M])
            first, second = tl.split(tl.permute(p, [0, 2, 3, 1]))
            more = ()
            for e in tl.static_range(E):
                w = w_ptr + e * tl.cast(columns, tl.int64) + at
                sum_e = sums[e] + first * tl.load(w)[:, :, None]
                more = more + (sum_e + second * tl.load(w + 8)[:, :, None],)
            sums = more
        more = ()
        for e in tl.static_range(E):
            more = more + (totals[e] + tl.sum(tl.sum(sums[e], 1), 0),)
        totals = more
    for e in tl.static_range(E):
        tl.store(out_ptr + (batch * E + e) * rows + i, totals[e], mask=i < rows)


@triton.jit(do_not_specialize=["rows", "columns", "tiles", "blocks"])
def many_moments_kernel(
    x_ptr, y_ptr, w_ptr, guard_ptr, out_ptr, rows, columns, tiles, blocks,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The same for a block of E columns: P @ W, both of three parts, six of their nine products.

    w, out  # (3, B, columns, blocks · E), (B, blocks · E, rows)
    """
    if tl.load(guard_ptr) == 0:
        return
    pid = tl.program_id(0).to(tl.int64)
    batch = pid // blocks // tiles
    i = pid // blocks % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    first = pid % blocks * E
    lanes = tl.arange(0, BLOCK_N)
    e = tl.arange(0, E)
    x, xl = rows_of(x_ptr, batch * rows + tl.minimum(i, rows - 1), WIDTH, PARTS)
    y_ptr += batch * columns * (PARTS * WIDTH)
    pitch = blocks * E
    part = tl.num_programs(0) // blocks // tiles * columns * pitch
    w_ptr += batch * columns * pitch + first + lanes[:, None] * pitch + e[None, :]
    total = tl.zeros([BLOCK_M, E], tl.float32)
    for block in range(0, columns, TILES * BLOCK_N):
        sums = tl.zeros([BLOCK_M, E], tl.float32)
        for start in range(block, tl.minimum(block + TILES * BLOCK_N, columns), BLOCK_N):
            at = tl.cast(start, tl.int64)
            s = exponents(x, xl, y_ptr, 0, 0, at, WIDTH, False, PARTS, BLOCK_N)
            p = tl.exp2(s)
            high = p.to(tl.bfloat16)
            p -= high.to(tl.float32)
            middle = p.to(tl.bfloat16)
            low = (p - middle.to(tl.float32)).to(tl.bfloat16)
            # small ones first: a sum on tensor cores cuts digits off at every step
            more = tl.dot(high, tl.load(w_ptr + 2 * part + at * pitch))
            w = tl.load(w_ptr + part + at * pitch)
            more = tl.dot(middle, w, more)
            more = tl.dot(high, w, more)
            w = tl.load(w_ptr + at * pitch)
            more = tl.dot(low, w, more)
            more = tl.dot(middle, w, more)
            sums += tl.dot(high, w, more)
        total += sums
    out_ptr += (batch * pitch + first + e[None, :]) * rows + i[:, None]
    tl.store(out_ptr, total, mask=i[:, None] < rows)
