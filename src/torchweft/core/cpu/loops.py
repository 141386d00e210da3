"""A program as one numba loop over tiles of positions: its source, and how it runs on threads.

    for each tile:  load the inputs' components · phases · store the results

A tile's values lie in slots of `TILE` numbers in one small array, so that the compiler knows their
distances, and a phase is one loop over positions that fills vector lanes.  Phases end at sums over
the features, and at forms with many terms: those are evaluated term by term from a table, which
compiles in no time.  Several short rows share a tile; rows that are summed over features and longer
than a tile take several blocks of slots.  A loop of one phase over contiguous operands needs no
loads: it reads them in place, and only results pass through the tile, as the compiler cannot know
whether operands and results share memory.  Sums over rows are added tile by tile in a fixed part of
the rows, so the bits do not depend on the number of threads.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweft.core.cpu.arrays import as_array
from torchweft.core.explain import Launch, record, recording
from torchweft.core.expressions.expr import SHRINK, SLOTS, reachable
from torchweft.core.expressions.program import Program
from torchweft.core.files import source_hash
from torchweft.core.printing.dialect import Contract, Dialect, Step, Sums, indented
from torchweft.core.printing.modules import load
from torchweft.core.printing.schedule import schedule

__all__ = ["Loop", "printed_loop", "run", "share", "terms"]


STRAIGHT = 200
"""Most terms of a program that are printed one by one; more would compile long for little gain."""

_IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*")

_HEADER = """
# with loop_parts and straight_line {parts}
import math

import numpy as np

from torchweft.core.cpu.loop_parts import TILE, add, clear, finish, jit, load, store, totals, walk
from torchweft.core.cpu.straight_line import straight_line

real = np.{dtype}

@jit
def normal_cdf(x):
    return real(0.5) * math.erfc(x * real(-0.7071067811865476))


@jit
def exp(x):
    return math.exp(x)


@jit
def sigmoid(x):
    return real(1) / (real(1) + math.exp(-x))


@jit
def reciprocal(x):
    return real(1) / x


@jit
def sqrt(x):
    return math.sqrt(x)


@jit
def rsqrt(x):
    return real(0) if x == real(0) else real(1) / math.sqrt(x)


@jit
def sign(x):
    return real(1) if x > real(0) else (real(-1) if x < real(0) else real(0))

"""

_CALLED = [
    pathlib.Path(__file__).with_name(f"{name}.py") for name in ("loop_parts", "straight_line")
]
_FUNCTIONS = ("exp", "normal_cdf", "sigmoid", "reciprocal", "sqrt", "rsqrt", "abs", "sign")
_SHRUNK = {
    "shrunk": f"({{0}} * {SHRINK!r})",
    "twice_shrunk": f"({{0}} * {2 * SHRINK**2!r})",
    "shrunk_square": f"(({{0}} * {SHRINK!r}) * ({{0}} * {SHRINK!r}))",
}
_DIALECT = Dialect(
    _SHRUNK | {f: f"{f}({{}})" for f in _FUNCTIONS}, lambda of: [], lambda name, component: []
)


class Loop(NamedTuple):
    """A printed program.

    Args:
        source: defines `kernel(first, last, parts, num_rows, features, num_row, num_feature,
            layout, places, pairs, terms, coefficients, *inputs, *outputs)` for some of the tasks.
        inputs: positions, among the program's inputs, of those that it reads.
        whole_rows: whether a task is a part of the rows; else it is one tile of features of it.
        layout: five integers for each input (slot, components, and strides that are filled in
            later), result (likewise, unless it is summed) and phase, see `loop_parts`.
        places: the slot of each component of each result, -1 for zero.
        pairs: slots of values that are summed over features, and of the sums.
        terms: slots (factor, factor, weight or -1, target) of the terms that `walk` evaluates.
        coefficients: coefficients of these terms.
    """

    source: str
    inputs: tuple[int, ...]
    whole_rows: bool
    layout: list[tuple[int, int, int, int, int]]
    places: list[int]
    pairs: list[tuple[int, int]]
    terms: list[tuple[int, int, int, int]]
    coefficients: list[float]


class _Phase(NamedTuple):
    """Steps of one loop over positions, or one `Sums`, or one `Contract` evaluated by `walk`."""

    steps: list[Step]
    lines: list[str]
    defined: set[str]
    read: set[str]


@functools.lru_cache(maxsize=256)
def printed_loop(program: Program, dtype: str, contiguous: bool = False) -> Loop:
    """The loop of a program in numpy's float32 or float64.

    Args:
        program: what to compute.
        dtype: name of numpy's type.
        contiguous: whether each operand has one row, and each of its components is contiguous.
    """
    return _LoopPrinter(program, contiguous).loop(dtype)


class _LoopPrinter:
    def __init__(self, program: Program, contiguous: bool) -> None:
        self.program = program
        self.steps, self.results = schedule(program)
        self.used = [i for i, o in enumerate(program.inputs) if o.name in program.used()]
        work = sum(
            len(s.form.terms) * len(s.results) for s in self.steps if isinstance(s, Contract)
        )
        alone = (Sums,) if work <= STRAIGHT else (Sums, Contract)
        self.phases = [_phase(steps, alone) for steps in _split(self.steps, alone)]
        self.shown = {name for result in self.results for name in result.names if name}
        # a result that is an operand needs a slot
        straight = all(phase.lines and self.shown <= phase.defined for phase in self.phases)
        self.in_place = contiguous and straight and len(self.phases) == 1
        self.slots: dict[str, int] = {}
        self.sums = {r.operand: len(r.names) for r in self.results if r.summed}
        self._give_slots()

    def _give_slots(self) -> None:
        """Slots for operands and sums over rows, then for values passed between phases."""
        for i in [] if self.in_place else self.used:
            operand = self.program.inputs[i]
            for c in range(operand.size):
                self._slot(f"{operand.name}{c}")
        for name, size in self.sums.items():
            for c in range(size):
                self._slot(f"{name}[{c}]")
        needed = self.shown.union(*(phase.read for phase in self.phases))
        for phase in self.phases:
            # results of `walk` are adjacent, to be zeroed at once
            kept = phase.defined if not phase.lines else phase.defined & needed
            for name in sorted(kept):
                self._slot(name)

    def _slot(self, name: str) -> int:
        return self.slots.setdefault(name, len(self.slots))

    def loop(self, dtype: str) -> Loop:
        self.layout: list[tuple[int, int, int, int, int]] = []
        self.places: list[int] = []
        self.pairs: list[tuple[int, int]] = []
        self.terms: list[tuple[int, int, int, int]] = []
        self.coefficients: list[float] = []
        self.whole_rows = any(isinstance(step, Sums) for step in self.steps)
        for i in self.used:
            operand = self.program.inputs[i]
            self._span(self.slots.get(f"{operand.name}0", -1), operand.size)
        self.outputs = {}
        for result in self.results:
            slot = self.slots[f"{result.operand}[0]"] if result.summed else 0
            span = self._span(len(self.places), len(result.names), slot)
            self.outputs[result.operand] = span
            self.places += [self.slots[name] if name else -1 for name in result.names]
        self.straight: list[str] = []
        kernel = list(self._kernel())
        body = "\n".join([*self.straight, *kernel])
        source = _HEADER.format(dtype=dtype, parts=source_hash(*_CALLED)).lstrip() + body + "\n"
        tables = self.layout, self.places, self.pairs, self.terms, self.coefficients
        return Loop(source, tuple(self.used), self.whole_rows, *tables)

    def _span(self, *numbers: int) -> str:
        """Add a row to the layout; returns the text that refers to it."""
        self.layout.append((*numbers, *[0] * (5 - len(numbers))))  # type: ignore[arg-type]
        return f"layout[{len(self.layout) - 1}]"

    def _kernel(self) -> Iterator[str]:
        operands = [f"in_{self.program.inputs[i].name}" for i in self.used]
        outputs = [f"out_{result.operand}" for result in self.results]
        names = "first, last, parts, num_rows, features, num_row, num_feature"
        tables = "layout, places, pairs, terms, coefficients"
        slots = len(self.slots)
        yield from (
            "",
            "@jit",
            f"def kernel({', '.join([names, tables, *operands, *outputs])}):",
            f"    size = {slots} * TILE",
            f"    most = {'max(features, 1)' if self.whole_rows else 'TILE'}",
            "    columns = (features + most - 1) // most",
            "    blocks = (min(most, features) + TILE - 1) // TILE",
            "    tile = np.zeros(blocks * size, real)",
            "    for task in range(first, last):",
            "        part, start = task // columns, task % columns * most",
            "        span = min(most, features - start)",
            "        height = max(1, TILE // span)",
            "        end = (part + 1) * num_rows // parts",
        )
        yield from indented(self._prepare(), 2)
        yield "        for row in range(part * num_rows // parts, end, height):"
        yield "            rows = min(height, end - row)"
        yield from indented(self._tile(), 3)
        yield from indented(self._finish(), 2)

    def _loads(self, by_row: bool) -> Iterator[str]:
        """Load the operands with rows, or those without, for every row of a tile."""
        rows = "row, at, rows, width" if by_row else "0 * row, at, height, width"
        for place, i in enumerate(self.used):
            operand = self.program.inputs[i]
            if ("row" in operand.axes) == by_row:
                yield f"load(block, layout[{place}], in_{operand.name}, {rows})"

    def _views(self) -> Iterator[str]:
        """Views of the components that are read in place."""
        for place, i in enumerate(self.used):
            operand = self.program.inputs[i].name
            for c in range(self.program.inputs[i].size):
                if f"{operand}{c}" in self.phases[0].read:
                    start = f"{c} * layout[{place}, 2] + at"
                    yield f"given_{operand}{c} = in_{operand}[{start} : {start} + width]"

    def _prepare(self) -> Iterator[str]:
        """Load what a task reads once, and zero its sums."""
        lines = list(self._loads(by_row=False))
        for name, number in self.sums.items():
            lines.append(f"clear(block, {self._span(self.slots[f'{name}[0]'], number)})")
        if lines:
            yield "row = part * num_rows // parts"
            yield from _of_blocks(lines)

    def _tile(self) -> Iterator[str]:
        """Load, all phases, store; the lines between two sums over features run block by block."""
        given = self._views() if self.in_place else self._loads(by_row=True)
        lines = ["count = rows * width", *given]
        for phase in self.phases:
            step = phase.steps[0]
            if isinstance(step, Sums):
                yield from _of_blocks(lines)
                lines = ["count = rows * width"]
                begin = len(self.pairs)
                self.pairs += [(self.slots[of], self.slots[n]) for n, of in step.of.items()]
                span = self._span(begin, len(self.pairs))
                yield f"totals(tile, size, blocks, pairs, {span}, rows, span)"
            elif phase.lines:
                lines += self._positions(phase)
            else:
                lines.append(self._walk(step))  # type: ignore[arg-type]
        for result in self.results:
            span, name = self.outputs[result.operand], result.operand
            if result.summed:
                lines.append(f"add(block, places, {span}, count)")
            else:
                lines.append(f"store(block, places, {span}, out_{name}, row, at, rows, width)")
        yield from _of_blocks(lines)

    def _positions(self, phase: _Phase) -> Iterator[str]:
        """The call of a phase, whose loop over positions is straight-line code."""
        given, lines = [], []
        for name in sorted(phase.read):
            slot = self.slots.get(name)
            given += [f"given_{name}"] * (slot is None)
            value = f"given_{name}[q]" if slot is None else f"block[{slot} * TILE + q]"
            lines.append(f"{name} = {value}")
        lines += phase.lines
        for name in sorted(phase.defined & self.slots.keys()):
            lines.append(f"block[{self.slots[name]} * TILE + q] = {name}")
        text = "\n".join(["for q in range(count):", *indented(lines, 1)])
        function = f"phase_{len(self.straight)}"
        names = ", ".join(["block", *given, "count", "num_row", "num_feature"])
        self.straight.append(
            f'{function} = straight_line("""\n{text}\n""", "{names}", globals())\n'
        )
        yield f"{function}(({names}))"

    def _walk(self, step: Contract) -> str:
        begin = len(self.terms)
        for slot, names in step.results.items():
            at = SLOTS.index(slot)
            factors = [i for i in (0, 1, 3, 2) if i != at and SLOTS[i] in step.form.slots]
            for coefficient, *components in sorted(step.form.terms, key=lambda t: t[1 + at]):
                name = names.get(components[at])
                read = [step.operands[i][components[i]] for i in factors]  # type: ignore[index]
                if name and all(read):
                    a, b, w = ([self.slots[r] for r in read if r] + [-1])[:3]
                    self.terms.append((a, b, w, self.slots[name]))
                    self.coefficients.append(coefficient)
        slots = [self.slots[name] for names in step.results.values() for name in names.values()]
        span = self._span(min(slots), len(slots), begin, len(self.terms))
        return f"walk(block, terms, coefficients, {span}, count)"

    def _finish(self) -> Iterator[str]:
        """The sums over a part of the rows."""
        if self.sums:
            yield from _of_blocks(
                f"finish(block, {self.outputs[name]}, out_{name}, "
                "part, at, features, height, width)"
                for name in self.sums
            )


def _of_blocks(lines: Iterable[str]) -> Iterator[str]:
    yield from (
        "for b in range(blocks):",
        "    block = tile[b * size : (b + 1) * size]",
        "    at, width = start + b * TILE, min(TILE, span - b * TILE)",
    )
    yield from indented(lines, 1)


StepTypes = tuple[type[Step], ...]


def _split(steps: Iterable[Step], alone: StepTypes) -> Iterator[list[Step]]:
    """Runs of steps for one loop over positions; each step of the types `alone` by itself."""
    run: list[Step] = []
    for step in steps:
        if isinstance(step, alone):
            if run:
                yield run
            yield [step]
            run = []
        else:
            run.append(step)
    if run:
        yield run


def _phase(steps: list[Step], alone: StepTypes) -> _Phase:
    step = steps[0]
    if isinstance(step, Sums):
        return _Phase(steps, [], set(step.of), set(step.of.values()))
    if isinstance(step, Contract) and Contract in alone:
        read = {name for operand in step.operands if operand for name in operand if name}
        defined = {name for names in step.results.values() for name in names.values()}
        return _Phase(steps, [], defined, read)
    lines = [line for step in steps for line in step.lines(_DIALECT)]
    defined = {line.partition(" ")[0] for line in lines}
    read = {name for line in lines for name in _IDENTIFIER.findall(line)}
    known = {"num_row", "num_feature", *_DIALECT.functions}
    return _Phase(steps, lines, defined, read - defined - known)


SERIAL_WORK = 2**20
"""Multiplications below which one thread is faster."""

MOST_PARTS = 64
"""Most parts of the rows, which threads share; each has its own partial sums."""

Array = np.ndarray[Any, Any]
LoopShape = tuple[int, int, int, Any, Any]
TaskRange = Callable[[int, int], None]


@functools.lru_cache(maxsize=1024)
def terms(program: Program) -> int:
    """Approximate number of multiplications per position."""
    nodes = reachable(program.roots())
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
        program: the program.
        dtype: float32 or float64, in which it computes.
        size: number of rows and of features.
        inputs: (components, rows or 1, features or 1) each, of any strides and either dtype.
        results: tensors to write to, (components, rows, features) of any strides and either dtype;
            None for sums over rows, which are returned as new tensors.
    """
    rows, features = size
    name = str(dtype).removeprefix("torch.")
    loop = printed_loop(program, name)
    given = [inputs[i].detach() for i in loop.inputs]
    operands = [*given, *results]
    flat = _flattened(operands) if _is_pointwise(program, loop) else None
    num_rows, width = size if flat is None else (1, rows * features)
    if flat is not None and all(t.stride(2) == 1 and t.dtype == dtype for t in flat[: len(given)]):
        loop = printed_loop(program, name, contiguous=True)
    from torchweft.core.cpu.loop_parts import TILE  # numba need not be installed

    parts = max(1, min(MOST_PARTS, num_rows, -(-rows * features // TILE**2)))
    outputs = [
        torch.empty(parts, o.operand.size, features, dtype=dtype, device="cpu") if r is None else r
        for o, r in zip(program.outputs, results, strict=True)
    ]
    real = np.dtype(name).type
    shape = parts, num_rows, width, real(rows), real(features)
    layout = _layout(loop, flat or operands)
    arrays = [_storage(t) for t in flat or [*given, *outputs]]
    tasks = parts * (1 if loop.whole_rows else -(-width // TILE))
    work = rows * features * max(terms(program), 1)
    share(_bound(loop, shape, layout, arrays), tasks, work, SERIAL_WORK)
    summed = [r is None for r in results]
    if recording():
        partial = sum(o.nbytes for o, flag in zip(outputs, summed, strict=True) if flag)
        record(Launch("numba", program.key, {"tile": TILE, "parts": parts}, tasks, partial))
    return [o.sum(0) if flag else o for o, flag in zip(outputs, summed, strict=True)]


def _layout(loop: Loop, operands: Sequence[Tensor | None]) -> Array:
    """The layout of a loop with the strides of its operands; None for sums."""
    layout = np.array(loop.layout, np.int64)
    for place, t in enumerate(operands):
        if t is not None:
            layout[place, 2:] = t.stride()
            layout[place, 3] *= t.shape[1] > 1  # one row stands for every row
    return layout


def _bound(loop: Loop, shape: LoopShape, layout: Array, arrays: list[Array]) -> TaskRange:
    """`run(first, last)`, which executes tasks first .. last-1."""
    kernel = load("loop", loop.source).kernel
    tables = (
        np.array(loop.places, np.int64),
        np.array(loop.pairs, np.int64).reshape(-1, 2),
        np.array(loop.terms, np.int64).reshape(-1, 4),
        np.array(loop.coefficients, type(shape[-1])),
    )
    return lambda first, last: kernel(first, last, *shape, layout, *tables, *arrays)


def _is_pointwise(program: Program, loop: Loop) -> bool:
    """Whether a loop treats rows and features alike."""
    operands = [program.inputs[i] for i in loop.inputs] + [o.operand for o in program.outputs]
    return not loop.whole_rows and all("row" in operand.axes for operand in operands)


def _flattened(tensors: Sequence[Tensor | None]) -> list[Tensor] | None:
    """Rows and features as one axis; None if some strides do not allow it."""
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
    """The memory from a tensor's first to its last element, with gaps."""
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return as_array(t.as_strided((extent,), (1,)))


RUNS_PER_THREAD = 4
"""Least runs of tasks per thread: a thread that starts late leaves its runs to the others."""

WORK_OF_A_RUN = 2**25
"""Multiplications of a run: some milliseconds, a few tenths of a second at the slowest.  Python
looks for signals between runs, so Ctrl-C ends a loop there."""


class _Threads:
    """A pool that does not survive a fork: the child process creates its own."""

    pool: ThreadPoolExecutor | None = None
    size = 0


os.register_at_fork(after_in_child=lambda: setattr(_Threads, "pool", None))


def share(run: TaskRange, tasks: int, work: int, serial: int) -> None:
    """Run tasks in runs; the caller and the pool's threads take the next run until none is left.

    So a thread that starts late, as when torch occupies its core, delays no other; and an
    interrupt ends all of them after the runs that they are in.

    Args:
        run: executes tasks first .. last-1.
        tasks: number of tasks.
        work: multiplications of all tasks.
        serial: multiplications below which one thread is faster.
    """
    threads = 1 if work < serial or tasks == 1 else torch.get_num_threads()
    least = 1 if threads == 1 else RUNS_PER_THREAD * threads
    number = min(tasks, max(least, work // WORK_OF_A_RUN))
    if number <= 1:
        run(0, tasks)
        return
    runs = iter(range(number))  # atomic under Python's lock

    def take() -> None:
        for i in runs:
            run(tasks * i // number, tasks * (i + 1) // number)

    if threads == 1:
        take()
        return
    if _Threads.pool is None or _Threads.size < threads:
        _Threads.pool, _Threads.size = ThreadPoolExecutor(threads), threads
    others = [_Threads.pool.submit(take) for _ in range(threads - 1)]
    try:
        take()
    finally:
        tuple(runs)  # after an interrupt, no other run begins
        for other in others:
            if not other.cancel():
                other.result()
