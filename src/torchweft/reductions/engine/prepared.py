"""Launches that are settled before they are asked for.

`prepared`: of calls whose values are of known kinds, so that a call only allocates and launches.
`begin`: of gradients, whose kernels are then compiled side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import Call, Launches, Step, compile_together, current_device
from torchweft.reductions.call import Options, Sizes, Wanted
from torchweft.reductions.formula.kernel_forms import parts
from torchweft.reductions.formula.node import Node
from torchweft.reductions.gpu import gaussians
from torchweft.reductions.gpu.launch import (
    Recipe,
    Values,
    bounded,
    execute,
    number,
    recipe_of,
    wide,
)

__all__ = ["Asked", "begin", "plain", "prepared"]


def plain(
    kind: str, formulas: tuple[Node, ...], like: Tensor, sizes: Sizes, options: Options
) -> Wanted:
    """`sums` or `shifted`, as operators give them."""
    width = formulas[-1].dim
    dtype = like.dtype if kind == "sums" else number(wide(like, options))
    widths = (width,) if kind == "sums" else (1, width)
    results = tuple([((sizes.batch, sizes.rows, width), dtype) for width in widths])
    return Wanted(kind, formulas, 0, "", results)


def prepared(
    wanted: Wanted, values: Values, sizes: Sizes, options: Options, *, alone: bool = False
) -> Callable[[Sequence[Tensor]], list[Tensor | None]] | None:
    """The reduction of all pairs, for contiguous values of the kinds of these.

    None where one recipe is not enough: for parts, products on tensor cores, nothing to reduce.  If
    `alone`, also where launches are not: for data stored otherwise, means of several kernels.
    """
    kind, formulas, k, ending, _ = wanted
    apart = kind != "smallest" and len(parts(formulas[-1])) > 1
    there = sizes.batch and sizes.rows and sizes.columns
    if apart or not there or _by_products(wanted, values, sizes, options):
        return None
    like = next(iter(values.values()))
    recipe = recipe_of(kind, formulas, k, values, sizes, None, options, like.device, ending=ending)
    settled = recipe.as_given and not recipe.blocks
    if alone and (not settled or (ending == "mean" and len(recipe.steps) > 1)):
        return None
    if not settled:
        return functools.partial(_executed, recipe, wanted.results)
    count = len(wanted.results)
    launches, partials = _side_by_side(recipe, len(values), count)
    every = (*wanted.results, *partials)

    def run(tensors: Sequence[Tensor]) -> list[Tensor | None]:
        like = tensors[0]
        made = _empty(like, every)
        with current_device(like):
            taken = (*tensors, *made)
            if not launches.steps[0].kernel.compiled:
                calls = [Call(s.kernel, [taken[n] for n in s.taken]) for s in launches.steps]
                compile_together(calls)
            launches(taken)
        return made[:count]

    return run


def _by_products(wanted: Wanted, values: Values, sizes: Sizes, options: Options) -> bool:
    """Whether products on tensor cores come first, which the device decides on."""
    if wanted.kind != "smallest":
        return gaussians.may_serve(values, sizes, None, options)
    return bounded(wanted.formulas[0], wanted.k, values, sizes, None, options) is not None


def _empty(
    like: Tensor, every: Sequence[tuple[tuple[int, ...], torch.dtype] | None]
) -> list[Tensor | None]:
    return [e if e is None else like.new_empty(e[0], dtype=e[1]) for e in every]


def _executed(
    recipe: Recipe,
    results: Sequence[tuple[tuple[int, ...], torch.dtype] | None],
    tensors: Sequence[Tensor],
) -> list[Tensor | None]:
    made = _empty(tensors[0], results)
    with current_device(tensors[0]):
        execute(recipe, dict(enumerate(tensors)), made)
    return made


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
