"""The executor on a CPU: loops of formulas as machine code, in tasks of some rows.

    columns_of(...)          # once: what depends on j alone, each a contiguous row
    kernel(first, last, ...) # tasks: some rows of a batch entry by a list of intervals of columns
        for tiles of COLUMNS_PER_TILE columns: for the rows of the task:
            for j in the tile: the formula, straight code
            add the tile's sum to the row's total, in float64

shifted stores a tile's exponents, moves the row's maximum once, then takes exponentials.  smallest
stores a tile's values, and looks through them only where the smallest comes before the row's worst.
lowest has the rows of a task in vector lanes, each with its minimum and index, so that few columns
are enough.

Tasks have a fixed size and are shared among threads, so bits do not depend on their number.
Numbers of 16 bits are computed in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweft.core.cpu.loops import share
from torchweft.core.cpu.machine_code import machine_code
from torchweft.core.explain import Launch, record, recording
from torchweft.core.expressions.expr import Expr, const, reachable
from torchweft.core.printing.dialect import Dialect, indented
from torchweft.reductions.call import Blocks, ReductionData, Sizes, Wanted
from torchweft.reductions.engine.tree import may_serve, neighbours
from torchweft.reductions.formula.lowering import (
    LOG2E,
    assign,
    assigned,
    count,
    factored,
    operand,
    scalars,
    separated,
    text,
)
from torchweft.reductions.formula.node import Node, swap, variables

__all__ = ["LoopPrinter", "lowest", "prepared", "serves", "shifted", "smallest", "sums"]

MOST_TERMS_OF_A_LOOP = 512
"""Scalar terms of a formula that compile in a second or so."""

SERIAL_PAIRS = 100_000
"""Pairs below which one thread is faster."""

ROWS_PER_TASK = 64

LEAST_LANES = 16
"""Rows of a task that fill vector lanes."""

WORK_OF_A_TASK = 2**29
"""Most operations of a task of several rows, as an interrupt waits for its end: a tenth of a
second where they fill vector lanes."""

WORK_OF_A_CALL = 64
"""Operations that a function of the library of mathematics counts as."""

COLUMNS_PER_TILE = 1024
"""Columns of a tile: some rows of them stay in a core's first cache."""

_FUNCTIONS = {
    **{f: f + "({})" for f in ("exp2", "log", "cos", "sin", "asin", "acos", "atan", "sqrt", "abs")},
    "same": "({})",
    "plus": "plus({}, {})",
    "rsqrt": "(1.0 / sqrt({0}) if {0} != 0.0 else 0.0)",
    "reciprocal": "(1.0 / {})",
    "sign": "(1.0 if {0} > 0.0 else (-1.0 if {0} < 0.0 else 0.0))",
    "floor": "floor({})",
    "round": "round({})",
    "step": "(1.0 if {} >= 0.0 else 0.0)",
    "xlogx": "({0} * log({0}) if {0} != 0.0 else 0.0)",
    "sinxdivx": "(sin({0}) / {0} if {0} != 0.0 else 1.0)",
    "divide": "({} / {})",
    "power": "pow({}, {})",
    "atan2": "atan2({}, {})",
    "equal": "(1.0 if {} == {} else 0.0)",
    "less": "(1.0 if {} < {} else 0.0)",
    "less_equal": "(1.0 if {} <= {} else 0.0)",
    "ifelse": "({1} if {0} >= 0.0 else {2})",
}
_CALLS = {"log", "cos", "sin", "asin", "acos", "atan", "xlogx", "sinxdivx", "power", "atan2"}
"""Those that call a function of the library of mathematics."""

_DIALECT = Dialect(_FUNCTIONS, lambda of: [], lambda name, component: [])

_HALVES = """\
half = (width + 1) // 2
scratch[half - 1] = {middle}
for j in range(0, width - half):
    one = {one}
    other = {other}
    scratch[j] = other if other {before} one else one
while half > 1:
    rest = half
    half = (rest + 1) // 2
    for j in range(0, rest - half):
        other = scratch[half + j]
        scratch[j] = other if other {before} scratch[j] else scratch[j]
"""
"""The largest or smallest of a tile's values, in scratch[0]: halves fill vector lanes."""

_LARGEST = _HALVES.format(
    middle="values[half - 1]", one="values[j]", other="values[half + j]", before=">"
)
_NOT_NAN = "({0} if {0} == {0} else instead[0])"
_LOWEST = _HALVES.format(
    middle=_NOT_NAN.format("values[half - 1]"),
    one=_NOT_NAN.format("values[j]"),
    other=_NOT_NAN.format("values[half + j]"),
    before="<",
)

_INSERT = f"""\
row = at + i
worst = best[row, size - 1]
for j in range(0, width):
    value = {_NOT_NAN.format("values[j]")}
    if value <= worst:
        number = start + j
        if values[j] != values[j] and value < 0.0:
            number = number - 9223372036854775807 - 1
        place = size
        while place > 0 and (
            value < best[row, place - 1]
            or value == best[row, place - 1] and number < index[row, place - 1]
        ):
            place = place - 1
            if place < size - 1:
                best[row, place + 1] = best[row, place]
                index[row, place + 1] = index[row, place]
            best[row, place] = value
            index[row, place] = number
        worst = best[row, size - 1]
"""
"""Keep, in (value, index) order, the smallest of a list and of a tile's values.

`instead`, −∞ or +∞, takes the place of NaN.  In that of −∞ it has an index less 2⁶³, so that it
comes first.
"""


_LOWER = """\
low = best[0, place + j]
index[0, place + j] = i if {0} <= low else index[0, place + j]
best[0, place + j] = {0} if {0} <= low else low
nans[0, place + j] = nans[0, place + j] if {0} == {0} else i
"""
"""The smallest value of each row and the smallest index of NaN; columns come in descending order,
so that the last of equal values has the smallest index."""

_NAN_FIRST = """\
for j in range(width):
    best[0, place + j] = best[0, place + j] if nans[0, place + j] < 0 else float('nan')
    index[0, place + j] = index[0, place + j] if nans[0, place + j] < 0 else nans[0, place + j]
"""


def serves(f: Node, w: Node | None = None, k: int = 1) -> bool:
    """Whether loops of these formulas compile in reasonable time; k may be any."""
    return count(f) + (count(w) if w is not None else 0) <= MOST_TERMS_OF_A_LOOP


def sums(f: Node, data: ReductionData) -> Tensor:
    """Σ_j f, (B, M, f.dim); 0 where there is nothing."""
    batch, rows, _ = data.sizes
    out = _wide(data.like).new_zeros(batch, rows, f.dim)
    _run("sums", f, None, 0, data, [out])
    return out.to(data.like.dtype)


def shifted(f: Node, w: Node, data: ReductionData) -> tuple[Tensor, Tensor]:
    """m = max_j f and Σ_j exp(f − m) w, (B, M, 1) and (B, M, w.dim); −∞ and 0 for nothing."""
    like, (batch, rows, _) = _wide(data.like), data.sizes
    top = like.new_full((batch, rows, 1), float("-inf"))
    dtype = torch.float64 if data.options.accumulate == "float64" else like.dtype
    out = like.new_zeros(batch, rows, w.dim, dtype=dtype)
    _run("shifted", f, w, 0, data, [top, out])
    return top.to(dtype), out


def smallest(f: Node, k: int, data: ReductionData) -> Tensor:
    """Indices of the k smallest values, see `operator.smallest`."""
    if (near := neighbours(f, max(k, 1), data)) is not None:
        return near[..., None]
    if k == 0 and _fills_lanes(data):
        return lowest(f, data)[1]
    like, shape = _wide(data.like), (*data.sizes[:2], max(k, 1))
    last = torch.iinfo(torch.int64).max
    instead_of_nan = like.new_tensor([float("inf" if k else "-inf")])
    found = []
    for component in range(f.dim):
        best = like.new_full(shape, float("inf"))
        index = like.new_full(shape, last, dtype=torch.int64)
        _run("smallest", f, None, component, data, [best, index], instead_of_nan, max(k, 1))
        index.masked_fill_(index == last, -1)
        found.append(index if k else torch.where(index < -1, index & last, index))
    return torch.stack(found, 3)


def lowest(f: Node, data: ReductionData) -> tuple[Tensor, Tensor]:
    """The smallest values and their indices, (B, M, 1, f.dim), as of torch.min; +∞, −1 for none."""
    (batch, rows, _), blocks = data.sizes, data.blocks
    if blocks is not None:
        data = data._replace(blocks=_ascending(blocks))
    best = _wide(data.like).new_full((f.dim, 1, batch * rows), float("inf"))
    index = torch.full_like(best, -1, dtype=torch.int64)
    for component in range(f.dim):
        results = [t[component, None] for t in (best, index)]
        _run("lowest", swap(f), None, component, data, [*results, torch.full_like(results[1], -1)])
    shape = (f.dim, batch, rows, 1)
    values, found = (t.view(shape).movedim(0, -1) for t in (best, index))
    return values, found


def prepared(
    wanted: Wanted, data: ReductionData, *, alone: bool = False
) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
    """Minima of all pairs with their values, of tensors of the shapes of the data.

    None for what has no values in its loop.  Every such call is `alone`.
    """
    (f, *_), sizes = wanted.formulas, data.sizes
    smallest_of_rows = wanted.kind == "smallest" and wanted.k == 0
    if not (smallest_of_rows and sizes.columns and _fills_lanes(data)) or may_serve(f, 1, data):
        return None
    shapes = [data.values[n].shape for n in range(len(data.values))]
    bare = data._replace(values={})  # which keeps no tensor of this call

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        given = {n: t.view(shapes[n]) for n, t in enumerate(tensors)}
        values, index = lowest(f, bare._replace(values=given))
        values = -values if wanted.ending == "negated" else values
        pairs = zip((values, index), wanted.results, strict=True)
        return [t if result is None else t.reshape(result[0]) for t, result in pairs]

    return run


def _fills_lanes(data: ReductionData) -> bool:
    """Whether tasks have rows enough for vector lanes."""
    blocks = 1 if data.blocks is None else max(len(data.blocks.starts), 1)
    return data.sizes.rows >= blocks * LEAST_LANES


def _ascending(blocks: Blocks) -> Blocks:
    """The same, with each list of intervals in the order of their starts."""
    numbers = torch.arange(len(blocks.j_starts), device="cpu")
    lists = torch.searchsorted(blocks.indptr, numbers, right=True)
    order = blocks.j_starts.argsort(stable=True)
    order = order[lists[order].argsort(stable=True)]
    return blocks._replace(j_starts=blocks.j_starts[order], j_ends=blocks.j_ends[order])


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _run(
    kind: str,
    f: Node,
    w: Node | None,
    component: int,
    data: ReductionData,
    results: Sequence[Tensor],
    *more: Any,
) -> None:
    """Fill results in; where there is nothing they stay as they are."""
    values, sizes, blocks, options = data
    if not sizes.columns or not results[0].numel():
        return
    types = [str(t.dtype).removeprefix("torch.") for t in results]
    loop = _loop(kind, f, w, component, tuple(types), options.accumulate != "auto")
    work_of_a_pair = loop.work + (results[0].shape[2] if kind == "smallest" else 0)
    length, least = (sizes.rows, LEAST_LANES) if kind == "lowest" else (sizes.columns, 1)
    tasks, intervals, pairs = _tasks(sizes, blocks, work_of_a_pair, least)
    if not pairs:
        return
    given = {n: _wide(t.detach()).contiguous() for n, t in values.items()}
    batch = max((len(given[v.data[0]]) for v in loop.columns), default=1)
    columns = results[0].new_empty(batch * loop.width, length)
    if loop.width:
        fill = machine_code(loop.columns_of)
        read = _operands(loop.columns, given)
        share(
            lambda first, last: fill(first, last, batch, columns, *read),
            length,
            batch * length * loop.work,
            SERIAL_PAIRS * loop.work,
        )
    kernel, step = machine_code(loop.kernel), loop.width if batch > 1 else 0
    rows = [sizes.rows, *_operands(loop.rows, given)]
    rows += [t.view(-1, t.shape[2]) for t in results] + [*more]

    def run(first: int, last: int) -> None:
        scratch = columns.new_empty(ROWS_PER_TASK, loop.totals, dtype=torch.float64)
        halves, tops = columns.new_empty(2, COLUMNS_PER_TILE), columns.new_empty(ROWS_PER_TASK)
        kernel(first, last, tasks, intervals, columns, step, scratch, *halves, tops, *rows)

    share(run, len(tasks), pairs * work_of_a_pair, SERIAL_PAIRS * work_of_a_pair)
    if recording():
        tile: dict[str, int | str] = {"rows": ROWS_PER_TASK, "columns": COLUMNS_PER_TILE}
        record(Launch("numba", kind, tile, len(tasks), columns.nbytes))


def _operands(variables_: Iterable[Node], given: dict[int, Tensor]) -> list[Tensor | int]:
    """The rows of each variable, and how many lie between two batch entries; 0 if all have one."""
    tensors = [given[v.data[0]] for v in variables_]
    pairs = ((t.view(-1, t.shape[2]), t.shape[1] if len(t) > 1 else 0) for t in tensors)
    return [part for pair in pairs for part in pair]


def _tasks(
    sizes: Sizes, blocks: Blocks | None, work_of_a_pair: int, least: int
) -> tuple[Tensor, Tensor, int]:
    """(batch entry, first and last row, first and last interval), intervals of columns, pairs."""
    if blocks is None:
        listed, intervals = [(0, sizes.rows, 0, 1)], np.array([[0, sizes.columns]])
    else:
        starts, ends, indptr = (t.tolist() for t in blocks[:3])
        listed = [*zip(starts, ends, indptr[:-1], indptr[1:], strict=True)]
        intervals = torch.stack((blocks.j_starts, blocks.j_ends), 1).numpy()
    before = [0, *(intervals[:, 1] - intervals[:, 0]).cumsum().tolist()]
    found, pairs = [], 0
    for start, end, first, last in listed:
        columns = before[last] - before[first]
        pairs += (end - start) * columns
        rows = WORK_OF_A_TASK // max(columns * work_of_a_pair, 1)
        rows = max(least, min(ROWS_PER_TASK, rows))
        found += [(i, min(i + rows, end), first, last) for i in range(start, end, rows)]
    each = np.array(found, np.int64).reshape(-1, 4)
    entries = np.repeat(np.arange(sizes.batch), len(each))[:, None]
    tasks = np.hstack((entries, np.tile(each, (sizes.batch, 1))))
    ranges = torch.from_numpy(np.ascontiguousarray(intervals))
    return torch.from_numpy(tasks), ranges, pairs * sizes.batch


# printed loops


class Loop(NamedTuple):
    """A printed reduction.

    Args:
        columns_of: fills the table of columns, if it has rows.
        kernel: executes tasks.
        columns: the variables that columns_of reads.
        rows: the variables that the kernel reads.
        width: number of rows of the table of columns, for a batch entry.
        totals: number of sums of a row.
        work: operations of a pair.
    """

    columns_of: str
    kernel: str
    columns: tuple[Node, ...]
    rows: tuple[Node, ...]
    width: int
    totals: int
    work: int


@functools.lru_cache(maxsize=256)
def _loop(
    kind: str, f: Node, w: Node | None, component: int, dtypes: tuple[str, ...], exact: bool
) -> Loop:
    """A printed loop; its code is found by its text."""
    return LoopPrinter(kind, f, w, component).loop(dtypes, exact)


class LoopPrinter:
    """The loop of a reduction.

    Args:
        kind: "sums", "shifted", "smallest" or "lowest".
        f: the summand, the exponent, or the formula that is compared; in lowest with i and j
            exchanged, as its table is that of the rows.
        w: the weight of shifted.
        component: the component that smallest and lowest compare.
    """

    def __init__(self, kind: str, f: Node, w: Node | None, component: int) -> None:
        self.kind, self.f, self.w = kind, f, w
        outputs = list(scalars(w if w is not None else f))
        self.compares = kind in ("smallest", "lowest")
        if self.compares:
            outputs = outputs[component : component + 1]
        split = [(const(1), e) if self.compares else factored(e) for e in outputs]
        self.outer = [outer for outer, _ in split]
        self.summed = list(dict.fromkeys(inner for _, inner in split))
        self.place = [self.summed.index(inner) for _, inner in split]
        exponent = list(scalars(f)) if w is not None else []
        self.parts = separated([*exponent, *self.summed])
        given = [*variables(f), *(variables(w) if w is not None else ())]
        self.variables = {operand(v.data[0]): v for v in given}
        # the rows of the table of columns: leaves that pairs read, and computed ones
        self.table = [e for e in reachable(self.parts.pairs) if e.kind == "leaf" and "j" in e.axes]

    def loop(self, dtypes: tuple[str, ...], exact: bool) -> Loop:
        """The texts for results of some dtypes, the first of which is that of all numbers.

        Args:
            dtypes: their names.
            exact: whether a tile's terms are summed in float64.
        """
        self.real = dtypes[0]
        kinds = [e.kind for e in reachable(self.parts.pairs)]
        # with calls there are no vector lanes, so one sum of all the tile's terms
        self.wide = "float64" if exact or _CALLS.intersection(kinds) else self.real
        constant = [e for _, e in self.parts.constant]
        made = [e for _, e in self.parts.columns]
        columns = self._read([*constant, *made, *self.table], (1, 2))
        rows = [e for _, e in self.parts.rows]
        read = self._read([*constant, *rows, *self.parts.pairs, *self.outer], (0, 2))
        work = sum(WORK_OF_A_CALL if kind in _CALLS else 1 for kind in kinds)
        columns_of = "\n".join(self._columns_of(columns)) + "\n"
        kernel = "\n".join(self._kernel(read, dtypes)) + "\n"
        return Loop(columns_of, kernel, columns, read, len(self.table), len(self.summed), work)

    def _read(self, expressions: Iterable[Expr], cats: tuple[int, int]) -> tuple[Node, ...]:
        """The variables of some categories that expressions read, by index."""
        names = {e.data[0] for e in reachable(expressions) if e.kind == "leaf"}
        found = {v.data[0]: v for name, v in self.variables.items() if name in names}
        return tuple(found[index] for index in sorted(found) if found[index].data[2] in cats)

    def _given(self, variables_: Iterable[Node]) -> Iterator[str]:
        """The arguments of each variable: its rows, and those between two batch entries."""
        for v in variables_:
            yield f"v{v.data[0]}: {self.real}[:, :], step{v.data[0]}: int64"

    def _entries(self, variables_: Iterable[Node]) -> Iterator[str]:
        """The first row of a batch entry, of each variable; a batch of one is broadcast."""
        yield from (f"at{v.data[0]} = step{v.data[0]} * batch" for v in variables_)

    def _loads(self, variables_: Iterable[Node], cat: int, at: str) -> Iterator[str]:
        for v in variables_:
            index, dim, own = v.data
            if own == cat:
                yield from (f"v{index}_{c} = v{index}[at{index}{at}, {c}]" for c in range(dim))

    def _columns_of(self, columns: tuple[Node, ...]) -> Iterator[str]:
        arguments = ["first: int64", "end: int64", "batches: int64", f"out: {self.real}[:, :]"]
        yield f"def columns_of({', '.join([*arguments, *self._given(columns)])}):"
        yield "    for batch in range(0, batches):"
        yield from indented(self._entries(columns), 2)
        yield from indented(self._loads(columns, 2, ""), 2)
        yield from indented(assign(self.parts.constant, _DIALECT), 2)
        yield "        for j in range(first, end):"
        yield from indented(self._loads(columns, 1, " + j"), 3)
        yield from indented(assign(self.parts.columns, _DIALECT), 3)
        for n, e in enumerate(self.table):
            yield f"            out[batch * {len(self.table)} + {n}, j] = {text(e)}"

    # the loop

    def _kernel(self, rows: tuple[Node, ...], dtypes: tuple[str, ...]) -> Iterator[str]:
        results = {
            "sums": ["out"],
            "shifted": ["top_out", "out"],
            "smallest": ["best", "index"],
            "lowest": ["best", "index", "nans"],
        }
        real = self.real
        arguments = [
            *("first: int64", "end: int64", "tasks: int64[:, :]", "intervals: int64[:, :]"),
            *(f"columns: {real}[:, :]", "step: int64", "total: float64[:, :]"),
            *(f"values: {real}[:]", f"scratch: {real}[:]", f"tops: {real}[:]", "rows: int64"),
            *self._given(rows),
            *(f"{n}: {dtype}[:, :]" for n, dtype in zip(results[self.kind], dtypes, strict=True)),
            *[f"instead: {real}[:]", "size: int64"] * (self.kind == "smallest"),
        ]
        yield f"def kernel({', '.join(arguments)}):"
        yield "    for task in range(first, end):"
        yield from ["        batch = tasks[task, 0]", "        begin = tasks[task, 1]"]
        yield from ["        at = batch * rows", "        entry = batch * step"]
        yield from indented(self._entries(rows), 2)
        yield from indented(self._loads(rows, 2, ""), 2)
        yield from indented(assign(self.parts.constant, _DIALECT), 2)
        yield from indented((self._lanes if self.kind == "lowest" else self._task)(rows), 2)

    def _lanes(self, rows: tuple[Node, ...]) -> Iterator[str]:
        """The rows of a task in vector lanes, one column after the other, the last one first."""
        lines, (name,) = self._pairs(list(self.parts.pairs))
        yield from ["start = begin", "place = at + begin", "width = tasks[task, 2] - begin"]
        yield "for q in range(0, tasks[task, 4] - tasks[task, 3]):"
        yield "    interval = tasks[task, 4] - 1 - q"
        yield "    for back in range(0, intervals[interval, 1] - intervals[interval, 0]):"
        yield "        i = intervals[interval, 1] - 1 - back"
        yield from indented(self._loads(rows, 0, " + i"), 2)
        yield from indented(assign(self.parts.rows, _DIALECT), 2)
        yield "        for j in range(width):"
        yield from indented([*lines, *_LOWER.format(name).splitlines()], 3)
        yield from _NAN_FIRST.splitlines()

    def _task(self, rows: tuple[Node, ...]) -> Iterator[str]:
        if self.kind != "smallest":
            yield "for i in range(0, tasks[task, 2] - begin):"
            yield from (f"    total[i, {n}] = 0.0" for n in range(len(self.summed)))
            yield from ["    tops[i] = float('-inf')"] * (self.kind == "shifted")
        yield "for q in range(tasks[task, 3], tasks[task, 4]):"
        yield f"    for start in range(intervals[q, 0], intervals[q, 1], {COLUMNS_PER_TILE}):"
        yield f"        width = min({COLUMNS_PER_TILE}, intervals[q, 1] - start)"
        yield "        for i in range(begin, tasks[task, 2]):"
        yield from indented(self._loads(rows, 0, " + i"), 3)
        yield from indented(assign(self.parts.rows, _DIALECT), 3)
        yield from indented(self._tile(), 3)
        if self.kind != "smallest":
            yield "for i in range(begin, tasks[task, 2]):"
            yield from indented(self._loads(rows, 0, " + i"))
            yield from indented(self._finish())

    def _pairs(self, expressions: list[Expr]) -> tuple[list[str], list[str]]:
        """The lines in the loop over j, and the names of the results."""
        read = set(reachable(expressions))
        place = "columns[entry + {}, start + j]"
        loads = [f"{text(e)} = {place.format(n)}" for n, e in enumerate(self.table) if e in read]
        lines, names = assigned(expressions, _DIALECT)
        return [*loads, *lines], names

    def _tile(self) -> Iterator[str]:
        pairs = list(self.parts.pairs)
        if self.kind == "sums":
            yield from self._sums(pairs, "")
            return
        lines, (name,) = self._pairs(pairs[:1])
        yield "for j in range(width):"
        yield from indented(lines)
        yield f"    values[j] = {name}"
        if self.kind == "smallest":
            yield from _LOWEST.splitlines()
            yield "if scratch[0] <= best[at + i, size - 1]:"
            yield from indented(_INSERT.splitlines())
            return
        yield from _LARGEST.splitlines()
        yield "before = tops[i - begin]"
        yield "top = before if before > scratch[0] else scratch[0]"
        yield "shift = top if abs(top) < float('inf') else 0.0"
        yield f"scale = float64(exp2((before - shift) * {LOG2E!r}))"
        yield "tops[i - begin] = top"
        for n in range(len(self.summed)):
            yield f"total[i - begin, {n}] *= scale"
        yield from self._sums(pairs[1:], "e")

    def _sums(self, expressions: list[Expr], factor: str) -> Iterator[str]:
        lines, names = self._pairs(expressions)
        for n in range(len(expressions)):
            yield f"s{n} = {self.wide}(0.0)"
        yield "for j in range(width):"
        if factor:
            yield f"    e = exp2((values[j] - shift) * {LOG2E!r})"
        yield from indented(lines)
        for n, (e, name) in enumerate(zip(expressions, names, strict=True)):
            term = f"e * {name}" if factor and e != const(1) else factor or name
            yield f"    s{n} += {self.wide}({term})"
        for n in range(len(expressions)):
            yield f"total[i - begin, {n}] += s{n}"

    def _finish(self) -> Iterator[str]:
        if self.kind == "shifted":
            yield "top_out[at + i, 0] = tops[i - begin]"
        lines, names = assigned(self.outer, _DIALECT)
        yield from lines
        for e, (outer, name) in enumerate(zip(self.outer, names, strict=True)):
            value = f"total[i - begin, {self.place[e]}]"
            factor = "" if outer == const(1) else f" * {name}"
            yield f"out[at + i, {e}] = {value}{factor}"
