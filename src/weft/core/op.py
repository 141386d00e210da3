"""The operator boundary: one body, one derivative rule, four doors.

    raw door         eager calls that need no gradient: the dispatcher op `weft::<name>_raw`
    eager door       eager calls with gradients: a ctx-style autograd.Function, the cheapest kind
    transform door   torch.func, vmap and forward mode: an autograd.Function with jvp and vmap
    compile door     torch.compile, export, AOTInductor: the registered op `weft::<name>`

All doors run the same body and the same derivative rule.  The rule calls the operation itself,
through the door it came by, so gradients of any order exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Operator"]

_LIBRARY = torch.library.Library("weft", "DEF")

Call = Callable[..., Tensor]
Gradients = Callable[[Call, Sequence[Any], Tensor, Sequence[bool]], tuple[Tensor | None, ...]]
Batch = Callable[[Call, int, Sequence[int | None], Sequence[Any]], Tensor]


class Operator:
    """An operation that is linear in each of its leading tensor arguments.

    Args:
        name: `weft::<name>` is the registered op, `weft::<name>_raw` the one without autograd.
        schema: its arguments in torch's schema language, without defaults, the differentiable
            tensors first; the result is one fresh tensor.
        linear: how many leading arguments are differentiable (each may be None).
        body: computes the result on real tensors.
        fake: an empty tensor of the result's shape and dtype, from the same arguments.
        gradients: `(call, args, grad, needed) -> gradients` of the linear arguments, each None
            where not needed; it uses `call` for the operation itself.
        batch: `(call, size, in_dims, args) -> result` with the mapped dimension in front.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        linear: int,
        body: Call,
        fake: Call,
        gradients: Gradients,
        batch: Batch,
    ) -> None:
        self._linear = linear
        self._gradients = gradients
        self._batch = batch
        for full_name in (f"{name}_raw", name):
            _LIBRARY.define(
                f"{full_name}({schema}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
            )
            for device in ("CPU", "CUDA"):
                _LIBRARY.impl(full_name, body, device)
            torch.library.register_fake(f"weft::{full_name}", fake, lib=_LIBRARY)
        self.raw = getattr(torch.ops.weft, f"{name}_raw").default
        self.registered = getattr(torch.ops.weft, name).default
        self._eager = _eager_door(self)
        self._transform = _transform_door(self)
        torch.library.register_autograd(
            f"weft::{name}",
            functools.partial(_backward, self, self.registered),
            setup_context=_remember,
            lib=_LIBRARY,
        )
        torch.library.register_vmap(
            f"weft::{name}", functools.partial(_vmap, self, self.registered), lib=_LIBRARY
        )

    def __call__(self, *args: Any) -> Tensor:
        """The operation, by the door that the call needs."""
        if torch.compiler.is_compiling():
            return self.registered(*args)  # type: ignore[no-any-return]
        if (
            torch._C._are_functorch_transforms_active()
            or torch.autograd.forward_ad._current_level >= 0
        ):
            return self._transform(*args)
        if torch.is_grad_enabled() and any(
            a is not None and a.requires_grad for a in args[: self._linear]
        ):
            return self._eager(*args)
        return self.raw(*args)  # type: ignore[no-any-return]


class _Slot:
    """Stands in the remembered arguments where a saved tensor belongs."""


_SLOT = _Slot()


def _remember(ctx: Any, inputs: Sequence[Any], output: Any = None) -> None:
    ctx.save_for_backward(*(a for a in inputs if isinstance(a, Tensor)))
    ctx.arguments = [_SLOT if isinstance(a, Tensor) else a for a in inputs]


def _recall(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if a is _SLOT else a for a in ctx.arguments]


def _backward(op: Operator, call: Call, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    args = _recall(ctx)
    linear = op._linear
    gradients = op._gradients(call, args, grad, ctx.needs_input_grad[:linear])
    return (*gradients, *[None] * (len(args) - linear))


def _vmap(
    op: Operator, call: Call, info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[Tensor, int]:
    return op._batch(call, info.batch_size, in_dims, args), 0


def _eager_door(op: Operator) -> Call:
    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            _remember(ctx, args)
            return op.raw(*args)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            return _backward(op, op, ctx, grad)

    return Eager.apply  # type: ignore[no-any-return]


def _transform_door(op: Operator) -> Call:
    class Transform(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Tensor:  # type: ignore[override]
            return op.raw(*args)  # type: ignore[no-any-return]

        @staticmethod
        def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:  # type: ignore[override]
            _remember(ctx, inputs)
            ctx.save_for_forward(*(a for a in inputs if isinstance(a, Tensor)))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            return _backward(op, Transform.apply, ctx, grad)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Tensor:  # type: ignore[override]
            args = _recall(ctx)
            changes = [
                Transform.apply(*args[:i], tangent, *args[i + 1 :])
                for i, tangent in enumerate(tangents[: op._linear])
                if tangent is not None
            ]
            return functools.reduce(torch.add, changes)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:  # type: ignore[override]
            return _vmap(op, Transform.apply, info, in_dims, *args)

    return Transform.apply  # type: ignore[no-any-return]
