"""Triton kernels of the products: one for rows of any product, the others with matrix tiles.

    z[n,m] = Σ_{e ∈ segment m} s[term e] · x[n, index1[e]] ∘ y[n, index2[e]]

A table pointer that is None is the identity.  z is contiguous; x and y have any strides.  Sums
and products are formed in fp32 (fp64 for fp64), in an order that depends on shapes alone.
Everything runs along grid axis 0.  WIDE: offsets may pass 2^31 elements, so they are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "add_product",
    "outer_kernel",
    "rounded_product",
    "rows_kernel",
    "split_kernel",
    "vecmat_batch_kernel",
    "vecmat_group_kernel",
    "vecmat_parts_kernel",
]


@triton.jit
def _row_of(index_ptr, entry, live):
    """The row that each entry names."""
    if index_ptr is None:
        return entry
    else:
        return tl.load(index_ptr + entry, mask=live, other=0).to(entry.dtype)


@triton.jit
def _segment_of(indptr_ptr, m, INT: tl.constexpr):
    """(first entry, number of entries) of segment m; without a table, entry m alone."""
    if indptr_ptr is None:
        return m, 1
    else:
        begin = tl.load(indptr_ptr + m).to(INT)
        return begin, tl.load(indptr_ptr + m + 1).to(INT) - begin


@triton.jit
def _terms(
    x_ptr, y_ptr, first, k, live, C, stride_xc, stride_yk, stride_yc,
    OP: tl.constexpr, ACC: tl.constexpr, K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """x ∘ y of each item, [BLOCK_R, BLOCK_T, BLOCK_C]; x_ptr and y_ptr point to their rows.

    For inner the sum over the channels in a lane is still to come, for vecmat the sum over k.
    """
    c = first + tl.arange(0, BLOCK_C)[None, None, :]  # [1, 1, BLOCK_C]
    mask = live & (c < C)  # [BLOCK_R, BLOCK_T, BLOCK_C]
    if OP == "inner":
        out = tl.zeros(mask.shape, ACC)
        for c0 in range(0, C, BLOCK_C):
            here = live & (c0 + c < C)
            x = tl.load(x_ptr + (c0 + c) * stride_xc, mask=here, other=0.0).to(ACC)
            out += x * tl.load(y_ptr + (c0 + c) * stride_yc, mask=here, other=0.0).to(ACC)
        return out
    elif OP == "vecmat":
        x = tl.load(x_ptr + k * stride_xc, mask=live, other=0.0).to(ACC)
        return x * tl.load(y_ptr + k * stride_yk + c * stride_yc, mask=mask, other=0.0).to(ACC)
    elif OP == "outer" and (K & (K - 1)) == 0 and BLOCK_C >= K:
        # x and y loaded once each: flat, as below, loads of x have a layout of their own
        c1 = first // K + tl.arange(0, BLOCK_C // K)[None, None, :]
        c2 = tl.arange(0, K)[None, None, :]
        x = tl.load(x_ptr + c1 * stride_xc, mask=live & (c1 < C // K), other=0.0).to(ACC)
        y = tl.load(y_ptr + c2 * stride_yc, mask=live, other=0.0).to(ACC)
        return tl.reshape(x[:, :, :, None] * y[:, :, None, :], mask.shape)
    elif OP == "outer":  # the K columns of a result row run fastest: c = c1 K + c2
        x = tl.load(x_ptr + c // K * stride_xc, mask=mask, other=0.0).to(ACC)
        return x * tl.load(y_ptr + c % K * stride_yc, mask=mask, other=0.0).to(ACC)
    else:
        x = tl.load(x_ptr + c * stride_xc, mask=mask, other=0.0).to(ACC)
        if OP == "mul":
            x *= tl.load(y_ptr + c * stride_yc, mask=mask, other=0.0).to(ACC)
        elif OP == "vecsca":
            x *= tl.load(y_ptr, mask=live, other=0.0).to(ACC)
        return x


@triton.jit(do_not_specialize=["N", "B", "M", "part"])
def rows_kernel(
    x_ptr, y_ptr, scale_ptr, z_ptr, indptr_ptr, index1_ptr, index2_ptr, term_ptr,
    N, B, M, part, C,
    stride_xn, stride_xr, stride_xc, stride_yn, stride_yr, stride_yk, stride_yc,
    OP: tl.constexpr, ACCUMULATE: tl.constexpr, ALONG_N: tl.constexpr, WIDE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """z[b,m,c] = Σ_{n ∈ part b} Σ_{e ∈ segment m} s[t] · (x[n,i] ∘ y[n,j])[c], any product.

    "mean" is "scale" over the number of entries.

    A program owns BLOCK_R of the B·M result rows and BLOCK_C channels, and walks the entries of
    each row BLOCK_T at a time.  ALONG_N: its rows are one m for BLOCK_R n, so that indices and
    lengths are uniform; else they are neighbours in memory, each with a segment of its own.
    ACCUMULATE: b is a part of `part` n's and an item is a pair (n, entry); else b is n.  For vecmat
    an item is one of the K rows of an entry's matrix; for outer a result row has K columns.

    Floor: every row that is named read once, z written once.  Bound: memory for mul, vecsca,
    scale, inner (2 flops for 8 bytes), and for outer with few entries; vecmat here is for
    small matrices that few entries share, 2 flops for 4 bytes of matrix.
    """
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    num_c = 1 if OP == "inner" else tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0).to(INT)
    block = pid // num_c
    first = (pid % num_c) * BLOCK_C
    c = first + tl.arange(0, BLOCK_C)[None, None, :]  # [1, 1, BLOCK_C]
    t = tl.arange(0, BLOCK_T)[None, :, None]  # [1, BLOCK_T, 1]
    r = tl.arange(0, BLOCK_R)[:, None, None]  # [BLOCK_R, 1, 1]
    if ALONG_N:
        m = block % M
        b = block // M * BLOCK_R + r
    else:
        m = (block * BLOCK_R + r) % M
        b = (block * BLOCK_R + r) // M
    inside = b < B  # [BLOCK_R, 1, 1]
    begin, length = _segment_of(indptr_ptr, m, INT)
    items = length
    if ACCUMULATE:
        items *= tl.minimum(N - b * part, part)
    if OP == "vecmat":
        items *= K
    most = tl.max(tl.where(inside, items, 0))

    acc = tl.zeros((BLOCK_R, BLOCK_T, BLOCK_C), ACC)
    for q0 in range(0, most, BLOCK_T):
        q = q0 + t
        live = q < items  # [BLOCK_R or 1, BLOCK_T, 1]
        k = 0
        if OP == "vecmat":
            k, q = q % K, q // K
        n, entry = b, begin + q
        if ACCUMULATE:
            turn = tl.maximum(length, 1)
            n, entry = b * part + q // turn, begin + q % turn
        i = _row_of(index1_ptr, entry, live)
        j = _row_of(index2_ptr, entry, live)
        x_row = x_ptr + n * stride_xn + i * stride_xr  # [BLOCK_R, BLOCK_T, 1]
        y_row = y_ptr if y_ptr is None else y_ptr + n * stride_yn + j * stride_yr
        term = _terms(
            x_row, y_row, first, k, live & inside, C, stride_xc, stride_yk, stride_yc,
            OP, ACC, K, BLOCK_C,
        )  # fmt: skip
        if scale_ptr is not None:
            weight = _row_of(term_ptr, entry, live)
            term *= tl.load(scale_ptr + weight, mask=live, other=0.0).to(ACC)
        acc += term

    z = tl.sum(acc, axis=1, keep_dims=True)  # [BLOCK_R, 1, BLOCK_C]
    if OP == "mean":
        count = tl.maximum(items, 1).to(ACC)
        z = tl.div_rn(z, count) if z.dtype == tl.float32 else z / count
    row = b * M + m
    if OP == "inner":
        z = tl.sum(z, axis=2, keep_dims=True)  # [BLOCK_R, 1, 1]
        tl.store(z_ptr + row, z.to(z_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(z_ptr + row * C + c, z.to(z_ptr.dtype.element_ty), mask=inside & (c < C))


@triton.jit
def _split(x):
    """x = high + middle + low in bf16, up to 2⁻²⁶ of x; what is left is 0 where x is infinite."""
    x = x.to(tl.float32)
    high = x.to(tl.bfloat16)
    rest = tl.where(high.to(tl.float32) == x, 0.0, x - high.to(tl.float32))
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _split_tf32(x):
    """x = high + low, high rounded to TF32's 10 bits; low is exact, and 0 where x is infinite."""
    bits = x.to(tl.int32, bitcast=True)
    high = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, tl.where(high == x, 0.0, x - high)


@triton.jit
def _dot_small_parts(x_high, x_middle, x_low, y_high, y_middle, y_low, acc):
    """acc + x @ y − x_high @ y_high of factors in the parts of `_split`, small products first."""
    acc = tl.dot(x_low, y_high, acc)
    acc = tl.dot(x_high, y_low, acc)
    acc = tl.dot(x_middle, y_middle, acc)
    acc = tl.dot(x_middle, y_high, acc)
    return tl.dot(x_high, y_middle, acc)


@triton.jit
def _dot_parts(x_high, x_middle, x_low, y_high, y_middle, y_low, acc):
    """acc + x @ y of factors in the parts of `_split`, the small products first."""
    acc = _dot_small_parts(x_high, x_middle, x_low, y_high, y_middle, y_low, acc)
    return tl.dot(x_high, y_high, acc)


@triton.jit
def rounded_product(x, y):
    """x @ y of fp32 numbers in six parts, as exact as a sum of rounded terms.

    Tensor cores cut a sum toward zero after every 16 products.  One after the other, such products
    have the errors of all, with one sign.  So sums of high parts begin at 0 again after 32
    products, and are added by fma, which rounds; the compiler would move `+` into tl.dot.
    """
    INNER: tl.constexpr = x.shape[1]
    x_high, x_middle, x_low = _split(x)
    y_high, y_middle, y_low = _split(y)
    acc = tl.zeros([x.shape[0], y.shape[1]], tl.float32)
    acc = _dot_small_parts(x_high, x_middle, x_low, y_high, y_middle, y_low, acc)
    k = tl.arange(0, INNER)[None, :] // 32
    for part in tl.static_range(0, INNER, 32):
        own = x_high if INNER <= 32 else tl.where(k == part // 32, x_high, 0.0)
        acc = tl.fma(tl.dot(own, y_high), 1.0, acc)
    return acc


@triton.jit
def add_product(x, y, acc, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x @ y.  Factors of different dtypes are converted to the accumulator's.

    bf16x6 forms products of fp32 numbers from six of their parts and leaves out 2⁻²⁴ of each;
    tf32x3 from three, at the same rate but with less to split, and leaves out 2⁻²¹.  By hand,
    since tl.dot's own form adds each product to an accumulator of its own.
    """
    if x.dtype != y.dtype:
        return add_product(x.to(ACC), y.to(ACC), acc, ACC, PRECISION)
    elif PRECISION == "bf16x6":
        x_high, x_middle, x_low = _split(x)
        y_high, y_middle, y_low = _split(y)
        return _dot_parts(x_high, x_middle, x_low, y_high, y_middle, y_low, acc)
    elif PRECISION == "tf32x3":
        x_high, x_low = _split_tf32(x)
        y_high, y_low = _split_tf32(y)
        acc = tl.dot(x_low, y_high, acc, input_precision="tf32")
        acc = tl.dot(x_high, y_low, acc, input_precision="tf32")
        return tl.dot(x_high, y_high, acc, input_precision="tf32")
    else:
        return tl.dot(x, y, acc, input_precision=PRECISION, out_dtype=ACC)


@triton.jit(do_not_specialize=["R"])
def split_kernel(
    y_ptr, z_ptr, R, K, C, stride_yr, stride_yk, stride_yc, BLOCK: tl.constexpr,
):  # fmt: skip
    """z[p,r,c,k] = part p of y[r,k,c], once instead of in every program that reads y."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    total = R * C * K
    k, c, r = o % K, o // K % C, o // K // C
    y = tl.load(y_ptr + r * stride_yr + k * stride_yk + c * stride_yc, mask=o < total, other=0.0)
    high, middle, low = _split(y)
    tl.store(z_ptr + o, high, mask=o < total)
    tl.store(z_ptr + total + o, middle, mask=o < total)
    tl.store(z_ptr + 2 * total + o, low, mask=o < total)


@triton.jit(do_not_specialize=["N", "M"])
def vecmat_batch_kernel(
    x_ptr, y_ptr, scale_ptr, z_ptr, indptr_ptr, index1_ptr, index2_ptr, term_ptr,
    N, M, K, C,
    stride_xn, stride_xr, stride_xc, stride_yr, stride_yk, stride_yc,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """z[n,m,c] = Σ_e s[t] Σ_k x[n,i,k] y[j,k,c]: matrices shared over n, a GEMM over n.

    A program owns BLOCK_N n's of one m and BLOCK_C columns; it walks the entries of m, and K in
    blocks.
    Floor: x and z once (y stays in L2).  Bound: memory, in 16 bits and in TF32.
    """
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    num_c, num_k = tl.cdiv(C, BLOCK_C), tl.cdiv(K, BLOCK_K)
    pid = tl.program_id(0).to(INT)
    m = pid // num_c % M
    n = pid // num_c // M * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    c = (pid % num_c) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    begin, length = _segment_of(indptr_ptr, m, INT)
    x_n = x_ptr + n[:, None] * stride_xn  # [BLOCK_N, 1]
    y_c = y_ptr + c[None, :] * stride_yc  # [1, BLOCK_C]
    acc = tl.zeros((BLOCK_N, BLOCK_C), ACC)
    for q in range(length * num_k):
        entry = begin + q // num_k
        k = q % num_k * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        i, j = _row_of(index1_ptr, entry, True), _row_of(index2_ptr, entry, True)
        x_mask, y_mask = (n < N)[:, None] & (k < K)[None, :], (k < K)[:, None] & (c < C)[None, :]
        x = tl.load(x_n + i * stride_xr + k[None, :] * stride_xc, mask=x_mask, other=0.0)
        y = y_c + j * stride_yr + k[:, None] * stride_yk
        y = tl.load(y, mask=y_mask, other=0.0)
        sums = acc
        if scale_ptr is not None:
            sums = tl.zeros_like(acc)
        sums = add_product(x, y, sums, ACC, PRECISION)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + _row_of(term_ptr, entry, True)).to(ACC)
            sums = acc + scale * sums
        acc = sums
    z = z_ptr + (n * M + m)[:, None] * C + c[None, :]
    tl.store(z, acc.to(z_ptr.dtype.element_ty), mask=(n < N)[:, None] & (c < C)[None, :])


@triton.jit
def _step_of_x(
    x_ptr, index1_ptr, q, steps, begin, num_k, inside, K, stride_xr, stride_xc,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x at step q, zeros past the last, [BLOCK_N, BLOCK_K]: block q % num_k of entry q // num_k."""
    k = q % num_k * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    i = _row_of(index1_ptr, begin + q // num_k, q < steps)
    mask = inside & (k < K)[None, :] & (q < steps)
    return tl.load(x_ptr + i * stride_xr + k[None, :] * stride_xc, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["N", "M"])
def vecmat_parts_kernel(
    x_ptr, y_ptr, scale_ptr, z_ptr, indptr_ptr, index1_ptr, index2_ptr, term_ptr,
    N, M, K, C,
    stride_xn, stride_xr, stride_xc, stride_yr, stride_yk, stride_yc, stride_part,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """What `vecmat_batch_kernel` computes, in fp32 on tensor cores: y in parts of `split_kernel`.

    x is loaded a step ahead and its parts are carried, so that dots take them from shared memory:
    from registers, in the step that loads them, dots wait for the load and for each other.
    Floor: x and z once.  Bound at K = C = 128: memory, 0.22 ms on an H200 for 9e5 rows, and
    0.18 ms of six products; measured 0.43, what is left is L2, where each program reads y.
    """
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    num_c, num_k = tl.cdiv(C, BLOCK_C), tl.cdiv(K, BLOCK_K)
    pid = tl.program_id(0).to(INT)
    m = pid // num_c % M
    n = pid // num_c // M * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    c = (pid % num_c) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    begin, length = _segment_of(indptr_ptr, m, INT)
    steps = length * num_k
    x_n = x_ptr + n[:, None] * stride_xn  # [BLOCK_N, 1]
    inside = (n < N)[:, None]
    x = _step_of_x(
        x_n, index1_ptr, 0, steps, begin, num_k, inside, K, stride_xr, stride_xc, BLOCK_K
    )
    x_high, x_middle, x_low = _split(x)
    acc = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for q in range(steps):
        x = _step_of_x(
            x_n, index1_ptr, q + 1, steps, begin, num_k, inside, K, stride_xr, stride_xc, BLOCK_K
        )
        entry = begin + q // num_k
        k = q % num_k * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        y_row = y_ptr + _row_of(index2_ptr, entry, True) * stride_yr
        y = y_row + k[:, None] * stride_yk + c[None, :] * stride_yc  # [BLOCK_K, BLOCK_C]
        mask = (k < K)[:, None] & (c < C)[None, :]
        y_high = tl.load(y, mask=mask, other=0.0)
        y_middle = tl.load(y + stride_part, mask=mask, other=0.0)
        y_low = tl.load(y + 2 * stride_part, mask=mask, other=0.0)
        sums = acc
        if scale_ptr is not None:
            sums = tl.zeros_like(acc)
        sums = _dot_parts(x_high, x_middle, x_low, y_high, y_middle, y_low, sums)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + _row_of(term_ptr, entry, True))
            sums = acc + scale * sums
        acc = sums
        x_high, x_middle, x_low = _split(x)
    z = z_ptr + (n * M + m)[:, None] * C + c[None, :]
    tl.store(z, acc, mask=inside & (c < C)[None, :])


@triton.jit(do_not_specialize=["M", "num_tiles"])
def vecmat_group_kernel(
    x_ptr, y_ptr, scale_ptr, z_ptr, tile_ptr, owner_ptr, index1_ptr, index_z_ptr, term_ptr,
    M, num_tiles, K, C,
    stride_xn, stride_xr, stride_xc, stride_yn, stride_yr, stride_yk, stride_yc,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """z[n, index_z[e], c] = s[t] Σ_k x[n,i,k] y[n,j,k,c]: entries that share a matrix together.

    Entries are sorted by matrix; tile p holds at most BLOCK_R of them, all with matrix owner[p].
    A program owns one tile of one n and BLOCK_C columns.  No two entries write one row of z.
    Floor: y once, x and z once; memory bound up to about BLOCK_R = 64 entries a matrix in fp32.
    """
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    num_c = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0).to(INT)
    p = pid // num_c % num_tiles
    n = pid // num_c // num_tiles
    c = (pid % num_c) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    begin, length = _segment_of(tile_ptr, p, INT)
    entry = begin + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    live = entry < begin + length
    j = _row_of(owner_ptr, p, True)
    x_row = x_ptr + n * stride_xn + _row_of(index1_ptr, entry, live)[:, None] * stride_xr
    y_row = y_ptr + n * stride_yn + j * stride_yr
    acc = tl.zeros((BLOCK_R, BLOCK_C), ACC)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        x_mask, y_mask = live[:, None] & (k < K)[None, :], (k < K)[:, None] & (c < C)[None, :]
        x = tl.load(x_row + k[None, :] * stride_xc, mask=x_mask, other=0.0)
        y = tl.load(y_row + k[:, None] * stride_yk + c[None, :] * stride_yc, mask=y_mask, other=0.0)
        acc = add_product(x, y, acc, ACC, PRECISION)
    if scale_ptr is not None:
        term = _row_of(term_ptr, entry, live)
        acc *= tl.load(scale_ptr + term, mask=live, other=0.0).to(ACC)[:, None]
    row = n * M + _row_of(index_z_ptr, entry, live)
    z = z_ptr + row[:, None] * C + c[None, :]
    tl.store(z, acc.to(z_ptr.dtype.element_ty), mask=live[:, None] & (c < C)[None, :])


@triton.jit
def _items(
    x_ptr, y_ptr, scale_ptr, index1_ptr, index2_ptr, term_ptr,
    q, items, n, begin, length, c, d, C, D,
    stride_xn, stride_xr, stride_xc, stride_yn, stride_yr, stride_yd, ACC: tl.constexpr,
):  # fmt: skip
    """s[t] · x, [BLOCK_K, BLOCK_C], and y, [BLOCK_K, BLOCK_D], of the pairs q = (n, entry)."""
    live = q < items  # [BLOCK_K]
    turn = tl.maximum(length, 1)
    n, entry = n + q // turn, begin + q % turn
    i, j = _row_of(index1_ptr, entry, live), _row_of(index2_ptr, entry, live)
    x = tl.load(
        x_ptr + (n * stride_xn + i * stride_xr)[:, None] + c[None, :] * stride_xc,
        mask=live[:, None] & (c < C)[None, :],
        other=0.0,
    )
    y = tl.load(
        y_ptr + (n * stride_yn + j * stride_yr)[:, None] + d[None, :] * stride_yd,
        mask=live[:, None] & (d < D)[None, :],
        other=0.0,
    )
    if scale_ptr is not None:
        term = _row_of(term_ptr, entry, live)
        # not in the inputs' dtype: a product rounded there would be past the error bound
        x = x.to(ACC) * tl.load(scale_ptr + term, mask=live, other=0.0).to(ACC)[:, None]
    return x, y


@triton.jit(do_not_specialize=["N", "M", "part"])
def outer_kernel(
    x_ptr, y_ptr, scale_ptr, z_ptr, indptr_ptr, index1_ptr, index2_ptr, term_ptr,
    N, M, part, C, D,
    stride_xn, stride_xr, stride_xc, stride_yn, stride_yr, stride_yd,
    ACCUMULATE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """z[b,m,c,d] = Σ_{n ∈ part b} Σ_{e ∈ segment m} s[t] · x[n,i,c] · y[n,j,d]: a GEMM with long K.

    A program owns a tile [BLOCK_C, BLOCK_D] of one result row and walks its items, pairs
    (n, entry), BLOCK_K at a time.  Without ACCUMULATE b is n.  BLOCK_K = 1 is for a few items:
    plain products, exact, where a dot would pad to 16.  bf16x6: items are loaded a step ahead and
    their parts carried, as in `vecmat_parts_kernel`.
    Floor: x and y once, z once.  Few items: bound by writing z.  Many, at C = D = 128 in fp32:
    memory, 0.22 ms on an H200 for 9e5 items; measured 0.42 and 0.03 to add the parts up.
    """
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    num_c, num_d = tl.cdiv(C, BLOCK_C), tl.cdiv(D, BLOCK_D)
    pid = tl.program_id(0).to(INT)
    row = pid // (num_c * num_d)
    m, b = row % M, row // M
    c = pid // num_d % num_c * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    d = pid % num_d * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    begin, length = _segment_of(indptr_ptr, m, INT)
    items, n = length, b
    if ACCUMULATE:
        items *= tl.minimum(N - b * part, part)
        n *= part
    step = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    acc = tl.zeros((BLOCK_C, BLOCK_D), ACC)
    if PRECISION == "bf16x6" and BLOCK_K > 1:
        x, y = _items(
            x_ptr, y_ptr, scale_ptr, index1_ptr, index2_ptr, term_ptr,
            step, items, n, begin, length, c, d, C, D,
            stride_xn, stride_xr, stride_xc, stride_yn, stride_yr, stride_yd, ACC,
        )  # fmt: skip
        x_high, x_middle, x_low = _split(x)
        y_high, y_middle, y_low = _split(y)
        for q0 in tl.range(BLOCK_K, items + BLOCK_K, BLOCK_K, num_stages=1):
            x, y = _items(
                x_ptr, y_ptr, scale_ptr, index1_ptr, index2_ptr, term_ptr,
                q0 + step, items, n, begin, length, c, d, C, D,
                stride_xn, stride_xr, stride_xc, stride_yn, stride_yr, stride_yd, ACC,
            )  # fmt: skip
            acc = _dot_parts(
                tl.trans(x_high), tl.trans(x_middle), tl.trans(x_low),
                y_high, y_middle, y_low, acc,
            )  # fmt: skip
            x_high, x_middle, x_low = _split(x)
            y_high, y_middle, y_low = _split(y)
    else:
        for q0 in range(0, items, BLOCK_K):
            x, y = _items(
                x_ptr, y_ptr, scale_ptr, index1_ptr, index2_ptr, term_ptr,
                q0 + step, items, n, begin, length, c, d, C, D,
                stride_xn, stride_xr, stride_xc, stride_yn, stride_yr, stride_yd, ACC,
            )  # fmt: skip
            if BLOCK_K == 1:
                acc += tl.trans(x).to(ACC) * y.to(ACC)
            else:
                acc = add_product(tl.trans(x), y, acc, ACC, PRECISION)
    z = z_ptr + (row * C + c)[:, None] * D + d[None, :]
    tl.store(z, acc.to(z_ptr.dtype.element_ty), mask=(c < C)[:, None] & (d < D)[None, :])
