"""Loops on the CPU of programs without sums, see torchweft.core.cpu.loop_source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchweft.core.cpu.loop_run import run
from torchweft.core.expressions.program import Program
from torchweft.o3.pointwise.source import varying

__all__ = ["prepared"]


def prepared(
    program: Program, dtype: torch.dtype, device: torch.device
) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """The results of a program whose operands have rows and no other axis, of any number of rows.

    Computed in float64: the powers of 1/|x| in derivatives pass float32 for x shorter than 1e-13.

    Args:
        program: what is computed, of tensors (rows, components).
        dtype: of its tensors; loops are the same for all.
        device: the CPU.
    """
    sizes, printed = [output.operand.size for output in program.outputs], varying(program)
    numbers = [
        (n, component, e.data)
        for n, output in enumerate(program.outputs)
        for component, e in enumerate(output.components)
        if e.kind == "const" and e.data
    ]

    def again(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
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
