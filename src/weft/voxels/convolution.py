"""y[o] = bias + Σ_k x[sources[k,o]] @ weight[k], rounded once, and its gradient.

Forward adds the bias before the one rounding.  Backward takes the weight's gradient first, so that
its partial sums are gone when the input's gradient is allocated.  Gradients of gradients go by the
closed operator, `operator.conv_op`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core.fused_op import FusedOperator, Gradients
from weft.voxels.kernel_map import KernelMap
from weft.voxels.operator import body, conv_op

__all__ = ["convolution"]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kernel_map: KernelMap,
    groups: int,
    precision: str,
    backend: str,
) -> Tensor:
    """(N_in, C_in), (K, C_in/groups, C_out), (C_out,) or None → (N_out, C_out)."""
    return _fused(x, weight, bias, *tables(kernel_map), groups, precision, backend)


def tables(kernel_map: KernelMap) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """What of a map enters an operator."""
    orders = kernel_map.inputs.order, kernel_map.outputs.order
    return kernel_map.sources, kernel_map.back, *orders


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sources: Tensor,
    targets: Tensor | None,
    in_order: Tensor | None,
    out_order: Tensor | None,
    groups: int,
    precision: str,
    backend: str,
) -> list[Tensor]:
    convolve = body(backend).convolve
    y = convolve(x, weight, sources, out_order, groups=groups, precision=precision, bias=bias)
    return [y]


def _backward(
    args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    x, weight, _, *maps, groups, precision, backend = args
    out_order = maps[-1]
    rest = (*maps, "w", groups, precision, backend)
    gw = conv_op.forward(x, grad, *rest) if needed[1] else None
    rest = (*maps, "x", groups, precision, backend)
    gx = conv_op.forward(grad, weight, *rest) if needed[0] else None
    return gx, gw, _row_sum(grad, out_order) if needed[2] else None


def _row_sum(grad: Tensor, order: Tensor | None) -> Tensor:
    """Σ over the rows in canonical order: the same bits in whatever order they stand."""
    rows = grad if order is None else grad.index_select(0, order)
    wide = torch.promote_types(grad.dtype, torch.float32)
    return rows.sum(0, dtype=wide).to(grad.dtype)


def _composition(x: Tensor, weight: Tensor, bias: Tensor | None, *maps_and_rest: Any) -> Tensor:
    *maps, groups, precision, backend = maps_and_rest
    y = conv_op(x, weight, *maps, "y", groups, precision, backend)
    return y if bias is None else y + bias


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, sources: Tensor, *_: Any) -> list[Tensor]:
    return [x.new_empty((sources.shape[1], weight.shape[2]))]


_fused = FusedOperator(
    "voxel_convolution",
    "Tensor x, Tensor weight, Tensor? bias, Tensor sources, Tensor? targets, Tensor? in_order, "
    "Tensor? out_order, int groups, str precision, str backend",
    3,
    _forward,
    _backward,
    _fake,
    _composition,
)
