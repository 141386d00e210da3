"""Hidden layers of a network of numbers, and their derivatives, by kernels on a GPU.

All layers are one launch, their gradients another, and second derivatives, as a loss of forces
needs them, two more; sums over the rows, which gradients of matrices are, are a launch of their
own.  Derivatives beyond are composed of torch's operations.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from torchweft.core.backend import interpreted
from torchweft.core.explain import record_cost, recording
from torchweft.core.gpu.launcher import Kernel, Tile, current_device, processors
from torchweft.core.operators.operator import plain_call, used
from torchweft.core.printing.modules import printed
from torchweft.o3.hidden_layers.source import HIDDEN_LAYERS, HiddenLayers, KernelSpec, source
from torchweft.products.tiles import has_wgmma

__all__ = ["hidden_layers", "serves"]

MOST_LAYERS = 4
MOST_WIDTH = 64
"""Layers, and numbers of each, that a program keeps in registers."""

TILE = Tile((64,), 4, 1)
"""Rows of a tile: as many as one warp group multiplies at a time."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs that sum over rows, each a piece of them for one matrix."""


def serves(layers: HiddenLayers, x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether kernels compute these layers: in float32, on GPUs whose warp groups multiply.

    Other GPUs keep both factors of a product in registers, where these do not fit.
    """
    every = (x, *weights)
    if torch.is_autocast_enabled(x.device.type) or not plain_call(every):
        return False
    alike = all(t.dtype == torch.float32 and t.device == x.device for t in every)
    return alike and _fits(layers, x.device)


@functools.lru_cache(maxsize=256)
def _fits(layers: HiddenLayers, device: torch.device) -> bool:
    some = 0 < len(layers.after) <= MOST_LAYERS and min(layers.widths) > 0
    return some and max(layers.widths) <= MOST_WIDTH and (interpreted() or has_wgmma(device))


def hidden_layers(layers: HiddenLayers, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """h_n of h_0 = x, h_{k+1} = c_k f(b_k h_k W_k), f(t) = t σ(t), b_0 = `before`, b_k = 1 else.

    Args:
        layers: widths and factors, which `serves` accepts.
        x: (…, widths[0]), float32.
        weights: (widths[k], widths[k + 1]) each, float32.

    Returns:
        (…, widths[-1]).  Differentiable to any order, bitwise repeatable.
    """
    flat = x.reshape(-1, x.shape[-1])
    varied = torch.is_grad_enabled() and any(t.requires_grad for t in (flat, *weights))
    h: Tensor
    if varied:
        h = _Hidden.apply(layers, flat, *weights)  # type: ignore[no-untyped-call]
    else:
        (h,) = _launched(KernelSpec(layers, "rows"), {"x": flat, **_named("w", weights)})
    return h.view(*x.shape[:-1], h.shape[1])


class _Hidden(torch.autograd.Function):
    """h_n."""

    @staticmethod
    def forward(ctx: Any, layers: HiddenLayers, x: Tensor, *weights: Tensor) -> Tensor:
        h, *t = _launched(KernelSpec(layers, "rows", more=True), {"x": x, **_named("w", weights)})
        ctx.layers = layers
        ctx.save_for_backward(x, *weights, *t)
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.layers.after)
        inputs, t = ctx.saved_tensors[: count + 1], ctx.saved_tensors[count + 1 :]
        summed = any(used(ctx, ctx.needs_input_grad[1:], inputs)[1:])
        slopes = _Slopes.apply if torch.is_grad_enabled() else _back
        found = slopes(ctx.layers, summed, *grads, *inputs, *t)
        return None, *found, *(() if summed else (None,) * count)


class _Slopes(torch.autograd.Function):
    """The gradients of Σ g h_n by x and, if they are summed, by the matrices."""

    @staticmethod
    def forward(
        ctx: Any, layers: HiddenLayers, summed: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.layers, ctx.summed = layers, summed
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return _back(layers, summed, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count, (v, *others) = len(ctx.layers.after), grads
        inputs, t = ctx.saved_tensors[: count + 2], ctx.saved_tensors[count + 2 :]
        behind = (None,) * count
        if torch.is_grad_enabled() or v is None or any(other is not None for other in others):
            return None, None, *_composed_slopes(ctx.layers, ctx.summed, inputs, grads), *behind
        _, by_x, *by_weights = used(ctx, ctx.needs_input_grad[2 : count + 4], inputs)
        given = _named("w", inputs[2:]) | _named("t", t) | {"g": inputs[0], "x": inputs[1], "v": v}
        u, *p = _launched(KernelSpec(ctx.layers, "tangent"), given)
        if not (by_x or any(by_weights)):
            return None, None, u, None, *behind, *behind
        found = _with_sums(ctx.layers, "second", any(by_weights), given | _named("p", p))
        return None, None, u, found[0], *(found[1:] or behind), *behind


def _back(layers: HiddenLayers, summed: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Of g, x, the matrices and t: the gradients of Σ g h_n."""
    count, (g, x, *rest) = len(layers.after), tensors
    given = {"g": g, "x": x} | _named("w", rest[:count]) | _named("t", rest[count:])
    return _with_sums(layers, "back", summed, given)


def _with_sums(
    layers: HiddenLayers, kind: str, summed: bool, given: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """The gradient by x of "back" or "second" and, if they are summed, those by the matrices."""
    gx, *kept = _launched(KernelSpec(layers, kind, more=summed), given)
    if not summed:
        return (gx,)
    count = len(layers.after)
    more = _named("d", kept[:count]) | _named("e", kept[count:])
    spec = KernelSpec(layers, "sums" if kind == "back" else "second sums")
    (sums,) = _launched(spec, {**given, **more})
    each = torch.split(sums.sum(0), list(layers.sizes))
    return gx, *[t.view(given[f"w{k}"].shape) for k, t in enumerate(each)]


def _composed_slopes(
    layers: HiddenLayers, summed: bool, given: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Gradients of the results of `_Slopes` by g, x and the matrices, by torch's operations."""
    pairs = [(n, grad) for n, grad in enumerate(grads) if grad is not None]
    if not pairs:
        return (None,) * len(given)
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        # views: g may depend on x, which is no part of these gradients
        every = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in given]
        g, x, *weights = every
        h = _composed(layers, x, weights)
        slopes = torch.autograd.grad(h, [x, *weights] if summed else [x], g, create_graph=True)
        outputs, cotangents = [slopes[n] for n, _ in pairs], [grad for _, grad in pairs]
        return torch.autograd.grad(
            outputs, every, cotangents, create_graph=create, allow_unused=True
        )


def _composed(layers: HiddenLayers, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """h_n by torch's operations."""
    factor = layers.before
    for weight, after in zip(weights, layers.after, strict=True):
        x, factor = after * silu(factor * (x @ weight)), 1.0
    return x


def _named(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Operands of each layer, by their names in kernels."""
    return {f"{name}{k}": tensor for k, tensor in enumerate(tensors)}


def _launched(spec: KernelSpec, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The results of a kernel in the order of its operands; sums have a row for each piece."""
    layers, like = spec.layers, given["x"]
    rows, piece = like.shape[0], TILE.blocks[0]
    if spec.summed:
        piece = _piece(len(layers.after), rows, like.device)
    parts = -(-rows // piece)
    results = {
        name: like.new_empty(parts, sum(layers.sizes))
        if name == "sums"
        else like.new_empty(rows, layers.widths[_layer(name)])
        for name in spec.operands
        if name not in given
    }
    tensors = [results[n] if n in results else given[n].contiguous() for n in spec.operands]
    programs, counts = (
        (parts * len(layers.after), (rows, piece)) if spec.summed else (parts, (rows,))
    )
    with current_device(like):
        _kernel(spec, like.device)(programs, tensors, counts)
    if recording():
        products = 2 * rows * sum(layers.sizes) * (2 if spec.kind.startswith("second") else 1)
        record_cost(sum(t.nbytes for t in tensors), products)
    return tuple(results.values())


def _piece(matrices: int, rows: int, device: torch.device) -> int:
    """Rows that a program sums, so that all programs run at once."""
    tiles = -(-rows // TILE.blocks[0])
    pieces = max(1, PROGRAMS_PER_PROCESSOR * processors(device) // matrices)
    return max(1, -(-tiles // pieces)) * TILE.blocks[0]


def _layer(result: str) -> int:
    """The layer whose width rows of a result have."""
    known = {"h": -1, "u": -1, "gx": 0}
    return known[result] if result in known else int(result[1:]) + 1


@functools.lru_cache(maxsize=256)
def _kernel(spec: KernelSpec, device: torch.device) -> Kernel:
    """It holds machine code, which depends on all arguments."""
    return Kernel(printed("o3_hidden_layers", source(spec), HIDDEN_LAYERS), (), (), TILE)
