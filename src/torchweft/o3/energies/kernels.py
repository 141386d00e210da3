"""The Triton kernel of energies of nodes and their sums."""
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["node_energies"]


@triton.jit(do_not_specialize=["rows"])
def node_energies(
    first_ptr, last_ptr, alone_ptr, scale_ptr, shift_ptr, starts_ptr, order_ptr,
    node_ptr, interaction_ptr, energy_ptr, rows, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """node[n] = shift + scale (first[n] + last[n]) + alone[n], and the sums over nodes of a graph.

    A program owns a graph; it adds BLOCK_N nodes at a time, each thread always the same places, so
    that results repeat bit for bit.   Bound: launches.
    """
    g = tl.program_id(0)
    begin, end = 0, rows
    if starts_ptr is not None:
        begin, end = tl.load(starts_ptr + g), tl.load(starts_ptr + g + 1)
    scale, shift = tl.load(scale_ptr), tl.load(shift_ptr)
    total = tl.zeros((BLOCK_N,), last_ptr.dtype.element_ty)
    apart = tl.zeros((BLOCK_N,), last_ptr.dtype.element_ty)
    for start in range(begin, end, BLOCK_N):
        p = start + tl.arange(0, BLOCK_N)
        live = p < end
        n = p if order_ptr is None else tl.load(order_ptr + p, mask=live, other=0)
        x = tl.load(last_ptr + n, mask=live, other=0.0)
        if first_ptr is not None:
            x = tl.load(first_ptr + n, mask=live, other=0.0) + x
        x = shift + scale * x
        alone = tl.load(alone_ptr + n, mask=live, other=0.0)
        tl.store(node_ptr + n, alone.to(tl.float64) + x.to(tl.float64), mask=live)
        total += tl.where(live, x, 0.0)
        apart += alone
    interaction = tl.sum(total, 0)
    tl.store(interaction_ptr + g, interaction)
    tl.store(energy_ptr + g, tl.sum(apart, 0) + interaction)
