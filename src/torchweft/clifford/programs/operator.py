"""The family's operator: `run(key, backend, *inputs)` computes a program, on any backend.

torchweft::clifford(Tensor[] tensors, str program, str backend) -> Tensor[]
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.clifford.programs.programs import program
from torchweft.core.cpu import loops as looped
from torchweft.core.explain import Launch, record, record_cost, recording
from torchweft.core.expressions.expr import reachable
from torchweft.core.expressions.program import (
    CHUNK,
    Operand,
    Program,
    accumulator,
    evaluate,
    lengths,
    mask,
)
from torchweft.core.expressions.program import run as run_program
from torchweft.core.expressions.rewrite import hoisted
from torchweft.core.operators.operator import compiling
from torchweft.core.operators.tensor_list import (
    CachedCall,
    Call,
    ListOperator,
    ProgramRule,
    Rest,
    Results,
    Tensors,
)
from torchweft.core.private import any_autocast

__all__ = ["bound", "forward", "run", "run_numba", "run_torch"]

Runner = Callable[[Program, Sequence[Tensor]], list[Tensor]]


@functools.cache
def _runner(backend: str) -> Runner:
    if backend == "triton":
        from torchweft.clifford.programs.launch import run as run_triton

        return run_triton
    return run_numba if backend == "numba" else run_torch


COMPILED = 2**20
"""Multiplications from which a program is worth the seconds of its first compilation."""


def run_torch(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results of a program, on any device: contiguous, in the dtype of the inputs."""
    if recording():
        size = lengths(program, inputs)
        chunk = max(1, CHUNK // max(size["feature"], 1))
        number = -(-size["row"] // chunk)
        record(Launch("torch", program.key, {"rows": chunk}, number))
    return run_program(program, inputs)


def run_numba(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same, by a printed loop; in torch where it is not worth compiling one."""
    size = lengths(program, inputs)
    positions = size["row"] * size["feature"]
    if not positions or positions * looped.terms(program) < COMPILED:
        return run_torch(program, inputs)
    wide = accumulator(inputs[0].dtype)
    found, values = hoisted(program)
    named = zip(program.inputs, inputs, strict=True)
    leaves = {o.name: t.detach() if "row" in o.axes else t.detach()[:, None] for o, t in named}
    leaves = {name: t.to(wide) for name, t in leaves.items()}
    given = list(leaves.values())
    for expressions in values:
        found_values = evaluate(expressions, leaves, size)
        given += [torch.stack([torch.as_tensor(v) for v in found_values])]
    shape = size["row"], size["feature"]
    results = [
        torch.empty(operand.size, *shape, dtype=wide) if "row" in operand.axes else None
        for operand in (output.operand for output in found.outputs)
    ]
    return [r.to(inputs[0].dtype) for r in looped.run(found, wide, shape, given, results)]


def _prepared(tensors: Tensors, rest: Rest) -> Callable[[Tensors], Results]:
    """The body of a call, for tensors of any shape."""
    key, backend = rest
    found, execute = program(key), _runner(backend)

    def body(inputs: Tensors) -> Results:
        if not any_autocast():
            return tuple(execute(found, inputs))
        # the inputs have their dtype: torch's own products in a body must not narrow them further
        with torch.autocast(inputs[0].device.type, enabled=False):
            return tuple(execute(found, inputs))

    return body


def _record_cost(found: Program, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Each stored element once; two operations for each term of a form and each blade."""
    moved = sum(t.untyped_storage().nbytes() if 0 in t.stride() else t.nbytes for t in inputs)
    moved += sum(t.nbytes for t in results)
    nodes = reachable(e for output in found.outputs for e in output.components)
    terms = sum(len(node.data.form.terms) for node in nodes if node.kind == "form")
    positions = max((math.prod(t.shape[1:]) for t in (*inputs, *results)), default=0)
    record_cost(moved, 2 * terms * positions)


class CliffordRule(ProgramRule):
    """Results of a program on the rows and features of multivectors, and its derivatives."""

    predictable = False

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """The results on real tensors: contiguous, in the inputs' dtype."""
        results = _prepared(tensors, rest)(tensors)
        if recording():
            _record_cost(self.program(rest[0]), tensors, results)
        return list(results)

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """Empty tensors of their shapes."""
        found = self.program(rest[0])
        lengths: dict[str, Any] = {}
        for operand, tensor in zip(found.inputs, tensors, strict=True):
            lengths.update(zip(operand.axes, tensor.shape[1:], strict=True))
        return [
            tensors[0].new_empty((o.operand.size, *(lengths[axis] for axis in o.operand.axes)))
            for o in found.outputs
        ]

    def gradients(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """A program again.  Each operand is one tensor: with less work than in general."""
        given, shown, found = list[Tensor](), list[bool](), list[Tensor | None]()
        for grad in grads:
            shown.append(grad is not None)
            if grad is not None:
                given.append(grad)
        if not given or True not in needed:
            return [None] * len(tensors)
        step = _step(tuple(needed), tuple(shown))
        results = iter(self._call(call, tensors, given, rest, step))
        for flag in needed:
            found.append(next(results) if flag else None)
        return found

    def batch(
        self, call: Call, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        """The results of a mapped call, the mapped dimension in front: more rows.

        An operand without rows is one for each entry, so that such calls are made one by one.
        """
        found = self.program(rest[0])
        mapped = [o for o, dim in zip(found.inputs, dims, strict=True) if dim is not None]
        operands = [*mapped, *(output.operand for output in found.outputs)]
        if not all("row" in operand.axes for operand in operands):
            pairs = list(zip(tensors, dims, strict=True))
            calls = [call([_entry(*pair, i) for pair in pairs], rest) for i in range(size)]
            return tuple(torch.stack(results) for results in zip(*calls, strict=True))
        triples = zip(tensors, dims, found.inputs, strict=True)
        results = call([_folded(size, *triple) for triple in triples], rest)
        return tuple(r.unflatten(1, (size, r.shape[1] // size)).movedim(1, 0) for r in results)


@functools.cache
def _step(needed: tuple[bool, ...], given: tuple[bool, ...]) -> str:
    """The last step of a key: the derivative by the needed inputs along the given cotangents."""
    return f"vjp {mask(needed)} {mask(given)}"


def _entry(tensor: Tensor, dim: int | None, index: int) -> Tensor:
    return tensor if dim is None else tensor.select(dim, index)


def _folded(size: int, tensor: Tensor, dim: int | None, operand: Operand) -> Tensor:
    """A mapped dimension becomes rows; what is not mapped is repeated, if it has rows."""
    if "row" not in operand.axes:
        return tensor
    entries = tensor.unsqueeze(1) if dim is None else tensor.movedim(dim, 1)
    return entries.expand(-1, size, -1, -1).flatten(1, 2)


_programs = ListOperator("clifford", "str program, str backend", CliffordRule(program))


def run(key: str, backend: str, *inputs: Tensor) -> Results:
    """The results of the program with a key, on tensors of its operands' axes."""
    return _programs(inputs, (key, backend))


def bound(key: str, backend: str) -> Callable[[Tensors], Results]:
    """The same as a function of the inputs, for calls that are cached."""
    rest: Rest = (key, backend)
    if not compiling():
        rest = CachedCall(rest, len(program(key).inputs), _prepared)
    return lambda inputs: _programs(inputs, rest)


def forward(key: str, backend: str, *inputs: Tensor) -> Results:
    """The results without a graph."""
    return _programs.forward(inputs, (key, backend))
