"""The operator of functions of a row in one kernel: gradients of any order are programs again.

    torchweft::o3_rows(Tensor[] tensors, str program) -> Tensor[]

Tensors are the program's, (rows, components) each.  On the CPU kernels are loops, for many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core.backend import choose, interpreted
from torchweft.core.cpu.loops import run
from torchweft.core.explain import record_cost, recording
from torchweft.core.expressions.program import Program
from torchweft.core.operators.call_cache import CallCache, signature
from torchweft.core.operators.operator import compiling, unwatched
from torchweft.core.operators.tensor_list import (
    CachedCall,
    Call,
    ListOperator,
    ProgramRule,
    Rest,
    Results,
    Tensors,
    mapped_as_rows,
)
from torchweft.o3.backends import chosen_backend, executor, refuse_backend
from torchweft.o3.pointwise.programs import row_program
from torchweft.o3.pointwise.source import varying

__all__ = ["cached_rows", "first_rows", "serves_rows"]

LOOP_DTYPES = (torch.float32, torch.float64)
ROW_DTYPES = (*LOOP_DTYPES, torch.bfloat16, torch.float16)

LOOP_FROM_NUMBERS = 2**15
"""Numbers of a result from which a loop is worth the seconds of its compilation."""

_INTERPRETED = interpreted()

_row_calls: CallCache[CallCache[tuple[Rest, int]]] = CallCache()
"""Cached calls by function, then by the signature of x without its rows; least numbers of x."""


def serves_rows(x: Tensor, backend: str | None = None, size: int = 0) -> bool:
    """Whether kernels compute a function of the rows of x; torch's own operations otherwise.

    Args:
        x: (..., components).
        backend: the one that is requested.  None: kernels on a GPU, loops of many rows on the CPU,
            and torch where a dispatch mode watches its operations.
        size: of a row of the result, where there are loops; 0: there are none.

    Raises:
        BackendError: the requested one cannot serve.
    """
    if backend is None:
        return _has_kernel(x) or (size > 0 and _has_loop(x, size))
    if backend == "torch":
        return False
    dtypes: tuple[torch.dtype, ...] = ROW_DTYPES
    if chosen_backend(backend, x.device.type) == "numba":
        dtypes = LOOP_DTYPES if size and not _INTERPRETED else ()
    if x.dtype not in dtypes:
        refuse_backend(backend, x.device.type, f"this function of rows, in {x.dtype}")
    return True


def _has_kernel(x: Tensor) -> bool:
    """Whether a kernel serves x where no backend is requested: on a GPU."""
    if not (x.is_cuda or _INTERPRETED) or not (compiling() or unwatched(x)):
        return False
    return x.dtype in ROW_DTYPES


def _has_loop(x: Tensor, size: int) -> bool:
    """Whether a loop does: of many rows, on the CPU, unless torch traces or is watched."""
    if compiling() or not _on_cpu(x) or not unwatched(x) or x.numel() < _fewest(x, size):
        return False
    return x.dtype in LOOP_DTYPES and choose(None, "cpu") == "numba"


def _on_cpu(x: Tensor) -> bool:
    return x.is_cpu and not _INTERPRETED


def _fewest(x: Tensor, size: int) -> int:
    """Numbers of x for which results of so many a row are worth a loop; a kernel always is."""
    return -(-LOOP_FROM_NUMBERS // size) * x.shape[-1] if _on_cpu(x) else 0


def cached_rows(called: Hashable, x: Tensor) -> Tensor | None:
    """The result of a cached call, which is one kernel; None: the call is not cached.

    Args:
        called: the function, and all that it is given beside x.
        x: (..., components).
    """
    # one look is enough for calls that no kernel ever served
    of_called = None if compiling() else _row_calls.get(called)
    known = None if of_called is None else signature((x,))
    if of_called is None or known is None:
        return None
    shape, *kind = known
    found = of_called.get((shape[-1:], *kind))
    if found is None or x.numel() < found[1]:
        return None
    return _by_kernel(x, found[0])


def first_rows(called: Hashable | None, key: str, x: Tensor, backend: str | None = None) -> Tensor:
    """The result of a call that was checked; from now on it is cached.

    Args:
        called: as in `cached_rows`; None: the call is not cached.
        key: of the program.
        x: (..., components), `served`.
        backend: the one that is requested, part of `called`.
    """
    known, rest = signature((x,)), (key,)
    if known is not None:
        shape, *kind = known
        rest = CachedCall(rest, 1, _prepared)
        if called is not None:
            # few rows give torch's bits, also after a call of many
            fewest = 0 if backend else _fewest(x, row_program(key).outputs[0].operand.size)
            if (of_called := _row_calls.get(called)) is None:
                _row_calls.keep(called, of_called := CallCache())
            of_called.keep((shape[-1:], *kind), (rest, fewest))
    return _by_kernel(x, rest)


def _by_kernel(x: Tensor, rest: Rest) -> Tensor:
    if x.dim() == 2:
        return _rows((x,), rest)[0]
    y = _rows((x.reshape(-1, x.shape[-1]),), rest)[0]
    return y.view(*x.shape[:-1], y.shape[1])


def _prepared(tensors: Tensors, rest: Rest) -> Callable[[Tensors], Results]:
    """The body for tensors like these, of any number of rows."""
    like, made = tensors[0], row_program(rest[0])
    if _on_cpu(like):
        return _loop(made)
    launch = executor("pointwise", "triton")
    found: Callable[[Tensors], Results] = launch.prepared(made, like.dtype, like.device)
    return found


def _loop(program: Program) -> Callable[[Tensors], Results]:
    """The body on the CPU: a loop in float64, for any number of rows (rows, components).

    In float32 the powers of 1/|x| in derivatives would overflow for x shorter than 1e-13.
    """
    sizes, printed = [output.operand.size for output in program.outputs], varying(program)
    numbers = [
        (n, component, e.data)
        for n, output in enumerate(program.outputs)
        for component, e in enumerate(output.components)
        if e.kind == "const" and e.data
    ]

    def again(given: Tensors) -> Results:
        rows = given[0].shape[0]
        results = tuple([given[0].new_empty((rows, size)) for size in sizes])
        if rows:
            inputs = [_components_first(t.resolve_neg()) for t in given]
            run(printed, torch.float64, (rows, 1), inputs, [_components_first(r) for r in results])
        for n, component, value in numbers:  # a loop stores zeros in their place
            results[n][:, component] = value
        return results

    return again


def _components_first(t: Tensor) -> Tensor:
    return t.T[:, :, None]


class RowFunctionRule(ProgramRule):
    """Results of a program and its derivatives."""

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """The results on real tensors."""
        results = _prepared(tensors, rest)(tensors)
        if recording():
            moved = sum(t.nbytes for t in (*tensors, *results))
            record_cost(moved, row_program(rest[0]).steps() * tensors[0].shape[0])
        return list(results)

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """Empty tensors of their shapes."""
        sizes = [output.operand.size for output in row_program(rest[0]).outputs]
        return [tensors[0].new_empty(tensors[0].shape[0], size) for size in sizes]

    def batch(
        self, call: Call, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        """The results of a mapped call: samples are more rows."""
        return mapped_as_rows(call, size, dims, tensors, rest)


_rows = ListOperator("o3_rows", "str program", RowFunctionRule(row_program))
