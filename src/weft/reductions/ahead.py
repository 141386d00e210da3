"""Launches that are settled before they are asked for.

`prepared`: of calls whose values are of known kinds, so that a call only allocates and launches.
`begin`: of gradients, whose kernels are then compiled side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.core.launcher import Call, Launches, Step, compile_together, current_device
from weft.reductions import gaussians
from weft.reductions.formula import Node
from weft.reductions.inner import parts
from weft.reductions.launch import Recipe, Values, execute, number, recipe_of, wide
from weft.reductions.ranges import Options, Sizes

__all__ = ["Asked", "begin", "prepared"]


def prepared(
    kind: str, formulas: tuple[Node, ...], values: Values, sizes: Sizes, options: Options
) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
    """`sums` or `shifted` of all pairs, for contiguous values of the kinds of these.

    None where one recipe is not enough: for parts, products on tensor cores, nothing to sum.
    """
    summed = formulas[-1]
    there = sizes.batch and sizes.rows and sizes.columns
    if not there or len(parts(summed)) > 1 or gaussians.may_serve(values, sizes, None, options):
        return None
    like = next(iter(values.values()))
    dtype = like.dtype if kind == "sums" else number(wide(like, options))
    widths = (summed.dim,) if kind == "sums" else (1, summed.dim)
    shapes = [((sizes.batch, sizes.rows, width), dtype) for width in widths]
    recipe = recipe_of(kind, formulas, 0, values, sizes, None, options, like.device)
    settled = recipe.as_given and not recipe.blocks
    launches, partials = _side_by_side(recipe, len(values), len(shapes)) if settled else (None, [])

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        like = tensors[0]
        results = [like.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
        with current_device(like):
            if launches is None:
                execute(recipe, dict(enumerate(tensors)), results)
                return results
            made = [like.new_empty(shape, dtype=dtype) for shape, dtype in partials]
            every = (*tensors, *results, *made)
            if not launches.steps[0].kernel.compiled:
                calls = [Call(s.kernel, [every[n] for n in s.taken]) for s in launches.steps]
                compile_together(calls)
            launches(every)
        return results

    return run


class Asked(NamedTuple):
    """A sum that will be asked for.

    Args:
        formula: what is summed.
        batches: the first dimension of each value.
        sizes: of the data.
        counts: how many blocks and intervals there are; None for all pairs.
    """

    formula: Node
    batches: tuple[int, ...]
    sizes: Sizes
    counts: tuple[int, int] | None


def begin(
    every: Sequence[Asked], dtype: torch.dtype, device: torch.device, options: Options
) -> None:
    """Have the kernels of several sums compiled at once, before the first is launched."""

    def empty(dtype: torch.dtype, batch: int = 0) -> Tensor:
        return torch.empty((batch, 0), dtype=dtype, device=device)

    calls = []
    for f, batches, sizes, counts in every:
        values = {n: empty(dtype, batch) for n, batch in enumerate(batches)}
        if counts is None and gaussians.may_serve(values, sizes, None, options):
            continue
        lists = [] if counts is None else [empty(torch.int64)] * 2
        merged = [] if counts is None else [empty(torch.int64), None]
        for part in parts(f) if sizes.batch and sizes.rows and sizes.columns else ():
            recipe = recipe_of("sums", (part,), 0, values, sizes, counts, options, device)
            for reads, kernel, partials, merge in recipe.steps:
                made = [empty(d) for _, d in partials] or [empty(dtype)]
                calls.append(Call(kernel.kernel, [empty(dtype)] * len(reads) + made + lists))
                if merge is not None:
                    calls.append(Call(merge.kernel, [*made, empty(dtype), *merged]))
    with current_device(empty(dtype)):
        compile_together(calls)


def _side_by_side(
    recipe: Recipe, values: int, results: int
) -> tuple[Launches, list[tuple[tuple[int, ...], torch.dtype]]]:
    """The launches of a recipe on values, results and partial ones; shapes and dtypes of these."""
    steps: list[Step] = []
    partials: list[tuple[tuple[int, ...], torch.dtype]] = []
    own = range(values, values + results)
    for reads, kernel, more, merge in recipe.steps:
        made = [values + results + len(partials) + n for n in range(len(more))]
        steps.append(Step(kernel.kernel, kernel.programs, (*reads, *(made or own))))
        if merge is not None:
            steps.append(Step(merge.kernel, merge.programs, (*made, *own)))
        partials += more
    return Launches(steps), partials
