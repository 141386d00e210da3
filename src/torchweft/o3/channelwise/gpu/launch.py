"""Launches of generated Triton kernels for calls: grids, tiles, scratch memory, partial sums.

The launches of a call are computed once for each structure, call, sizes and dtype, and cached.
Results that kernels store in parts (of edges, pieces of rows, runs or programs) are added up by the
kernels of `kernels.py`, in a fixed order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core import private
from torchweft.core.backend import interpreted
from torchweft.core.gpu import launcher
from torchweft.core.gpu.launcher import Kernel, Launches, Step, Tile, current_device, processors
from torchweft.core.printing.modules import printed, written
from torchweft.o3.channelwise.calls import Call
from torchweft.o3.channelwise.gpu.gluon import kernel_source
from torchweft.o3.channelwise.gpu.kernel_spec import RowKernelSpec
from torchweft.o3.channelwise.gpu.kernel_split import (
    ColumnLoan,
    GraphFacts,
    KernelSplit,
    ResultStorage,
    split_call,
)
from torchweft.o3.channelwise.gpu.source import kernel_name, operands
from torchweft.o3.channelwise.structure import Structure, entry_counts
from torchweft.o3.edges.graph import FLAT, Runs, Tables, flat

__all__ = ["prepared", "run", "serves"]

KERNELS = "torchweft.o3.channelwise.gpu.kernels"

MAX_RECIPES = 4096
"""Cached combinations of structure, call, sizes and dtype."""

MAX_COMPILED_TERMS = 2**13
"""Entries of 3j symbols times terms of a call: more compile for over half a minute on one core."""

WARPS_PER_PROCESSOR = 8
"""Warps of each multiprocessor where a program takes several rows: as many as run at once."""

LENT_BYTES = 2**26
"""Size of partial sums from which on kernels lend each other columns, which needs more kernels."""

EDGES_PER_WARP = 8
"""Most edges of a warp whose program takes some of a row's edges alone."""

SHORT_ROW = 16
"""Edges per row of z from which on kernels that take some edges prefetch the next edge.

Below, they prefetch the row: in short rows many edges are the first to read it.
"""

LOAN_TILE = Tile((4, 256), 2, 1)
"""Edges and columns of `fold_lent_kernel`."""

FOLDED_NUMBERS = 256
"""Numbers per program of `fold_columns_kernel`: many small programs of one warp."""

VECTOR = 4
"""Numbers that a thread reads at once."""

KERNEL_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Listed = Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]
Shape = tuple[int, int]


def serves(structure: Structure, call: Call, dtype: torch.dtype) -> bool:
    """Whether kernels of a call can be printed and compiled in reasonable time."""
    terms = sum(len(result.terms) for result in call.results)
    found = sum(entries for _, entries, _ in entry_counts(structure))
    return dtype in KERNEL_DTYPES and terms * found <= MAX_COMPILED_TERMS


def run(
    structure: Structure, call: Call, tensors: Sequence[Tensor], tables: Tables, shared: bool
) -> list[Tensor]:
    """The results of a call, see `operator.Run`."""
    body = prepared(structure, call, tensors, tables, shared, lambda _: flat(tables))
    return list(body(tensors))


def prepared(
    structure: Structure,
    call: Call,
    tensors: Sequence[Tensor],
    tables: Tables,
    shared: bool,
    listed: Listed,
) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """`run` for tensors and tables of this signature, see `operator.Prepare`."""
    count, device = len(tensors), tensors[0].get_device()
    with current_device(tensors[0]):
        recipe = _recipe(structure, call, tensors, tables, shared)

    def again(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        values = [t.contiguous() for t in given[:count]]
        lists = listed((*given[count:], None))
        if device < 0 or device == private.get_device():
            return tuple(_execute(recipe, values, lists))
        with current_device(values[0]):
            return tuple(_execute(recipe, values, lists))

    return again


class PartialSum(NamedTuple):
    """A kernel that adds partial sums up."""

    kernel: Kernel
    programs: int
    lists: tuple[int | None, ...]  # its indptr and entries, as places in FLAT
    shape: Shape  # of its result
    places: Tensor | None  # which parts it adds to each column; None: the same column


class ResultPlan(NamedTuple):
    """How a result is computed."""

    shape: Shape  # of the result
    parts: Shape | None = None  # shape of what kernels store; None: they store the result itself
    sums: tuple[PartialSum, ...] = ()  # what adds the parts up
    zero: bool = False  # whether the result must be zero before


class _Recipe(NamedTuple):
    """Launches on tensors, lists, constants, results and scratch, in this order."""

    launches: Launches
    constants: tuple[Tensor | None, ...]
    results: tuple[ResultPlan, ...]
    scratch: tuple[Shape, ...]
    wide: torch.dtype  # of scratch


_recipes: dict[Any, _Recipe] = {}


def _recipe(
    structure: Structure, call: Call, tensors: Sequence[Tensor], tables: Tables, shared: bool
) -> _Recipe:
    """The cached launches of a call."""
    like = tensors[0]
    lists, z, x, runs = flat(tables), *tables[9:]
    pieces = (z and z.num_pieces, x and x.num_pieces, runs and runs.owner.shape)
    # traced tables are int64 whatever their sizes, which needs other machine code
    index = tables.src if tables.dst is None else tables.dst
    kinds = (*map(type, lists), index is not None and index.dtype)
    key = (structure, call, tables[:3], pieces, kinds, shared, like.dtype, like.device)
    recipe = _recipes.get(key)
    if recipe is None:
        if len(_recipes) >= MAX_RECIPES:
            _recipes.clear()
        recipe = _recipes[key] = _prepare(structure, call, tables, shared, like)
        _compile(recipe, tensors, lists)
    return recipe


def _execute(
    recipe: _Recipe, tensors: Sequence[Tensor], lists: Sequence[Tensor | None]
) -> list[Tensor]:
    like = tensors[0]
    results = [
        like.new_zeros(plan.shape) if plan.zero else like.new_empty(plan.shape)
        for plan in recipe.results
    ]
    scratch = [like.new_empty(shape, dtype=recipe.wide) for shape in recipe.scratch]
    recipe.launches((*tensors, *lists, *recipe.constants, *results, *scratch))
    return results


def _compile(recipe: _Recipe, tensors: Sequence[Tensor], lists: tuple[Tensor | None, ...]) -> None:
    """Compile all kernels together, for results like those to come."""
    like = tensors[0]
    plain, wide = like.new_empty(1), like.new_empty(1, dtype=recipe.wide)
    results, scratch = [plain] * len(recipe.results), [wide] * len(recipe.scratch)
    every = (*tensors, *lists, *recipe.constants, *results, *scratch)
    launcher.compile_together(
        [
            launcher.Call(step.kernel, [every[n] for n in step.taken], step.free)
            for step in recipe.launches.steps
        ]
    )


# preparation


def _prepare(
    structure: Structure, call: Call, tables: Tables, shared: bool, like: Tensor
) -> _Recipe:
    rows = {"x": tables.num_x, "z": tables.num_z, "y": tables.num_edges}
    rows["w"] = 1 if shared else tables.num_edges
    shapes = [(rows[result.slot], structure.width(result.slot)) for result in call.results]
    wide = _wide(like.dtype)
    if not tables.num_edges:
        zeros = tuple(ResultPlan(shape, zero=True) for shape in shapes)
        return _Recipe(Launches(()), (), zeros, (), wide)
    split = split_call(structure, call, _facts(structure, tables, shared, like.dtype))
    lanes = _lanes(split, tables, like.device)
    results = tuple(
        _result_plan(storage, result.slot, shape, tables, lanes, like.device)
        for storage, result, shape in zip(split.outputs, call.results, shapes, strict=True)
    )
    loans = [loan for *_, loan in split.kernels if loan is not None]
    places = _Places(len(call.slots), results, loans, like.device)
    kernels, sums = list(_steps(split, call, tables, lanes, places)), list(places.sums())
    workspace = wide.itemsize * sum(map(math.prod, places.scratch))
    kernels = [step._replace(workspace_bytes=workspace) for step in kernels]
    launches = Launches((*kernels, *sums))
    return _Recipe(launches, places.constants, results, tuple(places.scratch), wide)


def _facts(structure: Structure, tables: Tables, shared: bool, dtype: torch.dtype) -> GraphFacts:
    present = {
        "x": (tables.src, tables.x_edges, tables.x_slices),
        "z": (tables.dst, tables.z_edges, tables.z_slices),
    }
    indexed, ordered, pieces = (
        "".join(slot for slot, found in present.items() if found[i] is not None) for i in range(3)
    )
    # partial sums of edges may lie in the gradient of weights only if they have its dtype
    parts = tables.num_edges * structure.width("x") * dtype.itemsize
    lends = dtype == _wide(dtype) and tables.x_slices is None and parts > LENT_BYTES
    wide, runs = dtype == torch.float64, tables.runs is not None
    return GraphFacts(indexed, ordered, pieces, shared, wide, runs, lends)


class _Places:
    """Numbers of the tensors of launches: the call's, lists, constants, results, scratch.

    Args:
        lists: number of the first list.
        results: the results.
        loans: their places and columns are the last constants.
        device: of the constants.
    """

    def __init__(
        self,
        lists: int,
        results: Sequence[ResultPlan],
        loans: Sequence[ColumnLoan],
        device: torch.device,
    ) -> None:
        self.lists, self._plans = lists, results
        tables = [
            torch.tensor(part, dtype=torch.int32).to(device)
            for loan in loans
            for part in (loan.places, loan.columns)
        ]
        self.constants = (None, *(s.places for plan in results for s in plan.sums), *tables)
        self.results = lists + len(FLAT) + len(self.constants)
        self.loans = self.results - len(tables)
        self.scratch: list[Shape] = []
        self.stored = [
            self.add(plan.parts) if plan.parts else self.results + n
            for n, plan in enumerate(results)
        ]

    def add(self, shape: Shape) -> int:
        """The number of new scratch memory."""
        self.scratch.append(shape)
        return self.results + len(self._plans) + len(self.scratch) - 1

    def list(self, name: str) -> int:
        """The number of a list of the graph."""
        return self.lists + FLAT.index(name)

    def shape(self, result: int) -> Shape:
        """The shape of a result."""
        return self._plans[result].shape

    def sums(self) -> Iterator[Step]:
        """The kernels that add the parts of results up."""
        nothing = self.lists + len(FLAT)
        constant = nothing
        for n, plan in enumerate(self._plans):
            part = self.stored[n]
            for s in plan.sums:
                constant += 1
                total = self.results + n if s is plan.sums[-1] else self.add(s.shape)
                lists = (nothing if k is None else self.lists + k for k in s.lists)
                yield Step(s.kernel, s.programs, (part, total, constant, *lists))
                part = total


def _steps(
    split: KernelSplit, call: Call, tables: Tables, lanes: int, places: _Places
) -> Iterator[Step]:
    """The kernels, each followed by the one that adds lent partial sums up."""
    own, constant = -1, places.loans
    for spec, numbers, loan in split.kernels:
        kernel, programs = _kernel(spec, tables, lanes)
        free = (0, tables.num_edges) if spec.divisible else ()
        stored = [places.stored[n] for n in numbers]
        if loan is not None:
            if loan.host is None and own < 0:
                own = places.add((tables.num_edges, loan.width))
            part = own if loan.host is None else places.results + loan.host
            stored[numbers.index(loan.result)] = part
        lists = (places.list(name) for name in _lists(spec))
        yield Step(kernel, programs, [*operands(spec), *stored, *lists], free)
        if loan is not None:
            rows, width = places.shape(loan.result)
            count, slot = len(loan.columns), call.results[loan.result].slot
            vector = VECTOR if _vectors(loan.columns) and _vectors(loan.places) else 1
            name, counts = written(KERNELS, "fold_lent_kernel"), (count, width, loan.width)
            kernel = Kernel(name, counts, (vector,), LOAN_TILE)
            lists = (places.list(f"{slot}_{name}") for name in ("indptr", "edges"))
            taken = (part, places.results + loan.result, constant, constant + 1, *lists)
            yield Step(kernel, rows * -(-count // LOAN_TILE.blocks[1]), taken)
            constant += 2


def _vectors(columns: Sequence[int]) -> bool:
    """Whether columns form contiguous groups of VECTOR, each from a multiple of VECTOR on."""
    groups = [columns[n : n + VECTOR] for n in range(0, len(columns), VECTOR)]
    return all(
        first % VECTOR == 0 and rest == list(range(first + 1, first + VECTOR))
        for first, *rest in groups
    )


def _kernel(spec: RowKernelSpec, tables: Tables, lanes: int) -> tuple[Kernel, int]:
    """The kernel of a specification, and its number of programs."""
    rows, edges = _rows(spec, tables), tables.num_edges
    short = spec.divisible and edges < SHORT_ROW * rows
    gluon = not (interpreted() or torch.version.hip)
    source = _source(spec, gluon, "row" if short else "edges")
    function = printed("o3_product", source, kernel_name(spec))
    block, tile_edges, warps, stages = spec.tiling
    tile = Tile((block, tile_edges, stages), warps, 1)
    if spec.divisible:
        span = min(EDGES_PER_WARP * tile_edges, max(1, edges // max(1, rows)))
        return Kernel(function, (span,), (), tile), -(-edges // span) * spec.channel_blocks
    items = -(-rows // tile_edges) if spec.runs or not spec.segmented else rows
    lanes = lanes if spec.looped else items
    return Kernel(function, (items, rows, lanes), (), tile), lanes * spec.channel_blocks


_source = functools.lru_cache(maxsize=256)(kernel_source)


def _lists(spec: RowKernelSpec) -> Iterator[str]:
    """Names of the lists that a kernel reads."""
    if spec.runs:
        yield from (f"runs_{name}" for name in Runs._fields[:4])
        return
    slot, own, other = (spec.owner, "dst", "src") if spec.owner == "z" else ("x", "src", "dst")
    wanted = (
        (f"{slot}_pieces" if spec.pieces else f"{slot}_indptr", spec.segmented),
        (f"{slot}_owner", spec.pieces),
        (own, spec.divisible),
        (f"{slot}_edges", spec.ordered),
        (other, spec.indexed),
    )
    yield from (name for name, there in wanted if there)


def _rows(spec: RowKernelSpec, tables: Tables) -> int:
    """Number of rows, pieces of rows or runs that the programs own."""
    if spec.runs and tables.runs is not None:
        return tables.runs.owner.shape[0]
    slices = tables.z_slices if spec.owner == "z" else tables.x_slices
    if slices is not None:
        return slices.num_pieces
    return tables.num_z if spec.owner == "z" else tables.num_x


def _lanes(split: KernelSplit, tables: Tables, device: torch.device) -> int:
    """Programs that share all rows where a program takes several, for one block of channels."""
    looped = [spec for spec, *_ in split.kernels if spec.looped]
    if not looped:
        return 0
    warps = max(spec.channel_blocks * spec.tiling.warps for spec in looped)
    share = WARPS_PER_PROCESSOR * processors(device) // warps
    return max(1, min(share, *(_rows(spec, tables) for spec in looped)))


# partial sums


def _result_plan(
    storage: ResultStorage | None,
    slot: str,
    shape: Shape,
    tables: Tables,
    lanes: int,
    device: torch.device,
) -> ResultPlan:
    if storage is None:
        return ResultPlan(shape, zero=True)
    if storage.direct or storage.rows == "lent":
        return ResultPlan(shape, zero=not storage.covered)
    count, walks = _walks(storage.rows, slot, shape[0], tables, lanes)
    places = None
    if storage.places is not None:
        places = torch.tensor(storage.places, dtype=torch.int32).to(device)
    sums, width = list[PartialSum](), storage.width
    for walk, rows in walks:
        sums.append(_partial_sum(walk, (rows, shape[1]), width, places, count))
        places, width = None, shape[1]
    return ResultPlan(shape, (count, storage.width), tuple(sums))


_Walk = tuple[str | None, str | None] | None
"""Names of the indptr and entries of partial sums; None: only columns are added up."""


def _walks(
    stored: str, slot: str, rows: int, tables: Tables, lanes: int
) -> tuple[int, list[tuple[_Walk, int]]]:
    """Number of stored rows, and for each partial sum its lists and number of rows."""
    slices = tables.z_slices if slot == "z" else tables.x_slices
    owners = (f"{slot}_owners", None), rows
    if stored == "lanes":
        return lanes, [((None, None), rows)]
    if stored == "runs" and tables.runs is not None:
        return tables.runs.owner.shape[0], [(("runs_bounds", "runs_order"), rows)]
    if stored == "pieces" and slices is not None:
        return slices.num_pieces, [owners]
    if stored == "edges" and slices is None:
        return tables.num_edges, [((f"{slot}_indptr", f"{slot}_edges"), rows)]
    if stored == "edges" and slices is not None:
        pieces = (f"{slot}_pieces", f"{slot}_edges"), slices.num_pieces
        return tables.num_edges, [pieces, owners]
    return rows, [(None, rows)]


def _partial_sum(
    walk: _Walk, shape: Shape, stored_width: int, places: Tensor | None, length: int
) -> PartialSum:
    rows, width = shape
    if walk is None:
        columns = min(128, 1 << max(width - 1, 0).bit_length())
        tile = Tile((FOLDED_NUMBERS // columns, columns), 1, 1)
        programs = -(-rows // tile.blocks[0]) * -(-width // columns)
        name, first = "fold_columns_kernel", rows
    else:
        tall, columns = (64, 32) if rows == 1 else (16, 128) if length > 8 * rows else (4, 256)
        tile = Tile((tall, columns), max(2, min(4, tall // 4)), 1)
        programs = rows * -(-width // columns)
        name, first = "fold_rows_kernel", length
    count = 1 if places is None else places.shape[0]
    kernel = Kernel(written(KERNELS, name), (first, width, stored_width), (count,), tile)
    lists = tuple(None if part is None else FLAT.index(part) for part in walk or ())
    return PartialSum(kernel, programs, lists, shape, places)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32
