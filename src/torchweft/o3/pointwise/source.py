"""Kernels of programs without sums, printed: a thread computes one channel of one row.

    result[row, component, c] = its expression of inputs[row, :, c]

Rows are (components, channels) side by side.  Bound: memory, each number read and written once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from torchweft.core.expressions.expr import WAVES, const, wave_series
from torchweft.core.expressions.program import Operand, Output, Program
from torchweft.core.printing.dialect import Dialect
from torchweft.core.printing.kernel import Frame, load_before_use
from torchweft.core.printing.schedule import schedule

__all__ = ["WARPS", "Job", "source", "varying"]

WARPS = 4
"""Of a kernel program: 32 numbers each."""

NEAR = 4.0
"""What w_n are evaluated at by their series, else by a recursion that loses digits at 0."""

TINY = {"tl.float32": 1.1754943508222875e-38, "tl.float64": sys.float_info.min}
"""The smallest normal numbers of float32 and float64: what is less has no root."""


class Job(NamedTuple):
    """What a kernel depends on.

    Args:
        program: what is computed.
        channels: of each component.
        wide: whether to compute in float64.
        gluon: whether to print Gluon, where no layout is searched for; else Triton.
    """

    program: Program
    channels: int
    wide: bool
    gluon: bool


def source(job: Job) -> str:
    """The text of the module; the kernel is its function `rows`."""
    frame, used = Frame(job.gluon, job.wide), job.program.used()
    pointers = [operand.name for operand in job.program.inputs if operand.name in used]
    pointers += [output.operand.name for output in job.program.outputs]
    body = list(_body(job, frame))
    waves = [
        frame.function(f"wave{n}", ["x"], _wave(n, job.wide))
        for n in range(WAVES)
        if any(f"wave{n}(" in line for line in body)
    ]
    parameters = [*(f"{name}_ptr" for name in pointers), "rows"]
    return frame.module(
        job.program.key, *waves, frame.function("rows", parameters, body, free=["rows"])
    )


def _wave(n: int, wide: bool) -> Iterator[str]:
    """w_n: near 0 by its series, away from it by those before it."""
    yield f"away = tl.where(x < {NEAR}, {NEAR}, x)"
    yield "root = tl.sqrt(away)"
    yield "now, following = tl.cos(root), tl.sin(root) / root"
    for k in range(n):
        yield f"now, following = following, ({2.0 * k + 1} * following - now) / away"
    yield f"near = tl.where(x < {NEAR}, x, {NEAR})"
    *first, last = wave_series(n, 14 if wide else 8)
    yield f"series = near * {last!r} + {first[-1]!r}"
    for coefficient in reversed(first[:-1]):
        yield f"series = series * near + {coefficient!r}"
    yield f"return tl.where(x < {NEAR}, series, now)"


def _body(job: Job, frame: Frame) -> Iterator[str]:
    layout = f", tl.BlockedLayout([1], [32], [{WARPS}], [0])" if job.gluon else ""
    threads = 32 * WARPS
    program = frame.cast("tl.program_id(0)")
    yield f"place = {program} * {threads} + tl.arange(0, {threads}{layout})"
    yield f"row = place // {job.channels}"
    yield f"c = place % {job.channels}"
    yield "live = row < rows"
    used = job.program.used()
    loads = {
        f"{operand.name}{n}": frame.load(at, "live")
        for operand in job.program.inputs
        if operand.name in used
        for n, at in enumerate(_addresses(operand, job.channels))
    }
    plan = schedule(varying(job.program))
    yield from load_before_use(plan, _dialect(frame.number), loads)
    for result, output in zip(plan.results, job.program.outputs, strict=True):
        places = _addresses(output.operand, job.channels)
        for at, name, value in zip(places, result.names, output.components, strict=True):
            # a stored number needs a shape, and its own dtype: alone it would be a float32
            stored = name or f"live.to({frame.number}) * {value.data!r}"
            yield f"tl.store({at}, {stored}, mask=live)"


def varying(program: Program) -> Program:
    """With 0 in place of results that are numbers, which no step makes."""
    return program._replace(
        outputs=tuple(
            Output(of, tuple(const(0) if e.kind == "const" else e for e in components))
            for of, components in program.outputs
        )
    )


def _addresses(operand: Operand, channels: int) -> list[str]:
    row = f"{operand.name}_ptr + row * {operand.size * channels} + c"
    return [f"{row} + {n * channels}" for n in range(operand.size)]


def _dialect(dtype: str) -> Dialect:
    functions = {
        "rsqrt": f'tl.rsqrt(tl.where({{0}} < {TINY[dtype]!r}, float("inf"), {{0}}))',
        "ramp": "tl.where({0} < 0, 0.0, {0})",
        "step": f"tl.where({{0}} < 0, 0.0, 1.0).to({dtype})",
        **{f"wave{n}": f"wave{n}({{0}})" for n in range(WAVES)},
        "sign": f"tl.where({{0}} > 0, 1.0, 0.0).to({dtype})",  # of what is not negative
    }
    return Dialect(functions, lambda of: [], lambda name, component: [])
