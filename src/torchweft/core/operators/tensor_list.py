"""An operator on a list of tensors whose derivatives are operators again: gradients of any order.

    torchweft::<name>(Tensor[] tensors, <arguments>) -> Tensor[]

It has the four entries of `operators.operator`.  `ProgramRule` differentiates operators that run
programs: the first non-tensor argument of such an operator is the key of a program, and the
gradient of the call is the call with the key "p | vjp ...", its tangent the one with "p | jvp ...";
its tensors are those of the call, then the cotangents or tangents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchweft.core.backend import interpreted
from torchweft.core.explain import recording as explaining
from torchweft.core.expressions.program import Program, mask
from torchweft.core.operators.operator import (
    LIBRARY,
    compiling,
    forward_level,
    recording,
    register,
    transformed,
    unwatched,
    used,
)

__all__ = ["CachedCall", "ListOperator", "ProgramRule", "Rule", "mapped_as_rows"]


Tensors = Sequence[Tensor]
Rest = tuple[Any, ...]
Results = tuple[Tensor, ...]
Call = Callable[[Tensors, Rest], Results]
Body = Callable[[Tensors], Results]
MaybeTensors = Sequence[Tensor | None]


class CachedCall(tuple[Any, ...]):
    """Non-tensor arguments of a call, with the cached body for one signature of tensors.

    The creator guarantees that it is only used with tensors of that signature, of any strides, and
    that the call's tables are not written to.

    Args:
        rest: the non-tensor arguments.
        floats: number of tensors before the tables.
        prepare: `(tensors, rest) -> body` for the signature, called once; it reads no values.
    """

    floats: int
    prepare: Callable[[Tensors, Rest], Body]
    body: Body | None
    derived: dict[Any, Any]
    begun: bool

    def __new__(
        cls, rest: Rest, floats: int, prepare: Callable[[Tensors, Rest], Body]
    ) -> CachedCall:
        """A tuple that equals `rest`."""
        found = super().__new__(cls, rest)
        found.floats, found.prepare, found.body, found.derived = floats, prepare, None, {}
        found.begun = False
        return found


class Rule(Protocol):
    """What an operator computes, and how it is differentiated and mapped.

    Its floating-point tensors, which may be differentiable, come before the tables.  `rest` holds
    the non-tensor arguments.  `call` is the operator by the entry in use: `(tensors, rest) ->
    results`.

    Attributes:
        predictable: whether the calls that compute gradients depend on the signature alone.
    """

    predictable: bool

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """The results on real tensors, as new tensors."""

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """Empty tensors of the results' shapes and dtypes."""

    def saved(self, results: Tensors) -> Tensors:
        """The results that derivatives need."""

    def gradients(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        grads: MaybeTensors,
        needed: Sequence[bool],
    ) -> MaybeTensors:
        """The gradient of each tensor, None where it is not needed."""

    def tangents(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        directions: MaybeTensors,
    ) -> Sequence[Tensor]:
        """The changes of the results along directions of the tensors."""

    def batch(
        self, call: Call, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        """The results of a mapped call, the mapped dimension in front."""


class ListOperator:
    """`op(tensors, rest)` by the entry that the call needs.

    Args:
        name: name of the registered op `torchweft::<name>`.
        schema: the non-tensor arguments in torch's schema language, without defaults.
        rule: what it computes.
    """

    def __init__(self, name: str, schema: str, rule: Rule) -> None:
        self.rule = rule
        schema = f"(Tensor[] tensors, {schema}) -> Tensor[]"
        self._op = register(name, schema, rule.body, rule.fake)
        self._eager = _eager_entry(self)
        self._transform = _transform_entry(self)
        torch.library.register_autograd(
            f"torchweft::{name}",
            self._registered_backward,
            setup_context=self._remember,
            lib=LIBRARY,
        )
        torch.library.register_vmap(f"torchweft::{name}", self._registered_vmap, lib=LIBRARY)

    def __call__(self, tensors: Tensors, rest: Rest) -> Results:
        """The results."""
        if compiling():
            return self.registered(tensors, rest)
        if transformed() or forward_level() >= 0:
            return self.mapped(tensors, rest)
        if recording():
            count = rest.floats if type(rest) is CachedCall else _floats(tensors)
            for a in tensors[:count]:
                if a.requires_grad:
                    if type(rest) is CachedCall and not rest.begun:
                        self._begin(tensors, rest)
                    return self._eager(rest, tensors[count:], *tensors[:count])
        return self.forward(tensors, rest)

    def forward(self, tensors: Tensors, rest: Rest) -> Results:
        """The results without a graph: by the body for plain tensors, else by the registered op."""
        if tensors and unwatched(tensors[0]):
            if type(rest) is CachedCall and not explaining():
                if rest.body is None:
                    rest.body = rest.prepare(tensors, rest)
                return rest.body(tensors)
            return tuple(self.rule.body(tensors, *rest))
        return self.registered(tensors, rest)

    def _begin(self, tensors: Tensors, rest: CachedCall) -> None:
        """Prepare a call and its gradients, so that their kernels are compiled together."""
        rest.begun = True
        if self.rule.predictable and _compiles(tensors[0]) and not explaining():
            with torch.no_grad():
                results = self._prepared(tensors, rest)
                saved = self.rule.saved(results)
                needed = [t.requires_grad for t in tensors]
                self.rule.gradients(self._prepared, tensors, rest, saved, results, needed)

    def _prepared(self, tensors: Tensors, rest: Rest) -> Results:
        """A call that is prepared but not run: its results have no memory of their own."""
        if type(rest) is CachedCall and rest.body is None:
            rest.body = rest.prepare(tensors, rest)
        results = self.rule.fake([t.to("meta") for t in tensors], *rest)
        return tuple([tensors[0].new_empty((1,) * r.dim()).expand(r.shape) for r in results])

    def registered(self, tensors: Tensors, rest: Rest) -> Results:
        """The results by the registered op."""
        return tuple(self._op(list(tensors), *rest))

    def mapped(self, tensors: Tensors, rest: Rest) -> Results:
        """The results under torch.func or forward mode."""
        return self._transform(rest, *tensors)

    def _remember(self, ctx: Any, inputs: Sequence[Any], output: Tensors) -> None:
        tensors, *rest = inputs
        ctx.save_for_backward(*tensors, *self.rule.saved(output))
        ctx.count, ctx.rest = len(tensors), tuple(rest)

    def _backward(
        self, call: Call, ctx: Any, grads: MaybeTensors, needed: Sequence[bool]
    ) -> MaybeTensors:
        kept = ctx.saved_tensors
        tensors, saved = kept[: ctx.count], kept[ctx.count :]
        return self.rule.gradients(call, tensors, ctx.rest, saved, grads, needed)

    def _registered_backward(self, ctx: Any, grads: MaybeTensors) -> tuple[Any, ...]:
        found = self._backward(self.registered, ctx, grads, ctx.needs_input_grad[0])
        return list(found), *[None] * len(ctx.rest)

    def _registered_vmap(
        self, info: Any, dims: Any, tensors: Tensors, *rest: Any
    ) -> tuple[list[Tensor], list[int]]:
        results = self.rule.batch(self.registered, info.batch_size, dims[0], tensors, rest)
        return list(results), [0] * len(results)


def _compiles(tensor: Tensor) -> bool:
    """Whether kernels serve it, compiled or in Triton's interpreter."""
    return (tensor.is_cuda or interpreted()) and unwatched(tensor)


def _floats(tensors: Tensors) -> int:
    """Number of tensors before the tables."""
    for count, tensor in enumerate(tensors):
        if not tensor.is_floating_point():
            return count
    return len(tensors)


def _eager_entry(op: ListOperator) -> Callable[..., Results]:
    class Eager(torch.autograd.Function):
        # tables are passed as one tuple: torch inspects every tensor argument, which takes time
        @staticmethod
        def forward(ctx: Any, rest: Rest, tables: Tensors, *floats: Tensor) -> Results:
            results = op.forward((*floats, *tables), rest)
            # tables of cached calls are not written to: torch need not watch their versions
            ctx.tables, tables = (tables, ()) if type(rest) is CachedCall else ((), tables)
            ctx.save_for_backward(*floats, *tables, *op.rule.saved(results))
            ctx.set_materialize_grads(False)
            ctx.rest, ctx.count, ctx.floats = rest, len(floats) + len(tables), len(floats)
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            kept = ctx.saved_tensors
            tensors, saved = (*kept[: ctx.count], *ctx.tables), kept[ctx.count :]
            needed = used(ctx, ctx.needs_input_grad[2:], tensors[: ctx.floats])
            needed += (False,) * (len(tensors) - ctx.floats)
            found = op.rule.gradients(op, tensors, ctx.rest, saved, grads, needed)
            return (None, None, *found[: ctx.floats])

    # Function.apply looks for functorch's wrappers first; ListOperator.__call__ has excluded them
    apply: Callable[..., Results] = super(torch.autograd.Function, Eager).apply
    return apply


def _transform_entry(op: ListOperator) -> Callable[..., Results]:
    class Transform(torch.autograd.Function):
        @staticmethod
        def forward(rest: Rest, *tensors: Tensor) -> Results:
            return op.registered(tensors, rest)

        @staticmethod
        def setup_context(ctx: Any, inputs: Sequence[Any], output: Results) -> None:
            rest, *tensors = inputs
            op._remember(ctx, (tensors, *rest), output)
            ctx.save_for_forward(*tensors, *op.rule.saved(output))
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return (None, *op._backward(op.mapped, ctx, grads, ctx.needs_input_grad[1:]))

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Results:
            kept = ctx.saved_tensors
            tensors, saved = kept[: ctx.count], kept[ctx.count :]
            return tuple(op.rule.tangents(op.mapped, tensors, ctx.rest, saved, tangents[1:]))

        @staticmethod
        def vmap(info: Any, dims: Any, rest: Rest, *tensors: Tensor) -> Any:
            return op.rule.batch(op.mapped, info.batch_size, dims[1:], tensors, rest), 0

    apply: Callable[..., Results] = Transform.apply
    return apply


class ProgramRule:
    """Derivatives of operators that run programs; subclasses add body, fake and batch.

    Args:
        program: returns the program with a key.
        tables: number of tensors after those of the program.
    """

    predictable = True

    def __init__(self, program: Callable[[str], Program], tables: int = 0) -> None:
        self.program, self._tables = program, tables
        self._used = functools.lru_cache(maxsize=1024)(lambda key: program(key).reads())

    def saved(self, results: Tensors) -> Tensors:
        """None: derivatives need no results."""
        return ()

    def gradients(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        grads: MaybeTensors,
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """Gradients of the inputs that need one and that the program reads, by a program."""
        wanted = [flag and read for flag, read in zip(needed, self._used(rest[0]), strict=False)]
        given = [grad for grad in grads if grad is not None]
        if not given or not any(wanted):
            return [None] * len(tensors)
        step = f"vjp {mask(wanted)} {_given(grads)}"
        results = iter(self._call(call, tensors, given, rest, step))
        found = [next(results) if flag else None for flag in wanted]
        return found + [None] * self._tables

    def tangents(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        directions: MaybeTensors,
    ) -> list[Tensor]:
        """Changes of the results along the directions, by a program."""
        directions = directions[: len(tensors) - self._tables]
        moved = [direction for direction in directions if direction is not None]
        return list(self._call(call, tensors, moved, rest, f"jvp {_given(directions)}"))

    def _call(
        self, call: Call, tensors: Tensors, more: list[Tensor], rest: Rest, step: str
    ) -> Tensors:
        count = len(tensors) - self._tables
        every = [*tensors[:count], *more, *tensors[count:]]
        return call(every, _followed(rest, step, count + len(more)))


def _given(tensors: MaybeTensors) -> str:
    """The mask of those that are given."""
    return mask([tensor is not None for tensor in tensors])


def _followed(rest: Rest, step: str, floats: int) -> Rest:
    """The arguments of a derived call, cached with those of a cached call."""
    name, *others = rest
    derived = (f"{name} | {step}", *others)
    if type(rest) is not CachedCall:
        return derived
    if step not in rest.derived:
        rest.derived[step] = CachedCall(derived, floats, rest.prepare)
    known: CachedCall = rest.derived[step]
    return known


def mapped_as_rows(
    call: Callable[[Sequence[Tensor], tuple[Any, ...]], Sequence[Tensor]],
    size: int,
    dims: Sequence[int | None],
    tensors: Sequence[Tensor],
    rest: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    """A mapped call of an operator on rows (rows, width): the samples become more rows."""
    rows = [
        (t.expand(size, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1)
        for t, d in zip(tensors, dims, strict=True)
    ]
    return tuple(r.view(size, r.shape[0] // size, r.shape[1]) for r in call(rows, rest))
