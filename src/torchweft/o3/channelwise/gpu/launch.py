"""Calls by generated Triton kernels: what is launched, and the memory between launches.

What a call needs beside its tensors and tables is settled once for each combination of structure,
call, sizes and dtype, and kept.
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
from torchweft.core.printing.modules import printed
from torchweft.o3.channelwise.calls import Call
from torchweft.o3.channelwise.gpu import gluon as dialects
from torchweft.o3.channelwise.gpu import source as generator
from torchweft.o3.channelwise.gpu.edge_rounds import Round, rounds
from torchweft.o3.channelwise.gpu.kernel_spec import Job
from torchweft.o3.channelwise.gpu.kernel_split import Division, Facts, Loan, divide
from torchweft.o3.channelwise.gpu.partial_sums import Made, loan_fold, made_of, round_fold
from torchweft.o3.channelwise.structure import Structure
from torchweft.o3.edges.graph import FLAT, Tables, flat
from torchweft.o3.edges.shared_source_runs import Runs
from torchweft.o3.irreps.wigner import entries_3j

__all__ = ["prepared", "run", "serves"]

MOST_RECIPES = 4096
"""One for each combination of structure, call, sizes and dtype."""

MOST_WORK = 2**13
"""Entries of 3j symbols times terms of a call that compilers bear: half a minute on one core."""

WARPS = 8
"""Of each processor where a program takes several rows: as many as run at once."""

LENT = 2**26
"""Bytes of parts from which on kernels lend each other room: more kernels add them up then."""

EDGES = 8
"""The most of a warp whose program can take some of a row's edges alone."""

MANY = 16
"""Edges of a row of x from which on there are rounds: each reads and writes the row again.

And those of a row of z from which on kernels that take some alone ask for the next edge's numbers,
not for the row: each edge reads it, but in short rows many edges are the first to.
"""

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
    with current_device(tensors[0]):
        recipe = _recipe(structure, call, tensors, tables, shared)
        return _execute(recipe, tensors, flat(tables))


def prepared(
    structure: Structure,
    call: Call,
    tensors: Sequence[Tensor],
    tables: Tables,
    shared: bool,
    listed: Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]],
) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """`run` for such tensors and tables.

    Args:
        structure: as in `run`, also those that follow.
        call: what is computed.
        tensors: those of the call, in any strides.
        tables: the edges.
        shared: whether w has one row for all edges.
        listed: takes the tables behind the tensors, and a None, to the order of FLAT.
    """
    count = len(tensors)
    device = tensors[0].get_device()
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


def _recipe(
    structure: Structure, call: Call, tensors: Sequence[Tensor], tables: Tables, shared: bool
) -> _Recipe:
    """What was settled for such a call, or is now."""
    like = tensors[0]
    lists, z, x, runs = flat(tables), *tables[9:]
    pieces = (z and z.num_pieces, x and x.num_pieces, runs and runs.owner.shape)
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
        _compile(recipe, tensors, lists)
    return recipe


class _Scratch(NamedTuple):
    """Parts in the dtype of sums: in a result, from a number on; None: in memory of their own."""

    shape: tuple[int, int]
    host: int | None = None
    place: int = 0


class _Recipe(NamedTuple):
    """Launches on tensors, lists, constants, results and scratch side by side."""

    launches: Launches
    constants: tuple[Tensor | None, ...]
    results: tuple[Made, ...]
    scratch: tuple[_Scratch, ...]


_recipes: dict[Any, _Recipe] = {}


def _facts(tables: Tables, shared: bool, dtype: torch.dtype) -> Facts:
    present = {
        "x": (tables.src, tables.x_edges, tables.x_slices),
        "z": (tables.dst, tables.z_edges, tables.z_slices),
    }
    indexed, ordered, pieces = (
        "".join(slot for slot, found in present.items() if found[i] is not None) for i in range(3)
    )
    runs = tables.runs is not None
    return Facts(indexed, ordered, pieces, shared, dtype == torch.float64, runs)


# execution


def _execute(
    recipe: _Recipe, tensors: Sequence[Tensor], lists: Sequence[Tensor | None]
) -> list[Tensor]:
    like = tensors[0]
    results = [
        like.new_zeros(made.shape) if made.zero else like.new_empty(made.shape)
        for made in recipe.results
    ]
    scratch = _scratch(recipe, results) if recipe.scratch else ()
    recipe.launches((*tensors, *lists, *recipe.constants, *results, *scratch))
    return results


def _scratch(recipe: _Recipe, results: Sequence[Tensor]) -> Iterator[Tensor]:
    wide = _wide(results[0].dtype)
    for shape, host, place in recipe.scratch:
        if host is None:
            yield results[0].new_empty(shape, dtype=wide)
        else:
            yield results[host].as_strided(shape, (shape[1], 1), place)


# preparation


def _compile(recipe: _Recipe, tensors: Sequence[Tensor], lists: tuple[Tensor | None, ...]) -> None:
    """All kernels at once, for results like those that will be."""
    like = tensors[0]
    plain, wide = like.new_empty(1), like.new_empty(1, dtype=_wide(like.dtype))
    results, scratch = [plain] * len(recipe.results), [wide] * len(recipe.scratch)
    every = (*tensors, *lists, *recipe.constants, *results, *scratch)
    launcher.compile_together(
        [
            launcher.Call(kernel, [every[n] for n in taken], free)
            for kernel, _, taken, free, _ in recipe.launches.steps
        ]
    )


def _prepare(
    structure: Structure, call: Call, tables: Tables, facts: Facts, like: Tensor
) -> _Recipe:
    rows = {"x": tables.num_x, "z": tables.num_z, "y": tables.num_edges}
    rows["w"] = 1 if facts.shared else tables.num_edges
    shapes = [(rows[result.slot], structure.width(result.slot)) for result in call.results]
    if not tables.num_edges:
        return _Recipe(Launches(()), (), tuple(Made(shape, None, (), True) for shape in shapes), ())
    division = divide(structure, call, facts)
    turns = _turns(division, shapes, tables, like.dtype)
    if len(turns) == 1 and _lends(structure, tables, like.dtype):
        division = divide(structure, call, facts._replace(lends=True))
    lanes = _lanes(division, tables, like.device)
    near = division.near if len(turns) > 1 else ()
    made = tuple(
        Made(shape, None, (), False)
        if n in near
        else made_of(output, result.slot, shape, tables, lanes, like.device)
        for n, (output, result, shape) in enumerate(
            zip(division.outputs, call.results, shapes, strict=True)
        )
    )
    plan = _Places(len(call.slots), made, _tables(division.loans, like.device))
    lent = dict(_lent(division, call, shapes, tables, plan))
    folds = tuple(plan.folds())
    begin = plan.end
    for turn in turns if near else ():
        host = division.host if turn.places else None
        for n, at in zip(near, turn.places or (0,) * len(near), strict=True):
            plan.add((turn.end - turn.begin, shapes[n][1]), host, at)
    own = sum(math.prod(s.shape) for s in plan.scratch if s.host is None)
    workspace = _wide(like.dtype).itemsize * own
    kernels = (
        step._replace(workspace_bytes=workspace)
        for step in _steps(division, shapes, tables, lanes, plan, begin, turns, lent)
    )
    launches = Launches((*kernels, *folds))
    return _Recipe(launches, plan.constants, made, tuple(plan.scratch))


class _Places:
    """Where tensors stand side by side: those of the call, lists, constants, results, scratch.

    Args:
        lists: where lists begin.
        made: the results.
        tables: of loans, the last constants.
    """

    def __init__(self, lists: int, made: Sequence[Made], tables: Sequence[Tensor]) -> None:
        self.lists, self._made = lists, made
        self.constants = (None, *(fold.places for m in made for fold in m.folds), *tables)
        self.results = lists + len(FLAT) + len(self.constants)
        self.tables = self.results - len(tables)
        self.scratch: list[_Scratch] = []
        self.written = [
            self.add(m.parts) if m.parts else self.results + n for n, m in enumerate(made)
        ]

    @property
    def end(self) -> int:
        """Where the next scratch will be."""
        return self.results + len(self._made) + len(self.scratch)

    def add(self, *scratch: Any) -> int:
        """Where this scratch is."""
        self.scratch.append(_Scratch(*scratch))
        return self.end - 1

    def folds(self) -> Iterator[Step]:
        """The kernels that add parts of results up."""
        nothing = self.lists + len(FLAT)
        place = nothing
        for n, m in enumerate(self._made):
            part = self.written[n]
            for fold in m.folds:
                place += 1
                total = self.results + n if fold is m.folds[-1] else self.add(fold.shape)
                walked = (nothing if k is None else self.lists + k for k in fold.lists)
                yield Step(fold.kernel, fold.programs, (part, total, place, *walked))
                part = total


def _lends(structure: Structure, tables: Tables, dtype: torch.dtype) -> bool:
    """Whether parts of edges may lie in the gradient of weights, and are worth it."""
    parts = tables.num_edges * structure.width("x") * dtype.itemsize
    return dtype == _wide(dtype) and tables.x_slices is None and parts > LENT


_Lent = dict[tuple[int, int], tuple[int, Step]]
"""For the number of a kernel, from 1 on, and of a result: where its parts are, what adds them."""


def _tables(loans: Sequence[Loan], device: torch.device) -> list[Tensor]:
    """Places and columns of one loan after the other."""
    lists = (part for loan in loans for part in (loan.places, loan.columns))
    return [torch.tensor(part, dtype=torch.int32).to(device) for part in lists]


def _lent(
    division: Division,
    call: Call,
    shapes: Sequence[tuple[int, int]],
    tables: Tables,
    plan: _Places,
) -> Iterator[tuple[tuple[int, int], tuple[int, Step]]]:
    """The entries of a _Lent."""
    own = -1
    for k, loan in enumerate(division.loans):
        n = loan.number
        if loan.host is None and own < 0:
            own = plan.add((tables.num_edges, loan.width))
        part = own if loan.host is None else plan.results + loan.host
        kernel, programs = loan_fold(loan, shapes[n])
        lists = [FLAT.index(f"{call.results[n].slot}_{name}") for name in ("indptr", "edges")]
        walked = (plan.lists + number for number in lists)
        taken = (part, plan.results + n, plan.tables + 2 * k, plan.tables + 2 * k + 1, *walked)
        yield (loan.jobs, n), (part, Step(kernel, programs, taken))


def _turns(
    division: Division, shapes: Sequence[tuple[int, int]], tables: Tables, dtype: torch.dtype
) -> list[Round]:
    """Rounds, if parts fit into the gradient of weights and rows of x are not short and not cut."""
    edges = tables.num_edges
    whole = dtype == _wide(dtype) and tables.x_slices is None
    if division.host is None or not whole or not MANY * tables.num_x <= edges < 2**31:
        return [Round(0, edges, None)]
    parts = tuple(shapes[n][1] for n in division.near)
    return rounds(edges, shapes[division.host][1], parts, dtype.itemsize)


def _steps(
    division: Division,
    shapes: Sequence[tuple[int, int]],
    tables: Tables,
    lanes: int,
    plan: _Places,
    begin: int,
    turns: Sequence[Round],
    lent: _Lent,
) -> Iterator[Step]:
    """The kernels of one round of edges after another, and those that add its parts up.

    The parts of rounds begin at `begin`.
    """
    lists, near = plan.lists, division.near if len(turns) > 1 else ()
    jobs = [(job, numbers, *_kernel(job, tables, lanes)) for job, numbers in division.jobs]
    folds = [(n, *round_fold(shapes[n])) for n in near]
    walked = [lists + FLAT.index(name) for name in ("x_indptr", "x_edges")]
    for at, turn in enumerate(turns):
        ends = (turn.begin, turn.end)
        parts = {n: begin + at * len(near) + i for i, n in enumerate(near)}
        for count, (job, numbers, kernel, programs) in enumerate(jobs, 1):
            mine = {n: lent[count, n] for n in numbers if (count, n) in lent}
            places = parts | {n: part for n, (part, _) in mine.items()}
            taken = [*generator.operands(job), *(places.get(n, plan.written[n]) for n in numbers)]
            taken += (lists + n for n in _lists(job))
            free = ends if job.divisible else ()
            yield Step(kernel, programs(*ends), taken, free)
            yield from (fold for _, fold in mine.values())
        for n, kernel, count in folds:
            yield Step(kernel, count, (parts[n], plan.results + n, *walked), ends)


def _kernel(job: Job, tables: Tables, lanes: int) -> tuple[Kernel, Callable[[int, int], int]]:
    """A job's kernel, and how many programs take the edges of a round."""
    rows, blocks = _items(job, tables), job.channel_blocks
    short = job.divisible and tables.num_edges < MANY * rows
    gluon = not (interpreted() or torch.version.hip)
    source = _source(job, gluon, "row" if short else "edges")
    function = printed("o3_product", source, generator.name(job))
    tile = Tile((job.tiling.block, job.tiling.edges, job.tiling.stages), job.tiling.warps, 1)
    items = -(-rows // job.tiling.edges) if job.runs or not job.segmented else rows
    numbers: tuple[int, ...] = (items, rows, lanes if job.looped else items)
    if job.divisible:
        span = min(EDGES * job.tiling.edges, max(1, tables.num_edges // max(1, rows)))
        numbers = (span,)
    kernel = Kernel(function, numbers, (), tile)
    if job.divisible:
        return kernel, lambda begin, end: -(-(end - begin) // span) * blocks
    return kernel, lambda begin, end: numbers[2] * blocks


def _lists(job: Job) -> Iterator[int]:
    """The tables that a kernel reads, by their places in FLAT."""
    if job.runs:
        yield from (FLAT.index(f"runs_{name}") for name in Runs._fields[:4])
        return
    slot, index = job.owner, "src" if job.owner == "z" else "dst"
    wanted = {
        f"{slot}_pieces" if job.pieces else f"{slot}_indptr": job.segmented,
        f"{slot}_owner": job.pieces,
        "dst" if slot == "z" else "src": job.divisible,
        f"{slot}_edges": job.ordered,
        index: job.indexed,
    }
    yield from (FLAT.index(name) for name, there in wanted.items() if there)


_source = functools.lru_cache(maxsize=256)(dialects.printed)


def _items(job: Job, tables: Tables) -> int:
    """Rows, pieces of rows or runs that the programs of a job own."""
    if job.runs and tables.runs is not None:
        return tables.runs.owner.shape[0]
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


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32
