"""The GPU path of programs: kernels, tiles and workspace of a call, chosen once for its shapes.

A thread holds every component of its features, so registers limit the tile: v features need about
28 + v · (values alive at once, sums over rows that stay in registers).  Compiled for sm_90, with 0
spills: the Cl(3,0) chain at v = 4 (130 registers), its gradient at v = 2 (255), Cl(2,0)'s at v = 4
(241), the Cl(1,3) chain at v = 4 (255), its gradient at v = 2 (254).

A program that sums over a row that no tile holds is split at its sums.  Measured on an H200, 4096
rows, fp32, against one kernel that read each row again for its sums and added the weight's gradient
up in memory: the gradient of the Cl(5,0) chain, F = 512, 889 µs for 2760; of Cl(1,3), F = 1024, 654
for 1313; of Cl(3,0), F = 2048, 574 for 942.  The chain itself: Cl(3,0), F = 4096, 645 for 734; with
F = 2048, where the second reading came from the L2 cache, 347 for 298.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.clifford.kernels import sum_partials_kernel
from torchweft.clifford.programs import source as generator
from torchweft.clifford.programs.source import RowTiling, copied_at_once, parameters
from torchweft.core import private_compilers
from torchweft.core.backend import interpreted
from torchweft.core.expressions.program import Operand, Program, accumulator
from torchweft.core.expressions.rewrite import split
from torchweft.core.gpu.launcher import Launcher, Tile, current_device
from torchweft.core.printing.dialect import Contract, most_live
from torchweft.core.printing.modules import printed
from torchweft.core.printing.schedule import schedule

__all__ = ["GpuLimits", "RowKernel", "choose", "run"]

LAUNCHES_KEPT = 4096
"""Cached launches: one for each combination of program, shapes, strides and dtypes."""

REGISTERS_PER_PROCESSOR, REGISTERS_PER_THREAD = 65536, 255
THREADS_PER_PROGRAM = 128
"""Least number of threads of a kernel program: it takes several short rows at a time."""
FEATURES_PER_TILE = 1024
VECTOR_TERMS = 512
"""Terms of a form up to which a thread takes several features.

With more the compiler moves so much ahead that registers spill: the Cl(5,0) chain at 4096 × 512
takes 354 µs at v = 2 (162 spills) and 251 at v = 1 (4 spills, H200).
"""
EXCHANGE_BYTES = 2048
"""Shared memory, at most, through which the warps of a kernel program add up."""


class GpuLimits(NamedTuple):
    """What a kernel may use.

    Args:
        gluon: whether kernels are Gluon (NVIDIA); else Triton.
        processors: number of multiprocessors.
        shared: bytes of shared memory of each.
    """

    gluon: bool
    processors: int
    shared: int


class RowKernel(NamedTuple):
    """A program, or a part of one, and its tiles.

    Args:
        program: what is computed.
        tiling: the tiles.
        tiles: number of tiles in a row.
        lanes: number of kernel programs that share the rows, for each tile.
    """

    program: Program
    tiling: RowTiling
    tiles: int
    lanes: int


class RowLaunch(NamedTuple):
    """A prepared kernel of a call.

    Args:
        reads: indices of the inputs that the kernel reads.
        shapes: of the results.
        dtypes: of the results.
        wide: the dtype of partial sums.
        partials: for each result the number of partial sums, 0 where the kernel writes the result.
        kernel: computes results and partial sums; None where there is nothing to compute.
        sums: for each result the kernel that adds its partial sums, or None.
    """

    reads: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    wide: torch.dtype
    partials: tuple[int, ...]
    kernel: Launcher | None
    sums: tuple[Launcher | None, ...]


_launches: dict[Any, tuple[RowLaunch, ...]] = {}


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
    launches = _launches.get(key)
    if launches is None:
        if len(_launches) >= LAUNCHES_KEPT:
            _launches.clear()
        launches = _launches[key] = _prepare(program, inputs, whole)
    results: list[Tensor] = []
    with current_device(inputs[0]):
        for launch in launches:  # each may read the results of those before it
            inputs = (*inputs, *results)
            results = _execute(launch, inputs)
    return results


def _execute(launch: RowLaunch, inputs: Sequence[Tensor]) -> list[Tensor]:
    like, results = inputs[0], []
    make = like.new_zeros if launch.kernel is None else like.new_empty
    for shape, dtype in zip(launch.shapes, launch.dtypes, strict=True):
        results.append(make(shape, dtype=dtype))
    if launch.kernel is None:
        return results
    targets, workspace, operands = list(results), 0, []
    for at, count in enumerate(launch.partials):
        if count:
            targets[at] = like.new_empty((count, *launch.shapes[at]), dtype=launch.wide)
            workspace += targets[at].nbytes
    for at in launch.reads:
        operands.append(inputs[at])  # noqa: PERF401
    launch.kernel([*operands, *targets], workspace)
    for add, partial, result in zip(launch.sums, targets, results, strict=True):
        if add is not None:
            add([partial, result])
    return results


def _prepare(program: Program, inputs: Sequence[Tensor], whole: bool) -> tuple[RowLaunch, ...]:
    """The kernels of a call; `whole` says whether all inputs begin at a multiple of 16 bytes."""
    lengths: dict[str, int] = {}
    for operand, tensor in zip(program.inputs, inputs, strict=True):
        lengths.update(zip(operand.axes, tensor.shape[1:], strict=True))
    rows, features, dtype = lengths["row"], lengths["feature"], inputs[0].dtype
    if not rows * features:
        shapes, dtypes = _results(program, lengths, dtype)
        return (RowLaunch((), shapes, dtypes, dtype, (), None, ()),)
    used = program.used()
    read = [t for t, o in zip(inputs, program.inputs, strict=True) if o.name in used]
    aligned = whole and all(_is_aligned(t) for t in read if t.dim() == 3)
    limits = _limits(inputs[0].device)
    strides = {o.name: t.stride() for o, t in zip(program.inputs, inputs, strict=True)}
    launches = []
    for kernel in choose(program, rows, features, dtype.itemsize, aligned, limits):
        launches.append(_launch(kernel, lengths, strides, dtype))
        strides |= {o.operand.name: (rows, 1) for o in kernel.program.outputs}
    return tuple(launches)


def _results(
    program: Program, lengths: dict[str, int], dtype: torch.dtype
) -> tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
    """Shapes and dtypes: sums over the features, which another kernel reads, stay wide."""
    operands = [output.operand for output in program.outputs]
    shapes = tuple((o.size, *(lengths[axis] for axis in o.axes)) for o in operands)
    return shapes, tuple(dtype if "feature" in o.axes else accumulator(dtype) for o in operands)


def _launch(
    kernel: RowKernel,
    lengths: dict[str, int],
    strides: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> RowLaunch:
    program, tiling, tiles, lanes = kernel
    inputs, outputs = parameters(program)
    shapes, dtypes = _results(program, lengths, dtype)
    names = [o.name for o in program.inputs]
    launcher = Launcher(
        printed(name := generator.name(program), generator.source(program, tiling), name),
        lanes * tiles,
        (),
        (lengths["row"], *(stride for o in inputs for stride in strides[o.name])),
        (lengths["feature"],),
        Tile((tiling.rows, tiling.block), tiling.warps, 1),
    )
    shared: dict[tuple[str, ...], int] = {("feature",): lanes}
    shared["row",] = tiles if tiling.tiles else 0
    partials = tuple(shared.get(o.axes, 0) for o in outputs)
    sums = tuple(
        _sum_partials(count, math.prod(shape)) if count else None
        for count, shape in zip(partials, shapes, strict=True)
    )
    reads = tuple(names.index(o.name) for o in inputs)
    return RowLaunch(reads, shapes, dtypes, accumulator(dtype), partials, launcher, sums)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether rows and components lie 16 elements apart, and features side by side."""
    component, row, feature = tensor.stride()
    return feature == 1 and component % 16 == 0 and row % 16 == 0


def _sum_partials(count: int, columns: int) -> Launcher:
    tile = Tile((64, 32), 4, 1)
    programs = -(-columns // tile.blocks[1])
    return Launcher(sum_partials_kernel, programs, (), (count, columns), (), tile)


@functools.cache
def _limits(device: torch.device) -> GpuLimits:
    """The limits of a device; in the interpreter few programs, for its speed."""
    if interpreted():
        return GpuLimits(False, 2, 0)
    ampere = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    gluon = ampere and importlib.util.find_spec("triton.experimental.gluon") is not None
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = private_compilers.driver.active.utils.get_device_properties(index)
    return GpuLimits(gluon, properties["multiprocessor_count"], properties["max_shared_mem"])


def choose(
    program: Program, rows: int, features: int, itemsize: int, aligned: bool, limits: GpuLimits
) -> tuple[RowKernel, ...]:
    """The kernels of a program, in order: each may read the results of those before it.

    Args:
        program: what is computed.
        rows: the length of that axis, not 0.
        features: the length of that axis, not 0.
        itemsize: bytes of an element.
        aligned: see RowTiling.
        limits: of the GPU.
    """
    kernel = _kernel(program, rows, features, itemsize, aligned, limits)
    parts = split(program)
    if kernel.tiles == 1 or len(parts) == 1:
        return (kernel,)
    return tuple(_kernel(part, rows, features, itemsize, aligned, limits) for part in parts)


def _kernel(
    program: Program, rows: int, features: int, itemsize: int, aligned: bool, limits: GpuLimits
) -> RowKernel:
    inputs, outputs = parameters(program)
    sums = [o for o in outputs if "row" not in o.axes]
    size = 2 if itemsize == 8 else 1  # registers of a value
    plan = schedule(program)
    live = most_live(plan) * size
    terms = max((len(s.form.terms) for s in plan.steps if isinstance(s, Contract)), default=0)
    vectors = (4, 2, 1) if terms <= VECTOR_TERMS else (1,)
    block, vector, registers = _tile(live + sum(o.size for o in sums) * size, features, vectors)
    sums_apart = limits.gluon and block < features
    if sums_apart:
        block, vector, registers = _tile(live, features, vectors)
    tiles = -(-features // block)
    tile_rows = max(1, THREADS_PER_PROGRAM * vector // block)
    threads = tile_rows * block // vector
    tiling = RowTiling(
        limits.gluon,
        tile_rows,
        block,
        vector,
        threads // 32,
        tiles=tiles > 1,
        ragged=features % block != 0,
        aligned=aligned,
        itemsize=itemsize,
    )
    resident = max(1, REGISTERS_PER_PROCESSOR // (registers * threads))
    if limits.gluon:
        tiling, resident = _in_shared(
            tiling, resident, features, inputs, sums * sums_apart, limits.shared
        )
    lanes = max(1, limits.processors * resident // tiles)
    return RowKernel(program, tiling, tiles, min(-(-rows // tile_rows), lanes))


def _tile(held: int, features: int, vectors: tuple[int, ...]) -> tuple[int, int, int]:
    """(features, features of a thread, registers) of the longest tile that fits the registers."""
    block = min(FEATURES_PER_TILE, 1 << (features - 1).bit_length())
    while True:
        for vector in (v for v in vectors if v <= block):
            registers = 28 + vector * held
            threads = max(THREADS_PER_PROGRAM, block // vector)
            fits = registers * threads <= REGISTERS_PER_PROCESSOR
            if (fits and registers <= REGISTERS_PER_THREAD) or (vector == 1 and block <= 256):
                return block, vector, min(REGISTERS_PER_THREAD, registers)
        block //= 2


def _in_shared(
    tiling: RowTiling,
    resident: int,
    features: int,
    inputs: list[Operand],
    sums: list[Operand],
    shared: int,
) -> tuple[RowTiling, int]:
    """The components in shared memory, as far as there is room, and the programs of a processor.

    Sums that registers do not hold come first, then feature operands, then the next rows.
    """
    tile, wide = tiling.rows * tiling.block, max(4, tiling.itemsize)
    can_stage = tiling.aligned and features % 16 == 0  # copies move 16 bytes
    rows = [o for o in inputs if can_stage and o.axes == ("row", "feature")]
    copied = [_Piece(o, tile * tiling.itemsize, copied_at_once(o, tiling)) for o in rows]
    summed = [_Piece(o, tile * wide, 1) for o in sums]
    kept = [_Piece(o, tiling.block * wide, 1) for o in inputs if o.axes == ("feature",)]
    needed = sum(piece.operand.size * piece.bytes for piece in (*summed, *copied, *kept))
    while resident > 1 and needed > shared // resident - EXCHANGE_BYTES:
        resident -= 1
    room = shared // resident - EXCHANGE_BYTES
    kept_there, room = _that_fit([*summed, *kept], room)
    staged, _ = _that_fit(copied, room)
    return tiling._replace(shared=kept_there, staged=staged), resident


class _Piece(NamedTuple):
    """An operand, the bytes of a component in shared memory, and how many come at once."""

    operand: Operand
    bytes: int
    at_once: int


def _that_fit(pieces: list[_Piece], room: int) -> tuple[tuple[tuple[str, int], ...], int]:
    """The number of components of each operand that fit, and the bytes that are left."""
    found = []
    for operand, size, at_once in pieces:
        count = min(operand.size, room // size // at_once * at_once)
        if count:
            found.append((operand.name, count))
        room -= count * size
    return tuple(found), room
