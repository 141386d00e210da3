"""The differentiable operators of sparse convolution.

`conv_op` is a trilinear form with one slot left open, and closed under differentiation:

    Q(x, w, y) = Σ_k Σ_o ⟨y[o], x[sources[k,o]] w[k]⟩

    role   a   b   result
    "y"    x   w   ∂Q/∂y[o] = Σ_k x[sources[k,o]] w[k]        (N_out, C_out)
    "x"    y   w   ∂Q/∂x[q] = Σ_k y[targets[k,q]] w[k]ᵀ       (N_in, C_in)
    "w"    x   y   ∂Q/∂w[k] = Σ_o x[sources[k,o]]ᵀ y[o]       (K, C_in/groups, C_out)

Each role is linear in both operands, and its derivatives are the other two roles with the gradient
in the slot that was open.  So gradients of any order exist, without backward kernels.

`convolution` is what layers call: it adds bias and epilogue before the one rounding.  Its backward
computes the weight's gradient first, so that its partial sums are freed before the input's gradient
is allocated; gradients of gradients use `conv_op`.

Maps are passed as tables, table[k,i] = sources[k, out_order[i]] and back[k,i] = targets[k,
in_order[i]].  Without `back`, it is table[K−1−k] (a submanifold map of an odd kernel): role "x"
then reads the same table, of which half may be stored, see `whole`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torchweft.core.operators.operator import (
    Call,
    FusedOperator,
    Gradients,
    Operator,
    compiling,
    plain_call,
    recording,
)
from torchweft.voxels.convolution import launch, numba_path, torch_path
from torchweft.voxels.convolution.epilogue import NO_EPILOGUE, Epilogue
from torchweft.voxels.grid import Geometry
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.kernel_map import KernelMap

__all__ = [
    "ConvOperands",
    "ConvOptions",
    "compile_before",
    "conv_op",
    "convolution",
    "observed",
]

_CONV_BODIES: dict[str, ModuleType] = {
    "triton": launch,
    "numba": numba_path,
    "torch": torch_path,
}
"""`convolve` and `weight_gradient` on real tensors, by backend."""

_MAP_SCHEMA = "Tensor table, Tensor? back, Tensor? in_order, Tensor? out_order, int offsets"


def _body(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    table, back, in_order, out_order, offsets, role, groups, precision, backend = rest
    body, flip = _CONV_BODIES[backend], back is None
    options: dict[str, Any] = {"groups": groups, "precision": precision}
    result: Tensor
    if role == "w":
        options |= {"offsets": offsets, "mirrored": flip}
        result = body.weight_gradient(a, b, table, out_order, **options)
    elif role == "x":
        read, order = (table, out_order) if flip else (back, in_order)
        result = body.convolve(a, launch.turned(b, groups), read, order, **options, flip=flip)
    else:
        result = body.convolve(a, b, table, out_order, **options)
    return result


def _fake(a: Tensor, b: Tensor, table: Tensor, back: Tensor | None, *rest: Any) -> Tensor:
    offsets, role, groups = rest[2:5]
    if role == "w":
        return a.new_empty((offsets, a.shape[1] // groups, b.shape[1]))
    if role == "x":
        read = table if back is None else back
        return a.new_empty((read.shape[1], b.shape[1] * groups))
    return a.new_empty((table.shape[1], b.shape[2]))


_OPERANDS = {"y": ("x", "w"), "x": ("y", "w"), "w": ("x", "y")}
"""The slots of the operands, by the open slot."""


def _gradients(
    call: Call, args: Sequence[Any], grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    a, b, *tables, role = args[:-3]
    slots = dict(zip(_OPERANDS[role], (a, b), strict=True)) | {role: grad}

    def gradient(slot: str) -> Tensor:
        first, second = (slots[letter] for letter in _OPERANDS[slot])
        return call(first, second, *tables, slot, *args[-3:])

    pairs = zip(_OPERANDS[role], needed, strict=True)
    return tuple([gradient(slot) if flag else None for slot, flag in pairs])


def _batch(call: Call, size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> Tensor:
    """One call per sample: calls that differ in their weights share nothing but tables."""
    a, b = (
        t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(args[:2], in_dims, strict=False)
    )
    return torch.stack([call(a[i], b[i], *args[2:]) for i in range(size)])


conv_op = Operator(
    "voxel_conv",
    f"Tensor a, Tensor b, {_MAP_SCHEMA}, str role, int groups, str precision, str backend",
    2,
    4,
    _body,
    _fake,
    _gradients,
    _batch,
)
"""conv_op(a, b, table, back, in_order, out_order, offsets, role, groups, precision, backend)"""


ConvOperands = tuple[Tensor, Tensor, Tensor | None, Epilogue]
"""Features (N_in, C_in), weight (K, C_in/groups, C_out), bias (C_out,) or None, and epilogue; all
tensors have one dtype and one device, but numbers of channels may be float32 beside 16 bits."""

ConvOptions = tuple[int, str, str]
"""Groups, precision and backend of a convolution."""


def convolution(operands: ConvOperands, kernel_map: KernelMap, options: ConvOptions) -> Tensor:
    """(N_out, C_out): the features on the map's outputs."""
    x, weight, bias, after = operands
    groups, precision, backend = options
    (table, back), around = kernel_map[:2], kernel_map.around
    inputs = kernel_map.inputs if around is None else around.voxels
    outputs = kernel_map.outputs
    order = outputs.order
    maps = table, back, order if inputs is outputs else inputs.order, order
    if after is NO_EPILOGUE or observed(x, weight, bias, *after[:5]):
        if backend == "triton":
            launch.compile_ahead(x, weight, bias, maps, groups, precision)
        y = _fused(x, weight, bias, *maps, weight.shape[0], *options)
        return y if after is NO_EPILOGUE else after(y)
    given = {"groups": groups, "precision": precision, "after": after.with_bias(bias)}
    result: Tensor = _CONV_BODIES[backend].convolve(x, weight, table, order, **given)
    return result


def compile_before(
    operands: ConvOperands, inputs: Coordinates, shape: Geometry, options: ConvOptions
) -> None:
    """Compile in threads what a layer will launch, before the host builds its map.

    Only for maps that determine the code before they exist: the outputs are the inputs, and the
    gradient reads the same table.
    """
    x, weight, bias, after = operands
    if compiling() or shape.mode != "submanifold" or not shape.symmetric:
        return
    if after is NO_EPILOGUE or observed(x, weight, bias, *after[:5]):
        kept = shape.num_offsets // 2 + 1
        any_table = x.new_empty(1, dtype=torch.int32).expand(kept, len(inputs))
        order = None if inputs.seem_sorted else any_table[0]
        maps = any_table, None, order, order
        launch.compile_ahead(x, weight, bias, maps, *options[:2], tiled=True)


def observed(*tensors: Tensor | None) -> bool:
    """Whether a call is recorded, transformed or watched; its epilogue is then steps of torch."""
    given = [t for t in tensors if t is not None]
    return not plain_call(given) or (recording() and any(t.requires_grad for t in given))


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    table, _, _, out_order, _, groups, precision, backend = rest
    after = NO_EPILOGUE if bias is None else Epilogue(shift=bias)
    options = {"groups": groups, "precision": precision, "after": after}
    return [_CONV_BODIES[backend].convolve(x, weight, table, out_order, **options)]


def _backward(
    args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    x, weight, _, *maps = args[:-3]
    options = args[-3:]
    gw = conv_op.forward(x, grad, *maps, "w", *options) if needed[1] else None
    gx = conv_op.forward(grad, weight, *maps, "x", *options) if needed[0] else None
    return gx, gw, _row_sum(grad, maps[-2]) if needed[2] else None


def _row_sum(grad: Tensor, order: Tensor | None) -> Tensor:
    """Σ over the rows in canonical order: the same bits for every order of the rows."""
    rows = grad if order is None else grad.index_select(0, order)
    wide = torch.promote_types(grad.dtype, torch.float32)
    return rows.sum(0, dtype=wide).to(grad.dtype)


def _composition(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    y = conv_op(x, weight, *rest[:-3], "y", *rest[-3:])
    return y if bias is None else y + bias


def _fused_fake(
    x: Tensor, weight: Tensor, _: Tensor | None, table: Tensor, *__: Any
) -> list[Tensor]:
    return [x.new_empty((table.shape[1], weight.shape[2]))]


_fused = FusedOperator(
    "voxel_convolution",
    f"Tensor x, Tensor weight, Tensor? bias, {_MAP_SCHEMA}, int groups, str precision, str backend",
    3,
    _forward,
    _backward,
    _fused_fake,
    _composition,
)
