"""y[o] = bias + Σ_k x[sources[k,o]] @ weight[k], rounded once, and its gradient.

Forward adds the bias before the one rounding.  Backward takes the weight's gradient first, so that
its partial sums are gone when the input's gradient is allocated.  Gradients of gradients go by the
closed operator, `operator.conv_op`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchweft.core.operators.fused import FusedOperator, Gradients
from torchweft.core.operators.operator import compiling, recording, transformed, unwatched
from torchweft.voxels.convolution.epilogue import PLAIN, Epilogue
from torchweft.voxels.convolution.operator import body, conv_op, turned
from torchweft.voxels.grid.geometry import Geometry
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.kernel_map import KernelMap

__all__ = ["compile_before", "convolution"]

_Tables = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Table, back, and the orders of inputs and outputs."""


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    after: Epilogue,
    kernel_map: KernelMap,
    groups: int,
    precision: str,
    backend: str,
) -> Tensor:
    """(N_in, C_in), (K, C_in/groups, C_out), (C_out,) or None → (N_out, C_out)."""
    maps = tables(kernel_map)
    if after == PLAIN or _observed(x, weight, bias, *after[:3]):
        if backend == "triton":
            _compile_ahead(x, weight, bias, maps, groups, precision)
        offsets = kernel_map.geometry.num_offsets
        return after(_fused(x, weight, bias, *maps, offsets, groups, precision, backend))
    table, _, _, order = maps
    convolve, whole = body(backend).convolve, after.with_bias(bias)
    with torch.no_grad():
        y: Tensor = convolve(
            x, weight, table, order, groups=groups, precision=precision, after=whole
        )
    return y


def compile_before(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    after: Epilogue,
    inputs: Coordinates,
    shape: Geometry,
    groups: int,
    precision: str,
) -> None:
    """Begin to compile what a layer will call, before the host goes and makes its map.

    Only for maps of which all is known that code depends on: the outputs are the inputs, and the
    gradient reads the same table.
    """
    if not _are_plain(x, weight) or shape.mode != "submanifold" or not shape.symmetric:
        return
    if not (after == PLAIN or _observed(x, weight, bias, *after[:3])):
        return
    kept = shape.num_offsets // 2 + 1
    any_table = x.new_empty(1, dtype=torch.int32).expand(kept, len(inputs))
    order = None if inputs.seem_sorted else any_table[0]
    maps = any_table, None, order, order
    _compile_ahead(x, weight, bias, maps, groups, precision, tiled=True)


def _compile_ahead(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    maps: _Tables,
    groups: int,
    precision: str,
    tiled: bool = False,
) -> None:
    """Compile at once what a layer and, where they are recorded, its gradients call."""
    if not _are_plain(x, weight):
        return
    from torchweft.voxels.convolution import launch

    turned_weight = functools.partial(turned, weight, groups)
    needed = recording() and x.requires_grad, recording() and weight.requires_grad
    options: dict[str, Any] = {"groups": groups, "precision": precision}
    options |= {"needed": needed, "tiled": tiled}
    launch.compile_ahead(x, weight, turned_weight, bias, *maps, **options)


def _are_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether they are tensors that kernels will read, seen by nobody else."""
    return not (compiling() or transformed()) and unwatched(x) and unwatched(weight)


def _observed(*tensors: Tensor | None) -> bool:
    """Whether somebody records, transforms or watches a call: then its steps are torch's own."""
    given = [t for t in tensors if t is not None]
    if compiling() or transformed() or forward_ad._current_level >= 0:
        return True
    recorded = recording() and any(t.requires_grad for t in given)
    return recorded or not all(unwatched(t) for t in given)


def tables(kernel_map: KernelMap) -> _Tables:
    """What of a map enters an operator."""
    orders = kernel_map.inputs.order, kernel_map.outputs.order
    return kernel_map.kept, kernel_map.back, *orders


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor,
    back: Tensor | None,
    in_order: Tensor | None,
    out_order: Tensor | None,
    offsets: int,
    groups: int,
    precision: str,
    backend: str,
) -> list[Tensor]:
    convolve, after = body(backend).convolve, Epilogue(shift=bias)
    return [convolve(x, weight, table, out_order, groups=groups, precision=precision, after=after)]


def _backward(
    args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    x, weight, _, *maps, groups, precision, backend = args
    out_order = maps[-2]
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


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor, *_: Any) -> list[Tensor]:
    return [x.new_empty((table.shape[1], weight.shape[2]))]


_fused = FusedOperator(
    "voxel_convolution",
    "Tensor x, Tensor weight, Tensor? bias, Tensor table, Tensor? back, Tensor? in_order, "
    "Tensor? out_order, int offsets, int groups, str precision, str backend",
    3,
    _forward,
    _backward,
    _fake,
    _composition,
)
