"""Reductions over j by generated Triton kernels: tiles, tasks, launches and merges.

What a call needs is settled once for each combination of formulas, sizes and dtypes, and kept.
Tiles follow from how many values a pair needs in registers: nothing is timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import (
    Launcher,
    Queued,
    Tile,
    current_device,
    launch_all,
    processors,
)
from torchweft.core.printing.modules import printed, written
from torchweft.errors import BackendError
from torchweft.reductions.call import Blocks, Options, Sizes
from torchweft.reductions.formula import kernel_forms as inner
from torchweft.reductions.formula.evaluate import evaluate
from torchweft.reductions.formula.kernel_forms import Looped, looped, parts
from torchweft.reductions.formula.lowering import count
from torchweft.reductions.formula.node import Node, const, reachable
from torchweft.reductions.gpu import gaussians, neighbours
from torchweft.reductions.gpu import source as generator
from torchweft.reductions.gpu.source import Job
from torchweft.reductions.gpu.storage import Stored, in_blocks, put_together, stored
from torchweft.reductions.gpu.tasks import Tasks, tasks
from torchweft.reductions.gpu.tiles import BLOCK, kept, tile

__all__ = [
    "Recipe",
    "Values",
    "bounded",
    "execute",
    "number",
    "recipe_of",
    "serves",
    "shifted",
    "smallest",
    "source",
    "sums",
    "tile",
]

MOST = 1024
"""Scalar terms of a formula that registers and compilers bear."""

LONGEST = 64
"""Components of a sum that no loop takes: more compile for many seconds, and spill."""

WIDEST = 1024
"""Entries of a list of the smallest."""

TOGETHER = 4
"""Components that one kernel sums."""

SHARE = 8
"""Tasks for each processor."""

MANY = 2**26
"""Pairs from which the time of a sum counts beside that of its call, so that tiles of points near
each other are worth a second loop in its kernel, which takes as long to compile as the first."""

Values = Mapping[int, Tensor]


def serves(f: Node, w: Node | None = None, k: int = 1) -> bool:
    """Whether kernels of these formulas can be printed and compiled in reasonable time."""
    given = [(part,) for part in parts(f)] if w is None else [(f, part) for part in parts(w)]
    return k <= WIDEST and all(map(_serves, given))


def _serves(given: tuple[Node, ...]) -> bool:
    what = looped(*given)
    formulas = (*what.formulas, *(s.term for s in what.inner))
    rest = (n for n in reachable(*formulas) if n.op in ("sqdist", "einsum", "sum"))
    short = all(a.dim <= LONGEST for n in rest for a in n.args)
    return short and sum(map(count, formulas)) <= MOST


def sums(f: Node, values: Values, sizes: Sizes, blocks: Blocks | None, options: Options) -> Tensor:
    """Σ_j f, (B, M, f.dim); 0 where there is nothing."""
    like = next(iter(values.values()))
    found = []
    for part in parts(f):
        out = _filled(like, (sizes.batch, sizes.rows, part.dim), 0, sizes, blocks)
        if out.numel() and sizes.columns:
            vectors = gaussians.vectors(part, values, sizes, blocks, options)
            if vectors is None:
                first = gaussians.sums(part, values, out, sizes, blocks, options)
                _run("sums", (part,), 0, values, [out], sizes, blocks, options, *first)
            else:
                ours, guard = vectors
                _run("sums", (part,), 0, values, [out], sizes, blocks, options, guard)
                out = torch.where(guard > 0, ours, out)
        found.append(out)
    return torch.cat(found, -1) if len(found) > 1 else found[0]


def shifted(
    f: Node, w: Node, values: Values, sizes: Sizes, blocks: Blocks | None, options: Options
) -> tuple[Tensor, Tensor]:
    """m = max_j f and Σ_j exp(f − m) w, (B, M, 1) and (B, M, w.dim); −∞ and 0 for nothing."""
    like = next(iter(values.values()))
    dtype = number(wide(like, options))
    found = []
    for part in parts(w):
        top = _filled(like, (sizes.batch, sizes.rows, 1), float("-inf"), sizes, blocks, dtype)
        out = _filled(like, (sizes.batch, sizes.rows, part.dim), 0, sizes, blocks, dtype)
        if top.numel() and sizes.columns:
            first = gaussians.shifted(f, part, values, [top, out], sizes, blocks, options)
            _run("shifted", (f, part), 0, values, [top, out], sizes, blocks, options, *first)
        found.append(out)
    return top, torch.cat(found, -1) if len(found) > 1 else found[0]


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
    shape = (sizes.batch, sizes.rows, k, f.dim)
    out = _filled(like, shape, -1, sizes, blocks, torch.int64)
    if out.numel() and sizes.columns:
        guard = _neighbours(f, k, values, out, sizes, blocks, options)
        _run("smallest", (f,), k, values, [None, out], sizes, blocks, options, guard)
    return out


def _neighbours(
    f: Node,
    k: int,
    values: Values,
    out: Tensor,
    sizes: Sizes,
    blocks: Blocks | None,
    options: Options,
) -> Tensor | None:
    """Find nearest neighbours by bounds where f is a distance; the guard says if they held."""
    found = bounded(f, k, values, sizes, blocks, options)
    if found is None:
        return None
    lengths = (sizes.rows, sizes.columns)
    u, v = (
        evaluate(part, values).expand(sizes.batch, length, part.dim).contiguous()
        for part, length in zip(found, lengths, strict=True)
    )
    with current_device(out):
        return neighbours.nearest(u, v, k, out[..., 0], processors(out.device))


def bounded(
    f: Node, k: int, values: Values, sizes: Sizes, blocks: Blocks | None, options: Options
) -> tuple[Node, Node] | None:
    """The points of a distance whose nearest neighbours are found by bounds."""
    found = neighbours.distance(f)
    if found is None or not neighbours.pays(found[0].dim, k, sizes.rows, sizes.columns):
        return None
    return found if gaussians.allowed(values, blocks, options) else None


def _filled(
    like: Tensor,
    shape: tuple[int, ...],
    value: float,
    sizes: Sizes,
    blocks: Blocks | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Memory for a result: what a row with nothing has, unless kernels write all rows."""
    found = like.new_empty(shape, dtype=dtype or like.dtype)
    return found.fill_(value) if blocks is not None or not sizes.columns else found


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
    formulas = (f,) if kind != "shifted" else (f, const(1) if w is None else w)
    job = _jobs(kind, looped(*formulas), k, wide, "auto", False)[0]
    return generator.source(job._replace(ranged=ranged, partial=ranged))


# Recipes: all that a call needs beside its tensors


class _Step(NamedTuple):
    """One kernel and its merge.

    Args:
        reads: variables, by index.
        kernel: launches it.
        partials: shapes and dtypes of its partial results; none where it writes the result itself.
        merge: merges them.
    """

    reads: tuple[int, ...]
    kernel: Launcher
    partials: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    merge: Launcher | None = None


class Recipe(NamedTuple):
    """The steps of a call, and the data that they take.

    Args:
        steps: one kernel after another, of the same tiles.
        height: rows of a tile.
        width: columns of a tile.
        data: how each variable is stored.
        as_given: whether all are stored as they are given.
        blocks: how many blocks of components batch entries have; 0 if components are not shared
            out.
        size: components of a block.
    """

    steps: tuple[_Step, ...]
    height: int
    width: int
    data: Mapping[int, Stored]
    as_given: bool
    blocks: int
    size: int


_recipes: dict[Any, Recipe] = {}
MOST_RECIPES = 4096


def _run(
    kind: str,
    formulas: tuple[Node, ...],
    k: int,
    values: Values,
    results: Sequence[Tensor | None],
    sizes: Sizes,
    blocks: Blocks | None,
    options: Options,
    guard: Tensor | None = None,
    *products: Queued,
) -> None:
    """Launch what computes the results: the products before, if any, then what their guard asks."""
    device, cut = _last(results).device, None
    counts = None if blocks is None else (len(blocks.starts), len(blocks.j_starts))
    guarded = guard is not None
    recipe = recipe_of(kind, formulas, k, values, sizes, counts, options, device, guarded)
    if blocks is not None:
        if not len(blocks.starts) or not len(blocks.j_starts):
            return
        share = SHARE * processors(device)
        cut = tasks(blocks, sizes.rows, recipe.height, share, BLOCK * recipe.width)
    with current_device(_last(results)):
        execute(recipe, values, results, cut, guard, products)


def _last(results: Sequence[Tensor | None]) -> Tensor:
    """The last of the results, which is always there."""
    found = results[-1]
    assert found is not None
    return found


def recipe_of(
    kind: str,
    formulas: tuple[Node, ...],
    k: int,
    values: Values,
    sizes: Sizes,
    counts: tuple[int, int] | None,
    options: Options,
    device: torch.device,
    guarded: bool = False,
    ending: str = "",
) -> Recipe:
    """The recipe of a call with values of these kinds, and so many blocks and intervals."""
    batched = tuple([t.shape[0] > 1 for t in values.values()])
    dtype = next(iter(values.values())).dtype
    many = sizes.batch * sizes.rows * sizes.columns >= MANY
    near = many and not guarded and options.precision != "ieee"
    exact = options.accumulate
    key = (kind, formulas, k, sizes, counts, exact, dtype, device, batched, guarded, near, ending)
    found = _recipes.get(key)
    if found is None:
        if len(_recipes) >= MOST_RECIPES:
            _recipes.clear()
        what = looped(*formulas, size=1 if kind == "smallest" else inner.BLOCK)
        wide, far = dtype == torch.float64, sizes.columns >= 2**31
        jobs = _jobs(kind, what, k, wide, exact, far, guarded, near, ending)
        among = dict(zip(values, batched, strict=True))
        found = _recipes[key] = _prepare(jobs, what, among, sizes, counts, device)
    return found


def execute(
    recipe: Recipe,
    values: Values,
    results: Sequence[Tensor | None],
    cut: Tasks | None = None,
    guard: Tensor | None = None,
    queue: Sequence[Queued] = (),
) -> None:
    """Launch the queue, then a recipe of contiguous values: on blocks as they are cut, if any.

    A result is None where it is not wanted: values beside indices, m where it becomes one with s.
    """
    lists = [] if cut is None else [cut.tasks, cut.intervals]
    lists += [] if guard is None else [guard]
    data = values
    if not recipe.as_given:
        data = {index: s.tensor(values) for index, s in recipe.data.items()}
    written = results
    if recipe.blocks:
        written = [
            r if r is None else in_blocks(r, recipe.blocks, min(recipe.size, r.shape[-1]))
            for r in results
        ]
    for step in recipe.steps:
        inputs = [data[index] for index in step.reads]
        launch_all([*queue, *_launches(step, inputs, written, cut, lists, guard)])
        queue = ()
    if recipe.blocks:
        for result, found in zip(results, written, strict=True):
            if result is not None and found is not None:
                put_together(found, result)


def _launches(
    step: _Step,
    inputs: Sequence[Tensor],
    results: Sequence[Tensor | None],
    cut: Tasks | None,
    lists: Sequence[Tensor],
    guard: Tensor | None,
) -> list[Queued]:
    """A kernel and its merge."""
    if step.merge is None:
        return [Queued(step.kernel, [*inputs, *results, *lists])]
    made = [_last(results).new_empty(shape, dtype=dtype) for shape, dtype in step.partials]
    listed = [] if cut is None and guard is None else [None if cut is None else cut.tiles, guard]
    return [
        Queued(step.kernel, [*inputs, *made, *lists], sum([t.nbytes for t in made])),
        Queued(step.merge, [*made, *results, *listed]),
    ]


def wide(like: Tensor, options: Options) -> bool:
    """Whether results of `shifted` are of float64."""
    return like.dtype == torch.float64 or options.accumulate == "float64"


def number(wide: bool) -> torch.dtype:
    """What numbers of this width are."""
    return torch.float64 if wide else torch.float32


def _jobs(
    kind: str,
    what: Looped,
    k: int,
    wide: bool,
    accumulate: str,
    far: bool,
    guarded: bool = False,
    near: bool = False,
    ending: str = "",
) -> list[Job]:
    """One job for each few components."""
    weight = what.formulas[1] if len(what.formulas) > 1 else None
    job = Job(kind, what.formulas[0], weight, 0, 0, wide=wide, accumulate=accumulate, kept=k)
    blocked = tuple(m.number for m in what.made if m.blocked)
    job = job._replace(far=far, guarded=guarded, near=near, inner=what.inner, blocked=blocked)
    job = job._replace(ending=ending)
    dim = what.formulas[-1].dim
    long = bool(what.inner or what.blocks)  # pairs are dear, or the tile is that of a block
    step = 1 if kind == "smallest" else inner.BLOCK if long else TOGETHER
    starts = range(0, dim, step)
    return [job._replace(first=first, last=min(first + step, dim)) for first in starts]


def _prepare(
    jobs: list[Job],
    what: Looped,
    batched: Mapping[int, bool],
    sizes: Sizes,
    counts: tuple[int, int] | None,
    device: torch.device,
) -> Recipe:
    batch, rows, columns = sizes
    batch *= max(what.blocks, 1)
    height = rows if counts is None else rows / max(counts[0], 1)
    tiles_ = [tile(job, height) for job in jobs]
    # one list of tasks serves all
    shape = min(tiles_, key=lambda t: t.blocks[0] // t.num_warps)
    height, width = shape.blocks[:2]
    share = SHARE * processors(device)
    if counts is None:
        tiles = -(-rows // height)
        shared = max(1, min(-(-share // (batch * tiles)), -(-columns // (4 * width))))
        length = -(-columns // (shared * width)) * width
        shared = -(-columns // length)
        programs = batch * tiles * shared
        numbers: tuple[int, ...] = (rows, columns, tiles, shared, length)
        merged = (tiles, shared, rows)
    else:
        tiles = counts[0] + rows // height
        programs = batch * (tiles + share)
        numbers = (rows, tiles + share)
        merged = (tiles, tiles + share, rows)
    ranged = counts is not None
    steps, data = [], {}
    for job in jobs:
        job = job._replace(ranged=ranged, partial=ranged or shared > 1)
        reads = generator.operands(job)
        for v in reads:
            apart = job.apart(v)
            data[v.data[0]] = stored(v, what, batched, sizes, max(height, width), apart=apart)
        numbers_ = (*numbers, *_layout([data[v.data[0]] for v in reads], what.blocks))
        text = generator.source(job)
        function = printed(f"reductions_{job.kind}", text, f"{job.kind}_kernel")
        kernel = Launcher(function, programs, (), numbers_, (), shape)
        indices = tuple(v.data[0] for v in reads)
        merge = _merge(job, batch, merged, programs, height) if job.partial else ()
        steps.append(_Step(indices, kernel, *merge))
    as_given = all(s.as_given for s in data.values())
    size = what.formulas[-1].dim
    return Recipe(tuple(steps), height, width, data, as_given, what.blocks, size)


def _layout(read: Sequence[Stored], blocks: int) -> tuple[int, ...]:
    """The numbers of a kernel behind those of its tasks."""
    pitches = (s.pitch for s in read if s.pitch)
    return (*(s.stride for s in read), *([blocks] if blocks else []), *pitches)


def _merge(
    job: Job, batch: int, numbers: tuple[int, int, int], programs: int, height: int
) -> tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], Launcher]:
    """Shapes and dtypes of the partial results of a job, and what merges them."""
    outputs, total = job.last - job.first, job.components
    merges = batch * numbers[0]
    constants: tuple[Any, ...] = (outputs, total, job.first, job.ranged)
    kernel = written("torchweft.reductions.gpu.kernels", f"merge_{job.kind}_kernel")
    dtype = getattr(torch, job.accumulator)
    partials = [((programs, outputs, height), dtype)]
    if job.kind == "sums":
        merges *= outputs
    elif job.kind == "shifted":
        partials = [((programs, 1 + outputs, height), dtype)]
        constants = (*constants, job.ending)
    else:
        constants = (job.kept, kept(job), total, job.first, job.ranged, job.sign)
        shape = (programs, height, job.kept)
        partials = [(shape, number(job.wide)), (shape, torch.int64)]
    tables = () if job.ranged or job.guarded else (None, None)
    merger = Launcher(kernel, merges, tables, numbers, constants, Tile((height,), 4, 1))
    return tuple(partials), merger
