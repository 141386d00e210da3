"""Kernels of programs: loads and stores printed around emitted steps, in Gluon or Triton.

One template serves every program: products, the fused chain, gradients of any order.  A kernel
program owns whole rows, so that row sums stay inside it, or the same tile of rows that are longer
(row sums are then results, one partial a tile), and loops over the rows:

    bring the feature operands (weights) to shared memory, once
    for the rows of this program:
        read the row (Gluon: prefetched to shared memory during the previous row)
        the program's steps, all sums of one level in one reduction
        store the outputs; add what is summed over rows to this program's own sums
    store these sums: one partial a program, added in a fixed order by another kernel

Traffic is the least there is: every operand once.  Measured on an H200 (Cl(3,0) chain backward,
4096 × 512, fp32): 92 µs for 79 of copying; weights read through the cache each row 110, without
the copy ahead 115, statistics saved by the forward pass 122.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torchweft.core.expressions.expr import SHRINK
from torchweft.core.expressions.program import Operand, Program
from torchweft.core.printing.dialect import Dialect, Schedule, indented
from torchweft.core.printing.kernel import Frame
from torchweft.core.printing.schedule import schedule

__all__ = ["RowTiling", "copied_at_once", "name", "parameters", "source"]


class RowTiling(NamedTuple):
    """The tiles of a kernel; its source depends on all of these.

    Args:
        gluon: whether to print Gluon; else Triton, without shared memory.
        rows: rows of a tile, a power of 2.
        block: features of a tile, a power of 2.
        vector: neighbouring features of a thread.
        warps: warps of a kernel program.
        tiles: whether a row is longer than a tile, and each tile has its own kernel programs.
        ragged: whether tiles extend past the last feature.
        aligned: whether all strides of rows and components are multiples of 16, of features 1.
        staged: row operands that are prefetched to shared memory: number of components.
        shared: feature operands and outputs that live in shared memory: number of components.
        itemsize: bytes of an element.
    """

    gluon: bool
    rows: int
    block: int
    vector: int = 4
    warps: int = 4
    tiles: bool = False
    ragged: bool = True
    aligned: bool = False
    staged: tuple[tuple[str, int], ...] = ()
    shared: tuple[tuple[str, int], ...] = ()
    itemsize: int = 4


def parameters(program: Program) -> tuple[list[Operand], list[Operand]]:
    """The inputs that a kernel reads, and the outputs: its first parameters are their pointers.

    Then come `num_rows`, the strides of each input (component, row and feature, where it has them)
    and `num_features`.  Outputs are contiguous.
    """
    used = program.used()
    return [o for o in program.inputs if o.name in used], [o.operand for o in program.outputs]


def name(program: Program) -> str:
    """The name of the kernel: the builder of the program, and how it was derived."""
    root, *steps = program.key.split(" | ")
    return "_".join([root.split(" ")[0], *(step.split(" ")[0] for step in steps), "kernel"])


def source(program: Program, tiling: RowTiling) -> str:
    """The module text of a program's kernel."""
    return _ProgramPrinter(program, tiling).module()


_ASYNC_COPY = "from triton.experimental.gluon.language.nvidia.ampere import async_copy"

_FUNCTIONS = {
    "exp": "tl.exp({0})",
    "normal_cdf": "(0.5 + 0.5 * tl.erf(({0}) * 0.7071067811865476))",
    "sigmoid": "(1.0 / (1.0 + tl.exp(-({0}))))",
    "reciprocal": "(1.0 / ({0}))",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt(tl.where(({0}) == 0, float('inf'), {0}))",
    "shrunk_square": f"(({{0}} * {SHRINK!r}) * ({{0}} * {SHRINK!r}))",
    "abs": "tl.abs({0})",
    "shrunk": f"({{0}} * {SHRINK!r})",
    "twice_shrunk": f"({{0}} * {2 * SHRINK**2!r})",
    "sign": "((({0}) > 0).to(tl.int8) - (({0}) < 0).to(tl.int8))",
}
_FLAT = "tl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])"
SUMS_PER_FLUSH = 4
"""Number of sums in shared memory that are read, then written, between two barriers."""


class _ProgramPrinter:
    """Prints the kernel of one program."""

    def __init__(self, program: Program, tiling: RowTiling) -> None:
        self.program, self.tiling = program, tiling
        self.frame = Frame(tiling.gluon, tiling.itemsize == 8)
        self.inputs, self.outputs = parameters(program)
        self.plan: Schedule = schedule(program)
        self.row_inputs = [o for o in self.inputs if "row" in o.axes]
        self.feature_inputs = [o for o in self.inputs if "row" not in o.axes]
        pairs = zip(self.plan.results, self.outputs, strict=True)
        self.summed = [(result, operand) for result, operand in pairs if result.summed]
        self.staged, self.kept = dict(tiling.staged), dict(tiling.shared)
        self.joint: set[int] = set()
        self.dialect = Dialect(_FUNCTIONS, self._sums, self._fetch)

    def module(self) -> str:
        """The text of the module."""
        # values that do not specialize the machine code are all that follows from the rows
        free = [o for o in self.inputs if o.axes == ("row",) or not self.tiling.aligned]
        body = list(self._body())  # finds which sums are joint
        return self.frame.module(
            self.program.key,
            *(_joint_sum(count) for count in sorted(self.joint)),
            self.frame.function(
                name(self.program),
                self._parameters(),
                body,
                ["num_rows", *(f"stride_{operand.name}c" for operand in free)],
            ),
            imports=[_ASYNC_COPY] * self.tiling.gluon,
        )

    def _parameters(self) -> Iterable[str]:
        for operand in (*self.inputs, *self.outputs):
            yield f"{operand.name}_ptr"
        yield "num_rows"
        for operand in self.inputs:
            yield f'stride_{operand.name}c: "i64"'
            yield from (f"stride_{operand.name}{axis[0]}" for axis in operand.axes)
        yield from (f"{name}: tl.constexpr" for name in ("num_features", "ROWS", "BLOCK"))

    def _body(self) -> Iterable[str]:
        tiling = self.tiling
        tile = (tiling.rows, tiling.block)
        yield from self.frame.layout(_blocked(tile, tiling.vector, tiling.warps))
        yield "pid = tl.program_id(0)"
        yield "programs = tl.num_programs(0)"
        if tiling.tiles:
            yield "tiles = (num_features + BLOCK - 1) // BLOCK"
            yield "tile = pid % tiles"
            yield "pid = pid // tiles"
            yield "programs = programs // tiles"
        yield "num_feature: tl.constexpr = num_features"
        yield f"plane = {self.frame.cast('num_rows')} * num_features"
        yield f"lanes = tl.arange(0, BLOCK{self.frame.sliced(0)})"
        yield f"own = tl.expand_dims(tl.arange(0, ROWS{self.frame.sliced(1)}), 1)"
        yield "f1 = tile * BLOCK + lanes" if tiling.tiles else "f1 = lanes"
        yield "f = tl.expand_dims(f1, 0)"  # the features of the tile, [1, BLOCK]
        if tiling.ragged:
            yield "inside = f < num_features"
        yield from self._features_to_shared_memory()
        yield from self._open_sums()
        if tiling.staged:
            yield from self._stage("pid * ROWS")
        yield "for start in range(pid * ROWS, num_rows, programs * ROWS):"
        yield from indented(self._rows())
        yield from self._close_sums()

    def _mask(self, operand: Operand) -> str:
        """The condition that an element of the tile exists; "" where all do."""
        masks = ["inside"] * (self.tiling.ragged and "feature" in operand.axes)
        masks += ["present"] * (self.tiling.rows > 1 and "row" in operand.axes)
        return " & ".join(masks)

    def _fetch(self, name: str, component: int) -> list[str]:
        """A component of a feature operand, [1, BLOCK], where it is used."""
        value = f"{name}{component}"
        if component < self.kept.get(name, 0):
            return [f"{value} = {value}_kept.load(LAYOUT)"]
        return [f"{value} = {self._feature(name, component)}"]

    def _feature(self, name: str, component: int) -> str:
        address = f"{name}_ptr + {component} * stride_{name}c + f * stride_{name}f"
        return self.frame.load(address, "inside" * self.tiling.ragged)

    def _features_to_shared_memory(self) -> Iterable[str]:
        """Copies feature operands to shared memory, widened once."""
        for operand in self.feature_inputs:
            for c in range(self.kept.get(operand.name, 0)):
                name = f"{operand.name}{c}"
                tile = f"{self.frame.number}, [1, BLOCK], {_FLAT}, {self._feature(operand.name, c)}"
                yield f"{name}_kept = tl.allocate_shared_memory({tile})"

    def _open_sums(self) -> Iterable[str]:
        for result, operand in self.summed:
            for c, name in enumerate(result.names):
                if not name:
                    continue
                value = self.frame.zeros("ROWS, BLOCK")
                if c < self.kept.get(operand.name, 0):
                    tile = f"{self.frame.number}, [ROWS, BLOCK], {_FLAT}, {value}"
                    value = f"tl.allocate_shared_memory({tile})"
                yield f"{operand.name}_sum{c} = {value}"

    def _partial(self, operand: Operand, component: int) -> str:
        """The address of this program's partial sum: (programs, components, features)."""
        first = f"{self.frame.cast('pid')} * ({operand.size} * num_features)"
        return f"{operand.name}_ptr + ({first} + f1) + {component} * num_features"

    def _close_sums(self) -> Iterable[str]:
        mask = ", mask=f1 < num_features" if self.tiling.ragged else ""
        totals = {}
        for result, operand in self.summed:
            for c, name in enumerate(result.names):
                kept = ".load(LAYOUT)" if c < self.kept.get(operand.name, 0) else ""
                if name:
                    totals[f"{operand.name}_total{c}"] = f"{operand.name}_sum{c}{kept}"
        yield from self._reduction(totals, 0)
        for result, operand in self.summed:
            for c, name in enumerate(result.names):
                value = f"{operand.name}_total{c}" if name else "0.0"
                yield f"tl.store({self._partial(operand, c)}, {value}{mask})"

    def _reduction(self, of: Mapping[str, str], axis: int) -> list[str]:
        """Sums along an axis of a tile; Gluon needs one exchange between warps for all of them."""
        if self.tiling.gluon and len(of) > 1:
            self.joint.add(len(of))
            left, terms = ", ".join(of), ", ".join(of.values())
            return [f"{left} = tl.reduce(({terms}), {axis}, add{len(of)})"]
        return [f"{name} = tl.sum({term}, {axis})" for name, term in of.items()]

    def _add_to_sums(self, lines: list[str]) -> list[str]:
        """The lines; a value is added to the program's sum after the last line that assigns it."""
        last = {line.split(" ", 1)[0]: at for at, line in enumerate(lines)}
        due: dict[int, list[tuple[Operand, int, str]]] = {}
        for result, operand in self.summed:
            for c, name in enumerate(result.names):
                if name:
                    due.setdefault(last.get(name, len(lines) - 1), []).append((operand, c, name))
        found: list[str] = []
        pending: list[str] = []
        for at, line in enumerate(lines):
            found.append(line)
            for operand, c, name in due.get(at, ()):
                value = f"tl.where(present, {name}, 0.0)" if self.tiling.rows > 1 else name
                if c < self.kept.get(operand.name, 0):
                    total = f"{operand.name}_sum{c}"
                    found.append(f"{total}_new = {total}.load(LAYOUT) + {value}")
                    pending.append(total)
                else:
                    found.append(f"{operand.name}_sum{c} += {value}")
            if len(pending) == SUMS_PER_FLUSH or at == len(lines) - 1:
                found += [f"{total}.store({total}_new)" for total in pending]
                pending = []
        return found

    def _rows(self) -> Iterable[str]:
        """The body of the loop over rows."""
        yield f"row = {self.frame.cast('start')} + own"
        if self.tiling.rows > 1:
            yield "present = row < num_rows"
        yield "out_row = row * num_features"
        for operand in self.row_inputs:
            if self.staged.get(operand.name, 0) < operand.size:
                yield f"{operand.name}_row = row * stride_{operand.name}r"
                if "feature" in operand.axes:
                    stride = self.frame.cast(f"stride_{operand.name}f")
                    yield f"{operand.name}_stride = {stride}"
        yield from self._read_rows()
        lines = [line for step in self.plan.steps for line in step.lines(self.dialect)]
        yield from self._add_to_sums(lines)
        yield from self._stores()

    def _read_rows(self) -> Iterable[str]:
        """Loads all components of row operands, [ROWS, BLOCK], and prefetches the next rows."""
        if self.staged:
            yield "async_copy.wait_group(0)"
            yield _gluon_names()[0]
        for operand in self.row_inputs:
            name, at_once = operand.name, copied_at_once(operand, self.tiling)
            for c in range(operand.size):
                if c < self.staged.get(name, 0):
                    place = f"{name}_next{c - c % at_once}.slice({c % at_once} * ROWS, ROWS)"
                    read = f"{place}.load(LAYOUT).to({self.frame.number})"
                else:
                    read = self.frame.load(self._address(operand, c), self._mask(operand))
                yield f"{name}{c} = {read}"
        if self.staged:
            yield _gluon_names()[0]
            yield from self._prefetch("start + programs * ROWS")

    def _address(self, operand: Operand, component: int) -> str:
        name = operand.name
        place = f"{name}_ptr + ({name}_row + {component} * stride_{name}c)"
        return f"{place} + f * {name}_stride" if "feature" in operand.axes else place

    def _stores(self) -> Iterable[str]:
        for result, operand in zip(self.plan.results, self.outputs, strict=True):
            mask = self._mask(operand)
            option = f", mask={mask}" if mask else ""
            for c, name in enumerate(() if result.summed else result.names):
                address = f"{operand.name}_ptr + {self._offset(operand, c)}"
                yield f"tl.store({address}, {name or '0.0'}{option})"

    def _offset(self, operand: Operand, component: int) -> str:
        """The offset of a component of an output.

        The order of additions makes a row's offset the loop invariant, not a pointer a component:
        such pointers would be held in registers, two for each component.
        """
        if "feature" in operand.axes:
            return f"(out_row + {component} * plane) + f"
        own = f"tile * {operand.size} + {component}" if self.tiling.tiles else f"{component}"
        return f"({own}) * {self.frame.cast('num_rows')} + row"

    def _sums(self, of: Mapping[str, str]) -> list[str]:
        """Row sums, [ROWS, 1]."""
        masked = "tl.where(inside, {}, 0.0)" if self.tiling.ragged else "{}"
        rows = {f"{name}_row": masked.format(term) for name, term in of.items()}
        expanded = (f"{name} = tl.expand_dims({name}_row, 1)" for name in of)
        return [*self._reduction(rows, 1), *expanded]

    def _copies(self) -> Iterable[tuple[str, int, int]]:
        """Staged operands: number of components, and of components that one copy moves."""
        for operand in self.row_inputs:
            if operand.name in self.staged:
                at_once = copied_at_once(operand, self.tiling)
                yield operand.name, self.staged[operand.name], at_once

    def _stage(self, start: str) -> Iterable[str]:
        """Shared memory for the next rows, and the prefetch of the first."""
        tiling = self.tiling
        for size in sorted({at_once for _, _, at_once in self._copies()}):
            shape = (size * tiling.rows, tiling.block)
            copy = f"COPY{size}"
            yield f"{copy}: tl.constexpr = {_blocked(shape, 16 // tiling.itemsize, tiling.warps)}"
            at = f"tl.expand_dims(tl.arange(0, {size} * ROWS, tl.SliceLayout(1, {copy})), 1)"
            yield f"copy{size}_c = {self.frame.cast(f'{at} // ROWS')}"
            yield f"copy{size}_r = {self.frame.cast(f'{at} % ROWS')}"
            lanes = f"tl.expand_dims(tl.arange(0, BLOCK, tl.SliceLayout(0, {copy})), 0)"
            yield f"copy{size}_f = {'tile * BLOCK + ' * tiling.tiles}{lanes}"
        for name, count, size in self._copies():
            element = f"{name}_ptr.dtype.element_ty"
            tile = f"{element}, [{size} * ROWS, BLOCK], {_FLAT}"
            for first in range(0, count, size):
                # each of its own: no barrier between their copies
                yield f"{name}_next{first} = tl.allocate_shared_memory({tile})"
            strides = f"copy{size}_c * stride_{name}c + copy{size}_r * stride_{name}r"
            yield f"{name}_ahead = {strides} + copy{size}_f"
        yield from self._prefetch(start)

    def _prefetch(self, start: str) -> Iterable[str]:
        """Copies to shared memory; registers hold only what differs between threads."""
        yield f"following = {start}"
        yield "if following < num_rows:"
        base = self.frame.cast("following")
        for name, count, size in self._copies():
            masks = [f"(copy{size}_f < num_features)"] * self.tiling.ragged
            masks += [f"(following + copy{size}_r < num_rows)"] * (self.tiling.rows > 1)
            mask = f", mask={' & '.join(masks)}" if masks else ""
            for first in range(0, count, size):
                to = f"{name}_next{first}"
                place = f"({base} * stride_{name}r + {first} * stride_{name}c)"
                read = f"({name}_ptr + {place}) + {name}_ahead"
                yield f"    async_copy.{_gluon_names()[1]}({to}, {read}{mask})"
        yield "async_copy.commit_group()"


@functools.cache
def _gluon_names() -> tuple[str, str]:
    """Names of the barrier (new in Triton 3.7) and of the copy to shared memory (new in 3.8)."""
    from triton.experimental.gluon import language as tl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy

    barrier = "thread_barrier" if hasattr(tl, "thread_barrier") else "barrier"
    older = not hasattr(async_copy, "async_load")
    return f"tl.{barrier}()", "async_copy_global_to_shared" if older else "async_load"


def copied_at_once(operand: Operand, tiling: RowTiling) -> int:
    """Number of components of a row operand that one instruction of a kernel program copies."""
    moved = 32 * tiling.warps * (16 // tiling.itemsize)
    return math.gcd(operand.size, max(1, moved // (tiling.rows * tiling.block)))


def _joint_sum(count: int) -> Iterable[str]:
    a, b = ([f"{side}{i}" for i in range(count)] for side in "ab")
    yield "\n\n@gluon.jit"
    yield f"def add{count}({', '.join([*a, *b])}):"
    yield f"    return {', '.join(f'{x} + {y}' for x, y in zip(a, b, strict=True))}"


def _blocked(shape: tuple[int, int], vector: int, warps: int) -> str:
    """The layout of a tile whose threads are contiguous along the features."""
    along = shape[1] // vector
    lanes = max(1, min(32, along))
    groups = max(1, min(warps, math.ceil(along / lanes)))
    layout = [1, vector], [32 // lanes, lanes], [warps // groups, groups], [1, 0]
    return f"tl.BlockedLayout({', '.join(map(str, layout))})"
