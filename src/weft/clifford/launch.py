"""The GPU path of programs: tiles, kernels and workspace of a call, settled once for its shapes."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from weft.clifford import generator, tiles
from weft.clifford.kernels import sum_partials_kernel
from weft.clifford.tiles import Machine
from weft.core.backend import interpreted
from weft.core.emit import load
from weft.core.launcher import Launcher, Tile
from weft.core.program import Program

__all__ = ["run"]

MOST_RECIPES = 4096
"""One for each combination of program, shapes, strides and dtypes."""


class Recipe(NamedTuple):
    """A call, prepared.

    Args:
        reads: places of the inputs that the kernel reads.
        shapes: of the results.
        partials: for each result that is summed over rows, how many kernel programs sum it; 0 for
            the others.
        swept: whether kernel programs add to their partials in memory.
        kernel: computes results and partials; None where there is nothing to compute.
        sums: for each result, what adds its partials; None for the others.
    """

    reads: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    partials: tuple[int, ...]
    swept: bool
    kernel: Launcher | None
    sums: tuple[Launcher | None, ...]


_recipes: dict[Any, Recipe] = {}


def run(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results of a program: contiguous (C, rows, features) or (C, features), in its dtype.

    Args:
        program: what to compute.
        inputs: (C, rows, features) or (C, features) in any strides, as its operands say.
    """
    whole = not any(t.data_ptr() & 15 for t in inputs)
    layouts = ((t.shape, t.stride(), t.dtype) for t in inputs)
    key = (program.key, inputs[0].device, whole, *layouts)
    recipe = _recipes.get(key)
    if recipe is None:
        if len(_recipes) >= MOST_RECIPES:
            _recipes.clear()
        recipe = _recipes[key] = _prepare(program, inputs, whole)
    if interpreted() or inputs[0].get_device() == torch._C._cuda_getDevice():
        return _execute(recipe, inputs)
    with torch.cuda.device(inputs[0].device):
        return _execute(recipe, inputs)


def _execute(recipe: Recipe, inputs: Sequence[Tensor]) -> list[Tensor]:
    like = inputs[0]
    if recipe.kernel is None:
        return [like.new_zeros(shape) for shape in recipe.shapes]
    results = [like.new_empty(shape) for shape in recipe.shapes]
    targets, workspace = list(results), 0
    for at, count in enumerate(recipe.partials):
        if count:
            make = like.new_zeros if recipe.swept else like.new_empty
            targets[at] = make((count, *recipe.shapes[at]), dtype=_wide(like.dtype))
            workspace += targets[at].nbytes
    recipe.kernel([*(inputs[at] for at in recipe.reads), *targets], workspace)
    for add, partial, result in zip(recipe.sums, targets, results, strict=True):
        if add is not None:
            add([partial, result])
    return results


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _prepare(program: Program, inputs: Sequence[Tensor], whole: bool) -> Recipe:
    """The recipe of a call; `whole` says whether all inputs begin at a multiple of 16 bytes."""
    lengths: dict[str, int] = {}
    for operand, tensor in zip(program.inputs, inputs, strict=True):
        lengths.update(zip(operand.axes, tensor.shape[1:], strict=True))
    operands = [output.operand for output in program.outputs]
    shapes = tuple((o.size, *(lengths[axis] for axis in o.axes)) for o in operands)
    rows, features = lengths["row"], lengths["feature"]
    if not rows * features:
        return Recipe((), shapes, (), False, None, ())
    used = program.used()
    reads = tuple(at for at, o in enumerate(program.inputs) if o.name in used)
    read = [inputs[at] for at in reads]
    aligned = whole and all(_is_aligned(t) for t in read if t.dim() == 3)
    dtype = inputs[0].dtype
    machine = _machine(inputs[0].device)
    tiling, lanes = tiles.choose(program, rows, features, dtype.itemsize, aligned, machine)
    strides = tuple(stride for t in read for stride in t.stride())
    kernel = Launcher(
        load(name := generator.name(program), generator.source(program, tiling)).__dict__[name],
        lanes * (-(-features // tiling.block) if tiling.tiles else 1),
        (),
        (rows, *strides),
        (features,),
        Tile((tiling.rows, tiling.block), tiling.warps, 1),
    )
    partials = tuple(0 if "row" in o.axes else lanes for o in operands)
    sums = tuple(
        _sum_partials(count, shape[0] * features) if count else None
        for count, shape in zip(partials, shapes, strict=True)
    )
    return Recipe(reads, shapes, partials, tiling.sweeps, kernel, sums)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether rows and components lie 16 elements apart, and features side by side."""
    component, row, feature = tensor.stride()
    return feature == 1 and component % 16 == 0 and row % 16 == 0


def _sum_partials(count: int, columns: int) -> Launcher:
    block = 32
    programs = -(-columns // block)
    return Launcher(
        sum_partials_kernel, programs, (), (count, columns), (), Tile((64, block), 4, 1)
    )


@functools.cache
def _machine(device: torch.device) -> Machine:
    """What kernels may use on a device; in the interpreter few programs, for its speed."""
    if interpreted():
        return Machine(False, 2, 0)
    ampere = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    gluon = ampere and importlib.util.find_spec("triton.experimental.gluon") is not None
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return Machine(gluon, properties["multiprocessor_count"], properties["max_shared_mem"])
