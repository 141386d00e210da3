"""Programs run by their printed loops: tensors to arrays, tiles shared among threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweft.core.cpu.loop_source import Loop, printed
from torchweft.core.cpu.threads import share
from torchweft.core.explain import Launch, record, recording
from torchweft.core.expressions.expr import reachable
from torchweft.core.expressions.program import Program
from torchweft.core.printing.modules import load

__all__ = ["run", "terms"]

SERIAL = 2**20
"""Multiplications below which one thread is faster."""

PARTS = 64
"""Most parts that rows are cut into: to share among threads, and one partial sum each."""

Array = np.ndarray[Any, Any]
Shape = tuple[int, int, int, Any, Any]
Run = Callable[[int, int], None]


@functools.lru_cache(maxsize=1024)
def terms(program: Program) -> int:
    """About how many multiplications a position takes."""
    nodes = reachable(e for output in program.outputs for e in output.components)
    return sum(len(n.data.form.terms) if n.kind == "form" else n.kind == "mul" for n in nodes)


def run(
    program: Program,
    dtype: torch.dtype,
    size: tuple[int, int],
    inputs: Sequence[Tensor],
    results: Sequence[Tensor | None],
) -> list[Tensor]:
    """The results of a program, the same bits on any number of threads.

    Args:
        program: what is computed.
        dtype: float32 or float64, in which it computes.
        size: how many rows and features there are.
        inputs: (components, rows or 1, features or 1) each, of any strides and either dtype.
        results: what is written, (components, rows, features) of any strides and either dtype;
            None for sums over rows, which are new.
    """
    rows, features = size
    name = str(dtype).removeprefix("torch.")
    loop = printed(program, name)
    given = [inputs[i].detach() for i in loop.inputs]
    operands = [*given, *results]
    flat = _flattened(operands) if _is_pointwise(program, loop) else None
    num_rows, width = size if flat is None else (1, rows * features)
    if flat is not None and all(t.stride(2) == 1 and t.dtype == dtype for t in flat[: len(given)]):
        loop = printed(program, name, contiguous=True)
    from torchweft.core.cpu.loop_parts import TILE  # numba need not be installed

    parts = max(1, min(PARTS, num_rows, -(-rows * features // TILE**2)))
    outputs = [
        torch.empty(parts, o.operand.size, features, dtype=dtype) if r is None else r
        for o, r in zip(program.outputs, results, strict=True)
    ]
    real = np.dtype(name).type
    shape = parts, num_rows, width, real(rows), real(features)
    layout = _layout(loop, flat or operands)
    arrays = [_storage(t) for t in flat or [*given, *outputs]]
    tasks = parts * (1 if loop.whole_rows else -(-width // TILE))
    work = rows * features * terms(program)
    threads = 1 if work < SERIAL else torch.get_num_threads()
    share(_bound(loop, shape, layout, arrays), tasks, threads)
    summed = [r is None for r in results]
    if recording():
        partial = sum(o.nbytes for o, flag in zip(outputs, summed, strict=True) if flag)
        record(Launch("numba", program.key, {"tile": TILE, "parts": parts}, tasks, partial))
    return [o.sum(0) if flag else o for o, flag in zip(outputs, summed, strict=True)]


def _layout(loop: Loop, operands: Sequence[Tensor | None]) -> Array:
    """The loop's, with the strides of what is read and written; None is a sum."""
    layout = np.array(loop.layout, np.int64)
    for place, t in enumerate(operands):
        if t is not None:
            layout[place, 2:] = t.stride()
            layout[place, 3] *= t.shape[1] > 1  # one row stands for every row
    return layout


def _bound(loop: Loop, shape: Shape, layout: Array, arrays: list[Array]) -> Run:
    """`run(first, last)` for some of the tasks."""
    kernel = load("loop", loop.source).kernel
    tables = (
        np.array(loop.places, np.int64),
        np.array(loop.pairs, np.int64).reshape(-1, 2),
        np.array(loop.terms, np.int64).reshape(-1, 4),
        np.array(loop.coefficients, type(shape[-1])),
    )
    return lambda first, last: kernel(first, last, *shape, layout, *tables, *arrays)


def _is_pointwise(program: Program, loop: Loop) -> bool:
    """Whether rows and features are alike to it."""
    operands = [program.inputs[i] for i in loop.inputs] + [o.operand for o in program.outputs]
    return not loop.whole_rows and all("row" in operand.axes for operand in operands)


def _flattened(tensors: Sequence[Tensor | None]) -> list[Tensor] | None:
    """Rows and features as one axis, None where some strides do not allow it."""
    found = []
    for t in tensors:
        assert t is not None  # no sum is pointwise
        _, rows, features = t.shape
        if features == 1:
            found.append(t.transpose(1, 2))
        elif rows == 1 or t.stride(1) == features * t.stride(2):
            found.append(
                t.as_strided((t.shape[0], 1, rows * features), (t.stride(0), 0, t.stride(2)))
            )
        else:
            return None
    return found


def _storage(t: Tensor) -> Array:
    """The numbers from the tensor's first to its last, whatever lies between."""
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    array: Array = t.as_strided((extent,), (1,)).numpy()
    return array
