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

from torchweft.core import private, recorded
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
    split_call,
)
from torchweft.o3.channelwise.gpu.source import kernel_name, operands
from torchweft.o3.channelwise.structure import Structure, entry_counts
from torchweft.o3.graph import FLAT, Runs, Tables, flat

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


class _Recipe(NamedTuple):
    """Launches on tensors, lists, constants, results and scratch, in this order."""

    launches: Launches
    constants: tuple[Tensor | None, ...]
    results: tuple[tuple[Shape, bool], ...]  # shape, and whether the result must be zero before
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
    return recorded.keep(recipe)


def _execute(
    recipe: _Recipe, tensors: Sequence[Tensor], lists: Sequence[Tensor | None]
) -> list[Tensor]:
    like = tensors[0]
    results = [
        like.new_zeros(shape) if zero else like.new_empty(shape) for shape, zero in recipe.results
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
    if not tables.num_edges:
        zeros = tuple((shape, True) for shape in shapes)
        return _Recipe(Launches(()), (), zeros, (), _wide(like.dtype))
    split = split_call(structure, call, _facts(structure, tables, shared, like.dtype))
    return _LaunchPlan(split, call, tables, shapes, like).recipe()


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


_TensorName = tuple[str, int]
"""A "tensor", "list", "constant", "result" or "scratch", and its number among these."""

NOTHING: _TensorName = ("constant", 0)


class _NamedStep(NamedTuple):
    """A launch whose tensors have no place yet."""

    kernel: Kernel
    programs: int
    taken: Sequence[_TensorName]
    free: tuple[int, ...] = ()


class _LaunchPlan:
    """The launches of a call, with constants and scratch memory that they need."""

    def __init__(
        self, split: KernelSplit, call: Call, tables: Tables, shapes: Sequence[Shape], like: Tensor
    ) -> None:
        self.split, self.call, self.tables, self.shapes = split, call, tables, shapes
        self.dtype, self.device = like.dtype, like.device
        self.constants: list[Tensor | None] = [None]
        self.scratch: list[Shape] = []

    def recipe(self) -> _Recipe:
        sums, lanes = list[_NamedStep](), _lanes(self.split, self.tables, self.device)
        stored = [self._stored(n, lanes, sums) for n in range(len(self.shapes))]
        kernels = list(self._kernels(lanes, stored))
        counts = {
            "tensor": len(self.call.slots),
            "list": len(FLAT),
            "constant": len(self.constants),
            "result": len(self.shapes),
            "scratch": len(self.scratch),
        }
        names = [(kind, n) for kind, count in counts.items() for n in range(count)]
        place = {name: n for n, name in enumerate(names)}
        wide = _wide(self.dtype)
        workspace = wide.itemsize * sum(map(math.prod, self.scratch))
        steps = [
            Step(
                kernel,
                programs,
                [place[name] for name in taken],
                free,
                workspace * (n < len(kernels)),
            )
            for n, (kernel, programs, taken, free) in enumerate((*kernels, *sums))
        ]
        zeros = (s is None or (s.direct and not s.covered) for s in self.split.outputs)
        results = tuple(zip(self.shapes, zeros, strict=True))
        constants, scratch = tuple(self.constants), tuple(self.scratch)
        return _Recipe(Launches(steps), constants, results, scratch, wide)

    def _new(self, shape: Shape) -> _TensorName:
        """New scratch memory."""
        self.scratch.append(shape)
        return "scratch", len(self.scratch) - 1

    def _constant(self, numbers: Sequence[Any]) -> _TensorName:
        """A new int32 tensor."""
        made = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        self.constants.append(made.to(self.device, non_blocking=True))  # a rehearsal may not wait
        return "constant", len(self.constants) - 1

    def _kernels(self, lanes: int, stored: Sequence[_TensorName]) -> Iterator[_NamedStep]:
        """The kernels, each followed by the one that adds lent partial sums up."""
        own: _TensorName | None = None
        for spec, numbers, loan in self.split.kernels:
            kernel, programs = _kernel(spec, self.tables, lanes)
            free = (0, self.tables.num_edges) if spec.divisible else ()
            parts = {n: stored[n] for n in numbers}
            if loan is not None and loan.host is not None:
                parts[loan.result] = "result", loan.host
            elif loan is not None:
                own = parts[loan.result] = own or self._new((self.tables.num_edges, loan.width))
            tensors = (("tensor", t) for t in operands(spec))
            yield _NamedStep(kernel, programs, [*tensors, *parts.values(), *_lists(spec)], free)
            if loan is not None:
                yield self._loan_sum(loan, parts[loan.result])

    def _loan_sum(self, loan: ColumnLoan, part: _TensorName) -> _NamedStep:
        """The kernel that adds up the partial sums of a loan."""
        (rows, width), count = self.shapes[loan.result], len(loan.columns)
        slot = self.call.results[loan.result].slot
        vector = VECTOR if _vectors(loan.columns) and _vectors(loan.places) else 1
        function, counts = written(KERNELS, "fold_lent_kernel"), (count, width, loan.width)
        tables = self._constant(loan.places), self._constant(loan.columns)
        lists = _list(f"{slot}_indptr"), _list(f"{slot}_edges")
        kernel = Kernel(function, counts, (vector,), LOAN_TILE)
        programs = rows * -(-count // LOAN_TILE.blocks[1])
        return _NamedStep(kernel, programs, [part, ("result", loan.result), *tables, *lists])

    def _stored(self, n: int, lanes: int, sums: list[_NamedStep]) -> _TensorName:
        """Where kernels store a result; the kernels that add its parts up are added to `sums`."""
        storage, slot, shape = self.split.outputs[n], self.call.results[n].slot, self.shapes[n]
        if storage is None or storage.direct:
            return "result", n
        count, walks = _walks(storage.rows, slot, shape[0], self.tables, lanes)
        part = first = self._new((count, storage.width))
        places, parts, width = NOTHING, 1, storage.width
        if storage.places is not None:
            places, parts = self._constant(storage.places), len(storage.places)
        for at, (walk, rows) in enumerate(walks, 1):
            total = ("result", n) if at == len(walks) else self._new((rows, shape[1]))
            kernel, programs = _partial_sum(walk is None, (rows, shape[1]), width, parts, count)
            lists = (NOTHING if name is None else _list(name) for name in walk or ())
            sums.append(_NamedStep(kernel, programs, [part, total, places, *lists]))
            part, places, parts, width = total, NOTHING, 1, shape[1]
        return first


def _list(name: str) -> _TensorName:
    return "list", FLAT.index(name)


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
    columns_only: bool, shape: Shape, stored_width: int, parts: int, length: int
) -> tuple[Kernel, int]:
    """A kernel that adds parts up, `parts` columns of `length` stored rows, and its programs."""
    rows, width = shape
    if columns_only:
        columns = min(128, 1 << max(width - 1, 0).bit_length())
        tile = Tile((FOLDED_NUMBERS // columns, columns), 1, 1)
        programs = -(-rows // tile.blocks[0]) * -(-width // columns)
        name = "fold_columns_kernel"
    else:
        tall, columns = (64, 32) if rows == 1 else (16, 128) if length > 8 * rows else (4, 256)
        tile = Tile((tall, columns), max(2, min(4, tall // 4)), 1)
        programs = rows * -(-width // columns)
        name = "fold_rows_kernel"
    counts = (rows if columns_only else length, width, stored_width)
    return Kernel(written(KERNELS, name), counts, (parts,), tile), programs


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


def _lists(spec: RowKernelSpec) -> list[_TensorName]:
    """The lists that a kernel reads."""
    if spec.runs:
        return [_list(f"runs_{name}") for name in Runs._fields[:4]]
    slot, own, other = (spec.owner, "dst", "src") if spec.owner == "z" else ("x", "src", "dst")
    wanted = (
        (f"{slot}_pieces" if spec.pieces else f"{slot}_indptr", spec.segmented),
        (f"{slot}_owner", spec.pieces),
        (own, spec.divisible),
        (f"{slot}_edges", spec.ordered),
        (other, spec.indexed),
    )
    return [_list(name) for name, there in wanted if there]


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


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32
