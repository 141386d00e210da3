"""The operator of functions of a row in one kernel: gradients of any order are programs again.

    weft::o3_rows(Tensor[] tensors, str program) -> Tensor[]

Tensors are the program's, (rows, components) each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core.backend import interpreted
from weft.core.explain import record_cost, recording
from weft.core.list_op import Call, Kept, ListOperator, Rest, Results, Tensors
from weft.core.op import compiling, unwatched
from weft.core.settled import Settled, kinds
from weft.o3.program_rule import ProgramRule
from weft.o3.row_programs import program, used

__all__ = ["again", "first", "served"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_INTERPRETED = interpreted()

_settled: Settled[Rest] = Settled()
"""By what is called, and the kind of x but its number of rows."""


def served(x: Tensor) -> bool:
    """Whether kernels compute functions of x: on a GPU.

    Who watches torch's operations sees them, as on the CPU.
    """
    if not (x.is_cuda or _INTERPRETED) or not (compiling() or unwatched(x)):
        return False
    return x.dtype in DTYPES


def again(called: Hashable, x: Tensor) -> Tensor | None:
    """The result of a call that is one kernel, its kinds settled before; None for others.

    Args:
        called: the function, and all that it is given beside x.
        x: (..., components).
    """
    known = kinds((x,))
    if known is None:
        return None
    shape, *kind = known
    rest = _settled.get((called, shape[-1:], *kind))
    return None if rest is None else _by_kernel(x, rest)


def first(called: Hashable | None, key: str, x: Tensor) -> Tensor:
    """That of one that was checked; it is settled now.

    Args:
        called: as in `again`; None: nothing names it.
        key: of the program.
        x: (..., components), `served`.
    """
    known, rest = kinds((x,)), (key,)
    if known is not None:
        shape, *kind = known
        rest = Kept(rest, 1, _prepared)
        if called is not None:
            _settled.keep((called, shape[-1:], *kind), rest)
    return _by_kernel(x, rest)


def _by_kernel(x: Tensor, rest: Rest) -> Tensor:
    if x.dim() == 2:
        return _rows((x,), rest)[0]
    y = _rows((x.reshape(-1, x.shape[-1]),), rest)[0]
    return y.view(*x.shape[:-1], y.shape[1])


def _prepared(tensors: Tensors, rest: Rest) -> Callable[[Tensors], Results]:
    """The body for tensors like these, of any number of rows."""
    # imported when needed: tracing needs no Triton
    launch, like = importlib.import_module("weft.o3.row_launch"), tensors[0]
    made: Callable[[Tensors], Results] = launch.prepared(program(rest[0]), like.dtype, like.device)
    return made


class Rows(ProgramRule):
    """Results of a program and its derivatives."""

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """The results on real tensors."""
        results = _prepared(tensors, rest)(tensors)
        if recording():
            moved = sum(t.nbytes for t in (*tensors, *results))
            record_cost(moved, program(rest[0]).steps() * tensors[0].shape[0])
        return list(results)

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """Empty tensors of their shapes."""
        sizes = [output.operand.size for output in program(rest[0]).outputs]
        return [tensors[0].new_empty(tensors[0].shape[0], size) for size in sizes]

    def batch(
        self, call: Call, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        """Of a mapped call: more rows."""
        rows = [
            (t.expand(size, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1)
            for t, d in zip(tensors, dims, strict=True)
        ]
        return tuple(r.view(size, r.shape[0] // size, r.shape[1]) for r in call(rows, rest))


_rows = ListOperator("o3_rows", "str program", Rows(used, 0))
