"""How torch enters an operation, with gradients of any order: one body, one derivative rule.

    plain        eager calls that need no gradient: the body, or the registered op if watched
    eager        eager calls with gradients: a ctx-style autograd.Function, the cheapest kind
    transform    torch.func, vmap and forward mode: an autograd.Function with jvp and vmap
    compile      torch.compile, export, AOTInductor: the registered op `torchweft::<name>`

The derivative rule calls the operation itself, through the entry by which it was called, so
gradients of any order exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

from torchweft.core import private
from torchweft.core.operators.operands import unwrapped
from torchweft.core.private import (
    eval_frame,
    temporarily_clear_interpreter_stack,
    transforms_active,
)
from torchweft.errors import ShapeError

__all__ = [
    "LIBRARY",
    "PLAIN",
    "FusedOperator",
    "Gradients",
    "Observer",
    "Operator",
    "below_transforms",
    "compiling",
    "constant_when_compiling",
    "forward_level",
    "on_gpu",
    "outside_graphs",
    "plain_call",
    "recording",
    "register",
    "transformed",
    "unwatched",
    "used",
    "watched",
    "will_write",
]


# torch's registration and autograd.Function carry no types
LIBRARY: Any = torch.library.Library("torchweft", "DEF")  # type: ignore[no-untyped-call]

F = TypeVar("F", bound=Callable[..., Any])
Call = Callable[..., Tensor]
GradientRule = Callable[[Call, Sequence[Any], Tensor, Sequence[bool]], tuple[Tensor | None, ...]]
Batch = Callable[[Call, int, Sequence[int | None], Sequence[Any]], Tensor]


# called at every call of an operator, so attributes are looked up once
PLAIN = (Tensor, torch.nn.Parameter)
watched = private.dispatch_modes
compiling = torch.compiler.is_compiling
recording = torch.is_grad_enabled
transformed = private.transforms_active
forward_level = private.forward_level


# torch's dispatch modes have no types
class Observer(private.DispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that notes what runs and changes nothing: operators run as without it."""

    active: ClassVar[list[Observer]] = []

    def __enter__(self) -> Self:
        self.active.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.active.remove(self)

    def note_written(self, tensors: Iterable[Tensor]) -> None:
        """Called before a kernel writes to tensors that others hold."""


def will_write(tensors: Sequence[Tensor]) -> None:
    """Tell torch and observers that a kernel will write to tensors that others hold."""
    for observer in Observer.active:
        observer.note_written(tensors)
    torch.autograd.graph.increment_version(tensors)


def unwatched(tensor: Tensor) -> bool:
    """Whether a tensor is plain, and no dispatch mode is active but observers."""
    if type(tensor) not in PLAIN or tensor.is_meta:
        return False
    return watched() == len(Observer.active)


def plain_call(tensors: Iterable[Tensor]) -> bool:
    """Whether a call on these is eager: not compiled, transformed, in forward mode, or watched."""
    if compiling() or transformed() or forward_level() >= 0 or watched() != len(Observer.active):
        return False
    return all([type(t) in PLAIN and not t.is_meta for t in tensors])  # noqa: C419 - faster


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU; tests replace it where kernels run in the interpreter."""
    return tensor.is_cuda


def used(ctx: Any, needed: Sequence[bool], tensors: Sequence[Tensor | None]) -> tuple[bool, ...]:
    """Which of the gradients that inputs of a Function need are used by the running backward pass.

    `needs_input_grad` was computed when the graph was recorded.  A pass for some inputs only, such
    as `torch.autograd.grad(energy, position)` for forces, uses no gradient of the weights.

    Args:
        ctx: context of the backward.
        needed: `needs_input_grad` of the last arguments of `apply`.
        tensors: those arguments; no other argument was a tensor.
    """
    if sum(needed) < 2:  # the pass reached this node for it
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
    except RuntimeError:  # a leaf that autograd.grad differentiates by
        return True


def constant_when_compiling(function: F) -> F:
    """Let torch.compile call a function with constants and keep its result instead of tracing it.

    Like torch.compiler.assume_constant_result, which imports torch's compiler, and Triton with it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def outside_graphs(function: F) -> F:
    """Let torch.compile break its graph at a call, once, instead of tracing data-dependent code.

    Like torch.compiler.disable, which imports torch's compiler, and Triton with it.
    """
    frame = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(frame, frame)  # of this function and its callees
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    reason = "it depends on what tensors hold: call it once before, its result is kept"
    function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return function


def register(
    name: str, schema: str, body: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Define the op `torchweft::<name>`; its autograd and vmap rules are registered separately.

    Args:
        name: name of the op.
        schema: arguments and results in torch's schema language.
        body: computes the results on real tensors.
        fake: empty tensors of the results' shapes and dtypes, from the same arguments.
    """
    LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, body, device)
    torch.library.register_fake(f"torchweft::{name}", fake, lib=LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.torchweft, name).default
    return op


class Operator:
    """An operation that is linear in each of its leading tensor arguments.

    Args:
        name: name of the registered op `torchweft::<name>`.
        schema: its arguments in torch's schema language, without defaults: the differentiable
            tensors, then the index tensors, then the other arguments; the result is a new tensor.
        linear: number of leading differentiable arguments; all but the first may be None.
        tables: number of index tensors that follow them; each may be None.
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
        self.registered: Call = register(name, f"({schema}) -> Tensor", body, fake)
        self._eager = _eager_entry(self)
        self._transform = _transform_entry(self)
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
        """The result, by the entry that the call needs."""
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
        """The result without a graph: by the body for plain tensors, else by the registered op.

        The dispatcher costs as much as the body of a small call, and is needed only by dispatch
        modes (fake tensors, counters) and tensor subclasses.
        """
        if unwatched(args[0]):
            return self.body(*args)
        return self.registered(*args)


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


def _eager_entry(op: Operator) -> Call:
    tables = op.tensors - op.linear

    class Eager(torch.autograd.Function):
        # tables are passed as one tuple: torch inspects every tensor argument, which takes time
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

    # Function.apply looks for functorch's wrappers first; Operator.__call__ has excluded them
    apply: Call = super(torch.autograd.Function, Eager).apply
    return apply


def _transform_entry(op: Operator) -> Call:
    class Transform(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Tensor:
            return op.registered(*args)

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
Backward = Callable[[Sequence[Any], Sequence[Tensor], Any, Sequence[bool]], Gradients]


class FusedOperator:
    """Results of several tensors, with a fused forward pass and a fused first gradient.

    Gradients of gradients, torch.func and forward mode use a composition: the same function made
    of operators that are closed under differentiation.

    Args:
        name: name of the registered op `torchweft::<name>`.
        schema: its arguments in torch's schema language: the tensors, then the other arguments.
        tensors: number of leading tensor arguments.
        forward: `(*args) -> [*results, *saved]`; the saved tensors are passed to `backward`.
        backward: `(args, saved, grad, needed) -> gradients` of the tensors, contiguous; None where
            not needed.
        fake: like `forward`, empty tensors of the right shapes.
        composition: `(*args) -> result` by operators with gradients of any order.
        keeps_result: whether the result itself is the first saved tensor.
        results: number of results; several are a tuple, of `composition` too, and `grad` is the
            tuple of their gradients.
        alone: `(*args) -> result` of eager calls without gradients; None if that takes as long as
            `forward`.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        tensors: int,
        forward: Callable[..., list[Tensor]],
        backward: Backward,
        fake: Callable[..., list[Tensor]],
        composition: Callable[..., Any],
        keeps_result: bool = False,
        results: int = 1,
        alone: Callable[..., Tensor] | None = None,
    ) -> None:
        self.results = results
        self.first_saved = 0 if keeps_result else results
        self.tensors, self.forward = tensors, forward
        self.composition: Call = composition
        self._alone = alone
        self._backward = backward
        several = "[]" if results > 1 else ""
        self._op = register(name, f"({schema}) -> Tensor[]", forward, fake)
        self._gradient_op = register(
            f"{name}_backward",
            f"({schema}, Tensor[] saved, Tensor{several} grad, bool[] needed) -> Tensor[]",
            self._needed_gradients,
            self._fake_gradients,
        )
        self._eager = _fused_entry(self)
        torch.library.register_autograd(
            f"torchweft::{name}",
            self._registered_backward,
            setup_context=self._remember,
            lib=LIBRARY,
        )

    def __call__(self, *args: Any) -> Tensor:
        """The result, or the tuple of several, by the entry that the call needs."""
        result: Tensor
        if compiling():
            result = self.shown(self._op(*args))
            return result
        if transformed() or forward_level() >= 0:
            return self.composition(*args)
        if recording() and any(a is not None and a.requires_grad for a in args[: self.tensors]):
            return self._eager(args[self.tensors :], *args[: self.tensors])
        if self._alone is not None and unwatched(args[0]):
            return self._alone(*args)
        result = self.shown(self.run(*args))
        return result

    def shown(self, found: Sequence[Any]) -> Any:
        """The result, or the tuple of several, of what begins with them."""
        return found[0] if self.results == 1 else tuple(found[: self.results])

    def run(self, *args: Any) -> list[Tensor]:
        """The result and what is saved, without a graph."""
        found: list[Tensor] = (self.forward if unwatched(args[0]) else self._op)(*args)
        return found

    def gradients(self, ctx: Any, grad: Any, needed: Sequence[bool]) -> Gradients:
        """The gradients of the tensors: fused, or by the composition if they are recorded."""
        kept = ctx.saved_tensors  # read once: checkpointing unpacks each tensor a single time
        args, saved = (*kept[: self.tensors], *ctx.rest), kept[self.tensors :]
        first = grad if self.results == 1 else grad[0]
        if unwatched(first) and not recording():
            return self._backward(args, saved, grad, needed)
        if recording():
            over = [a for a, flag in zip(args, needed, strict=False) if flag]
            results = torch.autograd.grad(
                self.composition(*args), over, grad, create_graph=True, materialize_grads=True
            )
        else:
            results = self._gradient_op(*args, list(saved), grad, list(needed))
        found = iter(results)
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
        found = self.gradients(ctx, self.shown(grads), ctx.needs_input_grad[: self.tensors])
        return (*found, *[None] * len(ctx.rest))


def _fused_entry(op: FusedOperator) -> Call:
    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rest: tuple[Any, ...], *tensors: Any) -> Any:
            results = op.run(*tensors, *rest)
            ctx.save_for_backward(*tensors, *results[op.first_saved :])
            ctx.set_materialize_grads(op.results > 1)
            ctx.rest = rest
            # `shown`, without a call in Python where there is one result
            return results[0] if op.results == 1 else op.shown(results)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            needed = ctx.needs_input_grad[1:]
            if grads[0] is None:
                return (None,) * (1 + len(needed))
            grad = grads[0] if op.results == 1 else grads
            return (None, *op.gradients(ctx, grad, needed))

    # as for Operator
    apply: Call = super(torch.autograd.Function, Eager).apply
    return apply


P = ParamSpec("P")
R = TypeVar("R")


def below_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function that builds index tables as if no transform and no inference mode were active.

    A tensor that is made under `torch.func.grad` is a wrapper that dies with the transform.  A
    table that outlives the transform, or that a kernel reads by its address, must not be one.
    Tensors of inference mode have no version: nothing is cached for such a table.

    Raises:
        ShapeError: a tensor among the arguments is mapped by `torch.vmap`.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return run(*args, **kwargs)
        if not transforms_active():
            return function(*args, **kwargs)
        plain = [_plain(a) if isinstance(a, Tensor) else a for a in args]
        with temporarily_clear_interpreter_stack():
            return function(*plain, **kwargs)  # type: ignore[arg-type]

    return run


def _plain(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers."""
    plain, mapped = unwrapped(tensor)
    if mapped:
        raise ShapeError(
            f"an index tensor of shape {tuple(tensor.shape)} is mapped by torch.vmap: tables must "
            "be the same for the whole map. Pass in_dims=None for them, or call once for each "
            "table."
        )
    return plain
