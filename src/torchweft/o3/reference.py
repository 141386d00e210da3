"""The oracle: every path a dense sum with its 3j symbol, in any dtype, differentiable by torch.

z[dst[e], m, u] += factor · Σ_ab C[a,b,m] x[src[e],a,u] y[e,b,u] w[e,u]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchweft.o3.channelwise.structure import Block, Structure
from torchweft.o3.irreps.wigner import wigner_3j

__all__ = ["channelwise_reference"]


def channelwise_reference(
    structure: Structure,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None = None,
    src: Tensor | None = None,
    dst: Tensor | None = None,
    num_nodes: int | None = None,
    sign: Callable[[Tensor], Tensor] = torch.positive,
) -> Tensor:
    """(num_nodes or E, Wz): the product of x (N, Wx), y (E, Wy) and weight (E, Ww) or (Ww,).

    `sign` is applied to the coefficients: torch.abs gives the magnitudes of an error bound.
    """
    x = x if src is None else x[src.long()]
    z = x.new_zeros(y.shape[0], structure.width("z"))
    for product in structure.products:
        channels = product.channels
        for path in product.paths:
            blocks = product.x[path.x], product.y[path.y], product.z[path.z]
            a, b = _block(x, blocks[0], channels), _block(y, blocks[1], channels)
            symbol = wigner_3j(*product.degrees(path), dtype=torch.float64)
            c = sign(path.factor * symbol).to(x)
            message = torch.einsum("abm,eau,ebu->emu", c, a, b)
            if weight is not None:
                message = message * _block(
                    weight.view(-1, weight.shape[-1]), product.w[path.w], channels
                )
            columns = torch.tensor(_columns(blocks[2], channels), device=x.device)
            z = z.index_add(1, columns, message.flatten(1))
    if dst is None:
        return z
    return z.new_zeros(num_nodes or 0, z.shape[1]).index_add(0, dst.long(), z)


def _block(rows: Tensor, block: Block, channels: int) -> Tensor:
    """(rows, components, channels): a block of every row."""
    columns = torch.tensor(_columns(block, channels), device=rows.device)
    return rows[:, columns].view(rows.shape[0], block.components, channels)


def _columns(block: Block, channels: int) -> list[int]:
    """The column of every component of every channel."""
    offset, _, step, channel_step = block
    return [
        offset + a * step + u * channel_step
        for a in range(block.components)
        for u in range(channels)
    ]
