"""Triton kernels of differences along edges, and of their sums over the edges of a node."""
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["edge_differences", "node_sums"]


@triton.jit
def _wide(v):
    """In float64 if v is, else in float32."""
    if v.dtype == tl.float64:
        return v
    else:
        return v.to(tl.float32)


@triton.jit(do_not_specialize=["edges"])
def edge_differences(
    x_ptr, shift_ptr, src_ptr, dst_ptr, out_ptr, edges,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[e, c] = x[dst[e], c] − x[src[e], c] + shift[e, c].   Bound: memory, out written once."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = place // WIDTH
    c = place % WIDTH
    live = e < edges
    of_src = tl.load(src_ptr + e, mask=live, other=0).to(tl.int64) * WIDTH + c
    of_dst = tl.load(dst_ptr + e, mask=live, other=0).to(tl.int64) * WIDTH + c
    v = _wide(tl.load(x_ptr + of_dst, mask=live, other=0.0))
    v -= _wide(tl.load(x_ptr + of_src, mask=live, other=0.0))
    if shift_ptr is not None:
        v += _wide(tl.load(shift_ptr + place, mask=live, other=0.0))
    tl.store(out_ptr + place, v, mask=live)


@triton.jit
def _sum_of_node(v_ptr, indptr_ptr, order_ptr, n, WIDTH, BLOCK_E, BLOCK_C):
    """Σ v[e, :] over the edges of node n, as [BLOCK_C]."""
    c = tl.arange(0, BLOCK_C)[None, :]
    first, last = tl.load(indptr_ptr + n), tl.load(indptr_ptr + n + 1)
    total = _wide(tl.zeros((BLOCK_E, BLOCK_C), v_ptr.dtype.element_ty))
    for start in range(first, last, BLOCK_E):
        p = start + tl.arange(0, BLOCK_E)[:, None]  # [BLOCK_E, 1]
        e = p if order_ptr is None else tl.load(order_ptr + p, mask=p < last, other=0)
        live = (p < last) & (c < WIDTH)  # [BLOCK_E, BLOCK_C]
        total += _wide(tl.load(v_ptr + e.to(tl.int64) * WIDTH + c, mask=live, other=0.0))
    return tl.sum(total, 0)


@triton.jit
def node_sums(
    v_ptr, dst_indptr_ptr, dst_order_ptr, src_indptr_ptr, src_order_ptr, out_ptr,
    WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[n, c] = Σ_{e: dst[e] = n} v[e, c] − Σ_{e: src[e] = n} v[e, c]; no src: the first sum.

    A program owns a node; it adds BLOCK_E of its edges at a time, each thread always the same
    places, so that results repeat bit for bit.   Bound: memory, v read twice.
    """
    n = tl.program_id(0)
    total = _sum_of_node(v_ptr, dst_indptr_ptr, dst_order_ptr, n, WIDTH, BLOCK_E, BLOCK_C)
    if src_indptr_ptr is not None:
        total -= _sum_of_node(v_ptr, src_indptr_ptr, src_order_ptr, n, WIDTH, BLOCK_E, BLOCK_C)
    c = tl.arange(0, BLOCK_C)
    tl.store(out_ptr + n.to(tl.int64) * WIDTH + c, total, mask=c < WIDTH)
