"""The one differentiable operator of sparse convolution: a trilinear form with one slot open.

    Q(x, w, y) = Σ_k Σ_o ⟨y[o], x[sources[k,o]] w[k]⟩

    role   a   b   result
    "y"    x   w   ∂Q/∂y[o] = Σ_k x[sources[k,o]] w[k]        (N_out, C_out)
    "x"    y   w   ∂Q/∂x[q] = Σ_k y[targets[k,q]] w[k]ᵀ       (N_in, C_in)
    "w"    x   y   ∂Q/∂w[k] = Σ_o x[sources[k,o]]ᵀ y[o]       (K, C_in/groups, C_out)

Each is linear in both operands, and its derivatives are the other two with the gradient in the slot
that was open: so there are gradients of any order, and no backward kernel.

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

from torchweft.core.operators.operator import Call, Operator

__all__ = ["Body", "body", "conv_op", "turned"]


class Body(Protocol):
    """A module that computes on real tensors; see cpu.py for what the functions are."""

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
