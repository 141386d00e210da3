"""Source of CPU loops for calls: edges by the row that they add to, channels in vector lanes.

    for the rows of a task:
        for the edges of the row:
            copy the blocks that the edge reads into a scratch array
            for each group of paths: what channels share, then for u in range(channels): the terms
            store the results of the edge
        store the results of the row

All vectors lie in one scratch array at constant offsets, so that the compiler vectorizes without
checks of overlap; values that channels share are scalars, and lie there between edges.  Only the
copies depend on the layout of rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchweft.core.printing.dialect import indented
from torchweft.o3.channelwise.arithmetic import Arithmetic
from torchweft.o3.channelwise.calls import Call
from torchweft.o3.channelwise.structure import Block, Path, Product

__all__ = ["LoopSpec", "loop_source"]

_IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*")
_VALUE = re.compile(r"([xyzw])(\d+)_(\d+)_(\d+)")

_LOOPS = {
    "task": ("for task in range(first, last):",),
    "row": ("for p in range(tasks[task], tasks[task + 1]):", "    row = rows[p]"),
    "edge": (
        "for k in range(indptr[p], indptr[p + 1]):",
        "    e = edges[k]",
        "    other = others[e]",
    ),
}
_TABLES = ("rows", "indptr", "edges", "others")


class LoopSpec(NamedTuple):
    """One walk over all edges; it determines the source."""

    product: Product  # blocks and paths
    call: Call  # its results; tensors are those of the whole call
    owner: str  # "z" or "x", the slot whose rows have lists of edges
    shared: bool  # whether w has one row
    added: tuple[bool, ...]  # for each result, whether stores add to the memory
    dtype: str  # name of the numpy dtype
    indices: tuple[str, ...]  # names of the numpy dtypes of rows, indptr, edges, others


class LoopSource(NamedTuple):
    """The text of a walk for `machine_code`, and the size of its scratch array."""

    text: str
    size: int


def loop_source(spec: LoopSpec) -> LoopSource:
    """A walk.

    It defines `kernel(first, last, scratch, tasks, rows, indptr, edges, others, *tensors,
    *results)` for tasks first .. last−1.  Task t has the rows p = tasks[t] .. tasks[t+1]−1; row p
    has the edges edges[indptr[p]] .. edges[indptr[p+1]−1] and is the owner's row rows[p]; others[e]
    is the row of edge e in the other slot.  Sums over a row are stored at p, sums over a task at t.
    """
    printer = _LoopPrinter(spec)
    return LoopSource("\n".join(printer.lines()) + "\n", printer.size)


class _PathGroup(NamedTuple):
    """Paths in one loop: lines before it, lines inside, the vectors these read, sums to add."""

    before: list[str]
    inside: list[str]
    vectors: list[str]
    sums: dict[tuple[int, int, int], str]


class _CopiedRun(NamedTuple):
    """Vectors of the scratch array, and their place in a row of memory."""

    place: int
    offset: int
    components: int
    step: int
    lanes: int
    channel_step: int


class _LoopPrinter:
    def __init__(self, spec: LoopSpec) -> None:
        self.spec, self.product, self.call = spec, spec.product, spec.call
        self.read: set[tuple[int, int, int]] = set()
        self.groups = [self._group(paths) for paths in self._grouped()]
        self.reached = sorted({key for group in self.groups for key in group.sums})
        self.places: dict[str, range] = {}
        self._give_places()

    # arithmetic

    def _grouped(self) -> Iterable[list[Path]]:
        """Paths that share a loop: those of one block of y."""
        found: dict[int, list[Path]] = {}
        for path in self.product.paths:
            found.setdefault(path.y, []).append(path)
        return found.values()

    def _group(self, paths: Iterable[Path]) -> _PathGroup:
        sums: dict[tuple[int, int, int], str] = {}

        def add(result: int, block: int, component: int, text: str) -> None:
            key = result, block, component
            sums[key] = f"{sums.get(key, '')} {text}"

        arithmetic = Arithmetic(self.product, self.call, add)
        for path in paths:
            arithmetic.path(path)
        shared: set[str] = set()
        before, inside = [], []
        for line in arithmetic.lines:
            name, _, text = line.partition(" = ")
            names = set(_IDENTIFIER.findall(text))
            if all(n in shared or (_VALUE.match(n) and not self._is_vector(n)) for n in names):
                shared.add(name)
                before.append(line)
            else:
                inside.append(line)
        lines = [*before, *inside, *sums.values()]
        values = dict.fromkeys(m[0] for line in lines for m in _VALUE.finditer(line))
        self.read |= {_component(value)[1:] for value in values}
        return _PathGroup(before, inside, [v for v in values if self._is_vector(v)], sums)

    def _is_vector(self, value: str) -> bool:
        slot, _, block, _ = _component(value)
        return self.product.blocks(slot)[block].channel_step != 0

    # places

    def _slot(self, kind: str, number: int) -> str:
        return self.call.slots[number] if kind == "t" else self.call.results[number].slot

    def _level(self, slot: str) -> str:
        """The loop that selects the row of a slot."""
        if slot == "w" and self.spec.shared:
            return "task"
        return "row" if slot == self.spec.owner else "edge"

    def _blocks(self, kind: str, number: int) -> list[tuple[int, Block]]:
        """The blocks in use, in the order of memory."""
        keys = self.read if kind == "t" else self.reached
        blocks = self.product.blocks(self._slot(kind, number))
        found = {block for n, block, _ in keys if n == number}
        return sorted(((b, blocks[b]) for b in found), key=lambda item: item[1].offset)

    def _shared(self, kind: str, number: int) -> Iterator[tuple[int, int, int]]:
        """(block, component, place in a row) of the values that channels share."""
        keys = self.read if kind == "t" else self.reached
        blocks = self.product.blocks(self._slot(kind, number))
        for n, b, c in sorted(keys):
            if n == number and not blocks[b].channel_step:
                yield b, c, blocks[b].offset + c * blocks[b].step

    def _give_places(self) -> None:
        """Place vectors in the order of their memory, so that copies merge; then kept scalars."""
        self.size = 0
        for kind, n in self._numbered():
            for b, block in self._blocks(kind, n):
                if block.channel_step:
                    self._place(f"{kind}{n}_{b}", block.components * self.product.channels)
        for kind, n in self._numbered():
            slot = self._slot(kind, n)
            if self._level(slot) != "edge":
                for b, c, _ in self._shared(kind, n):
                    self._place(f"{kind if kind == 'r' else slot}{n}_{b}_{c}", 1)

    def _numbered(self) -> Iterator[tuple[str, int]]:
        yield from (("t", n) for n in range(len(self.call.slots)))
        yield from (("r", n) for n in range(len(self.call.results)))

    def _place(self, name: str, size: int) -> None:
        self.places[name] = range(self.size, self.size + size)
        self.size += size

    def _at(self, kind: str, number: int, block: int, component: int) -> str:
        begin = self.places[f"{kind}{number}_{block}"].start
        return f"scratch[{begin + component * self.product.channels} + u]"

    def _runs(self, kind: str, number: int) -> Iterator[_CopiedRun]:
        """Copies between the scratch array and a row, adjacent ones merged."""
        channels = self.product.channels
        found: list[_CopiedRun] = []
        for b, (offset, degree, step, channel_step) in self._blocks(kind, number):
            if not channel_step:
                continue
            place, components = self.places[f"{kind}{number}_{b}"].start, 2 * degree + 1
            run = _CopiedRun(place, offset, components, step, channels, channel_step)
            if channel_step == 1 and (step == channels or components == 1):
                run = run._replace(components=1, lanes=components * channels)
            if found and _is_next(found[-1], run):
                found[-1] = found[-1]._replace(lanes=found[-1].lanes + run.lanes)
            else:
                found.append(run)
        return iter(found)

    # the text

    def lines(self) -> Iterator[str]:
        real = self.spec.dtype
        arguments = ["first: int64", "last: int64", f"scratch: {real}[:]", "tasks: int64[:]"]
        tables = zip(_TABLES, self.spec.indices, strict=True)
        arguments += [f"{name}: {dtype}[:]" for name, dtype in tables]
        arguments += [f"in{n}: {real}[:, :]" for n in range(len(self.call.slots))]
        arguments += [f"out{n}: {real}[:, :]" for n in range(len(self.call.results))]
        yield f"def kernel({', '.join(arguments)}):"
        edge = [*_LOOPS["edge"], *indented(self._edge(), 1)]
        row = [*_LOOPS["row"], *indented(self._around("row", edge), 1)]
        yield from indented([*_LOOPS["task"], *indented(self._around("task", row), 1)], 1)

    def _around(self, level: str, inside: Iterable[str]) -> Iterator[str]:
        yield from self._begin(level)
        yield from inside
        yield from self._end(level)

    def _array(self, kind: str, number: int, index: str) -> str:
        """An element of the row of a tensor or a result that a loop selects."""
        slot = self._slot(kind, number)
        level = self._level(slot)
        if kind == "t":
            edge = "other" if slot in "xz" else "e"
            row = {"task": "0", "row": "row", "edge": edge}[level]
            return f"in{number}[{row}, {index}]"
        row = {"task": "task", "row": "p", "edge": "e"}[level]
        return f"out{number}[{row}, {index}]"

    def _begin(self, level: str) -> Iterator[str]:
        """Loads of a level, and zeros for sums over it."""
        for n, slot in enumerate(self.call.slots):
            if self._level(slot) == level:
                for run in self._runs("t", n):
                    yield from _copies(run, f"scratch[{{0}}] = {self._array('t', n, '{1}')}")
                for b, c, place in self._shared("t", n):
                    name = self._scalar(f"{slot}{n}_{b}_{c}")
                    yield f"{name} = {self._array('t', n, str(place))}"
        for n, result in enumerate(self.call.results):
            if self._level(result.slot) == level:
                for b, c, _ in self._shared("r", n):
                    yield f"{self._scalar(f'r{n}_{b}_{c}')} = 0.0"
                spans = [
                    self.places[f"r{n}_{b}"]
                    for b, block in self._blocks("r", n)
                    if block.channel_step
                ]
                if spans and level != "edge":
                    yield f"for u in range({spans[-1].stop - spans[0].start}):"
                    yield f"    scratch[{spans[0].start} + u] = 0.0"

    def _scalar(self, name: str) -> str:
        """A value that channels share: a name inside of an edge, else an element."""
        return f"scratch[{self.places[name].start}]" if name in self.places else name

    def _edge(self) -> Iterator[str]:
        kept = [name for name in self.places if name.count("_") == 2]
        yield from (f"{name} = {self._scalar(name)}" for name in kept)
        yield from self._begin("edge")
        begun: set[tuple[int, int, int]] = set()
        for group in self.groups:
            yield from group.before
            yield f"for u in range({self.product.channels}):"
            for value in group.vectors:
                yield f"    {value} = {self._at('t', *_component(value)[1:])}"
            yield from indented(group.inside, 1)
            for key, text in group.sums.items():
                yield f"    {self._sum(key, text, key in begun)}"
            begun |= group.sums.keys()
        yield from (f"{self._scalar(name)} = {name}" for name in kept if name[0] == "r")
        yield from self._end("edge")

    def _sum(self, key: tuple[int, int, int], text: str, begun: bool) -> str:
        """Add to a component of a result."""
        r, b, c = key
        slot = self.call.results[r].slot
        if not self.product.blocks(slot)[b].channel_step:
            return f"r{r}_{b}_{c} = r{r}_{b}_{c}{text}"
        name = self._at("r", *key)
        if self._level(slot) == "edge" and not begun:
            return f"{name} = {text.removeprefix(' + ')}"
        return f"{name} = {name}{text}"

    def _end(self, level: str) -> Iterator[str]:
        """Stores of the sums over a level."""
        for n, result in enumerate(self.call.results):
            if self._level(result.slot) != level:
                continue
            equals = "+=" if self.spec.added[n] else "="
            for run in self._runs("r", n):
                yield from _copies(run, f"{self._array('r', n, '{1}')} {equals} scratch[{{0}}]")
            for b, c, place in self._shared("r", n):
                value = self._scalar(f"r{n}_{b}_{c}")
                yield f"{self._array('r', n, str(place))} {equals} {value}"


def _component(value: str) -> tuple[str, int, int, int]:
    """The slot, tensor, block and component that `value_name` named."""
    slot, rest = value[0], value[1:].split("_")
    tensor, block, component = map(int, rest)
    return slot, tensor, block, component


def _is_next(last: _CopiedRun, run: _CopiedRun) -> bool:
    """Whether a run continues another, in the scratch array and in memory."""
    return (
        last.components == run.components == last.channel_step == run.channel_step == 1
        and last.offset + last.lanes == run.offset
        and last.place + last.lanes == run.place
    )


def _copies(run: _CopiedRun, form: str) -> Iterator[str]:
    """A loop over the numbers of a run; `form` has a scratch index and a memory index."""
    u = "u" if run.channel_step == 1 else f"u * {run.channel_step}"
    if run.components == 1:
        yield f"for u in range({run.lanes}):"
        yield "    " + form.format(f"{run.place} + u", f"{run.offset} + {u}")
        return
    yield f"for c in range({run.components}):"
    yield f"    for u in range({run.lanes}):"
    places = f"{run.place} + c * {run.lanes} + u", f"{run.offset} + c * {run.step} + {u}"
    yield "        " + form.format(*places)
