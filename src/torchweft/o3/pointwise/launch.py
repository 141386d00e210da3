"""Launches of the kernels of programs without sums, see torchweft.o3.pointwise.source."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchweft.core import private
from torchweft.core.backend import interpreted
from torchweft.core.expressions.program import Program
from torchweft.core.gpu.launcher import Kernel, Tile, current_device
from torchweft.core.printing.modules import printed
from torchweft.o3.pointwise.source import WARPS, Job, source

__all__ = ["kernel", "prepared", "programs"]


@functools.lru_cache(maxsize=1024)
def prepared(
    program: Program, dtype: torch.dtype, device: torch.device
) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """The results of a program whose operands have rows and no other axis, of any number of rows.

    Args:
        program: what is computed.
        dtype: of its tensors, (rows, components) each.
        device: theirs.
    """
    used = program.used()
    taken = [n for n, operand in enumerate(program.inputs) if operand.name in used]
    sizes = [output.operand.size for output in program.outputs]
    run, index = kernel(program, 1, (dtype,), device), -1 if device.index is None else device.index

    def again(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        first = given[0]
        rows = first.shape[0]
        results = tuple([first.new_empty((rows, size)) for size in sizes])
        tensors = (*[given[n].contiguous() for n in taken], *results)
        if index < 0 or index == private.get_device():
            run(programs(rows), tensors, (rows,))
        else:
            with current_device(first):
                run(programs(rows), tensors, (rows,))
        return results

    return again


def programs(numbers: int) -> int:
    """Kernel programs for so many rows and channels."""
    return -(-numbers // (32 * WARPS))


@functools.lru_cache(maxsize=1024)
def kernel(
    program: Program, channels: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Kernel:
    """One for each combination that makes other machine code; of float64 it computes in that."""
    gluon = not (interpreted() or torch.version.hip)
    text = source(Job(program, channels, torch.float64 in dtypes, gluon))
    return Kernel(printed("o3_rows", text, "rows"), (), (), Tile((), WARPS, 1))
