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

__all__ = ["LANES", "Column", "Columns", "SymmetricKernelSpec", "name", "source"]

LANES = 32
"""Channels of a block: those of a warp's threads, neighbours in memory."""

PLAIN = Dialect({}, lambda of: [], lambda name, component: [])


class Column(NamedTuple):
    """A component in a row: channel c is at offset + c · step."""

    offset: int
    step: int


Columns = tuple[tuple[str, tuple[Column, ...]], ...]
"""Columns of the components of x and z; rows are as long as these."""


class SymmetricKernelSpec(NamedTuple):
    """All that the source of a kernel depends on.

    Args:
        program: what is computed.
        columns: columns of x and z.
        channels: channels of each component.
        warps: warps per kernel program, each with rows of its own.
        frame: language, and dtype of sums.
    """

    program: Program
    columns: Columns
    channels: int
    warps: int
    frame: Frame


def name(spec: SymmetricKernelSpec) -> str:
    """Name of the kernel."""
    return "symmetric_" + "".join(slots(spec.program.key).outputs)


def source(spec: SymmetricKernelSpec) -> str:
    """Module text of a kernel."""
    return _SymmetricPrinter(spec).module()


class _SymmetricPrinter:
    def __init__(self, spec: SymmetricKernelSpec) -> None:
        self.spec = spec
        self.columns = dict(spec.columns)
        self.plan: Schedule = schedule(spec.program)
        letters = slots(spec.program.key)
        used = spec.program.used()
        pairs = zip(spec.program.inputs, letters.inputs, strict=True)
        self.inputs = [(operand, slot) for operand, slot in pairs if operand.name in used]
        outputs = [output.operand for output in spec.program.outputs]
        self.outputs = list(zip(outputs, letters.outputs, strict=True))
        self.frame = spec.frame
        self.numbers = min(LANES, power_of_two(spec.channels))
        self.rows = LANES // self.numbers * spec.warps
        self.blocks = -(-spec.channels // LANES)

    def module(self) -> str:
        pointers = [o.name for o, _ in (*self.inputs, *self.outputs)]
        pointers += ["element", "order", "starts"]
        free = ["rows", "span"]
        parameters = [*(f"{p}_ptr" for p in pointers), *free]
        kernel = self.frame.function(name(self.spec), parameters, self._body(), free)
        return self.frame.module(self.spec.program.key, kernel)

    # loops

    def _body(self) -> Iterator[str]:
        threads = f"[1, 1], [{LANES // self.numbers}, {self.numbers}]"
        yield from self.frame.layout(f"tl.BlockedLayout({threads}, [{self.spec.warps}, 1], [1, 0])")
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
                table = f"element * {operand.size * self.spec.channels}"
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
        channels = "" if self.spec.channels % LANES == 0 else f" & (c < {self.spec.channels})"
        yield f"live = (p < stop){channels}"
        yield "row = tl.load(order_ptr + p, mask=p < stop, other=0).to(tl.int64)"
        for operand, slot in (*self.inputs, *self.outputs):
            if slot != "w":
                yield from self._places(operand, slot)
        loads = {
            f"{operand.name}{n}": self.frame.load(at, mask)
            for operand, slot in self.inputs
            for mask in [f"c < {self.spec.channels}" if slot == "w" else "live"]
            for n, at in enumerate(self._addresses(operand, slot))
        }
        yield from load_before_use(self.plan, PLAIN, loads)
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
        width = len(columns) * self.spec.channels
        for step in dict.fromkeys(column.step for column in columns):
            yield f"{operand.name}_at{step} = {operand.name}_ptr + row * {width} + c * {step}"

    def _addresses(self, operand: Operand, slot: str) -> list[str]:
        if slot == "w":
            return [f"{operand.name}_at + {n * self.spec.channels}" for n in range(operand.size)]
        return [f"{operand.name}_at{step} + {offset}" for offset, step in self.columns[slot]]

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
            width = size * self.spec.channels
            yield f"{of}_part = {of}_ptr + (chunk + element) * {width} + c1"
        for operand, component, value in self._summed():
            total = f"tl.sum({operand.name}_sum{component}, 0)" if value else "c1 * 0.0"
            at = f"{operand.name}_part + {component * self.spec.channels}"
            yield f"tl.store({at}, {total}, mask=c1 < {self.spec.channels})"
