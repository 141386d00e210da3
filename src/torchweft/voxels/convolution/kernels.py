"""Triton kernels of sparse convolution, over the tiles and pairs of `maps.gpu.tiles`.

    y[o] = Σ_k x[sources[k,o]] w[k]          dw[k] = Σ_o x[sources[k,o]]ᵀ g[o]

Rows are counted in int64 where K N or N C may pass 2^31 (WIDE).
"""
# Parameters are in groups:
# fmt: off

from __future__ import annotations

import triton
import triton.language as tl

from torchweft.voxels.maps.gpu.tile_kernels import (
    HALF,
    PANEL,
    UNIT,
    count_bits,
    lowest_bit,
    pairs_before,
    share_size,
    units_before,
)

WIDEST_WRITTEN = tl.constexpr(64)
"""Tiles of more columns are written in two halves."""


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
def _halves(a):
    """The first half of the columns, of [BLOCK_N] or [BLOCK_M, BLOCK_N], and the second."""
    if len(a.shape) == 1:
        return tl.split(a.reshape(2, a.shape[0] // 2).permute(1, 0))
    else:
        return tl.split(a.reshape(a.shape[0], 2, a.shape[1] // 2).permute(0, 2, 1))


@triton.jit
def _write(
    acc, scale, shift, y_ptr, residual_ptr, row, first, last, stride_yr, ACTIVATION: tl.constexpr
):
    """y = act(acc scale + shift + residual)."""
    n = first + tl.arange(0, acc.shape[1])
    at = row[:, None] * stride_yr + n[None, :]
    mask = (row >= 0)[:, None] & (n < last)[None, :]
    if scale is not None:
        acc *= scale[None, :]
    if shift is not None:
        acc += shift[None, :]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + at, mask=mask, other=0.0).to(acc.dtype)
    acc = _activated(acc, ACTIVATION)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _finish(
    acc, y_ptr, scale_ptr, shift_ptr, residual_ptr, mean_ptr, var_ptr, rows_ptr,
    tile, first, last, stride_yr,
    ACTIVATION: tl.constexpr, EPS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """y = act((acc − mean) / √(var + EPS) scale + shift + residual), before the one rounding.

    Wide tiles are written in halves: a residual takes as many registers as the sums.
    """
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    ACC: tl.constexpr = acc.dtype
    n = first + tl.arange(0, acc.shape[1])
    scale, shift = None, None
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + n, mask=n < last, other=0.0).to(ACC)
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + n, mask=n < last, other=0.0).to(ACC)
    if var_ptr is not None:
        inverse = tl.rsqrt(tl.load(var_ptr + n, mask=n < last, other=1.0).to(ACC) + EPS)
        scale = inverse if scale is None else scale * inverse
        moved = tl.load(mean_ptr + n, mask=n < last, other=0.0).to(ACC) * scale
        shift = -moved if shift is None else shift - moved
    row = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(INT)
    if acc.shape[1] > WIDEST_WRITTEN:
        left, right = _halves(acc)
        left_scale, right_scale, left_shift, right_shift = None, None, None, None
        if scale is not None:
            left_scale, right_scale = _halves(scale)
        if shift is not None:
            left_shift, right_shift = _halves(shift)
        _write(
            left, left_scale, left_shift, y_ptr, residual_ptr,
            row, first, last, stride_yr, ACTIVATION,
        )
        first += acc.shape[1] // 2
        _write(
            right, right_scale, right_shift, y_ptr, residual_ptr,
            row, first, last, stride_yr, ACTIVATION,
        )
    else:
        _write(acc, scale, shift, y_ptr, residual_ptr, row, first, last, stride_yr, ACTIVATION)


@triton.jit
def convolve_kernel(
    x_ptr, w_ptr, y_ptr, scale_ptr, shift_ptr, residual_ptr, mean_ptr, var_ptr,
    lists_ptr, halves_ptr, rows_ptr, turns_ptr,
    C, D, groups, stride_xr, stride_wk, stride_wc, stride_wd,
    K: tl.constexpr, FLIP: tl.constexpr, WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr, EPS: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_C: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """y[o] = Σ_k x[sources[k,o]] w[k] (FLIP: w[K−1−k]), each group C channels to D.

    A program owns BLOCK_M sorted rows and BLOCK_N columns, and walks (offset that a row needs,
    block of channels).  The rows to read are prefetched by one step in registers: x then waits for
    no other load of its step, and the pipeline holds num_stages blocks of x and of w.  Where blocks
    divide the channels (EVEN_C, EVEN_D), masks of channels are left out.
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
    first = group * D + pid % num_n * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    last = (group + 1) * D
    c = tl.arange(0, BLOCK_K)
    lane = tile % (PANEL // BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    list_ptr = lists_ptr + tile // (PANEL // BLOCK_M) * K * PANEL + lane  # [BLOCK_M]
    x_ptr += group * C + c
    w_ptr += c[:, None] * stride_wc + n[None, :] * stride_wd
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for word in range(WORDS):
        rest = _word_of(halves_ptr, tile, word, WORDS, PARTS)
        first_ptr = list_ptr + word * 32 * PANEL
        k = lowest_bit(rest)
        row = tl.load(first_ptr + k * PANEL)
        ch = 0
        for _ in range(count_bits(rest.to(tl.int32)) * tl.cdiv(C, BLOCK_K)):
            offset = word * 32 + k
            if FLIP:
                offset = K - 1 - offset
            # addresses before masks: in the other order `row` changes its layout twice
            x = x_ptr[None, :] + (row.to(INT)[:, None] * stride_xr + ch)
            x_mask = (row >= 0)[:, None]
            if not EVEN_C:
                x_mask &= (ch + c < C)[None, :]
            x = tl.load(x, mask=x_mask, other=0.0)
            w = w_ptr + (offset.to(INT) * stride_wk + ch * stride_wc)
            if EVEN_C and EVEN_D:
                w = tl.load(w)
            else:
                w = tl.load(w, mask=(ch + c < C)[:, None] & (n < last)[None, :], other=0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION, out_dtype=ACC)
            ends = ch + BLOCK_K >= C
            rest = tl.where(ends, rest & (rest - 1), rest)
            ch = tl.where(ends, 0, ch + BLOCK_K)
            k = lowest_bit(rest)
            row = tl.load(first_ptr + k * PANEL)
    _finish(
        acc, y_ptr, scale_ptr, shift_ptr, residual_ptr, mean_ptr, var_ptr, rows_ptr,
        tile, first, last, groups * D, ACTIVATION, EPS, WIDE, BLOCK_M,
    )


@triton.jit
def fold_kernel(
    x_ptr, w_ptr, y_ptr, scale_ptr, shift_ptr, residual_ptr, mean_ptr, var_ptr,
    lists_ptr, halves_ptr, rows_ptr, turns_ptr,
    C, D, groups, stride_xr, stride_wk, stride_wc, stride_wd,
    K: tl.constexpr, FLIP: tl.constexpr, WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr, EPS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """As `convolve_kernel`, for C <= WIDTH: BLOCK_K / WIDTH offsets in one dot.

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
    first = group * D + pid % num_n * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    last = (group + 1) * D
    lane = tile % (PANEL // BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    list_ptr = lists_ptr + (tile // (PANEL // BLOCK_M) * K * PANEL + lane)[:, None]
    c = tl.arange(0, BLOCK_K) % WIDTH
    x_ptr += group * C + c[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for lowest in range(0, K, BLOCK_K // WIDTH):
        k = lowest + tl.arange(0, BLOCK_K) // WIDTH  # [BLOCK_K]
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
        acc, y_ptr, scale_ptr, shift_ptr, residual_ptr, mean_ptr, var_ptr, rows_ptr,
        tile, first, last, groups * D, ACTIVATION, EPS, WIDE, BLOCK_M,
    )


@triton.jit
def depthwise_kernel(
    x_ptr, w_ptr, y_ptr, scale_ptr, shift_ptr, residual_ptr, mean_ptr, var_ptr,
    lists_ptr, halves_ptr, rows_ptr, turns_ptr,
    D, channels, stride_xr, stride_wk, stride_wd,
    K: tl.constexpr, FLIP: tl.constexpr, WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr, EPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """y[o,n] = Σ_k x[sources[k,o], n/D] w[k,n]: groups of one channel, to D of all `channels`.

    Bound: L2, where a row of x is read for each of its pairs.
    """
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    WORDS: tl.constexpr = (K + 31) // 32
    num_n = tl.cdiv(channels, BLOCK_N)
    tile = _tile_of(turns_ptr, tl.program_id(0) // num_n).to(INT)
    first = tl.program_id(0) % num_n * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    lane = tile % (PANEL // BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    list_ptr = lists_ptr + tile // (PANEL // BLOCK_M) * K * PANEL + lane  # [BLOCK_M]
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for word in range(WORDS):
        rest = _word_of(halves_ptr, tile, word, WORDS, BLOCK_M // HALF)
        for _ in range(count_bits(rest.to(tl.int32))):
            k = word * 32 + lowest_bit(rest)
            rest &= rest - 1
            row = tl.load(list_ptr + k * PANEL)
            x = x_ptr + tl.maximum(row, 0).to(INT)[:, None] * stride_xr + (n // D)[None, :]
            x = tl.load(x, mask=(row >= 0)[:, None] & (n < channels)[None, :], other=0.0)
            if FLIP:
                k = K - 1 - k
            w = tl.load(w_ptr + k.to(INT) * stride_wk + n * stride_wd, mask=n < channels, other=0.0)
            acc += x.to(ACC) * w.to(ACC)[None, :]
    _finish(
        acc, y_ptr, scale_ptr, shift_ptr, residual_ptr, mean_ptr, var_ptr, rows_ptr,
        tile, first, channels, channels, ACTIVATION, EPS, WIDE, BLOCK_M,
    )


@triton.jit
def _share(totals_ptr, number, shares, K: tl.constexpr, OFFSETS: tl.constexpr, WHOLE: tl.constexpr):
    """(first offset, last offset, units) of a share of all units of pairs; WHOLE: an offset."""
    if WHOLE:
        return number, number, 0
    else:
        size = share_size(totals_ptr, shares, K, OFFSETS)
        k = tl.arange(0, OFFSETS)
        ends = tl.cumsum(tl.cdiv(tl.load(totals_ptr + k, mask=k < K, other=0), UNIT), 0)
        first = tl.sum((ends <= number * size).to(tl.int32))
        last = tl.sum((ends < (number + 1) * size).to(tl.int32))
        return first, tl.minimum(last, K - 1), size


@triton.jit
def _units_of(
    totals_ptr, k, units, number, size, K: tl.constexpr, OFFSETS: tl.constexpr, WHOLE: tl.constexpr
):
    """Which of the `units` units of offset k's pairs a share sums: (first, step, number).

    Shares that lie inside an offset take its units in turn: programs that run at the same time then
    read about the same rows, from the L2 cache.
    """
    if WHOLE:
        return 0, 1, units
    else:
        low = units_before(totals_ptr, k, K, OFFSETS)
        first = tl.maximum(number * size - low, 0)
        count = tl.minimum((number + 1) * size - low, units) - first
        before = tl.cdiv(low, size) * size - low  # of the share that begins in an earlier offset
        inside = count == size
        step = tl.where(inside, (units - before) // size, 1)
        return tl.where(inside, before + (first - before) // size, first), step, count


@triton.jit
def _pairs_of(
    in_ptr, out_ptr, totals_ptr, k,
    K: tl.constexpr, OFFSETS: tl.constexpr, MIRRORED: tl.constexpr,
):
    """Pointers to the inputs and the outputs of offset k's pairs.

    MIRRORED: the offsets up to the centre are listed; those above have the same pairs swapped.
    """
    if MIRRORED:
        turned = k > K // 2
        low = pairs_before(totals_ptr, tl.where(turned, K - 1 - k, k), K, OFFSETS)
        i_ptr = tl.where(turned, out_ptr, in_ptr) + low
        return i_ptr, tl.where(turned, in_ptr, out_ptr) + low
    else:
        low = pairs_before(totals_ptr, k, K, OFFSETS)
        return in_ptr + low, out_ptr + low


@triton.jit(do_not_specialize=["shares"])
def weight_gradient_kernel(
    x_ptr, g_ptr, z_ptr, in_ptr, out_ptr, totals_ptr,
    shares, C, D, groups, stride_xr, stride_gr,
    K: tl.constexpr, OFFSETS: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
    MIRRORED: tl.constexpr, PRECISION: tl.constexpr, EVEN_C: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """z[s + k] = Σ x[in]ᵀ g[out] over the pairs of offset k in share s; WHOLE: z[k], over all.

    All units of pairs, offset by offset, are divided into equal shares, so that programs take the
    same time.  A program owns the tile [BLOCK_C, BLOCK_D] of a share and stores a sum for each of
    its offsets; s + k differs for all of these.  Rows are prefetched by one step, as in
    `convolve_kernel`.
    Floor: 2 L C D flops, or x and g once.  Bound: tensor cores from C = 256 on, else memory: rows
    come from L2 where programs that run at the same time read the same rows.
    """
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    pid = tl.program_id(0)
    num_c, num_d = tl.cdiv(C, BLOCK_C), tl.cdiv(D, BLOCK_D)
    number = pid // (num_c * num_d * groups)
    group = pid // (num_c * num_d) % groups
    c = pid // num_d % num_c * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    d = pid % num_d * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    first, last, size = _share(totals_ptr, number, shares, K, OFFSETS, WHOLE)
    x_ptr += group * C + c[None, :]
    g_ptr += group * D + d[None, :]
    lane = tl.arange(0, UNIT)
    for k in range(first, last + 1):
        i_ptr, o_ptr = _pairs_of(in_ptr, out_ptr, totals_ptr, k, K, OFFSETS, MIRRORED)
        count = tl.load(totals_ptr + k)
        unit, step, units = _units_of(
            totals_ptr, k, tl.cdiv(count, UNIT), number, size, K, OFFSETS, WHOLE
        )
        pair = unit * UNIT + lane
        i = tl.load(i_ptr + pair, mask=pair < count, other=-1).to(tl.int32)
        o = tl.load(o_ptr + pair, mask=pair < count, other=-1).to(tl.int32)
        acc = tl.zeros((BLOCK_C, BLOCK_D), ACC)
        for _ in range(units):
            x_mask, g_mask = (i >= 0)[:, None], (o >= 0)[:, None]
            if not EVEN_C:
                x_mask &= (c < C)[None, :]
            if not EVEN_D:
                g_mask &= (d < D)[None, :]
            x = tl.load(x_ptr + i.to(INT)[:, None] * stride_xr, mask=x_mask, other=0.0)
            g = tl.load(g_ptr + o.to(INT)[:, None] * stride_gr, mask=g_mask, other=0.0)
            acc = tl.dot(tl.trans(x), g, acc, input_precision=PRECISION, out_dtype=ACC)
            pair += step * UNIT
            i = tl.load(i_ptr + pair, mask=pair < count, other=-1).to(tl.int32)
            o = tl.load(o_ptr + pair, mask=pair < count, other=-1).to(tl.int32)
        slot = (k if WHOLE else number + k).to(tl.int64)
        z = z_ptr + (slot * C + c[:, None]) * (groups * D) + group * D + d[None, :]
        tl.store(z, acc.to(z_ptr.dtype.element_ty), mask=(c < C)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["shares"])
def depthwise_gradient_kernel(
    x_ptr, g_ptr, z_ptr, in_ptr, out_ptr, totals_ptr,
    shares, D, channels, stride_xr, stride_gr,
    K: tl.constexpr, OFFSETS: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
    MIRRORED: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """As `weight_gradient_kernel`, for groups of one channel, to D of all `channels`."""
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    num_n = tl.cdiv(channels, BLOCK_N)
    number = tl.program_id(0) // num_n
    n = tl.program_id(0) % num_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    first, last, size = _share(totals_ptr, number, shares, K, OFFSETS, WHOLE)
    lane = tl.arange(0, UNIT)
    for k in range(first, last + 1):
        i_ptr, o_ptr = _pairs_of(in_ptr, out_ptr, totals_ptr, k, K, OFFSETS, MIRRORED)
        count = tl.load(totals_ptr + k)
        unit, step, units = _units_of(
            totals_ptr, k, tl.cdiv(count, UNIT), number, size, K, OFFSETS, WHOLE
        )
        acc = tl.zeros((UNIT, BLOCK_N), ACC)
        for j in range(units):
            pair = (unit + j * step) * UNIT + lane
            live = pair < count
            i = tl.load(i_ptr + pair, mask=live, other=0).to(tl.int32)
            o = tl.load(o_ptr + pair, mask=live, other=0).to(tl.int32)
            mask = live[:, None] & (n < channels)[None, :]
            x = x_ptr + i.to(INT)[:, None] * stride_xr + (n // D)[None, :]
            x = tl.load(x, mask=mask, other=0.0).to(ACC)
            g = g_ptr + o.to(INT)[:, None] * stride_gr + n[None, :]
            acc += x * tl.load(g, mask=mask, other=0.0).to(ACC)
        z = z_ptr + (k if WHOLE else number + k).to(tl.int64) * channels + n
        tl.store(z, tl.sum(acc, axis=0).to(z_ptr.dtype.element_ty), mask=n < channels)


@triton.jit(do_not_specialize=["shares"])
def reduce_kernel(
    z_ptr, dw_ptr, totals_ptr, shares, size,
    K: tl.constexpr, OFFSETS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):
    """dw[k] = Σ_s z[s + k] over the shares with pairs of offset k, in a fixed order."""
    num = tl.cdiv(size, BLOCK)
    k = tl.program_id(0) // num
    e = (tl.program_id(0) % num * BLOCK + tl.arange(0, BLOCK))[None, :]  # [1, BLOCK]
    share_units = share_size(totals_ptr, shares, K, OFFSETS)
    low = units_before(totals_ptr, k, K, OFFSETS)
    units = tl.cdiv(tl.load(totals_ptr + k), UNIT)
    begin = low // share_units
    end = tl.where(units > 0, tl.cdiv(low + units, share_units), begin)
    acc = tl.zeros((BLOCK_S, BLOCK), z_ptr.dtype.element_ty)
    for share in range(begin, end, BLOCK_S):
        number = (share + tl.arange(0, BLOCK_S)).to(tl.int64)[:, None]
        z = tl.load(z_ptr + (number + k) * size + e, mask=(number < end) & (e < size), other=0.0)
        acc += z
    dw = tl.sum(acc, axis=0, keep_dims=True).to(dw_ptr.dtype.element_ty)
    tl.store(dw_ptr + k.to(tl.int64) * size + e, dw, mask=e < size)
