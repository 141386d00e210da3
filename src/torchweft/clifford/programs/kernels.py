"""Triton device code that is the same for every program."""

import triton
import triton.language as tl

__all__ = ["sum_partials_kernel"]


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
