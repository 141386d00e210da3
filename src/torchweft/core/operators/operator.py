"""How torch enters an operation, with gradients of any order: one body, one derivative rule.

    raw          eager calls that need no gradient: the body, or the op `torchweft::<name>_raw`
    eager        eager calls with gradients: a ctx-style autograd.Function, the cheapest kind
    transform    torch.func, vmap and forward mode: an autograd.Function with jvp and vmap
    compile      torch.compile, export, AOTInductor: the registered op `torchweft::<name>`

The derivative rule calls the operation itself, through the entry by which it was called, so
gradients of any order exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from torchweft.core import private
from torchweft.core.private import (
    eval_frame,
    functorch,
    temporarily_clear_interpreter_stack,
    transforms_active,
)
from torchweft.errors import ShapeError

__all__ = [
    "LIBRARY",
    "PLAIN",
    "FusedOperator",
    "Gradients",
    "Operator",
    "below_transforms",
    "compiling",
    "constant_when_compiling",
    "forward_level",
    "outside_graphs",
    "recording",
    "transformed",
    "unwatched",
    "used",
    "watched",
]


# torch's registration and autograd.Function carry no types
LIBRARY: Any = torch.library.Library("torchweft", "DEF")  # type: ignore[no-untyped-call]

F = TypeVar("F", bound=Callable[..., Any])
Call = Callable[..., Tensor]
GradientRule = Callable[[Call, Sequence[Any], Tensor, Sequence[bool]], tuple[Tensor | None, ...]]
Batch = Callable[[Call, int, Sequence[int | None], Sequence[Any]], Tensor]


# asked at every call, so looked up once
PLAIN = (Tensor, torch.nn.Parameter)
watched = private.dispatch_modes
compiling = torch.compiler.is_compiling
recording = torch.is_grad_enabled
transformed = private.transforms_active
forward_level = private.forward_level


def unwatched(tensor: Tensor) -> bool:
    """Whether nobody watches or replaces the dispatcher's work on a plain tensor."""
    return type(tensor) in PLAIN and not watched() and not tensor.is_meta


def used(ctx: Any, needed: Sequence[bool], tensors: Sequence[Tensor | None]) -> tuple[bool, ...]:
    """Of gradients that inputs of a Function need, those that the running pass makes use of.

    `needs_input_grad` was settled when the graph was made.  A pass for some inputs alone, such as
    `torch.autograd.grad(energy, position)` of forces, uses none of the weights' gradients.

    Args:
        ctx: of the backward.
        needed: for the last arguments of `apply`.
        tensors: those arguments; no other was a tensor.
    """
    if sum(needed) < 2:  # else the pass would not be here
        return tuple(needed)
    nodes = (node for node, _ in ctx.next_functions)
    found = []
    for flag, tensor in zip(needed, tensors, strict=True):
        node = None if tensor is None else next(nodes)
        found.append(flag and _executed(node))
    return tuple(found)


def _executed(node: Any) -> bool:
    try:
        return private.will_execute(node)
    except RuntimeError:  # a leaf that autograd.grad was asked for
        return True


def constant_when_compiling(function: F) -> F:
    """Let torch.compile call it with constants and keep the answer, instead of tracing into it.

    As torch.compiler.assume_constant_result, which imports torch's compiler, and triton with it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def outside_graphs(function: F) -> F:
    """Let torch.compile break its graph at a call, once, instead of tracing what follows from data.

    As torch.compiler.disable, which imports torch's compiler, and triton with it.
    """
    frame = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(frame, frame)  # of its own, and of those it calls
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    reason = "it depends on what tensors hold: call it once before, its result is kept"
    function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return function


class Operator:
    """An operation that is linear in each of its leading tensor arguments.

    Args:
        name: of the registered op `torchweft::<name>`, and of `<name>_raw`, without autograd.
        schema: its arguments in torch's schema language, without defaults: the differentiable
            tensors, then the index tensors, then the rest; the result is one fresh tensor.
        linear: how many leading arguments are differentiable; all but the first may be None.
        tables: how many index tensors follow them; each may be None.
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
        tables: int,
        body: Call,
        fake: Call,
        gradients: GradientRule,
        batch: Batch,
    ) -> None:
        self.linear = linear
        self.tensors = linear + tables
        self.body = body
        self.gradients = gradients
        self.batch = batch
        for full_name in (f"{name}_raw", name):
            LIBRARY.define(f"{full_name}({schema}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
            for device in ("CPU", "CUDA"):
                LIBRARY.impl(full_name, body, device)
            torch.library.register_fake(f"torchweft::{full_name}", fake, lib=LIBRARY)
        self.raw: Call = getattr(torch.ops.torchweft, f"{name}_raw").default
        self.registered: Call = getattr(torch.ops.torchweft, name).default
        self._eager = _eager_door(self)
        self._transform = _transform_door(self)
        torch.library.register_autograd(
            f"torchweft::{name}",
            functools.partial(_backward, self, self.registered),
            setup_context=functools.partial(_remember, self),
            lib=LIBRARY,
        )
        torch.library.register_vmap(
            f"torchweft::{name}", functools.partial(_vmap, self, self.registered), lib=LIBRARY
        )

    def __call__(self, *args: Any) -> Tensor:
        """The operation, by the door that the call needs."""
        if compiling():
            return self.registered(*args)
        if transformed() or forward_level() >= 0:
            return self._transform(*args)
        if recording():
            for a in args[: self.linear]:
                if a is not None and a.requires_grad:
                    return self._eager(args[self.linear :], *args[: self.linear])
        return self.forward(*args)

    def forward(self, *args: Any) -> Tensor:
        """The result without a graph: the body itself for plain tensors, else the raw op.

        The dispatcher costs as much as the body of a small call, and serves only those who watch
        or replace it: dispatch modes (fake tensors, counters) and tensor subclasses.
        """
        if unwatched(args[0]):
            return self.body(*args)
        return self.raw(*args)


def _remember(op: Operator, ctx: Any, inputs: Sequence[Any], output: Any = None) -> None:
    ctx.save_for_backward(*inputs[: op.tensors])
    ctx.rest = inputs[op.tensors :]


def _backward(op: Operator, call: Call, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    args = (*ctx.saved_tensors, *ctx.rest)
    gradients = op.gradients(call, args, grad, ctx.needs_input_grad[: op.linear])
    return (*gradients, *[None] * (len(args) - op.linear))


def _vmap(
    op: Operator, call: Call, info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[Tensor, int]:
    if any(dim is not None for dim in in_dims[op.linear : op.tensors]):
        raise ShapeError(
            "an index table was given to torch.vmap as a mapped argument: tables must be the same "
            "for the whole map. Pass in_dims=None for them, or call once for each table."
        )
    return op.batch(call, info.batch_size, in_dims, args), 0


def _eager_door(op: Operator) -> Call:
    tables = op.tensors - op.linear

    class Eager(torch.autograd.Function):
        # tables travel in one tuple: torch inspects every tensor argument at a price
        @staticmethod
        def forward(ctx: Any, rest: tuple[Any, ...], *linear: Any) -> Tensor:
            ctx.save_for_backward(*linear, *rest[:tables])
            ctx.rest = rest[tables:]
            return op.forward(*linear, *rest)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            args = (*ctx.saved_tensors, *ctx.rest)
            needed = used(ctx, ctx.needs_input_grad[1:], args[: op.linear])
            return (None, *op.gradients(op, args, grad, needed))

    # Function.apply looks for functorch's wrappers first; Operator.__call__ has seen to that
    apply: Call = super(torch.autograd.Function, Eager).apply
    return apply


def _transform_door(op: Operator) -> Call:
    class Transform(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Tensor:
            return op.raw(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            _remember(op, ctx, inputs)
            ctx.save_for_forward(*inputs[: op.tensors])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            return _backward(op, apply, ctx, grad)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Tensor:
            args = (*ctx.saved_tensors, *ctx.rest)
            changes = [
                apply(*args[:i], tangent, *args[i + 1 :])
                for i, tangent in enumerate(tangents[: op.linear])
                if tangent is not None
            ]
            return functools.reduce(torch.add, changes)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
            return _vmap(op, apply, info, in_dims, *args)

    apply: Call = Transform.apply
    return apply


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
        self._eager = _fused_entry(self)
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


def _fused_entry(op: FusedOperator) -> Callable[..., tuple[Tensor, ...]]:
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


P = ParamSpec("P")
R = TypeVar("R")


def below_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function of index tensors as if no transform were active.

    A tensor that is made under `torch.func.grad` is a wrapper that dies with the transform; a
    table that is kept must not be one, nor one that a kernel reads by its address.

    Raises:
        ShapeError: a tensor among the arguments is mapped by `torch.vmap`.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not transforms_active():
            return function(*args, **kwargs)
        plain = [_plain(a) if isinstance(a, Tensor) else a for a in args]
        with temporarily_clear_interpreter_stack():
            return function(*plain, **kwargs)  # type: ignore[arg-type]

    return run


def _plain(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            raise ShapeError(
                f"an index tensor of shape {tuple(tensor.shape)} is mapped by torch.vmap: tables "
                "are the same for all samples of a map. Map features and weights only, or call "
                "once for each table."
            )
        tensor = functorch.get_unwrapped(tensor)
    return tensor
