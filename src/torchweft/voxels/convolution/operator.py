"""The differentiable operators of sparse convolution.

`conv_op` is a trilinear form with one slot open, and closed under differentiation:

    Q(x, w, y) = Σ_k Σ_o ⟨y[o], x[sources[k,o]] w[k]⟩

    role   a   b   result
    "y"    x   w   ∂Q/∂y[o] = Σ_k x[sources[k,o]] w[k]        (N_out, C_out)
    "x"    y   w   ∂Q/∂x[q] = Σ_k y[targets[k,q]] w[k]ᵀ       (N_in, C_in)
    "w"    x   y   ∂Q/∂w[k] = Σ_o x[sources[k,o]]ᵀ y[o]       (K, C_in/groups, C_out)

Each is linear in both operands, and its derivatives are the other two with the gradient in the slot
that was open: so there are gradients of any order, and no backward kernel.

`convolution` is what layers call: bias and epilogue are added before the one rounding.  Its
backward computes the weight's gradient first, so that its partial sums are freed when the input's
gradient is allocated; gradients of gradients go by `conv_op`.

Maps come as their tables, table[k,i] = sources[k, out_order[i]] and back[k,i] = targets[k,
in_order[i]]; `back` None says table[K−1−k] (a submanifold map of an odd kernel): nothing else is
then derived for role "x", and the table may come as the half of it that says all, see `mirror`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from torchweft.core.operators.operator import (
    Call,
    FusedOperator,
    Gradients,
    Operator,
    compiling,
    forward_level,
    recording,
    transformed,
    unwatched,
)
from torchweft.voxels.convolution.epilogue import PLAIN, Epilogue
from torchweft.voxels.grid.geometry import Geometry
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.kernel_map import KernelMap

__all__ = ["Body", "body", "compile_before", "conv_op", "convolution", "turned"]


class Body(Protocol):
    """A module that computes on real tensors; see torch_path.py for what the functions are."""

    convolve: Callable[..., Tensor]
    weight_gradient: Callable[..., Tensor]


@functools.cache
def body(backend: str) -> Body:
    """The bodies of a backend, imported when it first serves: "triton" or "torch"."""
    name = "launch" if backend == "triton" else "torch_path"
    return cast(Body, importlib.import_module(f"torchweft.voxels.convolution.{name}"))


_SCHEMA = (
    "Tensor a, Tensor b, Tensor table, Tensor? back, Tensor? in_order, Tensor? out_order, "
    "int offsets, str role, int groups, str precision, str backend"
)


def _body(
    a: Tensor,
    b: Tensor,
    table: Tensor,
    back: Tensor | None,
    in_order: Tensor | None,
    out_order: Tensor | None,
    offsets: int,
    role: str,
    groups: int,
    precision: str,
    backend: str,
) -> Tensor:
    run = body(backend)
    flip = back is None
    if role == "w":
        sizes: dict[str, Any] = {"offsets": offsets, "mirrored": flip}
        return run.weight_gradient(
            a, b, table, out_order, groups=groups, precision=precision, **sizes
        )
    if role == "x":
        read, order = (table, out_order) if back is None else (back, in_order)
        weight = turned(b, groups)
        return run.convolve(a, weight, read, order, groups=groups, precision=precision, flip=flip)
    return run.convolve(a, b, table, out_order, groups=groups, precision=precision)


def turned(weight: Tensor, groups: int) -> Tensor:
    """(K, C_in/groups, C_out) → (K, C_out/groups, C_in), each group's matrix transposed."""
    if groups == 1:
        return weight.transpose(1, 2)
    offsets, inner, outer = weight.shape
    matrices = weight.reshape(offsets, inner, groups, outer // groups)
    return matrices.permute(0, 3, 2, 1).flatten(2)


def _fake(a: Tensor, b: Tensor, table: Tensor, back: Tensor | None, *rest: Any) -> Tensor:
    offsets, role, groups = rest[2:5]
    if role == "w":
        return a.new_empty((offsets, a.shape[1] // groups, b.shape[1]))
    if role == "x":
        read = table if back is None else back
        return a.new_empty((read.shape[1], b.shape[1] * groups))
    return a.new_empty((table.shape[1], b.shape[2]))


_OPERANDS = {"y": ("x", "w"), "x": ("y", "w"), "w": ("x", "y")}
"""The slots of the operands, by the one that is open."""


def _gradients(
    call: Call, args: Sequence[Any], grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    a, b, *tables, role, groups, precision, backend = args
    slots = dict(zip(_OPERANDS[role], (a, b), strict=True)) | {role: grad}

    def gradient(slot: str) -> Tensor:
        first, second = (slots[letter] for letter in _OPERANDS[slot])
        return call(first, second, *tables, slot, groups, precision, backend)

    left, right = _OPERANDS[role]
    return gradient(left) if needed[0] else None, gradient(right) if needed[1] else None


def _batch(call: Call, size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> Tensor:
    """Call by call: maps of one network differ in their weights, and share nothing but tables."""
    a, b = (
        t if dim is None else t.movedim(dim, 0) for t, dim in zip(args[:2], in_dims, strict=False)
    )
    mapped = [dim is not None for dim in in_dims[:2]]
    results = [
        call(a[i] if mapped[0] else a, b[i] if mapped[1] else b, *args[2:]) for i in range(size)
    ]
    return torch.stack(results)


conv_op = Operator("voxel_conv", _SCHEMA, 2, 4, _body, _fake, _gradients, _batch)
"""conv_op(a, b, table, back, in_order, out_order, offsets, role, groups, precision, backend)"""


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
    table, back, inputs, outputs, shape, _ = kernel_map
    order = outputs.order
    maps = table, back, order if inputs is outputs else inputs.order, order
    if after == PLAIN or _observed(x, weight, bias, *after[:3]):
        if backend == "triton":
            _compile_ahead(x, weight, bias, maps, groups, precision)
        y = _fused(x, weight, bias, *maps, shape.num_offsets, groups, precision, backend)
        return y if after is PLAIN else after(y)
    convolve, whole = body(backend).convolve, after.with_bias(bias)
    with torch.no_grad():
        return convolve(x, weight, table, order, groups=groups, precision=precision, after=whole)


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
    if compiling() or shape.mode != "submanifold" or not shape.symmetric:
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
    if compiling() or transformed() or not (unwatched(x) and unwatched(weight)):
        return
    from torchweft.voxels.convolution import launch

    turned_weight = functools.partial(turned, weight, groups)
    needed = recording() and x.requires_grad, recording() and weight.requires_grad
    options: dict[str, Any] = {"groups": groups, "precision": precision}
    options |= {"needed": needed, "tiled": tiled}
    launch.compile_ahead(x, weight, turned_weight, bias, *maps, **options)


def _observed(*tensors: Tensor | None) -> bool:
    """Whether somebody records, transforms or watches a call: then its steps are torch's own."""
    given = [t for t in tensors if t is not None]
    if compiling() or transformed() or forward_level() >= 0:
        return True
    recorded = recording() and any(t.requires_grad for t in given)
    return recorded or not all(unwatched(t) for t in given)


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
    convolve, after = body(backend).convolve, PLAIN if bias is None else Epilogue(shift=bias)
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


def _fused_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor, *_: Any
) -> list[Tensor]:
    return [x.new_empty((table.shape[1], weight.shape[2]))]


_fused = FusedOperator(
    "voxel_convolution",
    "Tensor x, Tensor weight, Tensor? bias, Tensor table, Tensor? back, Tensor? in_order, "
    "Tensor? out_order, int offsets, int groups, str precision, str backend",
    3,
    _forward,
    _backward,
    _fused_fake,
    _composition,
)
