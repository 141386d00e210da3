"""Kernels of symmetric contractions, printed for one program, layout and number of channels.

Rows come sorted by element.  A kernel program takes `span` neighbours of that order and a block of
channels, a thread one channel of one row at a time:

    for the elements among its rows:
        for ROWS rows of the element at once:
            read x, and the element's weights, which stay in the cache; the program's steps
            write results of rows; add what belongs to the element to the thread's own sums
        the threads' sums: a part of the element's

Nothing else goes through memory.  Chunk q's part of element e has number q + e: both only grow
along the order, so that no two parts meet and few numbers stay unused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchweft.core.expressions.program import Operand, Program
from torchweft.core.printing.dialect import Dialect, Schedule, indented
from torchweft.core.printing.kernel import Frame, load_before_use
from torchweft.core.printing.schedule import schedule
from torchweft.o3.symmetric.program import slots
from torchweft.products.tiles import power_of_two

__all__ = ["LANES", "Column", "Job", "name", "source"]

LANES = 32
"""Channels of a block: of a warp's threads, neighbours in memory."""

PLAIN = Dialect({}, lambda of: [], lambda name, component: [])


class Column(NamedTuple):
    """A component in a row: channel c is at offset + c · step."""

    offset: int
    step: int


class Job(NamedTuple):
    """What a kernel depends on.

    Args:
        program: what is computed.
        columns: of the components of x and z; rows are as long as these.
        channels: of each.
        warps: of a kernel program, each with rows of its own.
        wide: whether sums are in float64.
        gluon: whether to print Gluon, where no layout is searched for; else Triton.
    """

    program: Program
    columns: tuple[tuple[str, tuple[Column, ...]], ...]
    channels: int
    warps: int
    wide: bool
    gluon: bool


def name(job: Job) -> str:
    """The kernel's."""
    return "symmetric_" + "".join(slots(job.program.key).outputs)


def source(job: Job) -> str:
    """The module's text."""
    return _Printer(job).module()


class _Printer:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.columns = dict(job.columns)
        self.plan: Schedule = schedule(job.program)
        letters = slots(job.program.key)
        used = job.program.used()
        pairs = zip(job.program.inputs, letters.inputs, strict=True)
        self.inputs = [(operand, slot) for operand, slot in pairs if operand.name in used]
        outputs = [output.operand for output in job.program.outputs]
        self.outputs = list(zip(outputs, letters.outputs, strict=True))
        self.frame = Frame(job.gluon, job.wide)
        self.numbers = min(LANES, power_of_two(job.channels))
        self.rows = LANES // self.numbers * job.warps
        self.blocks = -(-job.channels // LANES)

    def module(self) -> str:
        pointers = [o.name for o, _ in (*self.inputs, *self.outputs)]
        pointers += ["element", "order", "starts"]
        free = ["rows", "span"]
        parameters = [*(f"{p}_ptr" for p in pointers), *free]
        kernel = self.frame.function(name(self.job), parameters, self._body(), free)
        return self.frame.module(self.job.program.key, kernel)

    # loops

    def _body(self) -> Iterator[str]:
        threads = f"[1, 1], [{LANES // self.numbers}, {self.numbers}]"
        yield from self.frame.layout(f"tl.BlockedLayout({threads}, [{self.job.warps}, 1], [1, 0])")
        yield f"block, chunk = tl.program_id(0) % {self.blocks}, tl.program_id(0) // {self.blocks}"
        yield f"c1 = block * {LANES} + tl.arange(0, {self.numbers}{self.frame.sliced(0)})"
        yield "c = tl.expand_dims(c1, 0)"
        yield f"own = tl.expand_dims(tl.arange(0, {self.rows}{self.frame.sliced(1)}), 1)"
        yield "place = chunk * span"
        yield "end = tl.minimum(place + span, rows)"
        yield "while place < end:"
        yield from indented(self._run())

    def _run(self) -> Iterator[str]:
        """The rows of one element."""
        yield f"element = {self.frame.cast('tl.load(element_ptr + tl.load(order_ptr + place))')}"
        yield "stop = tl.minimum(tl.load(starts_ptr + element + 1), end)"
        for operand, slot in self.inputs:
            if slot == "w":
                table = f"element * {operand.size * self.job.channels}"
                yield f"{operand.name}_at = {operand.name}_ptr + {table} + c"
        zeros = self.frame.zeros(f"{self.rows}, {self.numbers}")
        for operand, component, value in self._summed():
            if value:
                yield f"{operand.name}_sum{component} = {zeros}"
        yield f"for first in range(place, stop, {self.rows}):"
        yield from indented(self._rows())
        yield from self._parts()
        yield "place = tl.maximum(stop, place + 1)"  # an element that is none must not hang it

    def _rows(self) -> Iterator[str]:
        """Some rows at once, one a warp."""
        yield "p = first + own"
        channels = "" if self.job.channels % LANES == 0 else f" & (c < {self.job.channels})"
        yield f"live = (p < stop){channels}"
        yield "row = tl.load(order_ptr + p, mask=p < stop, other=0).to(tl.int64)"
        for operand, slot in (*self.inputs, *self.outputs):
            if slot != "w":
                yield from self._places(operand, slot)
        yield from self._steps()
        for operand, component, value in self._summed():
            if value:
                yield f"{operand.name}_sum{component} += {value}"
        for result, (operand, slot) in zip(self.plan.results, self.outputs, strict=True):
            if slot != "w":
                for at, value in zip(self._addresses(operand, slot), result.names, strict=True):
                    # a stored zero needs a shape
                    yield f"tl.store({at}, {value or 'tl.where(live, 0.0, 0.0)'}, mask=live)"

    # addresses

    def _places(self, operand: Operand, slot: str) -> Iterator[str]:
        """Where a row begins, for each step of channels."""
        columns = self.columns[slot]
        width = len(columns) * self.job.channels
        for step in dict.fromkeys(column.step for column in columns):
            yield f"{operand.name}_at{step} = {operand.name}_ptr + row * {width} + c * {step}"

    def _addresses(self, operand: Operand, slot: str) -> list[str]:
        if slot == "w":
            return [f"{operand.name}_at + {n * self.job.channels}" for n in range(operand.size)]
        return [f"{operand.name}_at{step} + {offset}" for offset, step in self.columns[slot]]

    # the program

    def _steps(self) -> Iterator[str]:
        """Steps, each component read before its first use."""
        loads = {
            f"{operand.name}{n}": self._load(at, slot)
            for operand, slot in self.inputs
            for n, at in enumerate(self._addresses(operand, slot))
        }
        yield from load_before_use(self.plan, PLAIN, loads)

    def _load(self, at: str, slot: str) -> str:
        return self.frame.load(at, f"c < {self.job.channels}" if slot == "w" else "live")

    # sums over the rows of an element

    def _summed(self) -> Iterator[tuple[Operand, int, str | None]]:
        for result, (operand, slot) in zip(self.plan.results, self.outputs, strict=True):
            if slot == "w":
                for component, value in enumerate(result.names):
                    yield operand, component, value

    def _parts(self) -> Iterator[str]:
        """The threads' sums, added up and stored."""
        found = {operand.name: operand.size for operand, slot in self.outputs if slot == "w"}
        for of, size in found.items():
            width = size * self.job.channels
            yield f"{of}_part = {of}_ptr + (chunk + element) * {width} + c1"
        for operand, component, value in self._summed():
            total = f"tl.sum({operand.name}_sum{component}, 0)" if value else "c1 * 0.0"
            at = f"{operand.name}_part + {component * self.job.channels}"
            yield f"tl.store({at}, {total}, mask=c1 < {self.job.channels})"
