"""The Triton kernel that adds up what programs summed over some rows of an element."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["fold_parts_kernel"]


@triton.jit(do_not_specialize=["span"])
def fold_parts_kernel(
    part_ptr, out_ptr, starts_ptr, span, width, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):
    """out[e, c] = Σ_q part[q + e, c] over the chunks q of `span` rows that hold rows of element e.

    The rows of e are starts[e] .. starts[e+1]−1.  A program owns BLOCK_C columns of one element and
    adds BLOCK_P parts at once.   Bound: memory, each part read once.
    """
    blocks = tl.cdiv(width, BLOCK_C)
    pid = tl.program_id(0)
    e = (pid // blocks).to(tl.int64)
    c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]  # [1, BLOCK_C]
    begin, end = tl.load(starts_ptr + e), tl.load(starts_ptr + e + 1)
    first = begin // span
    last = tl.where(begin < end, (end - 1) // span + 1, first)
    total = tl.zeros((BLOCK_P, BLOCK_C), part_ptr.dtype.element_ty)
    for start in range(first, last, BLOCK_P):
        q = start + tl.arange(0, BLOCK_P)[:, None]  # [BLOCK_P, 1]
        live = (q < last) & (c < width)  # [BLOCK_P, BLOCK_C]
        total += tl.load(part_ptr + (q + e) * width + c, mask=live, other=0.0)
    tl.store(out_ptr + e * width + c, tl.sum(total, 0)[None, :], mask=c < width)
