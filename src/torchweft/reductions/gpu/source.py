"""Triton kernels of formulas: a function `pairs` that holds the formula, and a loop around it.

A kernel program takes a task, some rows by some columns:

    load the rows once; what depends on i alone is computed here
    for the intervals of its columns (one, or those of a block of rows):
        for blocks of TILES tiles: for tiles of BLOCK_N columns:
            terms = pairs(...)            # [BLOCK_N / LANES, BLOCK_M, LANES]
            add them up, LANES columns beside each other
        the last tile of an interval is cut: its terms are masked, mostly no others are
    add up the lanes; store the result, or a partial one for a merge

A lane of columns is a lane of a warp, so sums over a tile need no exchange between threads; one at
the end does.  Sums are of a tile, then of a block of tiles, then in total: in float32 the error
stays that of a few dozen additions.  shifted keeps a maximum for each row and lane, and moves it
once a tile.  smallest looks for terms under the row's worst entry, and skips tiles without any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchweft.core.expressions.expr import Expr, const, reachable
from torchweft.core.printing.dialect import Dialect, indented
from torchweft.reductions.call import Job
from torchweft.reductions.formula.kernel_forms import Loops
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
from torchweft.reductions.gpu.gaussian_centred import Printer, near

__all__ = ["LANES", "NUMBERS", "Job", "near_registers", "operands", "registers", "source"]


NUMBERS = {False: ("rows", "columns", "tiles", "parts", "length"), True: ("rows", "tasks")}
"""The numbers that a kernel takes: where columns are one interval, and where they are several."""

LANES = 32
"""Columns that are added up apart."""

_HEADER = """# {title}
import triton
import triton.language as tl

from torchweft.reductions.gpu.kernels import (
    LOG2E, acos, asin, atan, atan2, empty_lists, ended, insert, nearest, power, sinxdivx,
    store_sorted, xlogx,
)

NUMBER = tl.{number}
TOTAL = tl.{total}
LANES = tl.constexpr({lanes})
"""


def source(job: Job) -> str:
    """The module text of a job's kernel, whose name is `<kind>_kernel`."""
    return "\n".join(_Writer(job).module()) + "\n"


def operands(job: Job) -> tuple[Node, ...]:
    """The variables that its kernel reads, in the order of its pointers."""
    return _Writer(job).variables


def registers(job: Job) -> int:
    """How many numbers a kernel keeps for each row and lane, at least."""
    writer = _Writer(job)
    rows = [e for e in reachable(writer.parts.pairs) if e.kind == "leaf" and e.axes == {"i"}]
    kept = 2 * len(writer.summed) if job.kind != "smallest" else 5
    return len(rows) + kept + 2 * (job.kind == "shifted")


def near_registers(job: Job) -> int:
    """How many numbers of a row a tile of points near each other keeps; 0 if there are none."""
    found = _Writer(job).near
    return 0 if found is None else len(found.near.points) + 2 * len(found.near.terms)


class _Writer:
    """The lines of one kernel."""

    def __init__(self, job: Job) -> None:
        self.job = job
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
        number = "tl.float64" if job.wide else "tl.float32"
        formats = {name: form.replace("NUMBER", number) for name, form in FORMATS.items()}
        self.number, self.total = number, f"tl.{job.accumulator}"
        self.dialect = Dialect(formats, lambda of: [], lambda name, component: [])
        self.loops = Loops(job.inner, number, self.dialect)
        leaves = [e for e in reachable([*terms, *self.outer]) if e.kind == "leaf"]
        read = {e.data[0] for e in (*leaves, *self.loops.leaves())}
        given = [job.formula, *([job.weight] if weights else []), *(s.term for s in job.inner)]
        found = {v.data[0]: v for f in given for v in variables(f) if operand(v.data[0]) in read}
        found |= self.loops.variables
        self.variables = tuple(found[index] for index in sorted(found))
        self.near = self._near()

    def _near(self) -> Printer | None:
        """What serves tiles of points near each other."""
        job = self.job
        plain = job.near and job.accumulator == "float32" and job.accumulate == "auto"
        if job.kind != "sums" or not plain or job.inner or job.blocked:
            return None
        made = near(job.formula, job.first, job.last)
        bounds = tuple(self._bounds()) if job.ranged else ()
        return made and Printer(made, self.variables, self.dialect, bounds)

    # the module

    def module(self) -> Iterator[str]:
        wide = "float64" if self.job.wide else "float32"
        title = f"{self.job.kind} of {self.job.formula}"
        yield _HEADER.format(title=title, number=wide, total=self.job.accumulator, lanes=LANES)
        yield from self.loops.functions()
        if self.near is not None:
            yield from self.near.functions()
        yield from self._pairs()
        yield ""
        yield ""
        numbers = [*NUMBERS[self.job.ranged], *(f"v{v.data[0]}_batch" for v in self.variables)]
        numbers += [*(["blocks"] if self.job.blocked else []), *self._pitches()]
        pointers = [f"v{v.data[0]}_ptr" for v in self.variables] + self._results()
        blocks = [f"{name}: tl.constexpr" for name in ("BLOCK_M", "BLOCK_N", "TILES")]
        yield f"@triton.jit(do_not_specialize={numbers})"
        yield f"def {self.job.kind}_kernel("
        yield f"    {', '.join([*pointers, *numbers, *blocks])}"
        yield "):"
        yield from indented(self._body())

    def _results(self) -> list[str]:
        lists = ["tasks_ptr", "intervals_ptr"] if self.job.ranged else []
        lists += ["guard_ptr"] if self.job.guarded else []
        if self.job.kind == "smallest":
            return ["values_ptr", "indices_ptr", *lists]
        one = ["out_ptr"] if self.job.kind == "sums" or self.job.partial else ["top_ptr", "out_ptr"]
        return [*one, *lists]

    # the formula

    def _arguments(self) -> list[str]:
        """What `pairs` is given: values of rows and parameters."""
        computed = [*self.parts.pairs, *(e for _, e in self.parts.columns)]
        leaves = [e for e in reachable(computed) if e.kind == "leaf"] + self.loops.leaves()
        return list(dict.fromkeys(text(e) for e in leaves if "j" not in e.axes))

    def _columns(self) -> list[Node]:
        """The variables of columns that `pairs` reads."""
        return [v for v in self.variables if v.data[2] == 1]

    def _pitches(self) -> list[str]:
        """From one component to the next, of variables that are stored by component."""
        return [f"v{v.data[0]}_pitch" for v in self.variables if self.job.apart(v)]

    def _pairs(self) -> Iterator[str]:
        pointers = [f"v{v.data[0]}_ptr" for v in (*self.loops.pointers(), *self._columns())]
        blocks = ["BLOCK_M: tl.constexpr", "BLOCK_N: tl.constexpr"]
        names = [*self._arguments(), *pointers, *self._pitches(), "lanes", "j", *blocks]
        yield ""
        yield ""
        yield "@triton.jit"
        yield f"def pairs({', '.join(names)}):"
        yield from indented(self._formula())

    def _formula(self) -> Iterator[str]:
        yield from self._loads(1, self.loops.leaves(), "j")
        yield from self.loops.lines()
        yield from self._loads(1, [*(e for _, e in self.parts.columns), *self.parts.pairs], "j")
        yield from assign(self.parts.columns, self.dialect)
        lines, names = assigned(self.parts.pairs, self.dialect)
        yield from lines
        shown = []
        for e, name in zip(self.parts.pairs, names, strict=True):
            shape = "[BLOCK_N // LANES, BLOCK_M, LANES]"
            if e.axes == {"i", "j"}:
                shown.append(name)
            elif e.axes:
                shown.append(f"tl.broadcast_to({name}, {shape})")
            else:
                shown.append(f"tl.full({shape}, {name}, {self.number})")
        yield f"return {', '.join(shown)}"

    def _loads(self, cat: int, expressions: Iterable[Expr], at: str) -> Iterator[str]:
        apart = {v.data[0] for v in self.variables if self.job.apart(v)}
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
        yield from self._loads(
            2, [*every, *(e for _, e in parts.columns), *parts.pairs, *outer], ""
        )
        yield from self._loads(0, [*every, *parts.pairs, *outer], "held")
        if not self.job.ranged:
            yield "begin = part * length"
            yield "end = tl.minimum(begin + length, columns)"
        if self.near is not None:
            yield from self.near.choice(len(self.summed))
        yield from indented(self._differences(), int(self.near is not None))
        if self.job.kind == "smallest":
            yield from self._store_lists()
            return
        yield from self._results_of_rows()
        if self.near is not None:
            yield from self.near.results(len(self.summed))
        yield from self._stores()

    def _differences(self) -> Iterator[str]:
        """From what was loaded to lists, or to totals in lanes."""
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
        """The data of its batch entry, and its block of components."""
        yield from (f"{pitch} = tl.cast({pitch}, tl.int64)" for pitch in self._pitches())
        entry = "batch // blocks" if self.job.blocked else "batch"
        for v in self.variables:
            name, block = f"v{v.data[0]}", ""
            if v.data[0] in self.job.blocked:
                step = v.dim if v.data[2] == 2 else f"{v.dim} * {name}_pitch"
                block = f" + batch % blocks * {step}"
            yield f"{name}_ptr += {entry} * {name}_batch{block}"

    def _task(self) -> Iterator[str]:
        """Its batch entry and rows.  Rows past the last stand for the last and are not stored."""
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
        """The part of an interval that is the task's: its place is that in the whole list."""
        yield "first_column = tl.load(intervals_ptr + q * 3)"
        yield "place = tl.load(intervals_ptr + q * 3 + 2)"
        yield "begin = first_column + tl.maximum(first_place - place, 0)"
        yield "end = tl.load(intervals_ptr + q * 3 + 1)"
        yield "end = tl.minimum(end, first_column + tl.maximum(last_place - place, 0))"

    def _interval(self) -> Iterator[str]:
        """Where products mostly do the work, each tile is masked: half the code to compile."""
        cut = self.job.guarded
        last, tile = "whole", [*self._call("start", "lanes"), *self._add("part")]
        if cut:
            last, tile = "end", list(self._cut("start", "part"))
        else:
            yield "whole = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N"
        if self.job.kind == "smallest":
            yield f"for start in range(begin, {last}, BLOCK_N):"
            yield from indented(tile)
        else:
            yield f"for block in range(begin, {last}, TILES * BLOCK_N):"
            if self._by_blocks():
                yield from indented(f"part{n} = {self._zeros()}" for n in range(len(self.summed)))
            yield f"    block_end = tl.minimum(block + TILES * BLOCK_N, {last})"
            yield "    for start in range(block, block_end, BLOCK_N):"
            yield from indented(tile, 2)
            yield from indented(self._add_blocks())
        if not cut:
            yield "if whole < end:"
            yield from indented(self._cut("whole", "total"))

    def _cut(self, start: str, target: str) -> Iterator[str]:
        """A tile that the interval may end in."""
        yield f"left = (end - {start}).to(tl.int32)"
        yield from self._call(start, "tl.minimum(lanes, left - 1)")
        yield from self._masked()
        yield from self._add(target)

    def _call(self, start: str, lanes: str) -> Iterator[str]:
        begins = {v: " + first_row" if v.data[2] == 0 else "" for v in self.loops.pointers()}
        for v in self._columns():
            begins[v] = f" + {start}" + ("" if self.job.apart(v) else f" * {v.dim}")
        pointers = [f"v{v.data[0]}_ptr{begin}" for v, begin in begins.items()]
        given = [*self._arguments(), *pointers, *self._pitches(), "lanes", lanes]
        arguments = ", ".join([*given, "BLOCK_M", "BLOCK_N"])
        names = [f"f{n}" for n in range(len(self.parts.pairs))]
        yield f"{', '.join(names)} = pairs({arguments})"
        if self.job.kind == "smallest":
            yield f"j = ({start} + lanes).to({self._indices()})"

    def _masked(self) -> Iterator[str]:
        """What stands past the end of the interval changes nothing."""
        neutral = {"sums": "0.0", "smallest": "float('inf')", "shifted": "float('-inf')"}
        for n in range(len(self.parts.pairs)):
            value = "0.0" if n else neutral[self.job.kind]
            yield f"f{n} = tl.where(lanes < left, f{n}, {value})"
        if self.job.kind == "smallest":
            last = 2**63 - 1 if self.job.far else 2**31 - 1
            yield f"j = tl.where(lanes < left, j, {last})"

    # what is done with the terms

    def _zeros(self) -> str:
        return "tl.zeros([BLOCK_M, LANES], TOTAL)"

    def _by_blocks(self) -> bool:
        """Whether tiles are added to blocks first; Kahan's rule does without."""
        return self.job.kind == "shifted" or self.job.accumulate != "kahan"

    def _lowest(self) -> str:
        """Where maxima start, and less it where they end: finite, as ∞ less ∞ would be NaN."""
        return "-1.7976931348623157e308" if self.job.wide else "-3.4028234663852886e38"

    def _indices(self) -> str:
        return "tl.int64" if self.job.far else "tl.int32"

    def _start(self) -> Iterator[str]:
        kind = self.job.kind
        if kind == "smallest":
            kept = 1 << (self.job.kept - 1).bit_length()
            lists = f"BLOCK_M, {kept}, {self.job.kept}, {self.number}, {self._indices()}"
            yield f"best, index = empty_lists({lists})"
            yield "worst = tl.max(best, 1)[:, None]"
            return
        for n in range(len(self.summed)):
            yield f"total{n} = {self._zeros()}"
            if self.job.accumulate == "kahan":
                yield f"lost{n} = {self._zeros()}"
        if kind == "shifted":
            yield f"top = tl.full([BLOCK_M, LANES], {self._lowest()}, {self.number})"
            yield "block_top = top"

    def _add(self, target: str) -> Iterator[str]:
        """A tile's terms to sums of a block, or in total."""
        if self.job.kind == "smallest":
            yield "f0 = tl.where(f0 == f0, f0, float('inf'))"
            yield "lowest = tl.min(f0, 0)"
            yield "if tl.max((lowest <= worst).to(tl.int32)) > 0:"
            yield "    best, index = insert(best, index, f0, j)"
            yield "    worst = tl.max(best, 1)[:, None]"
            return
        weights = iter(range(1, len(self.parts.pairs)))
        if self.job.kind == "shifted":
            yield f"new = tl.minimum(tl.maximum(top, tl.max(f0, 0)), -({self._lowest()}))"
            yield "scale = tl.exp2(tl.maximum(top - new, -1e30) * LOG2E).to(TOTAL)"
            yield "e = tl.exp2((f0 - new[None, :, :]) * LOG2E)"
            if target == "total":
                yield "block_top = new"
            yield "top = new"
        for n, summed in enumerate(self.summed):
            if self.job.kind == "sums":
                term = f"f{n}"
            elif summed == const(1):
                term = "e"
            else:
                term = f"e * f{next(weights)}"
            more = f"tl.sum(({term}).to(TOTAL), 0)"
            if self.job.kind == "shifted":
                yield f"{target}{n} = {target}{n} * scale + {more}"
            elif target == "total" or not self._by_blocks():
                yield from self._accumulated(n, more)
            else:
                yield f"{target}{n} += {more}"

    def _accumulated(self, n: int, more: str) -> Iterator[str]:
        """Into a total; by Kahan's rule with what the last addition lost."""
        if self.job.accumulate != "kahan":
            yield f"total{n} += {more}"
            return
        yield f"more = {more} - lost{n}"
        yield f"new = total{n} + more"
        yield f"lost{n} = (new - total{n}) - more"
        yield f"total{n} = new"

    def _add_blocks(self) -> Iterator[str]:
        if self.job.kind == "shifted":
            yield "scale = tl.exp2(tl.maximum(block_top - top, -1e30) * LOG2E).to(TOTAL)"
            yield "block_top = top"
        for n in range(len(self.summed)):
            if self.job.kind == "shifted":
                yield f"total{n} = total{n} * scale + part{n}"
            elif self._by_blocks():
                yield f"total{n} += part{n}"

    # the result

    def _results_of_rows(self) -> Iterator[str]:
        if self.job.kind == "shifted":
            yield "new = tl.max(top, 1)[:, None]"
            yield "scale = tl.exp2(tl.maximum(top - new, -1e30) * LOG2E).to(TOTAL)"
        for n in range(len(self.summed)):
            scale = " * scale" if self.job.kind == "shifted" else ""
            yield f"sum{n} = tl.sum(total{n}{scale}, 1)[None, :, None]"
        named = list(dict.fromkeys(e for e in self.outer if e != const(1)))
        lines, names = assigned(named, self.dialect)
        yield from lines
        factors = dict(zip(named, names, strict=True))
        for e, (outer, place) in enumerate(zip(self.outer, self.place, strict=True)):
            factor = f" * {factors[outer]}" if outer in factors else ""
            yield f"result{e} = sum{place}{factor}"

    def _stores(self) -> Iterator[str]:
        job, count = self.job, self.job.last - self.job.first
        shifted = job.kind == "shifted"
        if shifted:
            yield f"top = tl.where(new == {self._lowest()}, float('-inf'), new)"
            yield f"top = tl.where(new == -({self._lowest()}), float('inf'), top)[None, :, :]"
        lanes = "tl.arange(0, BLOCK_M)[None, :, None]"
        if job.partial:
            yield f"at = pid * ({count + shifted} * BLOCK_M) + {lanes}"
            if shifted:
                yield "tl.store(out_ptr + at, top)"
        elif shifted and not job.ending:
            yield "tl.store(top_ptr + batch * rows + i, top, mask=i < last_row)"
        if job.partial:
            for e in range(count):
                yield f"tl.store(out_ptr + at + {e + shifted} * BLOCK_M, result{e})"
        else:
            for e in range(count - (job.ending == "mean")):
                if job.ending:
                    others = f"result{count - 1}, '{job.ending}'"
                    yield f"result{e} = ended(top, result{e}, {others})"
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
        yield f"store_sorted(best, index, values_ptr, indices_ptr, {where}, {kept}, {sign})"
