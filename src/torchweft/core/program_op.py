"""An operator that runs programs: its gradients are programs again, so one op has every order.

    torchweft::<family>(Tensor[] inputs, str program, str backend) -> Tensor[]

Four doors, as in core/op.py: the raw op, an autograd.Function for eager gradients, one for
torch.func and forward mode, and the registered op for torch.compile, export and AOTInductor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchweft.core.expressions.program import Operand, Program, mask
from torchweft.core.operators.operator import LIBRARY, compiling, recording, transformed, unwatched

__all__ = ["ProgramOperator"]

Tensors = Sequence[Tensor]
Results = tuple[Tensor, ...]


class ProgramOperator:
    """Runs the programs of a family.

    Args:
        name: of the registered op `torchweft::<name>`, and of `<name>_raw`, without autograd.
        program: the program with a key.
        body: `(program, inputs, backend) -> results` on real tensors: contiguous, in the inputs'
            dtype.
    """

    def __init__(
        self,
        name: str,
        program: Callable[[str], Program],
        body: Callable[[Program, Tensors, str], list[Tensor]],
    ) -> None:
        self.program = program
        self._run = body
        schema = "(Tensor[] inputs, str program, str backend) -> Tensor[]"
        for full_name in (f"{name}_raw", name):
            LIBRARY.define(f"{full_name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
            for device in ("CPU", "CUDA"):
                LIBRARY.impl(full_name, self._body, device)
            torch.library.register_fake(f"torchweft::{full_name}", self._fake, lib=LIBRARY)
        self._raw = getattr(torch.ops.torchweft, f"{name}_raw").default
        self._op = getattr(torch.ops.torchweft, name).default
        self._eager = _eager_door(self)
        self._transform = _transform_door(self)
        torch.library.register_autograd(
            f"torchweft::{name}", self._registered_backward, setup_context=_remember, lib=LIBRARY
        )
        torch.library.register_vmap(f"torchweft::{name}", self._registered_vmap, lib=LIBRARY)

    def __call__(self, program: str, backend: str, *inputs: Tensor) -> Results:
        """The results, by the door that the call needs."""
        if compiling():
            return self.registered(program, backend, *inputs)
        if transformed() or forward_ad._current_level >= 0:
            return self._transform(program, backend, *inputs)
        if recording() and any(a.requires_grad for a in inputs):
            return self._eager(program, backend, *inputs)
        return self.forward(program, backend, *inputs)

    def forward(self, program: str, backend: str, *inputs: Tensor) -> Results:
        """The results without a graph: the body itself for plain tensors, else the raw op."""
        if unwatched(inputs[0]):
            return tuple(self._body(inputs, program, backend))
        return tuple(self._raw(list(inputs), program, backend))

    def registered(self, program: str, backend: str, *inputs: Tensor) -> Results:
        """The results by the registered op."""
        return tuple(self._op(list(inputs), program, backend))

    def _body(self, inputs: Tensors, program: str, backend: str) -> list[Tensor]:
        return self._run(self.program(program), inputs, backend)

    def _fake(self, inputs: Tensors, program: str, backend: str) -> list[Tensor]:
        found = self.program(program)
        lengths: dict[str, Any] = {}
        for operand, tensor in zip(found.inputs, inputs, strict=True):
            lengths.update(zip(operand.axes, tensor.shape[1:], strict=True))
        return [
            inputs[0].new_empty((o.operand.size, *(lengths[axis] for axis in o.operand.axes)))
            for o in found.outputs
        ]

    def gradients(
        self,
        call: Callable[..., Results],
        program: str,
        backend: str,
        inputs: Tensors,
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """The gradient of each input by the derived program, None where it is not needed."""
        given = [g for g in grads if g is not None]
        if not given or not any(needed):
            return [None] * len(inputs)
        derived = f"{program} | vjp {mask(needed)} {mask([g is not None for g in grads])}"
        found = iter(call(derived, backend, *inputs, *given))
        return [next(found) if flag else None for flag in needed]

    def batch(
        self,
        call: Callable[..., Results],
        size: int,
        dims: Sequence[int | None],
        program: str,
        backend: str,
        inputs: Tensors,
    ) -> list[Tensor]:
        """The results of a batch of calls, its dimension in front: more rows where rows are all.

        An operand that is the same for every row is one in each call, so that such calls are made
        one after the other.
        """
        found = self.program(program)
        mapped = [o for o, dim in zip(found.inputs, dims, strict=True) if dim is not None]
        operands = [*mapped, *(output.operand for output in found.outputs)]
        if not all("row" in operand.axes for operand in operands):
            calls = [
                call(
                    program, backend, *(_entry(*pair, i) for pair in zip(inputs, dims, strict=True))
                )
                for i in range(size)
            ]
            return [torch.stack(results) for results in zip(*calls, strict=True)]
        triples = zip(inputs, dims, found.inputs, strict=True)
        results = call(program, backend, *(_folded(size, *triple) for triple in triples))
        return [r.reshape(len(r), size, -1, r.shape[-1]).movedim(1, 0) for r in results]

    def _registered_backward(self, ctx: Any, grads: Any) -> tuple[Any, None, None]:
        needed = ctx.needs_input_grad[0]
        call = self.registered
        found = self.gradients(call, ctx.program, ctx.backend, ctx.saved_tensors, grads, needed)
        return found, None, None

    def _registered_vmap(
        self, info: Any, dims: Any, inputs: Tensors, program: str, backend: str
    ) -> tuple[list[Tensor], list[int]]:
        results = self.batch(self.registered, info.batch_size, dims[0], program, backend, inputs)
        return results, [0] * len(results)


def _remember(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    tensors, ctx.program, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _entry(tensor: Tensor, dim: int | None, index: int) -> Tensor:
    return tensor if dim is None else tensor.select(dim, index)


def _folded(size: int, tensor: Tensor, dim: int | None, operand: Operand) -> Tensor:
    """A mapped dimension becomes rows; what is not mapped is repeated, if it has rows."""
    if "row" not in operand.axes:
        return tensor
    entries = tensor.unsqueeze(1) if dim is None else tensor.movedim(dim, 1)
    return entries.expand(-1, size, -1, -1).flatten(1, 2)


def _eager_door(op: ProgramOperator) -> Callable[..., Results]:
    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, program: str, backend: str, *inputs: Tensor) -> Results:
            ctx.save_for_backward(*inputs)
            ctx.set_materialize_grads(False)
            ctx.program, ctx.backend = program, backend
            return op.forward(program, backend, *inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            needed = ctx.needs_input_grad[2:]
            found = op.gradients(op, ctx.program, ctx.backend, ctx.saved_tensors, grads, needed)
            return (None, None, *found)

    # Function.apply looks for functorch's wrappers first; ProgramOperator.__call__ has seen to that
    apply: Callable[..., Results] = super(torch.autograd.Function, Eager).apply
    return apply


def _transform_door(op: ProgramOperator) -> Callable[..., Results]:
    class Transform(torch.autograd.Function):
        @staticmethod
        def forward(program: str, backend: str, *inputs: Tensor) -> Results:
            return tuple(op._raw(list(inputs), program, backend))

        @staticmethod
        def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            ctx.program, ctx.backend, *tensors = inputs
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            needed = ctx.needs_input_grad[2:]
            found = op.gradients(apply, ctx.program, ctx.backend, ctx.saved_tensors, grads, needed)
            return (None, None, *found)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Results:
            directions = tangents[2:]
            given = [t for t in directions if t is not None]
            derived = f"{ctx.program} | jvp {mask([t is not None for t in directions])}"
            return apply(derived, ctx.backend, *ctx.saved_tensors, *given)

        @staticmethod
        def vmap(info: Any, dims: Any, program: str, backend: str, *inputs: Tensor) -> Any:
            results = op.batch(apply, info.batch_size, dims[2:], program, backend, inputs)
            return tuple(results), 0

    apply: Callable[..., Results] = Transform.apply
    return apply
