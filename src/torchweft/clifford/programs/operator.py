"""The family's operator: `run(key, backend, *inputs)` computes a program, on any backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchweft.clifford.programs.programs import program
from torchweft.core.explain import record_cost, recording
from torchweft.core.expressions.expr import reachable
from torchweft.core.expressions.program import Program
from torchweft.core.operators import autocast
from torchweft.core.program_op import ProgramOperator

__all__ = ["run"]

Runner = Callable[[Program, Sequence[Tensor]], list[Tensor]]


def _runner(backend: str) -> Runner:
    if backend == "triton":
        from torchweft.clifford.programs.launch import run as run_triton

        return run_triton
    from torchweft.clifford.programs.numba_path import run_numba, run_torch

    return run_numba if backend == "numba" else run_torch


def _body(found: Program, inputs: Sequence[Tensor], backend: str) -> list[Tensor]:
    execute = _runner(backend)
    if autocast.active():
        # the inputs have their dtype: torch's own products in a body must not narrow them further
        with torch.autocast(inputs[0].device.type, enabled=False):
            results = execute(found, inputs)
    else:
        results = execute(found, inputs)
    if recording():
        _record_cost(found, inputs, results)
    return results


def _record_cost(found: Program, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Each stored element once; two operations for each term of a form and each blade."""
    moved = sum(t.untyped_storage().nbytes() if 0 in t.stride() else t.nbytes for t in inputs)
    moved += sum(t.nbytes for t in results)
    nodes = reachable(e for output in found.outputs for e in output.components)
    terms = sum(len(node.data.form.terms) for node in nodes if node.kind == "form")
    positions = max((math.prod(t.shape[1:]) for t in (*inputs, *results)), default=0)
    record_cost(moved, 2 * terms * positions)


run = ProgramOperator("clifford", program, _body)
"""run(key, backend, *inputs) -> results"""
