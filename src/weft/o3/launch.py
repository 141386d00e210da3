"""Calls by generated Triton kernels: what is launched, and the memory between launches.

What a call needs beside its tensors and tables is settled once for each combination of structure,
call, sizes and dtype, and kept.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core import launcher
from weft.core.backend import interpreted
from weft.core.generated import load
from weft.core.launcher import Kernel, Tile, current_device, processors
from weft.o3 import dialects, generator, kernels
from weft.o3.contraction import Call
from weft.o3.division import Division, Facts, Output, divide
from weft.o3.generator import Job
from weft.o3.graph import FLAT, Tables, flat
from weft.o3.structure import Structure
from weft.o3.wigner import entries_3j

__all__ = ["run", "serves"]

MOST_RECIPES = 4096
"""One for each combination of structure, call, sizes and dtype."""

MOST_WORK = 2**13
"""Entries of 3j symbols times terms of a call that compilers bear: half a minute on one core."""

WARPS = 8
"""Of each processor where a program takes several rows: as many as run at once."""

EDGES = 8
"""The fewest that a program takes, on average, of a row that several programs share."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def serves(structure: Structure, call: Call, dtype: torch.dtype) -> bool:
    """Whether kernels of a call can be printed and compiled in reasonable time."""
    terms = sum(len(result.terms) for result in call.results)
    found = sum(
        len(entries_3j(*product.degrees(path)))
        for product in structure.products
        for path in product.paths
    )
    return dtype in DTYPES and terms * found <= MOST_WORK


def run(
    structure: Structure, call: Call, tensors: Sequence[Tensor], tables: Tables, shared: bool
) -> list[Tensor]:
    """The results of a call.

    Args:
        structure: blocks and paths.
        call: what is computed.
        tensors: one for each of the call's slots, (rows, width) contiguous.
        tables: the edges.
        shared: whether w has one row for all edges.
    """
    like = tensors[0]
    lists, z, x = flat(tables), tables.z_slices, tables.x_slices
    pieces = (z and z.num_pieces, x and x.num_pieces)
    # tables that were traced are int64 however small their numbers: other machine code
    index = tables.src if tables.dst is None else tables.dst
    kinds = (*map(type, lists), index is not None and index.dtype)
    key = (structure, call, tables[:3], pieces, kinds, shared, like.dtype, like.device)
    recipe = _recipes.get(key)
    if recipe is None:
        if len(_recipes) >= MOST_RECIPES:
            _recipes.clear()
        facts = _facts(tables, shared, like.dtype)
        recipe = _recipes[key] = _prepare(structure, call, tables, facts, like)
        with current_device(like):
            _compile(recipe, tensors, lists)
    with current_device(like):
        return _execute(recipe, tensors, lists)


class _Fold(NamedTuple):
    """One kernel that adds parts up: the lists it walks, and the shape of what it makes."""

    kernel: Kernel
    programs: int
    lists: tuple[int | None, ...]
    shape: tuple[int, int]
    places: Tensor | None

    def operands(
        self, part: Tensor, total: Tensor, lists: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        walked = (None if n is None else lists[n] for n in self.lists)
        return [part, total, self.places, *walked]


class _Made(NamedTuple):
    """A result: what kernels write, and what adds it up."""

    shape: tuple[int, int]
    parts: tuple[int, int] | None
    folds: tuple[_Fold, ...]
    zero: bool


class _Step(NamedTuple):
    """A kernel of paths, and what it takes of tensors, lists and results side by side."""

    kernel: Kernel
    programs: int
    takes: Callable[[Sequence[Tensor | None]], tuple[Tensor | None, ...]]


class _Recipe(NamedTuple):
    steps: tuple[_Step, ...]
    results: tuple[_Made, ...]
    workspace: int  # bytes of parts


_recipes: dict[Any, _Recipe] = {}


def _facts(tables: Tables, shared: bool, dtype: torch.dtype) -> Facts:
    present = {
        "x": (tables.src, tables.x_edges, tables.x_slices),
        "z": (tables.dst, tables.z_edges, tables.z_slices),
    }
    indexed, ordered, pieces = (
        "".join(slot for slot, found in present.items() if found[i] is not None) for i in range(3)
    )
    return Facts(indexed, ordered, pieces, shared, dtype == torch.float64)


# execution


def _execute(
    recipe: _Recipe, tensors: Sequence[Tensor], lists: tuple[Tensor | None, ...]
) -> list[Tensor]:
    like = tensors[0]
    results = [
        like.new_zeros(made.shape) if made.zero else like.new_empty(made.shape)
        for made in recipe.results
    ]
    if not recipe.workspace:
        every = (*tensors, *lists, *results)
        for kernel, programs, takes in recipe.steps:
            kernel(programs, takes(every))
        return results
    wide = _wide(like.dtype)
    parts = [
        result if made.parts is None else like.new_empty(made.parts, dtype=wide)
        for result, made in zip(results, recipe.results, strict=True)
    ]
    every = (*tensors, *lists, *parts)
    for kernel, programs, takes in recipe.steps:
        kernel(programs, takes(every), (), recipe.workspace)
    for part, result, made in zip(parts, results, recipe.results, strict=True):
        for fold in made.folds:
            last = fold is made.folds[-1]
            total = result if last else like.new_empty(fold.shape, dtype=wide)
            fold.kernel(fold.programs, fold.operands(part, total, lists))
            part = total
    return results


# preparation


def _compile(recipe: _Recipe, tensors: Sequence[Tensor], lists: tuple[Tensor | None, ...]) -> None:
    """All kernels at once, for results like those that will be."""
    like = tensors[0]
    plain, wide = like.new_empty(1), like.new_empty(1, dtype=_wide(like.dtype))
    every = (*tensors, *lists, *(wide if made.parts else plain for made in recipe.results))
    calls = [launcher.Call(kernel, takes(every)) for kernel, _, takes in recipe.steps]
    for made in recipe.results:
        for fold in made.folds:
            total = plain if fold is made.folds[-1] else wide
            calls.append(launcher.Call(fold.kernel, fold.operands(wide, total, lists)))
    launcher.compile_together(calls)


def _prepare(
    structure: Structure, call: Call, tables: Tables, facts: Facts, like: Tensor
) -> _Recipe:
    rows = {"x": tables.num_x, "z": tables.num_z, "y": tables.num_edges}
    rows["w"] = 1 if facts.shared else tables.num_edges
    shapes = [(rows[result.slot], structure.width(result.slot)) for result in call.results]
    if not tables.num_edges:
        return _Recipe((), tuple(_Made(shape, None, (), True) for shape in shapes), 0)
    division = divide(structure, call, facts)
    lanes = _lanes(division, tables, like.device)
    first = len(call.slots)
    steps = tuple(_step(job, numbers, tables, lanes, first) for job, numbers in division.jobs)
    made = tuple(
        _made(output, result.slot, shape, tables, lanes, like.device)
        for output, result, shape in zip(division.outputs, call.results, shapes, strict=True)
    )
    size = _wide(like.dtype).itemsize
    return _Recipe(steps, made, sum(size * math.prod(m.parts) for m in made if m.parts))


def _step(job: Job, numbers: tuple[int, ...], tables: Tables, lanes: int, first: int) -> _Step:
    """A job's kernel; lists begin at `first`, results behind them."""
    rows = _items(job, tables)
    items = rows if job.segmented else -(-rows // job.tiling.edges)
    module = load("o3_product", _source(job, not (interpreted() or torch.version.hip)))
    tile = Tile((job.tiling.block, job.tiling.edges, job.tiling.stages), job.tiling.warps, 1)
    if not job.looped:
        lanes = items * (_shares(items, tables.num_edges) if job.divisible else 1)
    kernel = Kernel(module.__dict__[generator.name(job)], (items, rows, lanes), (), tile)
    results = (first + len(FLAT) + n for n in numbers)
    lists = (first + n for n in _lists(job))
    programs = lanes * job.channel_blocks
    return _Step(kernel, programs, operator.itemgetter(*generator.operands(job), *results, *lists))


def _lists(job: Job) -> Iterator[int]:
    """The tables that a kernel reads, by their places in FLAT."""
    slot, index = job.owner, "src" if job.owner == "z" else "dst"
    wanted = {
        f"{slot}_pieces" if job.pieces else f"{slot}_indptr": job.segmented,
        f"{slot}_owner": job.pieces,
        f"{slot}_edges": job.ordered,
        index: job.indexed,
    }
    return (FLAT.index(name) for name, there in wanted.items() if there)


_source = functools.lru_cache(maxsize=256)(dialects.printed)


def _shares(items: int, num_edges: int) -> int:
    """Programs that share the edges of a row."""
    return max(1, num_edges // max(1, items * EDGES))


def _items(job: Job, tables: Tables) -> int:
    """Rows, or pieces of rows, that the programs of a job own."""
    slices = tables.z_slices if job.owner == "z" else tables.x_slices
    if slices is not None:
        return slices.num_pieces
    return tables.num_z if job.owner == "z" else tables.num_x


def _lanes(division: Division, tables: Tables, device: torch.device) -> int:
    """Programs that share the rows where a program takes several, for a block of channels."""
    looped = [job for job, _ in division.jobs if job.looped]
    if not looped:
        return 0
    warps = max(job.channel_blocks * job.tiling.warps for job in looped)
    share = WARPS * processors(device) // warps
    return max(1, min(share, *(_items(job, tables) for job in looped)))


def _made(
    output: Output | None,
    slot: str,
    shape: tuple[int, int],
    tables: Tables,
    lanes: int,
    device: torch.device,
) -> _Made:
    if output is None:
        return _Made(shape, None, (), True)
    if output.direct:
        return _Made(shape, None, (), not output.covered)
    slices = tables.z_slices if slot == "z" else tables.x_slices
    places = None if output.places is None else torch.tensor(output.places, dtype=torch.int32)
    walks = [(f"{slot} columns", shape[0])]
    count = shape[0]
    if output.rows == "lanes":
        walks, count = [(f"{slot} all", shape[0])], lanes
    elif output.rows == "pieces" and slices is not None:
        walks, count = [(f"{slot} owners", shape[0])], slices.num_pieces
    elif output.rows == "edges":
        walks, count = [(f"{slot} rows", shape[0])], tables.num_edges
        if slices is not None:
            walks = [(f"{slot} pieces", slices.num_pieces), (f"{slot} owners", shape[0])]
    folds: list[_Fold] = []
    width = output.width
    for walk, made_rows in walks:
        here = None if folds or places is None else places.to(device)
        folds.append(_fold(walk, (made_rows, shape[1]), width, here, count))
        width = shape[1]
    return _Made(shape, (count, output.width), tuple(folds), False)


def _fold(
    walk: str, shape: tuple[int, int], partial_width: int, places: Tensor | None, length: int
) -> _Fold:
    count = 1 if places is None else places.shape[0]
    rows, width = shape
    if walk.endswith("columns"):
        columns = min(128, 1 << max(width - 1, 0).bit_length())
        tile = Tile((1024 // columns, columns), 4, 1)
        programs = -(-rows // tile.blocks[0]) * -(-width // columns)
        numbers: tuple[int, ...] = (rows, width, partial_width)
        kernel = kernels.fold_columns_kernel
    else:
        tall = 64 if rows == 1 else 16 if length > 8 * rows else 8
        tile = Tile((tall, 32 if rows == 1 else 128), max(2, min(4, tall // 4)), 1)
        programs = rows * -(-width // tile.blocks[1])
        numbers = (length, width, partial_width)
        kernel = kernels.fold_rows_kernel
    fold = Kernel(kernel, numbers, (count,), tile)
    return _Fold(fold, programs, _walked(*walk.split()), shape, places)


def _walked(slot: str, what: str) -> tuple[int | None, ...]:
    """The indptr and the entries of a fold, by their places in FLAT."""
    names = {
        "columns": (),
        "all": (None, None),
        "owners": (f"{slot}_owners", None),
        "pieces": (f"{slot}_pieces", f"{slot}_edges"),
        "rows": (f"{slot}_indptr", f"{slot}_edges"),
    }
    return tuple(None if name is None else FLAT.index(name) for name in names[what])


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32
