"""Recipes of reductions on a GPU: kernels, grids, merges, and how each variable is stored.

A recipe follows from formulas, sizes and dtypes, and is cached by them: nothing is timed.
Variables are stored as they are given, or

    by component       (B or 1, dim, pitch), pitch ≥ length: neighbours are of one component
    in blocks          dim filled up with zeros to whole blocks of components

Blocks of pairs are cut into tasks for the programs of a kernel, on the device and without waiting:

    tiles      up to `height` rows of one block: (first task, last task, first row, last row)
    tasks      a tile by a stretch of its list of columns: (first row, last row, first interval,
               last interval, first place, last place)
    intervals  (first column, last column, place)

A place counts columns through all lists, one list after the other.  Neighbouring intervals of a
list that touch become one.  The numbers of tiles and tasks are known on the device alone: tables
have an upper bound as length, and their last entries have no rows.  Lists are cut so that no task
is longer than its share of all columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.core.gpu.launcher import Call, Kernel, Launches, Step, Tile, processors
from torchweft.core.printing.modules import printed, written
from torchweft.core.tables import TensorCache
from torchweft.reductions.call import Blocks, KernelSpec, ReductionData, Sizes, Wanted
from torchweft.reductions.formula.evaluate import evaluate
from torchweft.reductions.formula.kernel_forms import BLOCK, Looped, looped
from torchweft.reductions.formula.node import Node, variables
from torchweft.reductions.gpu import source as generator
from torchweft.reductions.gpu.source import TILES_PER_BLOCK, list_slots, tile

__all__ = ["Allocation", "ReductionRecipe", "TaskTables", "kernel_jobs", "recipe_of", "tasks"]

COMPONENTS_PER_KERNEL = 4
"""Components that one kernel sums."""

TASKS_PER_PROCESSOR = 8

MANY_PAIRS = 2**26
"""Pairs from which the time of a sum counts beside that of its call, so that tiles of points near
each other are worth a second loop in its kernel, which takes as long to compile as the first."""

NUMBERS_PER_LINE = 32
"""Numbers of a line of memory: components begin with one."""

Allocation = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor that a call allocates."""


class _Stored(NamedTuple):
    """How a variable lies in memory.

    Args:
        formula: its value.
        size: components, with padding.
        pitch: stride of components; 0 where the components of a row are neighbours.
        stride: stride of batch entries.
    """

    formula: Node
    size: int
    pitch: int
    stride: int

    @property
    def as_given(self) -> bool:
        """Whether it is a variable as it is."""
        f = self.formula
        return f.op == "var" and not self.pitch and self.size == f.dim

    def tensor(self, values: Mapping[int, Tensor]) -> Tensor:
        """The value in this layout."""
        f = self.formula
        value = values[f.data[0]] if f.op == "var" else evaluate(f, values)
        if not self.pitch:
            return pad(value, (0, self.size - f.dim)) if self.size > f.dim else value.contiguous()
        made = value.new_zeros(value.shape[0], self.size, self.pitch)
        made[:, : f.dim, : value.shape[1]] = value.transpose(1, 2)
        return made


class ReductionRecipe(NamedTuple):
    """What a call launches and allocates.

    Args:
        launches: kernels and merges.  They take, side by side: values, results, partial results,
            then tiles, tasks, intervals and the guard.
        kernels: number of kernels, without merges.
        stored: how each value lies in memory; None for one that no kernel reads.
        partials: the partial results, which steps share.
        shape: the tile of all kernels.
        blocks: blocks of components that batch entries have; 0 if components are not shared out.
        size: components of a block.
    """

    launches: Launches
    kernels: int
    stored: tuple[_Stored | None, ...]
    partials: tuple[Allocation, ...]
    shape: Tile
    blocks: int
    size: int

    @property
    def as_given(self) -> bool:
        """Whether kernels read and write tensors as they are given."""
        return not self.blocks and all(s is None or s.as_given for s in self.stored)

    def cut(self, blocks: Blocks, rows: int, device: torch.device) -> TaskTables:
        """The tasks of blocks."""
        height, width = self.shape.blocks[:2]
        share = TASKS_PER_PROCESSOR * processors(device)
        return tasks(blocks, rows, height, share, TILES_PER_BLOCK * width)

    def calls(self, taken: Sequence[Tensor | None]) -> list[Call]:
        """Calls to compile for these tensors."""
        return [Call(s.kernel, [taken[n] for n in s.taken]) for s in self.launches.steps]


def recipe_of(
    wanted: Wanted,
    data: ReductionData,
    counts: tuple[int, int] | None = None,
    guarded: bool = False,
) -> ReductionRecipe:
    """The recipe of a call, for values of this signature.

    `counts` are the numbers of blocks and intervals, None for all pairs; `guarded` says whether
    kernels run only where a guard is 0.
    """
    values, sizes, _, options = data
    dtype, device = data.like.dtype, data.like.device
    many = math.prod(sizes) >= MANY_PAIRS
    f, *w = wanted.formulas
    job = KernelSpec(
        wanted.kind,
        f,
        w[0] if w else None,
        first=0,
        last=0,
        ranged=counts is not None,
        wide=dtype == torch.float64,
        accumulate=options.accumulate,
        kept=max(wanted.k, 1),
        nan_first=wanted.kind == "smallest" and not wanted.k,
        far=sizes.columns >= 2**31,
        guarded=guarded,
        near=many and not guarded and options.precision != "ieee",
        ending=wanted.ending,
    )
    batched = tuple([(n, t.shape[0] > 1) for n, t in values.items()])
    return _recipe(job, sizes, counts, dtype, device, batched)


@functools.lru_cache(maxsize=4096)
def _recipe(
    whole: KernelSpec,
    sizes: Sizes,
    counts: tuple[int, int] | None,
    dtype: torch.dtype,
    device: torch.device,
    batched: tuple[tuple[int, bool], ...],
) -> ReductionRecipe:
    what, jobs = kernel_jobs(whole)
    fill = sizes.rows if counts is None else sizes.rows / max(counts[0], 1)
    # one list of tasks serves all
    shape = min((tile(job, fill) for job in jobs), key=lambda t: t.blocks[0] // t.num_warps)
    entries = sizes._replace(batch=sizes.batch * max(what.blocks, 1))
    grid = _grid(entries, counts, shape, device)
    partial = whole.ranged or grid.merged[1] > 1
    jobs = [job._replace(partial=partial) for job in jobs]
    beyond, given = max(shape.blocks[:2]), dict(batched)
    stored = {}
    for v in (v for job in jobs for v in generator.operands(job)):
        stored[v.data[0]] = _stored(v, what, given, sizes, beyond, jobs[0].apart(v))
    # made variables have numbers behind the given ones
    values = {n: stored.get(n) for n in sorted(given.keys() | stored.keys())}
    steps, partials = _steps(jobs, values, grid, shape, what.blocks)
    ways, size = tuple(values.values()), what.formulas[-1].dim
    return ReductionRecipe(Launches(steps), len(jobs), ways, partials, shape, what.blocks, size)


def kernel_jobs(whole: KernelSpec) -> tuple[Looped, list[KernelSpec]]:
    """The formulas of a reduction as kernels compute them, and a job for each few components."""
    given = [f for f in (whole.formula, whole.weight) if f is not None]
    what = looped(*given, size=1 if whole.kind == "smallest" else BLOCK)
    formula, *weight = what.formulas
    blocked = tuple(m.number for m in what.made if m.blocked)
    job = whole._replace(formula=formula, inner=what.inner, blocked=blocked)
    job = job._replace(weight=weight[0] if weight else None)
    long = bool(what.inner or what.blocks)  # pairs are dear, or the tile is that of a block
    step = 1 if job.kind == "smallest" else BLOCK if long else COMPONENTS_PER_KERNEL
    dim = what.formulas[-1].dim
    starts = range(0, dim, step)
    return what, [job._replace(first=n, last=min(n + step, dim)) for n in starts]


def _steps(
    jobs: Sequence[KernelSpec],
    values: Mapping[int, _Stored | None],
    grid: _Grid,
    shape: Tile,
    blocks: int,
) -> tuple[list[Step], tuple[Allocation, ...]]:
    """Kernels and merges, and the partial results that they share."""
    kind, ranged, guarded = jobs[0].kind, jobs[0].ranged, jobs[0].guarded
    height, places = shape.blocks[0], {n: place for place, n in enumerate(values)}
    results = range(len(values), len(values) + (1 if kind == "sums" else 2))
    each = [_partials(job, grid, height) for job in jobs]
    partials = tuple(dict.fromkeys(p for own in each for p in own))
    behind = results.stop + len(partials)
    tiles, *lists, guard = range(behind, behind + 4)
    lists = [*(lists if ranged else []), *([guard] if guarded else [])]
    steps = []
    for job, own in zip(jobs, each, strict=True):
        read = [v.data[0] for v in generator.operands(job)]
        made = [results.stop + partials.index(p) for p in own]
        ways = [s for n in read if (s := values[n]) is not None]
        numbers = [*grid.numbers, *(s.stride for s in ways), *([blocks] if blocks else [])]
        numbers += [s.pitch for s in ways if s.pitch]
        function = printed(f"reductions_{kind}", generator.source(job), f"{kind}_kernel")
        kernel = Kernel(function, tuple(numbers), (), shape)
        taken = [*(places[n] for n in read), *(made or results), *lists]
        room = sum(math.prod(lengths) * dtype.itemsize for lengths, dtype in own)
        steps.append(Step(kernel, grid.programs, taken, (), room))
        if job.partial:
            tables = [tiles, guard] if ranged or guarded else []
            steps.append(_merge(job, grid, height, [*made, *results, *tables]))
    return steps, partials


class _Grid(NamedTuple):
    """The grid of the kernels of a recipe.

    Args:
        programs: number of programs.
        numbers: arguments of kernels, TASK_NUMBERS of `source`.
        merges: tiles of all batch entries, a program of a merge each.
        merged: arguments of merges: tiles of a batch entry, tasks of a tile (or of all), rows.
    """

    programs: int
    numbers: tuple[int, ...]
    merges: int
    merged: tuple[int, int, int]


def _grid(sizes: Sizes, counts: tuple[int, int] | None, shape: Tile, device: torch.device) -> _Grid:
    batch, rows, columns = sizes
    height, width = shape.blocks[:2]
    share = TASKS_PER_PROCESSOR * processors(device)
    if counts is not None:
        tiles = counts[0] + rows // height
        most = tiles + share
        return _Grid(batch * most, (rows, most), batch * tiles, (tiles, most, rows))
    tiles = -(-rows // height)
    shared = max(1, min(-(-share // (batch * tiles)), -(-columns // (4 * width))))
    length = -(-columns // (shared * width)) * width
    shared = -(-columns // length)
    numbers = (rows, columns, tiles, shared, length)
    return _Grid(batch * tiles * shared, numbers, batch * tiles, (tiles, shared, rows))


def _stored(
    v: Node, what: Looped, batched: Mapping[int, bool], sizes: Sizes, beyond: int, apart: bool
) -> _Stored:
    """How a kernel reads a variable, by up to `beyond` rows or columns past the data."""
    made = next((m for m in what.made if m.number == v.data[0]), None)
    f = v if made is None else made.formula
    size = what.blocks * v.dim if made is not None and made.blocked else v.dim
    length = (sizes.rows, sizes.columns, 1)[v.data[2]]
    pitch = -(-(length + beyond) // NUMBERS_PER_LINE) * NUMBERS_PER_LINE if apart else 0
    entry = size * (pitch or length)
    return _Stored(f, size, pitch, entry * any(batched[u.data[0]] for u in variables(f)))


def _partials(job: KernelSpec, grid: _Grid, height: int) -> list[Allocation]:
    """The partial results of a job; none where it writes the result itself."""
    if not job.partial:
        return []
    if job.kind == "smallest":
        shape = (grid.programs, height, job.kept)
        return [(shape, torch.float64 if job.wide else torch.float32), (shape, torch.int64)]
    outputs = job.last - job.first + (job.kind == "shifted")
    return [((grid.programs, outputs, height), getattr(torch, job.accumulator))]


def _merge(job: KernelSpec, grid: _Grid, height: int, taken: Sequence[int]) -> Step:
    """What merges the partial results of a job."""
    outputs, programs = job.last - job.first, grid.merges
    constants: tuple[Any, ...] = (outputs, job.components, job.first, job.ranged)
    if job.kind == "sums":
        programs *= outputs
    elif job.kind == "shifted":
        constants = (*constants, job.ending)
    else:
        constants = (job.kept, list_slots(job), *constants[1:], job.sign, job.nan_first)
    function = written("torchweft.reductions.gpu.kernels", f"merge_{job.kind}_kernel")
    tables = () if job.ranged or job.guarded else (None, None)
    kernel = Kernel(function, (*tables, *grid.merged), constants, Tile((height,), 4, 1))
    return Step(kernel, programs, taken)


# blocks of pairs as tasks


class TaskTables(NamedTuple):
    """int64 tables, contiguous: (tiles, 4), (tasks, 6), (intervals, 3)."""

    tiles: Tensor
    tasks: Tensor
    intervals: Tensor


_tasks: TensorCache[TaskTables] = TensorCache()


def tasks(blocks: Blocks, rows: int, height: int, share: int, least: int) -> TaskTables:
    """The tasks of blocks, cached as long as these live.

    Args:
        blocks: the pairs.
        rows: of the result.
        height: rows of a tile.
        share: least number of tasks, unless these are too short.
        least: least number of columns of a task that is cut.
    """
    key = (rows, height, share, least)
    return _tasks.get(tuple(blocks), key, lambda: _cut(blocks, *key))


def _cut(blocks: Blocks, rows: int, height: int, share: int, least: int) -> TaskTables:
    starts, ends, indptr, first, last = _joined(blocks)
    before = _before(last - first)
    limits = before.index_select(0, indptr)
    most = len(starts) + rows // height
    tile_before = _before((ends - starts + (height - 1)) // height)
    of_blocks = (starts, ends, tile_before[:-1], limits[:-1], limits[1:])
    number, real, (start, stop, tile_first, begin, end) = _owned(tile_before, most, of_blocks)
    first_row = start + (number - tile_first) * height
    last_row = torch.minimum(first_row + height, stop)
    first_row, last_row, work = first_row * real, last_row * real, (end - begin) * real
    piece = ((work.sum() + (share - 1)) // share).clamp(min=least)
    task_before = _before(((work + (piece - 1)) // piece).clamp(min=1) * real)
    tiles = torch.stack((task_before[:-1], task_before[1:], first_row, last_row), 1)

    of_tiles = (first_row, last_row, begin, end, task_before[:-1])
    number, real, (*rows_, begin, end, task_first) = _owned(task_before, most + share, of_tiles)
    place = begin + (number - task_first) * piece
    last_place = torch.minimum(place + piece, end)
    first_interval = torch.searchsorted(before, place, right=True) - 1
    last_interval = torch.searchsorted(before, last_place)
    columns = (*rows_, first_interval, last_interval, place, last_place)
    table = torch.stack(columns, 1) * real.unsqueeze(1)
    return TaskTables(tiles, table, torch.stack((first, last, before[:-1]), 1))


def _joined(blocks: Blocks) -> Blocks:
    """The same pairs with touching intervals merged; the tables keep their length, padded by 0."""
    starts, ends, indptr, first, last = blocks
    count = len(first)
    if count < 2:
        return blocks
    begins = torch.ones(count + 1, dtype=torch.bool, device=first.device)
    torch.ne(first[1:], last[:-1], out=begins[1:-1])
    begins = begins.index_fill_(0, indptr, True)[:-1]
    runs = begins.cumsum(0)
    first, last = (
        torch.zeros_like(t).scatter_reduce(0, runs - 1, t, how, include_self=False)
        for t, how in ((first, "amin"), (last, "amax"))
    )
    return Blocks(starts, ends, pad(runs, (1, 0)).index_select(0, indptr), first, last)


def _before(counts: Tensor) -> Tensor:
    """Exclusive running sums, and the total."""
    return pad(counts.cumsum(0), (1, 0))


def _owned(
    before: Tensor, most: int, columns: Sequence[Tensor]
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Numbers 0 to `most`, whether each belongs to any owner, and the columns of its owner."""
    number = torch.arange(most, device=before.device)
    owner = torch.searchsorted(before[1:], number, right=True).clamp_(max=len(before) - 2)
    found = torch.stack(tuple(columns), 1).index_select(0, owner).unbind(1)
    return number, number < before[-1], found
