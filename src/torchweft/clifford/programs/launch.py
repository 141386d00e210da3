"""The GPU path of programs: tiles, kernels and workspace of a call, settled once for its shapes."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.clifford.programs import source as generator
from torchweft.clifford.programs import tiles
from torchweft.clifford.programs.kernels import sum_partials_kernel
from torchweft.clifford.programs.tiles import Kernel, Machine
from torchweft.core import private
from torchweft.core.backend import interpreted
from torchweft.core.expressions.program import Program
from torchweft.core.gpu.launcher import Launcher, Tile, current_device
from torchweft.core.printing.modules import printed

__all__ = ["run"]

MOST_RECIPES = 4096
"""One for each combination of program, shapes, strides and dtypes."""


class Recipe(NamedTuple):
    """A kernel of a call, prepared.

    Args:
        reads: places of the inputs that the kernel reads.
        shapes: of the results.
        dtypes: of the results.
        partials: for each result that several kernel programs sum, how many; 0 for the others.
        kernel: computes results and partials; None where there is nothing to compute.
        sums: for each result, what adds its partials; None for the others.
    """

    reads: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    partials: tuple[int, ...]
    kernel: Launcher | None
    sums: tuple[Launcher | None, ...]


_recipes: dict[Any, tuple[Recipe, ...]] = {}


def run(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results of a program: contiguous (C, rows, features) or (C, features), in its dtype.

    Args:
        program: what to compute.
        inputs: (C, rows, features) or (C, features) in any strides, as its operands say.
    """
    whole, layouts = True, list[Any]()
    for tensor in inputs:
        if tensor.data_ptr() & 15:
            whole = False
        layouts += tensor.shape, tensor.stride(), tensor.dtype
    key = (program.key, inputs[0].device, whole, *layouts)
    recipes = _recipes.get(key)
    if recipes is None:
        if len(_recipes) >= MOST_RECIPES:
            _recipes.clear()
        recipes = _recipes[key] = _prepare(program, inputs, whole)
    results: list[Tensor] = []
    with current_device(inputs[0]):
        for recipe in recipes:  # each may read the results of those before it
            inputs = (*inputs, *results)
            results = _execute(recipe, inputs)
    return results


def _execute(recipe: Recipe, inputs: Sequence[Tensor]) -> list[Tensor]:
    like, results = inputs[0], []
    make = like.new_zeros if recipe.kernel is None else like.new_empty
    for shape, dtype in zip(recipe.shapes, recipe.dtypes, strict=True):
        results.append(make(shape, dtype=dtype))
    if recipe.kernel is None:
        return results
    targets, workspace, operands = list(results), 0, []
    for at, count in enumerate(recipe.partials):
        if count:
            targets[at] = like.new_empty((count, *recipe.shapes[at]), dtype=_wide(like.dtype))
            workspace += targets[at].nbytes
    for at in recipe.reads:
        operands.append(inputs[at])  # noqa: PERF401
    recipe.kernel([*operands, *targets], workspace)
    for add, partial, result in zip(recipe.sums, targets, results, strict=True):
        if add is not None:
            add([partial, result])
    return results


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _prepare(program: Program, inputs: Sequence[Tensor], whole: bool) -> tuple[Recipe, ...]:
    """The kernels of a call; `whole` says whether all inputs begin at a multiple of 16 bytes."""
    lengths: dict[str, int] = {}
    for operand, tensor in zip(program.inputs, inputs, strict=True):
        lengths.update(zip(operand.axes, tensor.shape[1:], strict=True))
    rows, features, dtype = lengths["row"], lengths["feature"], inputs[0].dtype
    if not rows * features:
        shapes, dtypes = _results(program, lengths, dtype)
        return (Recipe((), shapes, dtypes, (), None, ()),)
    used = program.used()
    read = [t for t, o in zip(inputs, program.inputs, strict=True) if o.name in used]
    aligned = whole and all(_is_aligned(t) for t in read if t.dim() == 3)
    machine = _machine(inputs[0].device)
    kernels = tiles.choose(program, rows, features, dtype.itemsize, aligned, machine)
    strides = {o.name: t.stride() for o, t in zip(program.inputs, inputs, strict=True)}
    recipes = []
    for kernel in kernels:
        recipes.append(_recipe(kernel, lengths, strides, dtype))
        strides |= {o.operand.name: (rows, 1) for o in kernel.program.outputs}
    return tuple(recipes)


def _results(
    program: Program, lengths: dict[str, int], dtype: torch.dtype
) -> tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
    """Shapes and dtypes: sums over the features, which another kernel reads, stay wide."""
    operands = [output.operand for output in program.outputs]
    shapes = tuple((o.size, *(lengths[axis] for axis in o.axes)) for o in operands)
    return shapes, tuple(dtype if "feature" in o.axes else _wide(dtype) for o in operands)


def _recipe(
    kernel: Kernel,
    lengths: dict[str, int],
    strides: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> Recipe:
    program, tiling, count, lanes = kernel
    inputs, outputs = generator.parameters(program)
    shapes, dtypes = _results(program, lengths, dtype)
    names = [o.name for o in program.inputs]
    launcher = Launcher(
        printed(name := generator.name(program), generator.source(program, tiling), name),
        lanes * count,
        (),
        (lengths["row"], *(stride for o in inputs for stride in strides[o.name])),
        (lengths["feature"],),
        Tile((tiling.rows, tiling.block), tiling.warps, 1),
    )
    shared: dict[tuple[str, ...], int] = {
        ("feature",): lanes,
        ("row",): count if tiling.tiles else 0,
    }
    partials = tuple(shared.get(o.axes, 0) for o in outputs)
    sums = tuple(
        _sum_partials(number, math.prod(shape)) if number else None
        for number, shape in zip(partials, shapes, strict=True)
    )
    reads = tuple(names.index(o.name) for o in inputs)
    return Recipe(reads, shapes, dtypes, partials, launcher, sums)


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
    properties = private.driver.active.utils.get_device_properties(index)
    return Machine(gluon, properties["multiprocessor_count"], properties["max_shared_mem"])
