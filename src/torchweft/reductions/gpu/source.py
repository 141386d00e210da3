"""Triton kernels of formulas: a function `pairs` that holds the formula, and a loop around it.

A kernel program takes a task, some rows by some columns:

    load the rows once; what depends on i alone is computed here
    for the intervals of its columns (one, or the list of a block of rows):
        for blocks of TILES tiles: for tiles of BLOCK_N columns:
            terms = pairs(...)            # [BLOCK_N / LANES, BLOCK_M, LANES]
            add them up, LANES columns beside each other
        the last tile of an interval is cut: its terms are masked, in most kernels no others are
    add up the lanes; store the result, or a partial one for a merge

A lane of columns is a lane of a warp, so sums over a tile need no exchange between threads; one at
the end does.  Sums are of a tile, then of a block of tiles, then in total: in float32 the error
stays that of a few dozen additions.  shifted keeps a maximum for each row and lane, and moves it
once a tile.  smallest looks for terms under the row's worst entry, and skips tiles without any.

Tiles follow from how many values a pair keeps in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from torchweft.core.expressions.expr import Expr, const, reachable
from torchweft.core.gpu.launcher import Tile
from torchweft.core.printing.dialect import Dialect, indented
from torchweft.core.printing.kernel import Frame
from torchweft.reductions.call import KernelSpec
from torchweft.reductions.formula.kernel_forms import LONGEST, TILE_SHAPE, Loops
from torchweft.reductions.formula.lowering import (
    FORMATS,
    assign,
    assigned,
    factored,
    loads,
    operand,
    scalars,
    separated,
    text,
)
from torchweft.reductions.formula.node import Node, variables
from torchweft.reductions.gpu.gaussian_centred import BLOCKS, ZEROS, CentredPrinter, centred

__all__ = ["TILES_PER_BLOCK", "list_slots", "near_registers", "operands", "source", "tile"]

LANES = 32
"""Columns that are added up apart."""

TILES_PER_BLOCK = 16

MOST_LIST_ENTRIES = 4096
"""Entries of all lists of the smallest in a tile."""

TILE_SHAPES = ((6, 16, 2, 4), (14, 8, 4, 8), (30, 4, 4, 8), (1 << 30, 2, 4, 8))
"""(registers of a row up to which the shape is taken, rows and columns of a thread, warps).

A tile has fewer columns than threads: else the compiler lays tiles out as their columns are loaded,
and sums go through shared memory.
"""

LOOPED_TILE_SHAPES = ((10, 8, 4, 8), (40, 4, 4, 8), (1 << 30, 2, 4, 8))
"""The same for kernels that loop over components: each is loaded for all rows and columns."""

SHARED_SUM_REGISTERS = 9
"""Registers of a row beside a thread's columns, where components are added up by shares."""

NEAR_FEWEST, NEAR_FEW, NEAR_HIGH = 5, 11, 512
"""Tiles of points near each other: registers of a row up to which a thread has 32 rows, or 16, else
8, as a column takes 35 instructions beside 5 for a pair.  Tiles of 16 and 8 have two warps, as the
last tile is half empty; four in blocks of NEAR_HIGH rows or more.  A thread has one column.
"""

TASK_NUMBERS = {
    False: ("rows", "columns", "tiles", "parts", "length"),
    True: ("rows", "tasks"),
}
"""The numbers that a kernel takes: where columns are one interval, and where they are several."""

_HEADER = """
from torchweft.reductions.gpu.kernels import (
    LOG2E, acos, asin, atan, atan2, empty_lists, ended, insert, insert_nan_first, nearest, power,
    sinxdivx, store_sorted, xlogx,
)

NUMBER = {number}
TOTAL = tl.{total}
LANES = tl.constexpr({lanes})
"""


def source(job: KernelSpec) -> str:
    """The module text of a job's kernel, whose name is `<kind>_kernel`."""
    return _printer(job).module()


def operands(job: KernelSpec) -> tuple[Node, ...]:
    """The variables that its kernel reads, in the order of its pointers."""
    return _printer(job).variables


def near_registers(job: KernelSpec) -> int:
    """Values of a row that a tile of points near each other keeps; 0 without such tiles."""
    found = _printer(job).near
    return 0 if found is None else len(found.near.points) + 2 * len(found.near.terms)


@functools.lru_cache(maxsize=256)
def _printer(job: KernelSpec) -> _KernelPrinter:
    return _KernelPrinter(job)


def _registers(job: KernelSpec) -> int:
    """Least number of values that a kernel keeps for each row and lane."""
    printer = _printer(job)
    rows = [e for e in reachable(printer.parts.pairs) if e.kind == "leaf" and e.axes == {"i"}]
    kept = 2 * len(printer.summed) if job.kind != "smallest" else 5
    return len(rows) + kept + 2 * (job.kind == "shifted")


def tile(job: KernelSpec, height: float = 64) -> Tile:
    """Rows, columns and tiles of a block; `height` is how many rows a tile can fill.

    A thread has one column of each LANES and R rows: it keeps what pairs read of a row R times, and
    R partial and whole sums of each component.
    """
    if needed := near_registers(job):
        rows, warps = 16 if needed <= NEAR_FEW else 8, 4 if height >= NEAR_HIGH else 2
        if needed <= NEAR_FEWEST:
            rows, warps = 32, 1
        return Tile((rows * warps, LANES, 2 * TILES_PER_BLOCK), warps, 1)
    needed = _registers(job) * (2 if job.wide else 1)
    shapes = LOOPED_TILE_SHAPES if job.inner else TILE_SHAPES
    if not job.wide and any(s.dim >= LONGEST for s in job.inner):
        needed += SHARED_SUM_REGISTERS
    rows, columns, warps = next(shape for most, *shape in shapes if needed <= most)
    if job.wide:
        columns, warps = 2, 4
    most = MOST_LIST_ENTRIES // list_slots(job)
    while rows > 1 and (warps * rows >= 2 * height or warps * rows > most):
        rows //= 2
    return Tile((warps * rows, LANES * columns, TILES_PER_BLOCK), warps, 1)


def list_slots(job: KernelSpec) -> int:
    """Slots of a list of the smallest."""
    return 1 << max(job.kept - 1, 0).bit_length()


class _KernelPrinter:
    """The text of the kernel of a job."""

    def __init__(self, job: KernelSpec) -> None:
        self.job, self.frame = job, Frame(gluon=False, wide=job.wide)
        self.kind, self.number = job.kind, self.frame.number
        self.indices = "tl.int64" if job.far else "tl.int32"
        # where maxima start, and less it where they end: finite, as ∞ less ∞ would be NaN
        self.lowest = "-1.7976931348623157e308" if job.wide else "-3.4028234663852886e38"
        # tiles are added to blocks first; Kahan's rule does without
        self.by_blocks = job.kind == "shifted" or job.accumulate != "kahan"
        weights = job.weight is not None
        outputs = scalars(job.weight if weights else job.formula)[job.first : job.last]
        split = [factored(e) for e in outputs] if job.kind != "smallest" else []
        self.outer = [outer for outer, _ in split]
        inner = [e for _, e in split] or list(outputs)
        self.summed = list(dict.fromkeys(inner))
        self.place = [self.summed.index(e) for e in inner]
        exponent = list(scalars(job.formula)) if weights else []
        terms = [*exponent, *(e for e in self.summed if not weights or e != const(1))]
        self.parts = separated(terms)
        formats = {name: form.replace("NUMBER", self.number) for name, form in FORMATS.items()}
        self.dialect = Dialect(formats, lambda of: [], lambda name, component: [])
        self.loops = Loops(job.inner, self.number, self.dialect)
        self._name_operands([*terms, *self.outer])
        self.near = self._near()

    def _name_operands(self, expressions: list[Expr]) -> None:
        """The variables that the kernel reads, and the parameters that follow from them."""
        job = self.job
        leaves = [e for e in reachable(expressions) if e.kind == "leaf"]
        read = {e.data[0] for e in (*leaves, *self.loops.leaves())}
        given = (job.formula, job.weight, *(s.term for s in job.inner))
        known = [v for f in given if f is not None for v in variables(f)]
        found = {v.data[0]: v for v in known if operand(v.data[0]) in read}
        found |= self.loops.variables
        self.variables = tuple(found[index] for index in sorted(found))
        # from one component to the next, of variables that are stored by component
        self.pitches = [f"v{v.data[0]}_pitch" for v in self.variables if job.apart(v)]
        # the columns, and the values of rows and parameters, that `pairs` reads
        self.columns = [v for v in self.variables if v.data[2] == 1]
        computed = [*self.parts.pairs, *(e for _, e in self.parts.columns)]
        leaves = [e for e in reachable(computed) if e.kind == "leaf"] + self.loops.leaves()
        self.arguments = list(dict.fromkeys(text(e) for e in leaves if "j" not in e.axes))

    def _near(self) -> CentredPrinter | None:
        """The functions for tiles of points near each other."""
        job = self.job
        plain = job.near and job.accumulator == "float32" and job.accumulate == "auto"
        if job.kind != "sums" or not plain or job.inner or job.blocked:
            return None
        made = centred(job.formula, job.first, job.last)
        bounds = tuple(self._bounds()) if job.ranged else ()
        return made and CentredPrinter(made, self.variables, self.dialect, self.frame, bounds)

    # the module

    def module(self) -> str:
        job, kind = self.job, self.kind
        header = _HEADER.format(number=self.number, total=job.accumulator, lanes=LANES)
        numbers = [*TASK_NUMBERS[job.ranged], *(f"v{v.data[0]}_batch" for v in self.variables)]
        numbers += [*(["blocks"] if job.blocked else []), *self.pitches]
        pointers = [f"v{v.data[0]}_ptr" for v in self.variables] + self._results()
        own = [f"v{v.data[0]}_ptr" for v in (*self.loops.pointers(), *self.columns)]
        names = [*self.arguments, *own, *self.pitches, "lanes", "j", *BLOCKS[:2]]
        return self.frame.module(
            f"{kind} of {job.formula}",
            self.loops.functions(),
            self.near.functions() if self.near is not None else (),
            self.frame.function("pairs", names, self._formula()),
            self.frame.function(
                f"{kind}_kernel", [*pointers, *numbers, *BLOCKS], self._body(), numbers
            ),
            imports=[header],
        )

    def _results(self) -> list[str]:
        lists = ["tasks_ptr", "intervals_ptr"] if self.job.ranged else []
        lists += ["guard_ptr"] if self.job.guarded else []
        if self.kind == "smallest":
            return ["values_ptr", "indices_ptr", *lists]
        one = ["out_ptr"] if self.kind == "sums" or self.job.partial else ["top_ptr", "out_ptr"]
        return [*one, *lists]

    def _formula(self) -> Iterator[str]:
        """The body of `pairs`."""
        yield from self._loads(1, self.loops.leaves())
        yield from self.loops.lines()
        yield from self._loads(1, [*(e for _, e in self.parts.columns), *self.parts.pairs])
        yield from assign(self.parts.columns, self.dialect)
        lines, names = assigned(self.parts.pairs, self.dialect)
        yield from lines
        returned = []
        for e, name in zip(self.parts.pairs, names, strict=True):
            if e.axes == {"i", "j"}:
                returned.append(name)
            elif e.axes:
                returned.append(f"tl.broadcast_to({name}, {TILE_SHAPE})")
            else:
                returned.append(f"tl.full({TILE_SHAPE}, {name}, {self.number})")
        yield f"return {', '.join(returned)}"

    def _loads(self, cat: int, expressions: Iterable[Expr]) -> Iterator[str]:
        """Loads of what expressions read from the variables of one category."""
        apart = {v.data[0] for v in self.variables if self.job.apart(v)}
        at = ("held", "j", "")[cat]
        return loads(self.variables, cat, expressions, at, self.number, apart)

    # the loop

    def _body(self) -> Iterator[str]:
        if self.job.guarded:
            yield "if tl.load(guard_ptr) != 0:"
            yield "    return"
        yield from self._task()
        yield from self._entry()
        parts, outer = self.parts, self.outer
        every = [*(e for _, e in (*parts.constant, *parts.rows)), *self.loops.leaves()]
        yield from self._loads(2, [*every, *(e for _, e in parts.columns), *parts.pairs, *outer])
        yield from self._loads(0, [*every, *parts.pairs, *outer])
        if not self.job.ranged:
            yield "begin = part * length"
            yield "end = tl.minimum(begin + length, columns)"
        if self.near is not None:
            yield from self.near.choice(len(self.summed))
        yield from indented(self._differences(), int(self.near is not None))
        if self.kind == "smallest":
            yield from self._store_lists()
            return
        yield from self._results_of_rows()
        if self.near is not None:
            yield from self.near.results(len(self.summed))
        yield from self._stores()

    def _differences(self) -> Iterator[str]:
        """Lines from the loads to lists, or to totals in lanes."""
        yield from assign(self.parts.constant, self.dialect)
        yield from assign(self.parts.rows, self.dialect)
        yield "lanes = tl.arange(0, BLOCK_N // LANES)[:, None, None] * LANES"
        yield "lanes = lanes + tl.arange(0, LANES)[None, None, :]"
        yield from self._start()
        inside = list(self._interval())
        if self.job.ranged:
            yield "for q in range(first_interval, last_interval):"
            inside = list(indented([*self._bounds(), *inside]))
        yield from inside

    def _entry(self) -> Iterator[str]:
        """Pointers to the data of the batch entry and of the block of components."""
        yield from (f"{pitch} = tl.cast({pitch}, tl.int64)" for pitch in self.pitches)
        entry = "batch // blocks" if self.job.blocked else "batch"
        for v in self.variables:
            name, block = f"v{v.data[0]}", ""
            if v.data[0] in self.job.blocked:
                step = v.dim if v.data[2] == 2 else f"{v.dim} * {name}_pitch"
                block = f" + batch % blocks * {step}"
            yield f"{name}_ptr += {entry} * {name}_batch{block}"

    def _task(self) -> Iterator[str]:
        """Batch entry and rows of the task; rows past the last repeat it and are not stored."""
        yield "pid = tl.program_id(0).to(tl.int64)"
        if self.job.ranged:
            yield "batch = pid // tasks"
            yield "task_ptr = tasks_ptr + pid % tasks * 6"
            for n, what in enumerate(("row", "interval", "place")):
                yield f"first_{what} = tl.load(task_ptr + {2 * n})"
                yield f"last_{what} = tl.load(task_ptr + {2 * n + 1})"
        else:
            yield "part = pid % parts"
            yield "batch = pid // parts // tiles"
            yield "first_row = pid // parts % tiles * BLOCK_M"
            yield "last_row = rows"
        yield "i = first_row + tl.arange(0, BLOCK_M)[None, :, None]"
        yield "held = tl.maximum(tl.minimum(i, last_row - 1), 0)"

    def _bounds(self) -> Iterator[str]:
        """The part of interval q that belongs to the task; places count through the whole list."""
        yield "first_column = tl.load(intervals_ptr + q * 3)"
        yield "place = tl.load(intervals_ptr + q * 3 + 2)"
        yield "begin = first_column + tl.maximum(first_place - place, 0)"
        yield "end = tl.load(intervals_ptr + q * 3 + 1)"
        yield "end = tl.minimum(end, first_column + tl.maximum(last_place - place, 0))"

    def _interval(self) -> Iterator[str]:
        """The loop over tiles.

        Where tensor cores do most of the work, each tile is masked: half the code to compile.
        """
        cut = self.job.guarded
        last, terms = "whole", [*self._call("start", "lanes"), *self._add("part")]
        if cut:
            last, terms = "end", list(self._cut("start", "part"))
        else:
            yield "whole = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N"
        if self.kind == "smallest":
            yield f"for start in range(begin, {last}, BLOCK_N):"
            yield from indented(terms)
        else:
            yield f"for block in range(begin, {last}, TILES * BLOCK_N):"
            if self.by_blocks:
                yield from indented(f"part{n} = {ZEROS}" for n in range(len(self.summed)))
            yield f"    block_end = tl.minimum(block + TILES * BLOCK_N, {last})"
            yield "    for start in range(block, block_end, BLOCK_N):"
            yield from indented(terms, 2)
            yield from indented(self._add_blocks())
        if not cut:
            yield "if whole < end:"
            yield from indented(self._cut("whole", "total"))

    def _cut(self, start: str, target: str) -> Iterator[str]:
        """A tile in which the interval may end: columns past the end have no effect."""
        yield f"left = (end - {start}).to(tl.int32)"
        yield from self._call(start, "tl.minimum(lanes, left - 1)")
        neutral = {"sums": "0.0", "smallest": "float('inf')", "shifted": "float('-inf')"}
        for n in range(len(self.parts.pairs)):
            yield f"f{n} = tl.where(lanes < left, f{n}, {'0.0' if n else neutral[self.kind]})"
        if self.kind == "smallest":
            yield f"j = tl.where(lanes < left, j, {2**63 - 1 if self.job.far else 2**31 - 1})"
        yield from self._add(target)

    def _call(self, start: str, lanes: str) -> Iterator[str]:
        begins = {v: " + first_row" if v.data[2] == 0 else "" for v in self.loops.pointers()}
        for v in self.columns:
            begins[v] = f" + {start}" + ("" if self.job.apart(v) else f" * {v.dim}")
        pointers = [f"v{v.data[0]}_ptr{begin}" for v, begin in begins.items()]
        given = [*self.arguments, *pointers, *self.pitches, "lanes", lanes, "BLOCK_M", "BLOCK_N"]
        names = ", ".join(f"f{n}" for n in range(len(self.parts.pairs)))
        yield f"{names} = pairs({', '.join(given)})"
        if self.kind == "smallest":
            yield f"j = ({start} + lanes).to({self.indices})"

    # the accumulation of terms

    def _start(self) -> Iterator[str]:
        if self.kind == "smallest":
            slots, kept = list_slots(self.job), self.job.kept
            lists = f"BLOCK_M, {slots}, {kept}, {self.number}, {self.indices}"
            yield f"best, index = empty_lists({lists})"
            yield "worst = tl.max(best, 1)[:, None]"
            return
        for n in range(len(self.summed)):
            yield f"total{n} = {ZEROS}"
            if self.job.accumulate == "kahan":
                yield f"lost{n} = {ZEROS}"
        if self.kind == "shifted":
            yield f"top = tl.full([BLOCK_M, LANES], {self.lowest}, {self.number})"
            yield "block_top = top"

    def _add(self, target: str) -> Iterator[str]:
        """Add a tile's terms to the sums of a block, or to the totals."""
        if self.kind == "smallest":
            if self.job.nan_first:
                yield "lowest = tl.min(tl.where(f0 == f0, f0, float('-inf')), 0)"
            else:
                yield "f0 = tl.where(f0 == f0, f0, float('inf'))"
                yield "lowest = tl.min(f0, 0)"
            yield "if tl.max((lowest <= worst).to(tl.int32)) > 0:"
            insert = "insert_nan_first" if self.job.nan_first else "insert"
            yield f"    best, index = {insert}(best, index, f0, j)"
            yield "    worst = tl.max(best, 1)[:, None]"
        elif self.kind == "sums":
            for n in range(len(self.summed)):
                more = f"tl.sum((f{n}).to(TOTAL), 0)"
                if target == "total" or not self.by_blocks:
                    yield from self._accumulated(n, more)
                else:
                    yield f"{target}{n} += {more}"
        else:
            yield f"new = tl.minimum(tl.maximum(top, tl.max(f0, 0)), -({self.lowest}))"
            yield "scale = tl.exp2(tl.maximum(top - new, -1e30) * LOG2E).to(TOTAL)"
            yield "e = tl.exp2((f0 - new[None, :, :]) * LOG2E)"
            if target == "total":
                yield "block_top = new"
            yield "top = new"
            weights = iter(range(1, len(self.parts.pairs)))
            for n, summed in enumerate(self.summed):
                term = "e" if summed == const(1) else f"e * f{next(weights)}"
                yield f"{target}{n} = {target}{n} * scale + tl.sum(({term}).to(TOTAL), 0)"

    def _accumulated(self, n: int, more: str) -> Iterator[str]:
        """Add to a total, by Kahan's rule with the rounding error of the last addition."""
        if self.job.accumulate != "kahan":
            yield f"total{n} += {more}"
            return
        yield f"more = {more} - lost{n}"
        yield f"new = total{n} + more"
        yield f"lost{n} = (new - total{n}) - more"
        yield f"total{n} = new"

    def _add_blocks(self) -> Iterator[str]:
        if self.kind == "shifted":
            yield "scale = tl.exp2(tl.maximum(block_top - top, -1e30) * LOG2E).to(TOTAL)"
            yield "block_top = top"
            yield from (f"total{n} = total{n} * scale + part{n}" for n in range(len(self.summed)))
        elif self.by_blocks:
            yield from (f"total{n} += part{n}" for n in range(len(self.summed)))

    # the result

    def _results_of_rows(self) -> Iterator[str]:
        shifted = self.kind == "shifted"
        if shifted:
            yield "new = tl.max(top, 1)[:, None]"
            yield "scale = tl.exp2(tl.maximum(top - new, -1e30) * LOG2E).to(TOTAL)"
        for n in range(len(self.summed)):
            yield f"sum{n} = tl.sum(total{n}{' * scale' if shifted else ''}, 1)[None, :, None]"
        named = list(dict.fromkeys(e for e in self.outer if e != const(1)))
        lines, names = assigned(named, self.dialect)
        yield from lines
        factors = dict(zip(named, names, strict=True))
        for e, (outer, place) in enumerate(zip(self.outer, self.place, strict=True)):
            factor = f" * {factors[outer]}" if outer in factors else ""
            yield f"result{e} = sum{place}{factor}"

    def _stores(self) -> Iterator[str]:
        job, count = self.job, self.job.last - self.job.first
        shifted = self.kind == "shifted"
        if shifted:
            yield f"top = tl.where(new == {self.lowest}, float('-inf'), new)"
            yield f"top = tl.where(new == -({self.lowest}), float('inf'), top)[None, :, :]"
        if job.partial:
            lanes = "tl.arange(0, BLOCK_M)[None, :, None]"
            yield f"at = pid * ({count + shifted} * BLOCK_M) + {lanes}"
            if shifted:
                yield "tl.store(out_ptr + at, top)"
            for e in range(count):
                yield f"tl.store(out_ptr + at + {e + shifted} * BLOCK_M, result{e})"
            return
        if shifted and not job.ending:
            yield "tl.store(top_ptr + batch * rows + i, top, mask=i < last_row)"
        for e in range(count - (job.ending == "mean")):
            if job.ending:
                yield f"result{e} = ended(top, result{e}, result{count - 1}, '{job.ending}')"
            place = f"(batch * rows + i) * {job.components} + {job.first + e}"
            yield f"tl.store(out_ptr + {place}, result{e}, mask=i < last_row)"

    def _store_lists(self) -> Iterator[str]:
        job = self.job
        size, kept = job.formula.dim, job.kept
        yield "row = tl.arange(0, BLOCK_M)[:, None]"
        if job.partial:
            yield f"at = (pid * BLOCK_M + row) * {kept}"
            where, sign = "at, at >= 0, 1", 1
        else:
            yield f"at = (batch * rows + first_row + row) * {kept * size} + {job.first}"
            where, sign = f"at, first_row + row < last_row, {size}", job.sign
        how = f"{kept}, {sign}, {job.nan_first}, {job.partial}"
        yield f"store_sorted(best, index, values_ptr, indices_ptr, {where}, {how})"
