"""Kernels of Gaussian-like sums of vectors: out[e, i] = Σ_j 2^⟨x_i, y_j⟩ w_je, see moments.

x  # (B, rows, PARTS · WIDTH)
y  # (B, columns, PARTS · WIDTH), whole tiles of columns
"""

# ruff: noqa: N803, RUF005
# mypy: ignore-errors

import triton
import triton.language as tl

from torchweft.reductions.gpu.kernels import exponents, product_of_parts, rows_of


@triton.jit(do_not_specialize=["rows", "columns", "tiles", "blocks"])
def few_moments_kernel(
    x_ptr, y_ptr, w_ptr, guard_ptr, out_ptr, rows, columns, tiles, blocks,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Each column is multiplied pair by pair.

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
    """A block of E columns: P @ W, both of three parts, those products that float32 notices.

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
