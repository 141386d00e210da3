"""Functions that printed kernels of mixings call: tiles of matrix products.

PARTS is 2 for float32, 1 where TF32 is allowed, 0 for 16 bits.  A float32 is the sum of the nearest
number of 11 bits and of 12 more; the tensor core multiplies each by each but the low ones, which
leaves errors as of float32.  It truncates its sums where float32 rounds them, so it sums these
products over one block alone, and the blocks are added in float32.  Infinite numbers, and numbers
that round to infinity, have no such parts and become NaN.

Matrix products of libraries would need the rows of each block copied together, one launch for each,
and multiply float32 at 50 TFLOP/s.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["accumulate", "fold", "outer", "piece", "pieces", "prepare", "store"]


@triton.jit
def _rounded(x):
    """The nearest number of 11 bits."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _places(r, last, order_ptr, C, WIDTH: tl.constexpr, STEP):
    """Where component r % C of row r // C begins, and whether r comes before `last`."""
    live = r < last
    row = r // C
    if order_ptr is not None:
        row = tl.load(order_ptr + row, mask=live, other=0)
    return row.to(tl.int64) * WIDTH + r % C * STEP, live


# rows by element ("kind"): those of element k are order[starts[k]] .. order[starts[k + 1] - 1]


@triton.jit
def _counts(starts_ptr, CHUNK, C, KINDS: tl.constexpr, SIDE: tl.constexpr):
    """Each element: its number, first and last row of components, and number of pieces of CHUNK."""
    k = tl.arange(0, SIDE)
    begin = tl.load(starts_ptr + k, mask=k < KINDS, other=0) * C
    end = tl.load(starts_ptr + 1 + k, mask=k < KINDS, other=0) * C
    return k, begin, end, tl.cdiv(end - begin, CHUNK)


@triton.jit
def piece(part, starts_ptr, CHUNK, C, KINDS: tl.constexpr, SIDE: tl.constexpr):
    """The element and the rows of components of a part; no rows behind the last element."""
    k, begin, end, counts = _counts(starts_ptr, CHUNK, C, KINDS, SIDE)
    after = tl.cumsum(counts, 0)
    own = (after - counts <= part) & (part < after)
    first = tl.sum(tl.where(own, begin + (part - after + counts) * CHUNK, 0), 0)
    last = tl.minimum(first + CHUNK, tl.sum(tl.where(own, end, 0), 0))
    return tl.sum(tl.where(own, k, 0), 0), first, last


@triton.jit
def pieces(kind, starts_ptr, CHUNK, C, KINDS: tl.constexpr, SIDE: tl.constexpr):
    """The first part of an element, and one more than the last."""
    k, _, _, counts = _counts(starts_ptr, CHUNK, C, KINDS, SIDE)
    first = tl.sum(tl.where(k < kind, counts, 0), 0)
    return first, first + tl.sum(tl.where(k == kind, counts, 0), 0)


@triton.jit
def accumulate(
    acc, a_ptr, w_ptr, order_ptr, first_r, last_r, tile,
    C, WIDTH: tl.constexpr, STEP, COPY: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    STEP_K: tl.constexpr, STEP_N: tl.constexpr, FACTOR, LOW: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc[r, n] += Σ_k a[r, k] FACTOR w[k, n]: rows r of components, one step of w is 1.

    r begins at first_r and ends before last_r, n is a tile's.
    w is prepared, and its low parts lie LOW numbers behind the high ones; LOW is 0: it is not.
    """
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    r = first_r + tl.arange(0, BLOCK_M)
    begin, live = _places(r, last_r, order_ptr, C, WIDTH, STEP)
    n = tile % ACROSS * BLOCK_N + tl.arange(0, BLOCK_N)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        here, there = live[:, None], (n < N)[None, :]
        if K % BLOCK_K != 0:
            here, there = here & (k < K)[None, :], there & (k < K)[:, None]
        a = tl.load(a_ptr + begin[:, None] + (k * COPY)[None, :], mask=here, other=0.0)
        w = _matrix(w_ptr, k, n, there, STEP_K, STEP_N)
        if LOW == 0:
            whole = w.to(tl.float32) * FACTOR
            w = whole.to(a.dtype) if PARTS == 0 else _rounded(whole)
        if PARTS == 0:
            acc = tl.dot(a, w, acc)
        elif PARTS == 1:
            acc = tl.dot(_rounded(a), w, acc, input_precision="tf32")
        else:
            w_low = whole - w if LOW == 0 else _matrix(w_ptr + LOW, k, n, there, STEP_K, STEP_N)
            high = _rounded(a)
            part = tl.dot(a - high, w, input_precision="tf32")
            part = tl.dot(high, w_low, part, input_precision="tf32")
            acc += tl.dot(high, w, part, input_precision="tf32")
    return acc


@triton.jit
def _matrix(w_ptr, k, n, mask, STEP_K: tl.constexpr, STEP_N: tl.constexpr):
    """w[k, n], read along the numbers that follow each other."""
    if STEP_K == 1:
        at = w_ptr + n[:, None] * STEP_N + k[None, :]
        return tl.load(at, mask=mask.T, other=0.0).T
    return tl.load(w_ptr + k[:, None] * STEP_K + n[None, :], mask=mask, other=0.0)


@triton.jit
def store(
    acc, z_ptr, order_ptr, first_r, last_r, tile,
    C, WIDTH: tl.constexpr, STEP, COPY: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """z[r, n] = acc."""
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    r = first_r + tl.arange(0, BLOCK_M)
    begin, live = _places(r, last_r, order_ptr, C, WIDTH, STEP)
    n = tile % ACROSS * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = live[:, None] & (n < N)[None, :]
    to = z_ptr + begin[:, None] + (n * COPY)[None, :]
    tl.store(to, acc.to(z_ptr.dtype.element_ty), mask=mask)


@triton.jit
def prepare(
    w_ptr, p_ptr, tile,
    U: tl.constexpr, N: tl.constexpr, ROW: tl.constexpr, STEP_U: tl.constexpr, STEP_N: tl.constexpr,
    FACTOR: tl.constexpr, LOW: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Parts of factor · w (U, N), in rows ROW apart, at u · STEP_U + n · STEP_N."""
    ACROSS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    u = tile // ACROSS * BLOCK + tl.arange(0, BLOCK)
    n = tile % ACROSS * BLOCK + tl.arange(0, BLOCK)
    mask = (u < U)[:, None] & (n < N)[None, :]
    w = tl.load(w_ptr + u[:, None] * ROW + n[None, :], mask=mask, other=0.0)
    w = w.to(tl.float32) * FACTOR
    if STEP_U == 1:
        w, mask = w.T, mask.T
        to = p_ptr + n[:, None] * STEP_N + u[None, :]
    else:
        to = p_ptr + u[:, None] * STEP_U + n[None, :]
    if PARTS == 0:
        tl.store(to, w.to(p_ptr.dtype.element_ty), mask=mask)
    elif PARTS == 1:
        tl.store(to, _rounded(w), mask=mask)
    else:
        high = _rounded(w)
        tl.store(to, high, mask=mask)
        tl.store(to + LOW, w - high, mask=mask)


@triton.jit
def outer(
    t_ptr, z_ptr, w_ptr, order_ptr, first_row, last_row, tile, C: tl.constexpr,
    T_WIDTH: tl.constexpr, T_STEP: tl.constexpr, T_COPY: tl.constexpr, U: tl.constexpr,
    Z_WIDTH: tl.constexpr, Z_STEP: tl.constexpr, Z_COPY: tl.constexpr, N: tl.constexpr,
    ROW: tl.constexpr, FACTOR: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """w[u, n] = factor Σ_r t[r, u] z[r, n], components r of some rows; rows of w are ROW apart."""
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = (U + BLOCK_M - 1) // BLOCK_M * ACROSS
    u = tile % TILES // ACROSS * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % ACROSS * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # component after component of the same rows: one division for all of them
    for step in range(tl.cdiv(last_row - first_row, BLOCK_K) * C):
        row = first_row + step // C * BLOCK_K + tl.arange(0, BLOCK_K)
        live = row < last_row
        if order_ptr is not None:
            row = tl.load(order_ptr + row, mask=live, other=0)
        row = row.to(tl.int64)[:, None]
        at_t = t_ptr + step % C * T_STEP + row * T_WIDTH + (u * T_COPY)[None, :]
        at_z = z_ptr + step % C * Z_STEP + row * Z_WIDTH + (n * Z_COPY)[None, :]
        here, there = live[:, None], live[:, None]
        if U % BLOCK_M != 0:
            here = here & (u < U)[None, :]
        if N % BLOCK_N != 0:
            there = there & (n < N)[None, :]
        t = tl.load(at_t, mask=here, other=0.0).T
        z = tl.load(at_z, mask=there, other=0.0)
        if PARTS == 0:
            acc = tl.dot(t, z, acc)
        elif PARTS == 1:
            acc = tl.dot(_rounded(t), _rounded(z), acc, input_precision="tf32")
        else:
            t_high, z_high = _rounded(t), _rounded(z)
            some = tl.dot(t - t_high, z_high, input_precision="tf32")
            some = tl.dot(t_high, z - z_high, some, input_precision="tf32")
            acc += tl.dot(t_high, z_high, some, input_precision="tf32")
    to = w_ptr + u[:, None] * ROW + n[None, :]
    w = (acc * FACTOR).to(w_ptr.dtype.element_ty)
    tl.store(to, w, mask=(u < U)[:, None] & (n < N)[None, :])


@triton.jit
def fold(
    part_ptr, w_ptr, first_part, last_part, tile, NUMBERS: tl.constexpr, COUNT: tl.constexpr,
    N: tl.constexpr, LENGTH: tl.constexpr, ROW: tl.constexpr, FACTOR: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """w = factor Σ some parts, in fixed order, bound: memory.

    Rows (u, N) of w are ROW apart, those of parts LENGTH.
    """
    i = tile * BLOCK + tl.arange(0, BLOCK)
    place = i // N * LENGTH + i % N
    total = tl.zeros((BLOCK_P, BLOCK), tl.float32)
    for first in range(first_part, last_part, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        at = part_ptr + part.to(tl.int64)[:, None] * NUMBERS + place[None, :]
        total += tl.load(at, mask=(part < last_part)[:, None] & (i < COUNT)[None, :], other=0.0)
    w = tl.sum(total, 0) * FACTOR
    to = w_ptr + (i if ROW == N else i // N * ROW + i % N)
    tl.store(to, w.to(w_ptr.dtype.element_ty), mask=i < COUNT)
