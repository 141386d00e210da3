"""The family's programs on the CPU: printed loops where they pay, torch everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchweft.core.cpu import loops as looped
from torchweft.core.explain import Launch, record, recording
from torchweft.core.expressions.program import CHUNK, Program, accumulator, evaluate, lengths, run
from torchweft.core.expressions.rewrite import hoisted

__all__ = ["run_numba", "run_torch"]

COMPILED = 2**20
"""Multiplications from which a program is worth the seconds of its first compilation."""


def run_torch(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results of a program, on any device: contiguous, in the dtype of the inputs."""
    if recording():
        size = lengths(program, inputs)
        chunk = max(1, CHUNK // max(size["feature"], 1))
        number = -(-size["row"] // chunk)
        record(Launch("torch", program.key, {"rows": chunk}, number))
    return run(program, inputs)


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
