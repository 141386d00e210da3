"""The family's programs on the CPU: printed loops where they pay, torch everywhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.core import evaluate
from weft.core.evaluate import accumulator, lengths
from weft.core.explain import Launch, record, recording
from weft.core.expr import reachable
from weft.core.generated import load
from weft.core.hoist import hoisted
from weft.core.loops import Loop, printed
from weft.core.program import Program
from weft.core.threads import share

__all__ = ["run_numba", "run_torch"]

SERIAL = 100_000
"""Multiplications below which one thread is faster."""

COMPILED = 2**20
"""Multiplications from which a program is worth the seconds of its first compilation."""

PARTS = 64
"""Most parts that rows are cut into: to share among threads, and one partial sum each."""

Array = np.ndarray[Any, Any]


def run_torch(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results of a program, on any device: contiguous, in the dtype of the inputs."""
    if recording():
        size = lengths(program, inputs)
        chunk = max(1, evaluate.CHUNK // max(size["feature"], 1))
        number = -(-size["row"] // chunk)
        record(Launch("torch", program.key, {"rows": chunk}, number))
    return evaluate.run(program, inputs)


def run_numba(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same, by a printed loop; in torch where it is not worth compiling one."""
    size = lengths(program, inputs)
    positions = size["row"] * size["feature"]
    if not positions or positions * _terms(program) < COMPILED:
        return run_torch(program, inputs)
    wide = accumulator(inputs[0].dtype)
    found, values = hoisted(program)
    named = zip(program.inputs, inputs, strict=True)
    leaves = {o.name: t.detach() if "row" in o.axes else t.detach()[:, None] for o, t in named}
    leaves = {name: t.to(wide) for name, t in leaves.items()}
    given = list(leaves.values())
    for expressions in values:
        found_values = evaluate.evaluate(expressions, leaves, size)
        given += [torch.stack([torch.as_tensor(v) for v in found_values])]
    loop = printed(found, str(wide).removeprefix("torch."))
    return [
        r.to(inputs[0].dtype)
        for r in _run(found, loop, [given[i] for i in loop.inputs], size, wide)
    ]


@functools.lru_cache(maxsize=1024)
def _terms(program: Program) -> int:
    """About how many multiplications a position takes."""
    nodes = reachable(e for output in program.outputs for e in output.components)
    return sum(len(n.data.form.terms) if n.kind == "form" else n.kind == "mul" for n in nodes)


def _run(
    program: Program, loop: Loop, inputs: list[Tensor], size: dict[str, int], wide: torch.dtype
) -> list[Tensor]:
    rows, features = size["row"], size["feature"]
    flat = _flattened(inputs) if _is_pointwise(program, loop) else None
    if flat is not None and all(t.stride(2) == 1 for t in flat):
        loop = printed(program, str(wide).removeprefix("torch."), contiguous=True)
    num_rows, width = (rows, features) if flat is None else (1, rows * features)
    from weft.core.loop_parts import TILE

    parts = max(1, min(PARTS, num_rows, -(-rows * features // TILE**2)))
    outputs = []
    for operand in (output.operand for output in program.outputs):
        first = operand.size if "row" in operand.axes else parts
        second = rows if "row" in operand.axes else operand.size
        outputs.append(torch.empty(first, second, features, dtype=wide))
    arrays = [_storage(t) for t in (*(inputs if flat is None else flat), *outputs)]
    layout = np.array(loop.layout, np.int64)
    for i, t in enumerate(flat or inputs):
        layout[i, 2:] = t.stride()
        layout[i, 3] *= t.shape[1] > 1  # one row stands for every row
    real = arrays[0].dtype.type
    tasks = parts * (1 if loop.whole_rows else -(-width // TILE))
    kernel = load("loop", loop.source).kernel
    tables = (
        np.array(loop.places, np.int64),
        np.array(loop.pairs, np.int64).reshape(-1, 2),
        np.array(loop.terms, np.int64).reshape(-1, 4),
        np.array(loop.coefficients, real),
    )
    shape = parts, num_rows, width, real(rows), real(features)

    def run(first: int, last: int) -> None:
        kernel(first, last, *shape, layout, *tables, *arrays)

    work = rows * features * _terms(program)
    share(run, tasks, 1 if work < SERIAL else torch.get_num_threads())
    if recording():
        summed = [
            o.nbytes
            for o, r in zip(outputs, program.outputs, strict=True)
            if "row" not in r.operand.axes
        ]
        record(Launch("numba", program.key, {"tile": TILE, "parts": parts}, tasks, sum(summed)))
    return [
        o if "row" in output.operand.axes else o.sum(0)
        for o, output in zip(outputs, program.outputs, strict=True)
    ]


def _is_pointwise(program: Program, loop: Loop) -> bool:
    """Whether rows and features are alike to it."""
    operands = [program.inputs[i] for i in loop.inputs] + [o.operand for o in program.outputs]
    return not loop.whole_rows and all("row" in operand.axes for operand in operands)


def _flattened(inputs: list[Tensor]) -> list[Tensor] | None:
    """Rows and features as one axis, None where some strides do not allow it."""
    found = []
    for t in inputs:
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
