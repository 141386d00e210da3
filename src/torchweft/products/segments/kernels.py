"""The Triton kernel of extremes of segments."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["extreme_kernel"]


@triton.jit(do_not_specialize=["M", "T"])
def extreme_kernel(
    x_ptr, value_ptr, place_ptr, indptr_ptr, order_ptr,
    M, T, C, stride_xr, stride_xc,
    LARGEST: tl.constexpr, WIDE: tl.constexpr, FILL: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """value[m,c] = max or min of x[order[e],c] over e in segment m; place[m,c]: the first such row.

    A program owns BLOCK_R segments and BLOCK_C channels, and walks each segment in order, STEPS
    entries at a time: their loads do not wait for each other.  An order that is None is the
    identity.  value and place are contiguous; a place that is None is not stored.  FILL: what is
    written for nothing, None for ∓inf; its place is T.

    Floor: x read once, values and places written once: (T·itemsize + M·(itemsize + 8))·C bytes, or
    M·itemsize·C without places, and 4 (T + M) of tables.  Bound: memory; 2 comparisons a number.
    """
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    element: tl.constexpr = x_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float32 if element == tl.float16 or element == tl.bfloat16 else element
    num_c = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0).to(INT)
    m = pid // num_c * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]  # [BLOCK_R, 1]
    c = (pid % num_c) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]  # [1, BLOCK_C]
    inside = m < M
    begin = tl.load(indptr_ptr + m, mask=inside, other=0).to(INT)
    length = tl.load(indptr_ptr + m + 1, mask=inside, other=0).to(INT) - begin
    most = tl.max(length)
    if FILL is None:
        best = tl.full((BLOCK_R, BLOCK_C), float("-inf") if LARGEST else float("inf"), ACC)
    else:
        best = tl.full((BLOCK_R, BLOCK_C), FILL, ACC)
    place = tl.full((BLOCK_R, BLOCK_C), 0, INT) + T
    for q0 in range(0, most, STEPS):
        for step in tl.static_range(STEPS):
            live = q0 + step < length  # [BLOCK_R, 1]
            row = begin + q0 + step
            if order_ptr is not None:
                row = tl.load(order_ptr + row, mask=live, other=0).to(INT)
            mask = live & (c < C)
            x = tl.load(x_ptr + row * stride_xr + c * stride_xc, mask=mask, other=0).to(ACC)
            better = x > best if LARGEST else x < best
            better = live & (better | (place == T) | ((x != x) & (best == best)))
            best = tl.where(better, x, best)
            place = tl.where(better, row, place)
    mask = inside & (c < C)
    tl.store(value_ptr + m * C + c, best.to(element), mask=mask)
    if place_ptr is not None:
        tl.store(place_ptr + m * C + c, place.to(tl.int64), mask=mask)
