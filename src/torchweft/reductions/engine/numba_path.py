"""The executor on a CPU: loops of formulas that numba compiles, in tasks of some rows.

    columns_of(...)          # once: what depends on j alone, each a contiguous row
    kernel(first, last, ...) # tasks: some rows of a batch entry by a list of intervals of columns
        for tiles of COLUMNS_PER_TILE columns: for the rows of the task:
            for j in the tile: the formula, straight code
            add the tile's sum to the row's total, in float64

shifted stores a tile's exponents, moves the row's maximum once, then takes exponentials.  smallest
stores a tile's values, and looks through them only where the smallest comes before the row's worst.

Tasks have a fixed size and are shared among threads, so bits do not depend on their number.
Numbers of 16 bits are computed in float32.
"""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweft.core.cpu.arrays import as_array
from torchweft.core.cpu.loops import share
from torchweft.core.explain import Launch, record, recording
from torchweft.core.expressions.expr import Expr, const, reachable
from torchweft.core.files import source_hash
from torchweft.core.printing.dialect import Dialect, indented
from torchweft.core.printing.modules import load
from torchweft.reductions.call import Blocks, ReductionData, Sizes
from torchweft.reductions.engine.tree import neighbours
from torchweft.reductions.formula.lowering import (
    assigned,
    count,
    factored,
    operand,
    scalars,
    separated,
    text,
)
from torchweft.reductions.formula.node import Node, variables

__all__ = ["LoopPrinter", "serves", "shifted", "smallest", "sums"]

MOST_TERMS_OF_A_LOOP = 512
"""Scalar terms of a formula that compile in a second or so."""

SERIAL_PAIRS = 100_000
"""Pairs below which one thread is faster."""

ROWS_PER_TASK = 64

WORK_OF_A_TASK = 2**29
"""Most operations of a task of several rows, as an interrupt waits for its end: a tenth of a
second where they fill vector lanes."""

WORK_OF_A_CALL = 64
"""Operations that a function of the library of mathematics counts as."""

COLUMNS_PER_TILE = 1024
"""Columns of a tile: some rows of them stay in a core's first cache."""

_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])")

_FUNCTIONS = {
    "same": "({})",
    "plus": "plus({}, {})",
    "exp2": "exp2({})",
    "log": "math.log({})",
    "cos": "math.cos({})",
    "sin": "math.sin({})",
    "asin": "math.asin({})",
    "acos": "math.acos({})",
    "atan": "math.atan({})",
    "sqrt": "math.sqrt({})",
    "rsqrt": "(1.0 / math.sqrt({0}) if {0} != 0.0 else 0.0)",
    "reciprocal": "(1.0 / {})",
    "abs": "abs({})",
    "sign": "(1.0 if {0} > 0.0 else (-1.0 if {0} < 0.0 else 0.0))",
    "floor": "np.floor({})",
    "round": "np.rint({})",
    "step": "(1.0 if {} >= 0.0 else 0.0)",
    "xlogx": "({0} * math.log({0}) if {0} != 0.0 else 0.0)",
    "sinxdivx": "(math.sin({0}) / {0} if {0} != 0.0 else 1.0)",
    "divide": "({} / {})",
    "power": "math.pow({}, {})",
    "atan2": "math.atan2({}, {})",
    "equal": "(1.0 if {} == {} else 0.0)",
    "less": "(1.0 if {} < {} else 0.0)",
    "less_equal": "(1.0 if {} <= {} else 0.0)",
    "ifelse": "({1} if {0} >= 0.0 else {2})",
}
_CALLS = {name for name, form in _FUNCTIONS.items() if "math." in form and "sqrt" not in form}
_DIALECT = Dialect(_FUNCTIONS, lambda of: [], lambda name, component: [])

_CALLED = pathlib.Path(__file__).with_name("numba_functions.py")

_HEADER = """# {title}
# with numba_functions {version}
import math

import numpy as np

from torchweft.reductions.engine.numba_functions import exp2_{size} as exp2
from torchweft.reductions.engine.numba_functions import insert, jit, largest, lowest, plus

real = np.{dtype}
wide = np.{wide}
infinity = real(np.inf)
nan = real(np.nan)
LOG2E = real(1 / math.log(2))
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
    like, shape = _wide(data.like), (*data.sizes[:2], max(k, 1))
    last = torch.iinfo(torch.int64).max
    instead_of_nan = np.dtype(str(like.dtype).removeprefix("torch.")).type(np.inf if k else -np.inf)
    found = []
    for component in range(f.dim):
        best, index = like.new_full(shape, float("inf")), torch.full(shape, last)
        _run("smallest", f, None, component, data, [best, index], instead_of_nan)
        index.masked_fill_(index == last, -1)
        found.append(index if k else torch.where(index < -1, index & last, index))
    return torch.stack(found, 3)


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
    dtype = str(results[0].dtype).removeprefix("torch.")
    loop, module = _loop(kind, f, w, component, dtype, options.accumulate != "auto")
    work_of_a_pair = loop.work + (results[0].shape[2] if kind == "smallest" else 0)
    tasks, intervals, pairs = _tasks(sizes, blocks, work_of_a_pair)
    if not pairs:
        return
    arrays = {n: as_array(_wide(t.detach()).contiguous()) for n, t in values.items()}
    given = [arrays[v.data[0]] for v in loop.columns]
    batch = max((len(a) for a in given), default=1)
    columns = np.empty((batch, loop.width, sizes.columns), results[0].numpy().dtype)
    if loop.width:
        share(
            lambda first, last: module.columns_of(first, last, *given, columns),
            sizes.columns,
            batch * sizes.columns * loop.work,
            SERIAL_PAIRS * loop.work,
        )
    arguments = [arrays[v.data[0]] for v in loop.rows] + [r.numpy() for r in results] + [*more]

    def run(first: int, last: int) -> None:
        module.kernel(first, last, tasks, intervals, columns, *arguments)

    share(run, len(tasks), pairs * work_of_a_pair, SERIAL_PAIRS * work_of_a_pair)
    if recording():
        tile: dict[str, int | str] = {"rows": ROWS_PER_TASK, "columns": COLUMNS_PER_TILE}
        record(Launch("numba", kind, tile, len(tasks), columns.nbytes))


def _tasks(sizes: Sizes, blocks: Blocks | None, work_of_a_pair: int) -> tuple[Any, Any, int]:
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
        rows = max(1, min(ROWS_PER_TASK, rows))
        found += [(i, min(i + rows, end), first, last) for i in range(start, end, rows)]
    each = np.array(found, np.int64).reshape(-1, 4)
    entries = np.repeat(np.arange(sizes.batch), len(each))[:, None]
    tasks = np.hstack((entries, np.tile(each, (sizes.batch, 1))))
    return tasks, np.ascontiguousarray(intervals), pairs * sizes.batch


# printed loops


class Loop(NamedTuple):
    """A printed reduction.

    Args:
        source: defines `columns_of(first, last, *columns and parameters, out)` and
            `kernel(first, last, tasks, intervals, columns, *rows and parameters, *results)`.
        columns: the variables that columns_of reads.
        rows: the variables that the kernel reads.
        width: number of rows that columns_of writes.
        work: operations of a pair.
    """

    source: str
    columns: tuple[Node, ...]
    rows: tuple[Node, ...]
    width: int
    work: int


@functools.lru_cache(maxsize=256)
def _loop(
    kind: str, f: Node, w: Node | None, component: int, dtype: str, exact: bool
) -> tuple[Loop, Any]:
    """A printed loop and its module."""
    wide = "float64" if exact else dtype
    found = LoopPrinter(kind, f, w, component).loop(dtype, wide, source_hash(_CALLED))
    return found, load(f"reductions_{kind}_loop", found.source)


class LoopPrinter:
    """The loop of a reduction.

    Args:
        kind: "sums", "shifted" or "smallest".
        f: the summand, the exponent, or the formula that is compared.
        w: the weight of shifted.
        component: the component that smallest compares.
    """

    def __init__(self, kind: str, f: Node, w: Node | None, component: int) -> None:
        self.kind, self.f, self.w = kind, f, w
        outputs = list(scalars(w if w is not None else f))
        if kind == "smallest":
            outputs = outputs[component : component + 1]
        split = [factored(e) if kind != "smallest" else (const(1), e) for e in outputs]
        self.outer = [outer for outer, _ in split]
        self.summed = list(dict.fromkeys(inner for _, inner in split))
        self.place = [self.summed.index(inner) for _, inner in split]
        exponent = list(scalars(f)) if w is not None else []
        self.parts = separated([*exponent, *self.summed])
        given = [*variables(f), *(variables(w) if w is not None else ())]
        self.variables = {operand(v.data[0]): v for v in given}
        # the rows of the table of columns: leaves that pairs read, and computed ones
        self.table = [e for e in reachable(self.parts.pairs) if e.kind == "leaf" and "j" in e.axes]

    def loop(self, dtype: str, wide: str, version: str) -> Loop:
        """The text for numpy's type `dtype` and sums over a tile in `wide`.

        `version` is that of numba_functions, whose compiled form a compiled loop holds.
        """
        size = "double" if dtype == "float64" else "single"
        title = f"{self.kind} of {self.f}"
        if any(e.kind in _CALLS for e in reachable(self.parts.pairs)):
            wide = "float64"  # no vector lanes, so one sum of all the tile's terms
        header = _HEADER.format(title=title, version=version, size=size, dtype=dtype, wide=wide)
        constant = [e for _, e in self.parts.constant]
        made = [e for _, e in self.parts.columns]
        columns = self._read([*constant, *made, *self.table], (1, 2))
        rows = [e for _, e in self.parts.rows]
        read = self._read([*constant, *rows, *self.parts.pairs, *self.outer], (0, 2))
        before = self._columns_of(columns) if self.table else ()
        body = [header, *before, "", "", *self._kernel(read)]
        kinds = [e.kind for e in reachable(self.parts.pairs)]
        work = sum(WORK_OF_A_CALL if kind in _CALLS else 1 for kind in kinds)
        return Loop("\n".join(body) + "\n", columns, read, len(self.table), work)

    def _read(self, expressions: Iterable[Expr], cats: tuple[int, int]) -> tuple[Node, ...]:
        """The variables of some categories that expressions read, by index."""
        names = {e.data[0] for e in reachable(expressions) if e.kind == "leaf"}
        found = {v.data[0]: v for name, v in self.variables.items() if name in names}
        return tuple(found[index] for index in sorted(found) if found[index].data[2] in cats)

    def _entries(self, variables_: Iterable[Node]) -> Iterator[str]:
        """The batch entry of each variable; a batch of one is broadcast."""
        for v in variables_:
            name = f"v{v.data[0]}"
            yield f"{name}_ = {name}[min(batch, len({name}) - 1)]"

    def _loads(self, variables_: Iterable[Node], cat: int, at: str) -> Iterator[str]:
        for v in variables_:
            index, dim, own = v.data
            if own == cat:
                yield from (f"v{index}_{c} = v{index}_[{at}, {c}]" for c in range(dim))

    def _assign(self, part: Iterable[tuple[Expr, Expr]]) -> Iterator[str]:
        targets, expressions = [a for a, _ in part], [e for _, e in part]
        lines, names = _typed(expressions)
        yield from lines
        yield from (f"{text(a)} = {name}" for a, name in zip(targets, names, strict=True))

    def _columns_of(self, columns: tuple[Node, ...]) -> Iterator[str]:
        names = ", ".join(f"v{v.data[0]}" for v in columns)
        yield "@jit"
        yield f"def columns_of(first, last, {names}{', ' if names else ''}out):"
        yield "    for batch in range(out.shape[0]):"
        yield from indented(self._entries(columns), 2)
        yield from indented(self._loads(columns, 2, "0"), 2)
        yield from indented(self._assign(self.parts.constant), 2)
        yield "        for j in range(first, last):"
        yield from indented(self._loads(columns, 1, "j"), 3)
        yield from indented(self._assign(self.parts.columns), 3)
        for n, e in enumerate(self.table):
            yield f"            out[batch, {n}, j] = {text(e)}"

    # the loop

    def _kernel(self, rows: tuple[Node, ...]) -> Iterator[str]:
        names = [f"v{v.data[0]}" for v in rows]
        results = {
            "sums": ["out"],
            "shifted": ["top_out", "out"],
            "smallest": ["best", "index", "instead"],
        }
        arguments = ["first", "last", "tasks", "intervals", "columns", *names, *results[self.kind]]
        yield "@jit"
        yield f"def kernel({', '.join(arguments)}):"
        yield "    most = 0"
        yield "    for task in range(first, last):"
        yield "        most = max(most, tasks[task, 2] - tasks[task, 1])"
        if self.kind != "smallest":
            yield f"    total = np.zeros((most, {len(self.summed)}), np.float64)"
        if self.kind != "sums":
            made = f"np.empty({COLUMNS_PER_TILE}, real)"
            yield f"    values, scratch = {made}, {made}"
        if self.kind == "shifted":
            yield "    tops = np.empty(most, real)"
        yield "    for task in range(first, last):"
        yield from indented(self._task(rows), 2)

    def _task(self, rows: tuple[Node, ...]) -> Iterator[str]:
        yield "batch, begin, end = tasks[task, 0], tasks[task, 1], tasks[task, 2]"
        yield from self._entries(rows)
        yield from self._loads(rows, 2, "0")
        yield from self._assign(self.parts.constant)
        yield from ["total[:] = 0.0"] * (self.kind != "smallest")
        yield from ["tops[:] = -infinity"] * (self.kind == "shifted")
        yield "for q in range(tasks[task, 3], tasks[task, 4]):"
        yield f"    for start in range(intervals[q, 0], intervals[q, 1], {COLUMNS_PER_TILE}):"
        yield f"        width = min({COLUMNS_PER_TILE}, intervals[q, 1] - start)"
        yield "        entry = columns[min(batch, len(columns) - 1)]"
        for n in range(len(self.table)):
            yield f"        g{n} = entry[{n}, start : start + width]"
        yield "        for i in range(begin, end):"
        yield from indented(self._loads(rows, 0, "i"), 3)
        yield from indented(self._assign(self.parts.rows), 3)
        yield from indented(self._tile(), 3)
        if self.kind != "smallest":
            yield "for i in range(begin, end):"
            yield from indented(self._loads(rows, 0, "i"))
            yield from indented(self._finish())

    def _pairs(self, expressions: list[Expr]) -> tuple[list[str], list[str]]:
        """The lines in the loop over j, and the names of the results."""
        read = set(reachable(expressions))
        loads = [f"{text(e)} = g{n}[j]" for n, e in enumerate(self.table) if e in read]
        lines, names = _typed(expressions)
        return [*loads, *lines], names

    def _tile(self) -> Iterator[str]:
        pairs = list(self.parts.pairs)
        if self.kind == "sums":
            yield from self._sums(pairs, "")
            return
        lines, (name,) = self._pairs(pairs[:1])
        yield "for j in range(width):"
        yield from indented(lines)
        if self.kind == "smallest":
            yield f"    values[j] = {name}"
            yield "least = lowest(values, scratch, width, instead)"
            yield "if least <= best[batch, i, len(best[batch, i]) - 1]:"
            yield "    insert(best[batch, i], index[batch, i], values, start, width, instead)"
            return
        yield f"    values[j] = {name}"
        yield "top = largest(values, scratch, width)"
        yield "if tops[i - begin] > top:"
        yield "    top = tops[i - begin]"
        yield "shift = top if abs(top) < infinity else real(0)"
        yield "scale = np.float64(exp2((tops[i - begin] - shift) * LOG2E))"
        yield "tops[i - begin] = top"
        for n in range(len(self.summed)):
            yield f"total[i - begin, {n}] *= scale"
        yield from self._sums(pairs[1:], "e")

    def _sums(self, expressions: list[Expr], factor: str) -> Iterator[str]:
        lines, names = self._pairs(expressions)
        for n in range(len(expressions)):
            yield f"s{n} = wide(0)"
        yield "for j in range(width):"
        if factor:
            yield "    e = exp2((values[j] - shift) * LOG2E)"
        yield from indented(lines)
        for n, (e, name) in enumerate(zip(expressions, names, strict=True)):
            term = f"e * {name}" if factor and e != const(1) else factor or name
            yield f"    s{n} += wide({term})"
        for n in range(len(expressions)):
            yield f"total[i - begin, {n}] += s{n}"

    def _finish(self) -> Iterator[str]:
        if self.kind == "shifted":
            yield "top_out[batch, i, 0] = tops[i - begin]"
        lines, names = _typed(self.outer)
        yield from lines
        for e, (outer, name) in enumerate(zip(self.outer, names, strict=True)):
            value = f"total[i - begin, {self.place[e]}]"
            factor = "" if outer == const(1) else f" * {name}"
            yield f"out[batch, i, {e}] = {value}{factor}"


def _typed(expressions: Iterable[Expr]) -> tuple[list[str], list[str]]:
    """`assigned` with typed numbers: a literal is a double to numba."""
    lines, names = assigned(expressions, _DIALECT)
    return [_number(line) for line in lines], [_number(name) for name in names]


def _number(line: str) -> str:
    line = _NUMBER.sub(lambda found: f"real({found[0]})", line)
    return re.sub(r'float\("(-?)inf"\)', r"(\1infinity)", line).replace('float("nan")', "nan")
