"""Triton kernels of batch norms: rows (N, C), numbers of a channel (C,), sums in float32.

    z = (x − mean) / √(var + eps) · weight + bias + residual,   y = act(z)

Sums over rows are those of parts of `chunk` rows, added in the order of the parts: the same bits at
every call.  A program owns BLOCK_C channels of a part, or of BLOCK_R rows.

valid_ptr, where given, holds how many rows are real, the first ones: statistics and sums are theirs
alone.  The others are padding: they are not read, and are 0 in results.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = [
    "apply_kernel",
    "gradient_kernel",
    "gradient_sums_kernel",
    "joined_statistics_kernel",
    "statistics_kernel",
    "total_kernel",
    "total_statistics_kernel",
]


@triton.jit
def _channels(C, BLOCK_C: tl.constexpr):
    """(row of programs, channels [BLOCK_C]) of a program."""
    num_c = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    return pid // num_c, pid % num_c * BLOCK_C + tl.arange(0, BLOCK_C)


@triton.jit
def _numbers(ptr, c, C, default):
    """The numbers of channels, [BLOCK_C]; a default where there are none."""
    if ptr is None:
        return tl.zeros_like(c).to(tl.float32) + default
    else:
        return tl.load(ptr + c, mask=c < C, other=default).to(tl.float32)


@triton.jit
def _rows(ptr, row, last, c, C):
    """Rows of channels in float32, [BLOCK_R, BLOCK_C]; 0 outside."""
    at = row.to(tl.int64)[:, None] * C + c[None, :]
    live = (row < last)[:, None] & (c < C)[None, :]
    return tl.load(ptr + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, v, row, last, c, C):
    at = row.to(tl.int64)[:, None] * C + c[None, :]
    live = (row < last)[:, None] & (c < C)[None, :]
    tl.store(ptr + at, v.to(ptr.dtype.element_ty), mask=live)


@triton.jit
def _real(valid_ptr, rows):
    """How many of the first `rows` rows are real."""
    if valid_ptr is not None:
        rows = tl.minimum(tl.load(valid_ptr), rows).to(tl.int32)
    return rows


@triton.jit
def _divisor(valid_ptr, rows):
    """The number of rows of a part; 1 for one of padding, whose sums nobody reads."""
    if valid_ptr is not None:
        rows = tl.maximum(rows, 1)
    return rows


@triton.jit
def _or_zero(v, row, valid_ptr, real):
    """Results of real rows, and 0 for padding."""
    if valid_ptr is not None:
        v = tl.where((row < real)[:, None], v, 0.0)
    return v


@triton.jit
def _inverse_deviation(var_ptr, c, C, eps):
    """1 / √(var + eps), [BLOCK_C]."""
    return tl.div_rn(1.0, tl.sqrt_rn(_numbers(var_ptr, c, C, 1.0) + eps))


@triton.jit
def _activated(z, ACTIVATION: tl.constexpr):
    """act(z); a NaN stays one."""
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)
    elif ACTIVATION == "silu":
        z = z * _logistic(z)
    elif ACTIVATION == "gelu":
        z = z * (0.5 + 0.5 * tl.erf(z * 0.7071067811865476))
    return z


@triton.jit
def _logistic(z):
    """1 / (1 + exp(−z)), without overflow whatever the sign."""
    e = tl.exp(-tl.abs(z))
    return tl.where(z < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _before_activation(g, z, ACTIVATION: tl.constexpr):
    """g act'(z); as in torch, relu's gradient is that of NaN where z is NaN."""
    if ACTIVATION == "relu":
        g = tl.where(z <= 0, 0.0, g)
    elif ACTIVATION == "silu":
        s = _logistic(z)
        g = g * (s + z * s * (1.0 - s))
    elif ACTIVATION == "gelu":
        density = tl.exp(-0.5 * z * z) * 0.3989422804014327
        g = g * (0.5 + 0.5 * tl.erf(z * 0.7071067811865476) + z * density)
    return g


@triton.jit(do_not_specialize=["rows", "chunk"])
def statistics_kernel(
    x_ptr, valid_ptr, parts_ptr, rows, chunk, C,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """parts[0, p] = mean less row 0, parts[1, p] = Σ (x − mean)², over the rows of part p.

    Means are less row 0, so that a mean far from 0 takes no digits.  Squares are of x less the mean
    of the part's first block, which is no further from the part's mean than its rows are.
    Bound: memory, x read once.
    """
    part, c = _channels(C, BLOCK_C)
    first = part * chunk
    last = _real(valid_ptr, tl.minimum(first + chunk, rows))
    r = tl.arange(0, BLOCK_R)
    base = _numbers(x_ptr, c, C, 0.0)
    live = (first + r < last)[:, None]
    near = tl.where(live, _rows(x_ptr, first + r, last, c, C) - base[None, :], 0.0)
    near = tl.sum(near, 0) / tl.minimum(_divisor(valid_ptr, last - first), BLOCK_R)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(first, last, BLOCK_R):
        row = start + r
        d = (_rows(x_ptr, row, last, c, C) - base[None, :]) - near[None, :]
        d = tl.where((row < last)[:, None], d, 0.0)
        total += d
        squares += d * d
    count = _divisor(valid_ptr, last - first)
    mean = tl.sum(total, 0) / count
    square = tl.sum(squares, 0) - mean * mean * count
    at = part.to(tl.int64) * C + c
    tl.store(parts_ptr + at, near + mean, mask=c < C)
    at += tl.cdiv(rows, chunk).to(tl.int64) * C
    tl.store(parts_ptr + at, tl.where(square < 0, 0.0, square), mask=c < C)


@triton.jit(do_not_specialize=["rows", "chunk"])
def total_statistics_kernel(
    x_ptr, valid_ptr, parts_ptr, mean_ptr, var_ptr, count_ptr,
    running_mean_ptr, running_var_ptr, tracked_ptr, rows, chunk, momentum, C,
    CUMULATIVE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """mean, var and count of all parts; running += factor (value − running), of var N/(N−1) var.

    factor is momentum; CUMULATIVE: 1 / tracked, the number of batches with this one, which is
    counted here otherwise.
    """
    _, c = _channels(C, BLOCK_C)
    inside = (c < C)[None, :]
    all_parts = tl.cdiv(rows, chunk)
    rows = _real(valid_ptr, rows)
    parts = tl.cdiv(rows, chunk)
    p = tl.arange(0, BLOCK_P)
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, parts, BLOCK_P):
        count = tl.minimum(rows - (start + p) * chunk, chunk)[:, None]
        live = (start + p < parts)[:, None] & inside
        mean = tl.load(parts_ptr + (start + p)[:, None] * C + c[None, :], mask=live, other=0.0)
        total += tl.where(live, count * mean, 0.0)
    divisor = _divisor(valid_ptr, rows)  # of no rows, 0 and 0
    middle = tl.sum(total, 0) / divisor
    squares = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, parts, BLOCK_P):
        count = tl.minimum(rows - (start + p) * chunk, chunk)[:, None]
        live = (start + p < parts)[:, None] & inside
        at = (start + p)[:, None] * C + c[None, :]
        away = tl.load(parts_ptr + at, mask=live, other=0.0) - middle[None, :]
        square = tl.load(parts_ptr + all_parts * C + at, mask=live, other=0.0)
        squares += tl.where(live, square + count * away * away, 0.0)
    square = tl.sum(squares, 0)
    middle += tl.where(rows > 0, _numbers(x_ptr, c, C, 0.0), 0.0)
    tl.store(mean_ptr + c, middle, mask=c < C)
    tl.store(var_ptr + c, square / divisor, mask=c < C)
    if count_ptr is not None:
        tl.store(count_ptr + 0 * c, rows, mask=c == 0)
    if running_mean_ptr is not None:
        momentum = _counted(tracked_ptr, momentum, CUMULATIVE)
        momentum = tl.where(rows > 0, momentum, 0.0)
        _track(running_mean_ptr, middle, momentum, c, C)
        _track(running_var_ptr, square / _divisor(valid_ptr, rows - 1), momentum, c, C)


@triton.jit(do_not_specialize=["ranks"])
def joined_statistics_kernel(
    ranks_ptr, mean_ptr, var_ptr, count_ptr, running_mean_ptr, running_var_ptr, tracked_ptr,
    ranks, momentum, C,
    CUMULATIVE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """mean, var and count of the rows of all ranks, of those of each, added in float64.

    Of each rank: C means, C variances and the number of rows.  `running` is as in
    `total_statistics_kernel`, and stays as it is if no rank has a row.
    """
    c = _channels(C, BLOCK_C)[1]
    count = tl.zeros((BLOCK_C,), tl.float64)
    total = tl.zeros((BLOCK_C,), tl.float64)
    for rank in range(ranks):
        rows, mean, _ = _of_rank(ranks_ptr, rank, c, C)
        count += rows
        total += rows * mean
    middle = total / tl.maximum(count, 1.0)
    square = tl.zeros((BLOCK_C,), tl.float64)
    for rank in range(ranks):
        rows, mean, var = _of_rank(ranks_ptr, rank, c, C)
        square += rows * (var + (mean - middle) * (mean - middle))
    tl.store(mean_ptr + c, middle, mask=c < C)
    tl.store(var_ptr + c, square / tl.maximum(count, 1.0), mask=c < C)
    tl.store(count_ptr + 0 * c, count, mask=c == 0)
    if running_mean_ptr is not None:
        momentum = _counted(tracked_ptr, momentum, CUMULATIVE)
        momentum = tl.where(count > 0, momentum, 0.0)
        _track(running_mean_ptr, middle.to(tl.float32), momentum, c, C)
        square = square / tl.maximum(count - 1.0, 1.0)
        _track(running_var_ptr, square.to(tl.float32), momentum, c, C)


@triton.jit
def _of_rank(ptr, rank, c, C):
    """(number of rows, their mean, their variance) of a rank, [BLOCK_C] each."""
    ptr += rank * (2 * C + 1)
    mean = tl.load(ptr + c, mask=c < C, other=0.0)
    return tl.load(ptr + 2 * C), mean, tl.load(ptr + C + c, mask=c < C, other=0.0)


@triton.jit
def _counted(tracked_ptr, momentum, CUMULATIVE: tl.constexpr):
    """The weight of this batch, which is counted."""
    if CUMULATIVE:
        momentum = 1.0 / tl.load(tracked_ptr).to(tl.float32)
    elif tl.program_id(0) == 0:
        tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)
    return momentum


@triton.jit
def _track(ptr, value, factor, c, C):
    running = tl.load(ptr + c, mask=c < C, other=0.0).to(tl.float32)
    value = running + factor * (value - running)
    tl.store(ptr + c, value.to(ptr.dtype.element_ty), mask=c < C)


@triton.jit(do_not_specialize=["rows"])
def apply_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, mean_ptr, var_ptr, valid_ptr, y_ptr, rows, eps, C,
    ACTIVATION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y = act(z).   Bound: memory, x and residual read once, y written once."""
    block, c = _channels(C, BLOCK_C)
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)
    scale = _numbers(weight_ptr, c, C, 1.0) * _inverse_deviation(var_ptr, c, C, eps)
    real = _real(valid_ptr, rows)
    z = (_rows(x_ptr, row, real, c, C) - _numbers(mean_ptr, c, C, 0.0)[None, :]) * scale[None, :]
    z += _numbers(bias_ptr, c, C, 0.0)[None, :]
    if residual_ptr is not None:
        z += _rows(residual_ptr, row, real, c, C)
    y = _or_zero(_activated(z, ACTIVATION), row, valid_ptr, real)
    _store(y_ptr, y, row, rows, c, C)


@triton.jit
def _row_gradients(
    g_ptr, x_ptr, residual_ptr, weight, bias, mean, inverse, row, last, c, C,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """(∂/∂z, (x − mean) / √(var + eps)) of rows, [BLOCK_R, BLOCK_C] each; 0 and any outside."""
    g = _rows(g_ptr, row, last, c, C)
    normal = (_rows(x_ptr, row, last, c, C) - mean[None, :]) * inverse[None, :]
    if ACTIVATION is not None:
        z = normal * weight[None, :] + bias[None, :]
        if residual_ptr is not None:
            z += _rows(residual_ptr, row, last, c, C)
        g = _before_activation(g, z, ACTIVATION)
    return g, normal


@triton.jit(do_not_specialize=["rows", "chunk"])
def gradient_sums_kernel(
    g_ptr, x_ptr, weight_ptr, bias_ptr, residual_ptr, mean_ptr, var_ptr, valid_ptr, dz_ptr,
    parts_ptr, rows, chunk, eps, C,
    ACTIVATION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """parts[0, p] = Σ ∂/∂z and parts[1, p] = Σ ∂/∂z · (x − mean) / √(var + eps) over part p.

    Writes dz = ∂/∂z, the gradient of residual, where it is asked for.
    Bound: memory, g and x read once, and what z takes.
    """
    part, c = _channels(C, BLOCK_C)
    first = part * chunk
    end = tl.minimum(first + chunk, rows)
    last = _real(valid_ptr, end)
    weight, bias = _numbers(weight_ptr, c, C, 1.0), _numbers(bias_ptr, c, C, 0.0)
    mean, inverse = _numbers(mean_ptr, c, C, 0.0), _inverse_deviation(var_ptr, c, C, eps)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    products = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(first, end, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        g, normal = _row_gradients(
            g_ptr, x_ptr, residual_ptr, weight, bias, mean, inverse, row, last, c, C, ACTIVATION
        )
        if dz_ptr is not None:
            _store(dz_ptr, _or_zero(g, row, valid_ptr, last), row, end, c, C)
        total += tl.where((row < last)[:, None], g, 0.0)
        products += tl.where((row < last)[:, None], g * normal, 0.0)
    at = part.to(tl.int64) * C + c
    tl.store(parts_ptr + at, tl.sum(total, 0), mask=c < C)
    at += tl.cdiv(rows, chunk).to(tl.int64) * C
    tl.store(parts_ptr + at, tl.sum(products, 0), mask=c < C)


@triton.jit(do_not_specialize=["rows", "chunk"])
def total_kernel(
    parts_ptr, sums_ptr, rows, chunk, C,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """sums[i] = Σ_p parts[i, p], i = 0, 1."""
    i, c = _channels(C, BLOCK_C)
    parts = tl.cdiv(rows, chunk)
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, parts, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        at = (i * parts + p)[:, None] * C + c[None, :]
        live = (p < parts)[:, None] & (c < C)[None, :]
        total += tl.load(parts_ptr + at, mask=live, other=0.0)
    tl.store(sums_ptr + i * C + c, tl.sum(total, 0), mask=c < C)


@triton.jit(do_not_specialize=["rows"])
def gradient_kernel(
    g_ptr, x_ptr, weight_ptr, bias_ptr, residual_ptr, mean_ptr, var_ptr, valid_ptr, sums_ptr,
    count_ptr, dx_ptr, rows, eps, C,
    ACTIVATION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx = weight / √(var + eps) · (dz − sums[0]/n − sums[1]/n · (x − mean) / √(var + eps)).

    n is count, else the number of real rows; without sums, mean and var do not depend on x.
    Bound: memory, g and x read once, and what z takes; dx written once.
    """
    block, c = _channels(C, BLOCK_C)
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)
    weight, bias = _numbers(weight_ptr, c, C, 1.0), _numbers(bias_ptr, c, C, 0.0)
    mean, inverse = _numbers(mean_ptr, c, C, 0.0), _inverse_deviation(var_ptr, c, C, eps)
    real = _real(valid_ptr, rows)
    g, normal = _row_gradients(
        g_ptr, x_ptr, residual_ptr, weight, bias, mean, inverse, row, real, c, C, ACTIVATION
    )
    if sums_ptr is not None:
        count = real.to(tl.float32) if count_ptr is None else tl.load(count_ptr).to(tl.float32)
        count = tl.maximum(count, 1.0)  # there may be no rows
        g -= (_numbers(sums_ptr, c, C, 0.0) / count)[None, :]
        g -= normal * (_numbers(sums_ptr + C, c, C, 0.0) / count)[None, :]
    dx = _or_zero(g * (weight * inverse)[None, :], row, valid_ptr, real)
    _store(dx_ptr, dx, row, rows, c, C)
