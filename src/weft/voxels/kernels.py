"""Triton kernels of sparse convolution, and of what is prepared for them from its tables.

    y[o] = Σ_k x[sources[k,o]] w[k]          dw[k] = Σ_o x[sources[k,o]]ᵀ g[o]

What is prepared reads table[k,i] = sources[k, order[i]], whose columns i stand in canonical order.
Preparation: rows of equal masks (which of the K offsets have a voxel) stand together, so that a
tile of rows needs few offsets; pairs of an offset stand together in canonical order.  A panel is
`PANEL` sorted rows, `lists` (panels, K, PANEL) the input rows they read, −1 for none, defined for
the offsets that one of them needs.  Halves of panels have masks of their own: tiles are 64 or 128
rows.  Masks are words of 32 bits.  One file, since preparation and use share this layout.
Everything runs along grid axis 0.  Rows are counted in int64
where K N or N C may pass 2^31 (WIDE, and always in the preparation).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "convolve_kernel",
    "depthwise_gradient_kernel",
    "depthwise_kernel",
    "fold_kernel",
    "key_kernel",
    "list_kernel",
    "mask_kernel",
    "pair_kernel",
    "rank_kernel",
    "reduce_kernel",
    "share_kernel",
    "tally_kernel",
    "weight_gradient_kernel",
]

PANEL = tl.constexpr(128)
HALF = tl.constexpr(64)
UNIT = tl.constexpr(64)
"""Pairs that are summed at once."""


@triton.jit
def _row_of(order_ptr, i, live):
    """Row number i of the canonical order."""
    if order_ptr is None:
        return i.to(tl.int64)
    else:
        return tl.load(order_ptr + i, mask=live, other=0).to(tl.int64)


@triton.jit
def _lowest(word):
    """The number of the lowest bit that is set in an int64 below 2^32; 0 if there is none."""
    bit = (((word & -word).to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127
    return tl.where(word == 0, 0, bit)


@triton.jit
def _count(word):
    """How many bits are set in an int32."""
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    return (eights + (eights >> 8) + (eights >> 16) + (eights >> 24)) & 63


@triton.jit(do_not_specialize=["N"])
def mask_kernel(table_ptr, masks_ptr, N, K: tl.constexpr, BLOCK: tl.constexpr):
    """masks[w,i]: bit b says whether column i of a table has a row at offset 32 w + b.

    A program reads 32 offsets of BLOCK columns, as they lie.  Bound: memory, 4 K N bytes.
    """
    WORDS: tl.constexpr = (K + 31) // 32
    pid = tl.program_id(0)
    bit = tl.arange(0, 32)[:, None]
    k = pid % WORDS * 32 + bit  # [32, 1]
    i = pid.to(tl.int64) // WORDS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    at = k * N.to(tl.int64) + i[None, :]
    source = tl.load(table_ptr + at, mask=(k < K) & (i < N)[None, :], other=-1)
    mask = tl.sum((source >= 0).to(tl.int32) << bit, axis=0)
    tl.store(masks_ptr + pid % WORDS * N.to(tl.int64) + i, mask, mask=i < N)


@triton.jit
def _mask_of(parts_ptr, word, i, live, N, PARTS: tl.constexpr):
    """Word `word` of the masks of columns, from its parts."""
    mask = tl.zeros(i.shape, tl.int32)
    for part in tl.static_range(PARTS):
        at = (word * PARTS + part) * N.to(tl.int64) + i
        mask |= tl.load(parts_ptr + at, mask=live, other=0)
    return mask


@triton.jit
def _often(
    parts_ptr, word, N,
    K: tl.constexpr, PARTS: tl.constexpr, OFFSETS: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """How many of a sample of columns have a row at each offset: of one word, and of all words."""
    sample = tl.arange(0, SAMPLES).to(tl.int64) * N // SAMPLES
    live = sample < N
    bit = tl.arange(0, 32)[None, :]
    mask = _mask_of(parts_ptr, word, sample, live, N, PARTS)
    count = tl.sum((mask[:, None] >> bit) & 1, axis=0)  # [32]
    if K <= 32:
        return count, count
    else:
        k = tl.arange(0, OFFSETS)[None, :]
        at = k // 32 * N.to(tl.int64) + sample[:, None]
        masks = tl.load(parts_ptr + at, mask=live[:, None] & (k < K), other=0)
        return count, tl.sum((masks >> k % 32) & 1, axis=0)


@triton.jit(do_not_specialize=["N", "blocks"])
def key_kernel(
    parts_ptr, masks_ptr, keys_ptr, counts_ptr, N, blocks,
    K: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, OFFSETS: tl.constexpr,
    SAMPLES: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """keys[i]: column i's mask as a Gray code, below the number of its NEAR neighbours.

    The rarer an offset in a sample of columns, the higher its bit; neighbours in a Gray code
    differ in one offset.  Also the masks, and counts[k,b], the pairs of block b of the columns.
    A program owns one such block.
    """
    KEY: tl.constexpr = keys_ptr.dtype.element_ty
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    bit = tl.arange(0, 32)
    other = tl.arange(0, OFFSETS)[None, :]
    gray = tl.zeros((BLOCK,), KEY)
    for word in tl.static_range((K + 31) // 32):
        mask = _mask_of(parts_ptr, word, i, i < N, N, PARTS)
        if masks_ptr is not None:
            tl.store(masks_ptr + word * N.to(tl.int64) + i, mask, mask=i < N)
        there = (mask[:, None] >> bit[None, :]) & 1  # [BLOCK, 32]
        k = word * 32 + bit
        tl.store(counts_ptr + k * blocks + block, tl.sum(there, axis=0), mask=k < K)
        own, all = _often(parts_ptr, word, N, K, PARTS, OFFSETS, SAMPLES)
        rarer = (all[None, :] < own[:, None]) | (
            (all[None, :] == own[:, None]) & (other < k[:, None])
        )
        place = BITS - 1 - tl.sum((rarer & (other < K)).to(tl.int32), axis=1)[None, :]
        digits = there.to(KEY) << tl.maximum(place, 0).to(KEY)
        gray += tl.sum(tl.where(place >= 0, digits, 0), axis=1)
    for log in tl.static_range(6 if keys_ptr.dtype.element_ty == tl.int64 else 5):
        gray ^= gray >> (1 << log)
    tl.store(keys_ptr + i, ((i // NEAR).to(KEY) << BITS) | gray, mask=i < N)


@triton.jit(do_not_specialize=["N"])
def rank_kernel(
    keys_ptr, sorted_ptr, N, MOST: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """sorted[r] = i where key i is the r-th, equal keys as they stand: a stable sort of few keys.

    A program owns BLOCK keys and counts those before each of them; BLOCK divides CHUNK.  MOST is
    not below any key, and keys are not negative.  Bound: instructions, two for each of N² pairs.
    """
    begin = tl.program_id(0) * BLOCK
    i = begin + tl.arange(0, BLOCK)[:, None]
    lane = tl.arange(0, CHUNK)[None, :]
    key = tl.load(keys_ptr + i, mask=i < N, other=0)
    before = tl.zeros((BLOCK, CHUNK), tl.int32)
    for first in range(0, N, CHUNK):
        other = tl.load(keys_ptr + first + lane, mask=first + lane < N, other=MOST)
        # of chunks that stand before, equal keys come before too
        other -= (first + CHUNK <= begin).to(tl.int32)
        before += (other < key).to(tl.int32)
    j = begin // CHUNK * CHUNK + lane
    other = tl.load(keys_ptr + j, mask=j < N, other=MOST)
    before += ((other == key) & (j < i)).to(tl.int32)
    rank = tl.sum(before, axis=1, keep_dims=True)
    tl.store(sorted_ptr + rank, i, mask=i < N)


@triton.jit(do_not_specialize=["N"])
def list_kernel(
    table_ptr, masks_ptr, order_ptr, sorted_ptr, rows_ptr, lists_ptr, halves_ptr, N,
    K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """rows, lists and the masks of its halves, of one panel and 32 offsets.

    Bound: L2, a sector for each entry that is there.
    """
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    WORDS: tl.constexpr = (K + 31) // 32
    panel = tl.program_id(0).to(INT) // WORDS
    word = tl.program_id(0) % WORDS
    lane = tl.arange(0, PANEL)
    slot = panel * PANEL + lane  # [PANEL]
    live = slot < N
    i = tl.load(sorted_ptr + slot, mask=live, other=0).to(INT)
    mask = tl.load(masks_ptr + word * N.to(tl.int64) + i, mask=live, other=0)
    if word == 0:
        row = _row_of(order_ptr, i, live)
        tl.store(rows_ptr + slot, tl.where(live, row, -1).to(tl.int32))
    bit = tl.arange(0, 32)[:, None]
    there = ((mask[None, :] >> bit) & 1) != 0  # [32, PANEL]
    k = word * 32 + bit
    source = tl.load(table_ptr + (k * N.to(INT) + i[None, :]), mask=there, other=-1)
    needed = tl.max(there.to(tl.int32), axis=1, keep_dims=True) != 0
    at = (panel * K + k) * PANEL + lane[None, :]
    tl.store(lists_ptr + at, source, mask=needed & (k < K))
    for half in tl.static_range(2):
        here = (there & (lane // HALF == half)[None, :]).to(tl.int32)
        bits = tl.sum(tl.max(here, axis=1, keep_dims=True) << bit)
        tl.store(halves_ptr + (2 * panel + half) * WORDS + word, bits)


@triton.jit
def _offsets_of(halves_ptr, tile, live, WORDS: tl.constexpr, PARTS: tl.constexpr):
    """How many offsets each tile of PARTS halves needs; −1 where there is no tile."""
    count = tl.zeros(tile.shape, tl.int32)
    for word in tl.static_range(WORDS):
        mask = tl.zeros(tile.shape, tl.int32)
        for part in tl.static_range(PARTS):
            at = (tile * PARTS + part) * WORDS + word
            mask |= tl.load(halves_ptr + at, mask=live, other=0)
        count += _count(mask)
    return tl.where(live, count, -1)


@triton.jit
def _turns(
    halves_ptr, turns_ptr, tiles, needed,
    WORDS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    longer = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, tiles, BLOCK):
        count = _offsets_of(halves_ptr, first + lane, first + lane < tiles, WORDS, PARTS)
        longer += (count > needed).to(tl.int32)
    turn = tl.sum(longer)
    for first in range(0, tiles, BLOCK):
        count = _offsets_of(halves_ptr, first + lane, first + lane < tiles, WORDS, PARTS)
        mine = (count == needed).to(tl.int32)
        tl.store(turns_ptr + turn + tl.cumsum(mine, 0) - mine, first + lane, mask=mine != 0)
        turn += tl.sum(mine)


@triton.jit
def _scan(counts_ptr, starts_ptr, totals_ptr, k, blocks, BLOCK: tl.constexpr):
    total = 0
    for first in range(0, blocks, BLOCK):
        b = first + tl.arange(0, BLOCK)
        count = tl.load(counts_ptr + k * blocks + b, mask=b < blocks, other=0)
        start = total + tl.cumsum(count, 0) - count
        tl.store(starts_ptr + k * blocks + b, start, mask=b < blocks)
        total += tl.sum(count)
    tl.store(totals_ptr + k, total)


@triton.jit(do_not_specialize=["blocks", "panels"])
def tally_kernel(
    counts_ptr, starts_ptr, totals_ptr, halves_ptr, turns_ptr, blocks, panels,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """starts[k,b]: the pairs of offset k in earlier blocks; totals[k], in all.

    turns: tiles of 64, then of 128 rows, by how many offsets they need, most first.  A program
    owns an offset; of those behind, such a number of one size of tile.
    """
    WORDS: tl.constexpr = (K + 31) // 32
    pid = tl.program_id(0)
    needed = pid - K
    if needed < 0:
        _scan(counts_ptr, starts_ptr, totals_ptr, pid, blocks, BLOCK)
    elif needed <= K:
        _turns(halves_ptr, turns_ptr, 2 * panels, needed, WORDS, 1, BLOCK)
    else:
        _turns(halves_ptr, turns_ptr + 2 * panels, panels, needed - K - 1, WORDS, 2, BLOCK)


@triton.jit
def _pairs_before(totals_ptr, k, K: tl.constexpr, OFFSETS: tl.constexpr):
    """Pairs of the offsets below k."""
    other = tl.arange(0, OFFSETS)
    total = tl.load(totals_ptr + other, mask=(other < k) & (other < K), other=0)
    return tl.sum(total.to(tl.int64))


@triton.jit(do_not_specialize=["N", "blocks"])
def pair_kernel(
    table_ptr, masks_ptr, order_ptr, starts_ptr, totals_ptr, in_ptr, out_ptr, N, blocks,
    K: tl.constexpr, OFFSETS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The pairs (in, out), offset after offset, each in canonical order of the output rows.

    A program owns 8 offsets of one block.  Bound: instructions, for each of K N entries.
    """
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    GROUPS: tl.constexpr = (K + 7) // 8
    block = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    i = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    row = _row_of(order_ptr, i, i < N).to(tl.int32)
    mask = tl.load(masks_ptr + group // 4 * N.to(tl.int64) + i, mask=i < N, other=0)
    for j in range(8):
        k = group * 8 + j
        if k < K:
            there = (mask >> k % 32) & 1
            first = _pairs_before(totals_ptr, k, K, OFFSETS).to(INT)
            first += tl.load(starts_ptr + k * blocks + block)
            at = first + tl.cumsum(there, 0) - there
            source = tl.load(table_ptr + (k * N.to(INT) + i), mask=there != 0, other=-1)
            tl.store(in_ptr + at, source, mask=there != 0)
            tl.store(out_ptr + at, row, mask=there != 0)


@triton.jit
def _share_size(totals_ptr, shares, K: tl.constexpr, OFFSETS: tl.constexpr):
    """Pairs of a share, a multiple of UNIT."""
    size = tl.cdiv(tl.cdiv(_pairs_before(totals_ptr, K, K, OFFSETS), shares), UNIT)
    return tl.maximum(size, 1) * UNIT


@triton.jit
def _part_of(share, size, total, OFFSETS: tl.constexpr):
    """At which part of its offset each share begins, in [0, 1]; past the last pair, 2."""
    begin = (share.to(tl.int64) * size)[:, None]  # [shares, 1]
    end = tl.cumsum(total, 0)[None, :]  # [1, OFFSETS]
    inside = (begin < end) & (begin >= end - total[None, :])
    passed = (begin - end + total[None, :]).to(tl.float32)
    part = passed / tl.maximum(total, 1).to(tl.float32)[None, :]
    part = tl.sum(tl.where(inside, part, 0.0), axis=1)
    return tl.where(share * size < tl.sum(total), part, 2.0)


@triton.jit(do_not_specialize=["shares"])
def share_kernel(
    totals_ptr, turns_ptr, shares, K: tl.constexpr, OFFSETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """turns: shares of the pairs by the part of their offset at which they begin.

    Shares that run together then read about the same rows.  A program places BLOCK shares.
    """
    k = tl.arange(0, OFFSETS)
    total = tl.load(totals_ptr + k, mask=k < K, other=0).to(tl.int64)
    size = _share_size(totals_ptr, shares, K, OFFSETS)
    lane = tl.arange(0, BLOCK)
    share = tl.program_id(0) * BLOCK + lane
    part = _part_of(share, size, total, OFFSETS)[:, None]
    turn = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, shares, BLOCK):
        other = first + lane
        before = _part_of(other, size, total, OFFSETS)[None, :]
        ahead = (before < part) | ((before == part) & (other[None, :] < share[:, None]))
        turn += tl.sum((ahead & (other < shares)[None, :]).to(tl.int32), axis=1)
    tl.store(turns_ptr + turn, share, mask=share < shares)


@triton.jit
def _word_of(halves_ptr, tile, word, WORDS: tl.constexpr, PARTS: tl.constexpr):
    """The offsets that a tile of PARTS halves needs, of 32, as the bits of an int64."""
    mask = tl.load(halves_ptr + tile * PARTS * WORDS + word)
    if PARTS == 2:
        mask |= tl.load(halves_ptr + (tile * PARTS + 1) * WORDS + word)
    return mask.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _tile_of(turns_ptr, turn):
    if turns_ptr is None:
        return turn
    else:
        return tl.load(turns_ptr + turn)


@triton.jit
def _activated(y, ACTIVATION: tl.constexpr):
    """act(y); a NaN stays one."""
    if ACTIVATION == "relu":
        y = tl.where(y < 0, 0.0, y)
    elif ACTIVATION == "silu":
        e = tl.exp(-tl.abs(y))  # no overflow, whatever the sign
        y = y * (tl.where(y < 0, e, 1.0) / (1.0 + e))
    elif ACTIVATION == "gelu":
        y = y * (0.5 + 0.5 * tl.erf(y * 0.7071067811865476))
    return y


@triton.jit
def _finish(
    acc, y_ptr, scale_ptr, shift_ptr, residual_ptr, rows_ptr, tile, n, last, stride_yr,
    ACTIVATION: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """y = act(acc scale + shift + residual) of a tile's rows: all before the one rounding."""
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + n, mask=n < last, other=0.0).to(acc.dtype)[None, :]
    if shift_ptr is not None:
        acc += tl.load(shift_ptr + n, mask=n < last, other=0.0).to(acc.dtype)[None, :]
    row = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    at = tl.maximum(row, 0).to(INT)[:, None] * stride_yr + n[None, :]
    mask = (row >= 0)[:, None] & (n < last)[None, :]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + at, mask=mask, other=0.0).to(acc.dtype)
    acc = _activated(acc, ACTIVATION)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def convolve_kernel(
    x_ptr, w_ptr, y_ptr, scale_ptr, shift_ptr, residual_ptr,
    lists_ptr, halves_ptr, rows_ptr, turns_ptr,
    C, D, groups, stride_xr, stride_wk, stride_wc, stride_wd,
    K: tl.constexpr, FLIP: tl.constexpr, WIDE: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[o] = Σ_k x[sources[k,o]] w[k] (FLIP: w[K−1−k]), each group C channels to D.

    A program owns BLOCK_M sorted rows and BLOCK_N columns, and walks (offset that a row needs,
    block of channels).  The rows to read come a step ahead in registers: x then waits for no other
    load of its step, and the pipeline holds num_stages blocks of x and of w.
    Floor: 2 L C D flops, or x and y once.  Bound: tensor cores from C = 128 on, at fewer channels
    L2, where a row of x is read for each of its pairs.
    """
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    WORDS: tl.constexpr = (K + 31) // 32
    PARTS: tl.constexpr = BLOCK_M // HALF
    pid = tl.program_id(0)
    num_n = tl.cdiv(D, BLOCK_N)
    group = pid // num_n % groups
    tile = _tile_of(turns_ptr, pid // (num_n * groups)).to(INT)
    n = group * D + pid % num_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    last = (group + 1) * D
    c = tl.arange(0, BLOCK_K)
    lane = tile % (PANEL // BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    list_ptr = lists_ptr + tile // (PANEL // BLOCK_M) * K * PANEL + lane  # [BLOCK_M]
    x_ptr += group * C
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for word in tl.static_range(WORDS):
        rest = _word_of(halves_ptr, tile, word, WORDS, PARTS)
        first_ptr = list_ptr + word * 32 * PANEL
        k = _lowest(rest)
        row = tl.load(first_ptr + k * PANEL)
        chunk = 0
        for _ in range(_count(rest.to(tl.int32)) * tl.cdiv(C, BLOCK_K)):
            offset = word * 32 + k
            if FLIP:
                offset = K - 1 - offset
            ch = chunk * BLOCK_K + c
            x = x_ptr + tl.maximum(row, 0).to(INT)[:, None] * stride_xr + ch[None, :]
            x = tl.load(x, mask=(row >= 0)[:, None] & (ch < C)[None, :], other=0.0)
            w = w_ptr + offset.to(INT) * stride_wk
            w += ch[:, None] * stride_wc + n[None, :] * stride_wd
            w = tl.load(w, mask=(ch < C)[:, None] & (n < last)[None, :], other=0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION, out_dtype=ACC)
            ends = (chunk + 1) * BLOCK_K >= C
            rest = tl.where(ends, rest & (rest - 1), rest)
            chunk = tl.where(ends, 0, chunk + 1)
            k = _lowest(rest)
            row = tl.load(first_ptr + k * PANEL)
    _finish(
        acc, y_ptr, scale_ptr, shift_ptr, residual_ptr, rows_ptr, tile, n, last, groups * D,
        ACTIVATION, WIDE, BLOCK_M,
    )  # fmt: skip


@triton.jit
def fold_kernel(
    x_ptr, w_ptr, y_ptr, scale_ptr, shift_ptr, residual_ptr,
    lists_ptr, halves_ptr, rows_ptr, turns_ptr,
    C, D, groups, stride_xr, stride_wk, stride_wc, stride_wd,
    K: tl.constexpr, FLIP: tl.constexpr, WIDE: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What `convolve_kernel` computes for C <= WIDTH: BLOCK_K / WIDTH offsets in one dot.

    Bound: writing y, and the latency of reading short rows.
    """
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    WORDS: tl.constexpr = (K + 31) // 32
    PARTS: tl.constexpr = BLOCK_M // HALF
    pid = tl.program_id(0)
    num_n = tl.cdiv(D, BLOCK_N)
    group = pid // num_n % groups
    tile = _tile_of(turns_ptr, pid // (num_n * groups)).to(INT)
    n = group * D + pid % num_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    last = (group + 1) * D
    lane = tile % (PANEL // BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    list_ptr = lists_ptr + (tile // (PANEL // BLOCK_M) * K * PANEL + lane)[:, None]
    c = tl.arange(0, BLOCK_K) % WIDTH
    x_ptr += group * C + c[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for first in range(0, K, BLOCK_K // WIDTH):
        k = first + tl.arange(0, BLOCK_K) // WIDTH  # [BLOCK_K]
        mask = tl.load(halves_ptr + tile * PARTS * WORDS + k // 32, mask=k < K, other=0)
        if PARTS == 2:
            at = (tile * PARTS + 1) * WORDS + k // 32
            mask |= tl.load(halves_ptr + at, mask=k < K, other=0)
        needed = ((mask >> k % 32) & 1) != 0
        row = tl.load(list_ptr + k[None, :] * PANEL, mask=needed[None, :], other=-1)
        x = x_ptr + tl.maximum(row, 0).to(INT) * stride_xr  # [BLOCK_M, BLOCK_K]
        x = tl.load(x, mask=(row >= 0) & (c < C)[None, :], other=0.0)
        offset = K - 1 - k if FLIP else k
        w = w_ptr + offset.to(INT)[:, None] * stride_wk
        w += c[:, None] * stride_wc + n[None, :] * stride_wd
        w = tl.load(w, mask=(needed & (c < C))[:, None] & (n < last)[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION, out_dtype=ACC)
    _finish(
        acc, y_ptr, scale_ptr, shift_ptr, residual_ptr, rows_ptr, tile, n, last, groups * D,
        ACTIVATION, WIDE, BLOCK_M,
    )  # fmt: skip


@triton.jit
def depthwise_kernel(
    x_ptr, w_ptr, y_ptr, scale_ptr, shift_ptr, residual_ptr,
    lists_ptr, halves_ptr, rows_ptr, turns_ptr,
    D, channels, stride_xr, stride_wk, stride_wd,
    K: tl.constexpr, FLIP: tl.constexpr, WIDE: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[o,n] = Σ_k x[sources[k,o], n/D] w[k,n]: groups of one channel, to D of all `channels`.

    Bound: L2, where a row of x is read for each of its pairs.
    """
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    WORDS: tl.constexpr = (K + 31) // 32
    num_n = tl.cdiv(channels, BLOCK_N)
    tile = _tile_of(turns_ptr, tl.program_id(0) // num_n).to(INT)
    n = tl.program_id(0) % num_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    lane = tile % (PANEL // BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    list_ptr = lists_ptr + tile // (PANEL // BLOCK_M) * K * PANEL + lane  # [BLOCK_M]
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for word in tl.static_range(WORDS):
        rest = _word_of(halves_ptr, tile, word, WORDS, BLOCK_M // HALF)
        for _ in range(_count(rest.to(tl.int32))):
            k = word * 32 + _lowest(rest)
            rest &= rest - 1
            row = tl.load(list_ptr + k * PANEL)
            x = x_ptr + tl.maximum(row, 0).to(INT)[:, None] * stride_xr + (n // D)[None, :]
            x = tl.load(x, mask=(row >= 0)[:, None] & (n < channels)[None, :], other=0.0)
            if FLIP:
                k = K - 1 - k
            w = tl.load(w_ptr + k.to(INT) * stride_wk + n * stride_wd, mask=n < channels, other=0.0)
            acc += x.to(ACC) * w.to(ACC)[None, :]
    _finish(
        acc, y_ptr, scale_ptr, shift_ptr, residual_ptr, rows_ptr, tile, n, channels, channels,
        ACTIVATION, WIDE, BLOCK_M,
    )  # fmt: skip


@triton.jit
def _share(
    totals_ptr, turns_ptr, turn, shares, K: tl.constexpr, OFFSETS: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """(number, begin, end, first offset, last offset) of the share whose turn it is.

    WHOLE: a share is one offset, and its number 0, since the offset is added to it.
    """
    if WHOLE:
        begin = _pairs_before(totals_ptr, turn, K, OFFSETS)
        return 0, begin, begin + tl.load(totals_ptr + turn), turn, turn
    else:
        share = tl.load(turns_ptr + turn)
        size = _share_size(totals_ptr, shares, K, OFFSETS)
        k = tl.arange(0, OFFSETS)
        total = tl.load(totals_ptr + k, mask=k < K, other=0).to(tl.int64)
        begin = tl.minimum(share * size, tl.sum(total))
        end = tl.minimum(begin + size, tl.sum(total))
        ends = tl.cumsum(total, 0)
        first = tl.sum((ends <= begin).to(tl.int32))
        return share, begin, end, first, tl.sum((ends < end).to(tl.int32))


@triton.jit(do_not_specialize=["shares"])
def weight_gradient_kernel(
    x_ptr, g_ptr, z_ptr, in_ptr, out_ptr, totals_ptr, turns_ptr,
    shares, C, D, groups, stride_xr, stride_gr,
    K: tl.constexpr, OFFSETS: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """z[s + k] = Σ x[in]ᵀ g[out] over the pairs of offset k in share s; WHOLE: z[k], over all.

    All pairs, offset after offset, are cut into equal shares, so that programs end together.  A
    program owns the tile [BLOCK_C, BLOCK_D] of a share and stores a sum for each offset that it
    meets; s + k is another number for each.  Rows come a step ahead, as in `convolve_kernel`.
    Floor: 2 L C D flops, or x and g once.  Bound: tensor cores from C = 256 on, else memory: rows
    come from L2 as far as shares that run together read the same.
    """
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    pid = tl.program_id(0)
    num_c, num_d = tl.cdiv(C, BLOCK_C), tl.cdiv(D, BLOCK_D)
    turn = pid // (num_c * num_d * groups)
    group = pid // (num_c * num_d) % groups
    c = pid // num_d % num_c * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    d = pid % num_d * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    number, begin, end, first, last = _share(totals_ptr, turns_ptr, turn, shares, K, OFFSETS, WHOLE)
    x_ptr += group * C + c[None, :]
    g_ptr += group * D + d[None, :]
    lane = tl.arange(0, UNIT)
    for k in range(first, last + 1):
        low = _pairs_before(totals_ptr, k, K, OFFSETS)
        high = tl.minimum(end, low + tl.load(totals_ptr + k))
        low = tl.maximum(begin, low)
        left = (high - low).to(tl.int32)
        i = tl.load(in_ptr + low + lane, mask=lane < left, other=-1)
        o = tl.load(out_ptr + low + lane, mask=lane < left, other=-1)
        acc = tl.zeros((BLOCK_C, BLOCK_D), ACC)
        for step in range(0, left, UNIT):
            x = x_ptr + tl.maximum(i, 0).to(INT)[:, None] * stride_xr
            x = tl.load(x, mask=(i >= 0)[:, None] & (c < C)[None, :], other=0.0)
            g = g_ptr + tl.maximum(o, 0).to(INT)[:, None] * stride_gr
            g = tl.load(g, mask=(o >= 0)[:, None] & (d < D)[None, :], other=0.0)
            acc = tl.dot(tl.trans(x), g, acc, input_precision=PRECISION, out_dtype=ACC)
            following = step + UNIT + lane
            i = tl.load(in_ptr + low + following, mask=following < left, other=-1)
            o = tl.load(out_ptr + low + following, mask=following < left, other=-1)
        slot = (number + k).to(tl.int64)
        z = z_ptr + (slot * C + c[:, None]) * (groups * D) + group * D + d[None, :]
        tl.store(z, acc.to(z_ptr.dtype.element_ty), mask=(c < C)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["shares"])
def depthwise_gradient_kernel(
    x_ptr, g_ptr, z_ptr, in_ptr, out_ptr, totals_ptr, turns_ptr,
    shares, D, channels, stride_xr, stride_gr,
    K: tl.constexpr, OFFSETS: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What `weight_gradient_kernel` computes for groups of one channel, to D of all `channels`."""
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    num_n = tl.cdiv(channels, BLOCK_N)
    turn = tl.program_id(0) // num_n
    n = tl.program_id(0) % num_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    number, begin, end, first, last = _share(totals_ptr, turns_ptr, turn, shares, K, OFFSETS, WHOLE)
    lane = tl.arange(0, UNIT)
    for k in range(first, last + 1):
        low = _pairs_before(totals_ptr, k, K, OFFSETS)
        high = tl.minimum(end, low + tl.load(totals_ptr + k))
        low = tl.maximum(begin, low)
        left = (high - low).to(tl.int32)
        acc = tl.zeros((UNIT, BLOCK_N), ACC)
        for step in range(0, left, UNIT):
            live = step + lane < left
            i = tl.load(in_ptr + low + step + lane, mask=live, other=0)
            o = tl.load(out_ptr + low + step + lane, mask=live, other=0)
            mask = live[:, None] & (n < channels)[None, :]
            x = x_ptr + i.to(INT)[:, None] * stride_xr + (n // D)[None, :]
            x = tl.load(x, mask=mask, other=0.0).to(ACC)
            g = g_ptr + o.to(INT)[:, None] * stride_gr + n[None, :]
            acc += x * tl.load(g, mask=mask, other=0.0).to(ACC)
        z = z_ptr + (number + k).to(tl.int64) * channels + n
        tl.store(z, tl.sum(acc, axis=0).to(z_ptr.dtype.element_ty), mask=n < channels)


@triton.jit(do_not_specialize=["shares"])
def reduce_kernel(
    z_ptr, dw_ptr, totals_ptr, shares, size,
    K: tl.constexpr, OFFSETS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dw[k] = Σ_s z[s + k] over the shares that meet offset k, in an order that is fixed."""
    num = tl.cdiv(size, BLOCK)
    k = tl.program_id(0) // num
    e = (tl.program_id(0) % num * BLOCK + tl.arange(0, BLOCK))[None, :]  # [1, BLOCK]
    step = _share_size(totals_ptr, shares, K, OFFSETS)
    low = _pairs_before(totals_ptr, k, K, OFFSETS)
    first = low // step
    last = first + tl.cdiv(low - first * step + tl.load(totals_ptr + k), step)
    last = tl.where(tl.load(totals_ptr + k) > 0, last, first).to(tl.int32)
    acc = tl.zeros((BLOCK_S, BLOCK), z_ptr.dtype.element_ty)
    for share in range(first.to(tl.int32), last, BLOCK_S):
        number = (share + tl.arange(0, BLOCK_S)).to(tl.int64)[:, None]
        z = tl.load(z_ptr + (number + k) * size + e, mask=(number < last) & (e < size), other=0.0)
        acc += z
    dw = tl.sum(acc, axis=0, keep_dims=True).to(dw_ptr.dtype.element_ty)
    tl.store(dw_ptr + k.to(tl.int64) * size + e, dw, mask=e < size)
