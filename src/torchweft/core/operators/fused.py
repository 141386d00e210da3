"""An operator with a fused forward and a fused first gradient, and a composition for the rest.

The composition is the same function made of operators that are closed under differentiation.  It
serves gradients of gradients (a backward that is itself recorded), torch.func and forward mode;
what training runs, forward and backward once, is fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core.operators.operator import (
    LIBRARY,
    compiling,
    forward_level,
    recording,
    transformed,
    unwatched,
)

__all__ = ["FusedOperator", "Gradients"]

Gradients = Sequence[Tensor | None]
Backward = Callable[[Sequence[Any], Sequence[Tensor], Tensor, Sequence[bool]], Gradients]


class FusedOperator:
    """One result of several tensors.

    Args:
        name: `torchweft::<name>` is the registered op.
        schema: its arguments in torch's schema language: the tensors, then the rest.
        tensors: how many tensors lead.
        forward: `(*args) -> [result, *saved]`; what is saved goes to `backward`.
        backward: `(args, saved, grad, needed) -> gradients` of the tensors, contiguous; None where
            not needed.
        fake: like `forward`, empty tensors of the right shapes.
        composition: `(*args) -> result` by operators with gradients of any order.
        keeps_result: whether the result itself is the first that is saved.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        tensors: int,
        forward: Callable[..., list[Tensor]],
        backward: Backward,
        fake: Callable[..., list[Tensor]],
        composition: Callable[..., Tensor],
        keeps_result: bool = False,
    ) -> None:
        self.first_saved = 0 if keeps_result else 1
        self.tensors, self.forward, self.composition = tensors, forward, composition
        self._backward = backward
        LIBRARY.define(f"{name}({schema}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(name, forward, device)
        torch.library.register_fake(f"torchweft::{name}", fake, lib=LIBRARY)
        gradient_schema = f"({schema}, Tensor[] saved, Tensor grad, bool[] needed) -> Tensor[]"
        LIBRARY.define(f"{name}_backward{gradient_schema}", tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(f"{name}_backward", self._needed_gradients, device)
        torch.library.register_fake(
            f"torchweft::{name}_backward", self._fake_gradients, lib=LIBRARY
        )
        self._op = getattr(torch.ops.torchweft, name).default
        self._gradient_op = getattr(torch.ops.torchweft, f"{name}_backward").default
        self._eager = _eager_door(self)
        torch.library.register_autograd(
            f"torchweft::{name}",
            self._registered_backward,
            setup_context=self._remember,
            lib=LIBRARY,
        )

    def __call__(self, *args: Any) -> Tensor:
        """The result, by the door that the call needs."""
        if compiling():
            result: Tensor = self._op(*args)[0]
            return result
        if transformed() or forward_level() >= 0:
            return self.composition(*args)
        if recording() and any(a is not None and a.requires_grad for a in args[: self.tensors]):
            return self._eager(args[self.tensors :], *args[: self.tensors])[0]
        return self.run(*args)[0]

    def run(self, *args: Any) -> list[Tensor]:
        """The result and what is saved, without a graph."""
        if unwatched(args[0]):
            return self.forward(*args)
        found: list[Tensor] = self._op(*args)
        return found

    def gradients(
        self, args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
    ) -> Gradients:
        """The gradients of the tensors: fused, or by the composition if they are recorded."""
        if recording():
            return self._recorded_gradients(args, grad, needed)
        if unwatched(grad):
            return self._backward(args, saved, grad, needed)
        found = iter(self._gradient_op(*args, list(saved), grad, list(needed)))
        return [next(found) if flag else None for flag in needed]

    def _recorded_gradients(
        self, args: Sequence[Any], grad: Tensor, needed: Sequence[bool]
    ) -> Gradients:
        result = self.composition(*args)
        over = [a for a, flag in zip(args, needed, strict=False) if flag]
        found = iter(
            torch.autograd.grad(result, over, grad, create_graph=True, materialize_grads=True)
        )
        return [next(found) if flag else None for flag in needed]

    def _needed_gradients(self, *args: Any) -> list[Tensor]:
        *arguments, saved, grad, needed = args
        found = self._backward(arguments, saved, grad, needed)
        return [g for g in found if g is not None]

    def _fake_gradients(self, *args: Any) -> list[Tensor]:
        needed = args[-1]
        return [a.new_empty(a.shape) for a, flag in zip(args, needed, strict=False) if flag]

    def _remember(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        ctx.save_for_backward(*inputs[: self.tensors], *output[self.first_saved :])
        ctx.rest = inputs[self.tensors :]

    def _registered_backward(self, ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
        kept = ctx.saved_tensors  # once: checkpointing unpacks each tensor a single time
        tensors, saved = kept[: self.tensors], kept[self.tensors :]
        needed = ctx.needs_input_grad[: self.tensors]
        found = self.gradients((*tensors, *ctx.rest), saved, grads[0], needed)
        return (*found, *[None] * len(ctx.rest))


def _eager_door(op: FusedOperator) -> Callable[..., tuple[Tensor, ...]]:
    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rest: tuple[Any, ...], *tensors: Any) -> tuple[Tensor, ...]:
            results = op.run(*tensors, *rest)
            ctx.save_for_backward(*tensors, *results[op.first_saved :])
            ctx.mark_non_differentiable(*results[1:])
            ctx.set_materialize_grads(False)
            ctx.rest = rest
            return tuple(results)

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
            needed = ctx.needs_input_grad[1:]
            if grad is None:
                return (None,) * (1 + len(needed))
            kept = ctx.saved_tensors  # once: checkpointing unpacks each tensor a single time
            tensors, saved = kept[: op.tensors], kept[op.tensors :]
            return (None, *op.gradients((*tensors, *ctx.rest), saved, grad, needed))

    # Function.apply looks for functorch's wrappers first; FusedOperator.__call__ has seen to that
    apply: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, Eager).apply
    return apply
