"""The executor on a GPU: reductions over j by generated Triton kernels and their merges.

`sums`, `shifted` and `smallest` reduce any data.  `prepared` serves calls whose values have a known
signature, so that a call only allocates and launches; `begin` compiles the kernels of gradients
side by side, before the first of them is launched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import (
    Call,
    Queued,
    compile_together,
    current_device,
    processors,
)
from torchweft.errors import BackendError
from torchweft.reductions.call import KernelSpec, Options, ReductionData, Sizes, Wanted
from torchweft.reductions.formula.kernel_forms import looped, parts
from torchweft.reductions.formula.lowering import count
from torchweft.reductions.formula.node import Node, const, reachable
from torchweft.reductions.gpu import gaussians, neighbours
from torchweft.reductions.gpu import source as generator
from torchweft.reductions.gpu.recipe import (
    Allocation,
    ReductionRecipe,
    TaskTables,
    kernel_jobs,
    recipe_of,
)

__all__ = ["begin", "plain", "prepared", "serves", "shifted", "smallest", "source", "sums"]

MOST_TERMS = 1024
"""Scalar terms of a formula that registers and compilers bear."""

LONGEST_SUM = 64
"""Components of a sum that no loop takes: more compile for many seconds, and spill."""

MOST_SMALLEST = 1024
"""Entries of a list of the smallest."""

Results = Sequence[Tensor | None]
"""Tensors to write, or None for a result that is not wanted: values beside indices, m beside s."""


def serves(f: Node, w: Node | None = None, k: int = 1) -> bool:
    """Whether kernels of these formulas can be printed and compiled in reasonable time."""
    given = [(part,) for part in parts(f)] if w is None else [(f, part) for part in parts(w)]
    return k <= MOST_SMALLEST and all(map(_serves, given))


def _serves(given: tuple[Node, ...]) -> bool:
    what = looped(*given)
    formulas = (*what.formulas, *(s.term for s in what.inner))
    unrolled = (n for n in reachable(*formulas) if n.op in ("sqdist", "einsum", "sum"))
    short = all(a.dim <= LONGEST_SUM for n in unrolled for a in n.args)
    return short and sum(map(count, formulas)) <= MOST_TERMS


def sums(f: Node, data: ReductionData) -> Tensor:
    """Σ_j f, (B, M, f.dim); 0 where there is nothing."""
    found = []
    for part in parts(f):
        out = _filled(data, (part.dim,), 0, data.like.dtype)
        if out.numel() and data.sizes.columns:
            vectors = gaussians.moment_sums(part, data)
            if vectors is None:
                first = gaussians.products("sums", (part,), data, [out])
                _run("sums", (part,), data, [out], *first)
            else:
                ours, guard = vectors
                _run("sums", (part,), data, [out], guard)
                out = torch.where(guard > 0, ours, out)
        found.append(out)
    return torch.cat(found, -1) if len(found) > 1 else found[0]


def shifted(f: Node, w: Node, data: ReductionData) -> tuple[Tensor, Tensor]:
    """m = max_j f and Σ_j exp(f − m) w, (B, M, 1) and (B, M, w.dim); −∞ and 0 for nothing."""
    dtype, found = _shifted_dtype(data), []
    for part in parts(w):
        top, out = _filled(data, (1,), float("-inf"), dtype), _filled(data, (part.dim,), 0, dtype)
        if top.numel() and data.sizes.columns:
            first = gaussians.products("shifted", (f, part), data, [top, out])
            _run("shifted", (f, part), data, [top, out], *first)
        found.append(out)
    return top, torch.cat(found, -1) if len(found) > 1 else found[0]


def smallest(f: Node, k: int, data: ReductionData) -> Tensor:
    """Indices of the k smallest values, see `operator.smallest`."""
    if k > MOST_SMALLEST:
        raise BackendError(
            f"{k} smallest values are asked for: kernels keep up to {MOST_SMALLEST}. Pass "
            'backend="torch", or ask for fewer.'
        )
    several = max(k, 1)
    out = _filled(data, (several, f.dim), -1, torch.int64)
    if out.numel() and data.sizes.columns:
        points, guard = neighbours.bounded(f, several, data), None
        if points is not None:
            guard = neighbours.nearest_by_bounds(points, several, data, out, processors(out.device))
        _run("smallest", (f,), data, [None, out], guard, k=k)
    return out


def _filled(
    data: ReductionData, shape: tuple[int, ...], value: float, dtype: torch.dtype
) -> Tensor:
    """Memory for a result, filled with the result of empty rows unless kernels write all rows."""
    batch, rows, columns = data.sizes
    found = data.like.new_empty((batch, rows, *shape), dtype=dtype)
    return found.fill_(value) if data.blocks is not None or not columns else found


def _shifted_dtype(data: ReductionData) -> torch.dtype:
    """The dtype of the results of `shifted`."""
    wide = data.like.dtype == torch.float64 or data.options.accumulate == "float64"
    return torch.float64 if wide else torch.float32


def source(
    kind: str, f: Node, w: Node | None = None, k: int = 1, wide: bool = False, ranged: bool = False
) -> str:
    """The text of the kernel of a formula's first components, as it is printed for one task a row.

    Args:
        kind: "sums", "shifted" or "smallest".
        f: the formula.
        w: the weight of shifted.
        k: number of smallest values.
        wide: for float64.
        ranged: over lists of intervals.

    Returns:
        The source of the Triton kernel.

    Example:
        >>> from torchweft.reductions import source
        >>> from torchweft.reductions.formula.node import node, var
        >>> text = source("sums", node("sqdist", var(0, 3, 0), var(1, 3, 1)))
        >>> "tl.load" in text
        True
    """
    weight = None if kind != "shifted" else const(1) if w is None else w
    job = KernelSpec(kind, f, weight, 0, 0, ranged=ranged, partial=ranged, wide=wide, kept=k)
    return generator.source(kernel_jobs(job)[1][0])


def _run(
    kind: str,
    formulas: tuple[Node, ...],
    data: ReductionData,
    results: Results,
    guard: Tensor | None = None,
    *products: Queued,
    k: int = 0,
) -> None:
    """Launch what computes the results: products first, if any, then kernels under their guard."""
    blocks, cut = data.blocks, None
    counts = None if blocks is None else (len(blocks.starts), len(blocks.j_starts))
    wanted = Wanted(kind, formulas, k, "", ())
    recipe = recipe_of(wanted, data, counts, guarded=guard is not None)
    if blocks is not None:
        if not len(blocks.starts) or not len(blocks.j_starts):
            return
        cut = recipe.cut(blocks, data.sizes.rows, data.like.device)
    with current_device(data.like):
        _execute(recipe, data.values, results, cut, guard, products)


def _execute(
    recipe: ReductionRecipe,
    values: Mapping[int, Tensor],
    results: Results,
    cut: TaskTables | None = None,
    guard: Tensor | None = None,
    queue: Sequence[Queued] = (),
) -> None:
    """Launch the queue, then a recipe of contiguous values: on blocks as they are cut, if any."""
    blocks, written = recipe.blocks, results
    if blocks:
        written = [r if r is None else _in_blocks(r, blocks, recipe.size) for r in results]
    inputs = [s if s is None else s.tensor(values) for s in recipe.stored]
    partials = _empty(next(iter(values.values())), recipe.partials)
    tables = (None, None, None) if cut is None else cut
    taken = (*inputs, *written, *partials, *tables, guard)
    kernels = [*(q.launcher.kernel for q in queue), *(s.kernel for s in recipe.launches.steps)]
    if not all(kernel.compiled for kernel in kernels):
        first = [Call(q.launcher.kernel, q.operands) for q in queue]
        compile_together(first + recipe.calls(taken))
    for launcher, operands, workspace_bytes in queue:
        launcher(operands, workspace_bytes)
    recipe.launches(taken)
    for result, found in zip(results, written, strict=True) if blocks else ():
        if result is not None and found is not None:  # blocks of components side by side
            result.copy_(found.movedim(1, -2).flatten(-2)[..., : result.shape[-1]])


def _in_blocks(result: Tensor, blocks: int, size: int) -> Tensor:
    """(B, blocks, ..., size): a result's first component, for all components of each block."""
    sizes = (-1, blocks, *[-1] * (result.dim() - 2), min(size, result.shape[-1]))
    return result[:, None, ..., :1].expand(sizes).contiguous()


# calls of a known signature


def plain(kind: str, formulas: tuple[Node, ...], data: ReductionData) -> Wanted:
    """`sums` or `shifted`, as operators return them."""
    width = formulas[-1].dim
    dtype = data.like.dtype if kind == "sums" else _shifted_dtype(data)
    widths = (width,) if kind == "sums" else (1, width)
    results = tuple([((*data.sizes[:2], width), dtype) for width in widths])
    return Wanted(kind, formulas, 0, "", results)


def prepared(
    wanted: Wanted, data: ReductionData, *, alone: bool = False
) -> Callable[[Sequence[Tensor]], list[Tensor | None]] | None:
    """The reduction of all pairs, for contiguous values of the signature of the data.

    None where one recipe is not enough: for formulas in parts, tensor cores, nothing to reduce.  If
    `alone`, also where launches are not enough: for data that is stored in other layouts, and for
    means by several kernels.
    """
    kind, formulas, k, ending, results = wanted
    if kind != "smallest":
        apart = len(parts(formulas[-1])) > 1 or gaussians.may_serve(data)
    else:
        apart = neighbours.bounded(formulas[0], max(k, 1), data) is not None
    if apart or not all(data.sizes):
        return None
    recipe = recipe_of(wanted, data)
    if alone and (not recipe.as_given or (ending == "mean" and recipe.kernels > 1)):
        return None
    if not recipe.as_given:
        return functools.partial(_allocated_and_run, recipe, results)
    launches, every = recipe.launches, (*results, *recipe.partials)

    def run(tensors: Sequence[Tensor]) -> list[Tensor | None]:
        like = tensors[0]
        made = _empty(like, every)
        with current_device(like):
            taken = (*tensors, *made)
            if not launches.steps[0].kernel.compiled:
                compile_together(recipe.calls(taken))
            launches(taken)
        return made[: len(results)]

    return run


def _empty(like: Tensor, every: Sequence[Allocation | None]) -> list[Tensor | None]:
    return [e if e is None else like.new_empty(e[0], dtype=e[1]) for e in every]


def _allocated_and_run(
    recipe: ReductionRecipe, results: Sequence[Allocation | None], tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    made = _empty(tensors[0], results)
    with current_device(tensors[0]):
        _execute(recipe, dict(enumerate(tensors)), made)
    return made


FutureSum = tuple[Node, tuple[int, ...], Sizes, tuple[int, int] | None]
"""Formula of a later sum, first dimension of each value, sizes, numbers of blocks and intervals
(None for all pairs)."""


def begin(
    every: Sequence[FutureSum], dtype: torch.dtype, device: torch.device, options: Options
) -> None:
    """Compile the kernels of several sums at once, before the first is launched."""

    def empty(dtype: torch.dtype, batch: int = 0) -> Tensor:
        return torch.empty((batch, 0), dtype=dtype, device=device)

    calls = []
    for f, batches, sizes, counts in every:
        values = {n: empty(dtype, batch) for n, batch in enumerate(batches)}
        data = ReductionData(values, sizes, None, options)
        if counts is None and gaussians.may_serve(data):
            continue
        tables = [] if counts is None else [empty(torch.int64)] * 3
        for part in parts(f) if all(sizes) else ():
            recipe = recipe_of(Wanted("sums", (part,), 0, "", ()), data, counts)
            given = [empty(dtype)] * (1 + len(recipe.stored))
            calls += recipe.calls([*given, *(empty(d) for _, d in recipe.partials), *tables, None])
    with current_device(empty(dtype)):
        compile_together(calls)
