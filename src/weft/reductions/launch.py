"""Reductions over j by generated Triton kernels: tiles, tasks, launches and merges.

What a call needs is settled once for each combination of formulas, sizes and dtypes, and kept.
Tiles follow from how many values a pair needs in registers: nothing is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.backend import interpreted
from weft.core.generated import load
from weft.core.launcher import Launcher, Tile
from weft.errors import BackendError
from weft.reductions import generator, kernels, tensor_cores
from weft.reductions.formula import Node, const, reachable
from weft.reductions.generator import Job
from weft.reductions.ranges import Blocks, Options, Sizes
from weft.reductions.scalars import count
from weft.reductions.tasks import Tasks, tasks

__all__ = ["serves", "shifted", "smallest", "source", "sums", "tile"]

MOST = 1024
"""Scalar terms of a formula that registers and compilers bear."""

LONGEST = 64
"""Components that one term sums: more compile for many seconds, and spill."""

WIDEST = 1024
"""Entries of a list of the smallest."""

KEPT = 4096
"""Entries of the lists of a tile."""

TOGETHER = 4
"""Components that one kernel sums."""

SHARE = 8
"""Tasks for each processor."""

BLOCK = 16
"""Tiles of a block."""

Values = Mapping[int, Tensor]


def serves(f: Node, w: Node | None = None, k: int = 1) -> bool:
    """Whether kernels of these formulas can be printed and compiled in reasonable time."""
    formulas = (f,) if w is None else (f, w)
    inner = (n for n in reachable(*formulas) if n.op in ("sqdist", "einsum", "sum"))
    short = all(a.dim <= LONGEST for n in inner for a in n.args)
    return short and sum(map(count, formulas)) <= MOST and k <= WIDEST


def sums(f: Node, values: Values, sizes: Sizes, blocks: Blocks | None, options: Options) -> Tensor:
    """Σ_j f, (B, M, f.dim); 0 where there is nothing."""
    like = next(iter(values.values()))
    out = like.new_zeros(sizes.batch, sizes.rows, f.dim)
    if out.numel() and sizes.columns:
        guard = _on_tensor_cores("sums", f, None, values, [out], sizes, blocks, options)
        _run("sums", f, None, 0, values, [out], sizes, blocks, options, guard)
    return out


def shifted(
    f: Node, w: Node, values: Values, sizes: Sizes, blocks: Blocks | None, options: Options
) -> tuple[Tensor, Tensor]:
    """m = max_j f and Σ_j exp(f − m) w, (B, M, 1) and (B, M, w.dim); −∞ and 0 for nothing."""
    like = next(iter(values.values()))
    wide = like.dtype == torch.float64 or options.accumulate == "float64"
    dtype = torch.float64 if wide else torch.float32
    top = like.new_full((sizes.batch, sizes.rows, 1), float("-inf"), dtype=dtype)
    out = like.new_zeros(sizes.batch, sizes.rows, w.dim, dtype=dtype)
    if top.numel() and sizes.columns:
        guard = _on_tensor_cores("shifted", f, w, values, [top, out], sizes, blocks, options)
        _run("shifted", f, w, 0, values, [top, out], sizes, blocks, options, guard)
    return top, out


def smallest(
    f: Node, k: int, values: Values, sizes: Sizes, blocks: Blocks | None, options: Options
) -> Tensor:
    """Indices of the k smallest values, (B, M, k, f.dim), ascending; −1 where there are fewer."""
    if k > WIDEST:
        raise BackendError(
            f"{k} smallest values are asked for: kernels keep up to {WIDEST}. Pass "
            'backend="torch", or ask for fewer.'
        )
    like = next(iter(values.values()))
    out = like.new_full((sizes.batch, sizes.rows, k, f.dim), -1, dtype=torch.int64)
    if out.numel() and sizes.columns:
        _run("smallest", f, None, k, values, [out], sizes, blocks, options)
    return out


def source(
    kind: str, f: Node, w: Node | None = None, k: int = 1, wide: bool = False, ranged: bool = False
) -> str:
    """The text of the kernel of a formula's first components, as it is printed for one task a row.

    Args:
        kind: "sums", "shifted" or "smallest".
        f: the formula.
        w: the weight of shifted.
        k: in smallest, how many.
        wide: for float64.
        ranged: over lists of intervals.
    """
    job = next(_jobs(kind, f, w, k, wide, "auto", False))
    return generator.source(job._replace(ranged=ranged, partial=ranged))


# Recipes: all that a call needs beside its tensors


class _Step(NamedTuple):
    """One kernel and its merge.

    Args:
        job: what it computes.
        reads: variables, by index.
        kernel: launches it.
        partials: shapes of its partial results; none where it writes the result itself.
        merge: merges them.
    """

    job: Job
    reads: tuple[int, ...]
    kernel: Launcher
    partials: tuple[tuple[int, ...], ...]
    merge: Launcher | None


class _Recipe(NamedTuple):
    steps: tuple[_Step, ...]
    height: int
    width: int


_recipes: dict[Any, _Recipe] = {}
MOST_RECIPES = 4096


def _run(
    kind: str,
    f: Node,
    w: Node | None,
    k: int,
    values: Values,
    results: Sequence[Tensor],
    sizes: Sizes,
    blocks: Blocks | None,
    options: Options,
    guard: Tensor | None = None,
) -> None:
    like = results[0]
    batched = tuple(sorted((index, t.shape[0] > 1) for index, t in values.items()))
    counts = None if blocks is None else (len(blocks.starts), len(blocks.j_starts))
    dtype = next(iter(values.values())).dtype
    guarded = guard is not None
    key = (kind, f, w, k, sizes, counts, options.accumulate, dtype, like.device, batched, guarded)
    recipe = _recipes.get(key)
    if recipe is None:
        if len(_recipes) >= MOST_RECIPES:
            _recipes.clear()
        wide = dtype == torch.float64
        jobs = _jobs(kind, f, w, k, wide, options.accumulate, sizes.columns >= 2**31)
        jobs = [job._replace(guarded=guarded) for job in jobs]
        recipe = _recipes[key] = _prepare(jobs, dict(batched), sizes, counts, like.device)
    cut = None
    if blocks is not None:
        if not len(blocks.starts) or not len(blocks.j_starts):
            return
        share = SHARE * _processors(like.device)
        cut = tasks(blocks, sizes.rows, recipe.height, share, BLOCK * recipe.width)
    if interpreted() or like.get_device() == torch._C._cuda_getDevice():
        _execute(recipe, values, results, cut, guard)
    else:
        with torch.cuda.device(like.device):
            _execute(recipe, values, results, cut, guard)


def _execute(
    recipe: _Recipe,
    values: Values,
    results: Sequence[Tensor],
    cut: Tasks | None,
    guard: Tensor | None,
) -> None:
    lists = [] if cut is None else [cut.tasks, cut.intervals]
    lists += [] if guard is None else [guard]
    for job, reads, kernel, partials, merge in recipe.steps:
        inputs = [values[index] for index in reads]
        if merge is None:
            kernel([*inputs, *results, *lists])
            continue
        total = getattr(torch, job.accumulator)
        dtypes = (total,) if job.kind != "smallest" else (_number(job), torch.int64)
        made = [results[0].new_empty(s, dtype=d) for s, d in zip(partials, dtypes, strict=True)]
        kernel([*inputs, *made, *lists], sum(t.nbytes for t in made))
        merge([*made, *results, None if cut is None else cut.tiles])


def _number(job: Job) -> torch.dtype:
    return torch.float64 if job.wide else torch.float32


def _jobs(
    kind: str, f: Node, w: Node | None, k: int, wide: bool, accumulate: str, far: bool
) -> Any:
    """One job for each few components."""
    if kind == "shifted" and w is None:
        w = const(1)
    dim = (w or f).dim
    step = 1 if kind == "smallest" else TOGETHER
    for first in range(0, dim, step):
        last = min(first + step, dim)
        yield Job(kind, f, w, first, last, wide=wide, accumulate=accumulate, kept=k, far=far)


PRODUCTS = {
    "split": Tile((64, 128, BLOCK), 4, 3),
    "tf32x3": Tile((128, 64, BLOCK), 4, 2),
    "tf32x3, no wgmma": Tile((128, 32, BLOCK), 8, 2),
    "tf32": Tile((128, 128, BLOCK), 8, 2),
    "bf16": Tile((128, 128, BLOCK), 8, 3),
}
"""The tiles of products on tensor cores."""

ROWS = 64
"""Rows for each task from which the rows alone make enough tasks."""

COLUMNS = 2**12
"""Columns from which products are worth their preparation."""


def _on_tensor_cores(
    kind: str,
    f: Node,
    w: Node | None,
    values: Values,
    results: Sequence[Tensor],
    sizes: Sizes,
    blocks: Blocks | None,
    options: Options,
) -> Tensor | None:
    """Launch products of rows where f is a Gaussian of that kind; the guard says if they held."""
    like = results[0]
    plain = blocks is None and options.accumulate == "auto" and options.precision != "ieee"
    single = all(v.dtype == torch.float32 for v in values.values())
    enough = sizes.batch * sizes.rows >= ROWS * SHARE * _processors(like.device)
    many = enough and sizes.columns >= COLUMNS
    if not (plain and single and many) or torch.version.hip is not None:
        return None
    if kind == "sums":
        found = tensor_cores.split(f)
    else:
        exponent = tensor_cores.exponent(f)
        alone = w is not None and w.dim == 1 and w.cats <= {1, 2}
        found = tensor_cores.Split(exponent, const(1), w) if exponent and w and alone else None
    if found is None:
        return None
    asked = options.precision or "tf32x3"
    shape = PRODUCTS[_way(found, asked, like.device)]
    most = tensor_cores.SUMS if kind == "sums" else tensor_cores.SHIFTED
    if options.precision is not None:
        most = float("inf")
    made = tensor_cores.operands(found, values, sizes, shape.blocks[1], most, asked)
    apart = made.a is not None
    precision = asked if apart and asked == "tf32x3" else "tf32"
    constants: tuple[Any, ...] = (made.x.shape[2], apart, precision)
    kernel, rows = kernels.split_sums_kernel, [made.rows]
    if kind == "shifted":
        kernel, rows = kernels.split_shifted_kernel, []
        constants = (found.columns is not const(1), *constants)
    tiles = -(-sizes.rows // shape.blocks[0])
    numbers = (sizes.rows, made.y.shape[1], tiles)
    launcher = Launcher(kernel, sizes.batch * tiles, (), numbers, constants, shape)
    given = [made.x, made.y, made.a, made.b, *rows, made.columns, made.guard, *results]
    launcher(given, sum(t.nbytes for t in made if t is not None))
    return made.guard


def _way(found: tensor_cores.Split, asked: str, device: torch.device) -> str:
    """The key of PRODUCTS."""
    if tensor_cores.is_split(found):
        return "split"
    if asked != "tf32x3" or interpreted() or torch.cuda.get_device_capability(device) >= (9, 0):
        return asked
    return "tf32x3, no wgmma"


def tile(job: Job, height: float = 64) -> Tile:
    """Rows, columns and tiles of a block; `height` is how many rows a tile can fill.

    A thread has one column of each LANES and R rows: it keeps what pairs read of a row R times, and
    R partial and whole sums of each component.
    """
    needed = generator.registers(job) * (2 if job.wide else 1)
    rows, columns, warps = next(shape for most, *shape in _SHAPES if needed <= most)
    if job.wide:
        columns, warps = 2, 4
    while rows > 1 and (warps * rows >= 2 * height or warps * rows * _kept(job) > KEPT):
        rows //= 2
    return Tile((warps * rows, generator.LANES * columns, BLOCK), warps, 1)


def _kept(job: Job) -> int:
    """Slots of a list."""
    return 1 << max(job.kept - 1, 0).bit_length()


_SHAPES = ((6, 16, 2, 4), (14, 8, 4, 8), (30, 4, 4, 8), (1 << 30, 2, 4, 8))
"""Registers of a row up to which a thread has so many rows and columns, and the warps.

A tile has fewer columns than threads: else the compiler lays tiles out as their columns are loaded,
and sums go through shared memory.
"""


def _prepare(
    jobs: list[Job],
    batched: Mapping[int, bool],
    sizes: Sizes,
    counts: tuple[int, int] | None,
    device: torch.device,
) -> _Recipe:
    batch, rows, columns = sizes
    height = rows if counts is None else rows / max(counts[0], 1)
    tiles_ = [tile(job, height) for job in jobs]
    # one list of tasks serves all
    shape = min(tiles_, key=lambda t: t.blocks[0] // t.num_warps)
    height, width = shape.blocks[:2]
    share = SHARE * _processors(device)
    if counts is None:
        tiles = -(-rows // height)
        parts = max(1, min(-(-share // (batch * tiles)), -(-columns // (4 * width))))
        length = -(-columns // (parts * width)) * width
        parts = -(-columns // length)
        programs = batch * tiles * parts
        numbers: tuple[int, ...] = (rows, columns, tiles, parts, length)
        merged = (tiles, parts, rows)
    else:
        tiles = counts[0] + rows // height
        programs = batch * (tiles + share)
        numbers = (rows, tiles + share)
        merged = (tiles, tiles + share, rows)
    ranged = counts is not None
    steps = []
    for job in jobs:
        job = job._replace(ranged=ranged, partial=ranged or parts > 1)
        reads = generator.operands(job)
        strides = tuple(batched[v.data[0]] * v.dim * (rows, columns, 1)[v.data[2]] for v in reads)
        name = f"{job.kind}_kernel"
        module = load(f"reductions_{job.kind}", generator.source(job))
        kernel = Launcher(module.__dict__[name], programs, (), (*numbers, *strides), (), shape)
        indices = tuple(v.data[0] for v in reads)
        if not job.partial:
            steps.append(_Step(job, indices, kernel, (), None))
            continue
        partials, merge = _merge(job, batch, merged, programs, height)
        steps.append(_Step(job, indices, kernel, partials, merge))
    return _Recipe(tuple(steps), height, width)


def _merge(
    job: Job, batch: int, numbers: tuple[int, int, int], programs: int, height: int
) -> tuple[tuple[tuple[int, ...], ...], Launcher]:
    """Shapes of the partial results of a job, and what merges them."""
    outputs, total = job.last - job.first, (job.weight or job.formula).dim
    merges = batch * numbers[0]
    constants: tuple[Any, ...] = (outputs, total, job.first, job.ranged)
    kernel = getattr(kernels, f"merge_{job.kind}_kernel")
    partials: tuple[tuple[int, ...], ...] = ((programs, outputs, height),)
    if job.kind == "sums":
        merges *= outputs
    elif job.kind == "shifted":
        partials = ((programs, 1 + outputs, height),)
    else:
        constants = (job.kept, _kept(job), total, job.first, job.ranged)
        partials = ((programs, height, job.kept),) * 2
    return partials, Launcher(kernel, merges, (), numbers, constants, Tile((height,), 4, 1))


@functools.cache
def _processors(device: torch.device) -> int:
    """Of a GPU; in the interpreter few, for its speed."""
    if interpreted():
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
