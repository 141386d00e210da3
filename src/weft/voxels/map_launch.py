"""Keys and kernel maps on a GPU: few launches, and a read only where the host must know a number.

Each function gives the same bits as the torch code that it stands in for; its numbers are handed
over at every call, so another count of voxels never compiles again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.backend import interpreted
from weft.core.explain import Launch, record, recording
from weft.core.launcher import Tile
from weft.voxels import map_kernels
from weft.voxels.geometry import Geometry

__all__ = ["WALK", "pack", "resample", "submanifold", "survey"]

WALK = 8
"""Cells of the last axis that a search walks over; a longer line is searched place by place."""

AXES = 4
ROWS, PAIRS = 1024, 512
"""Rows that a program surveys or packs, pairs that one places."""

SEARCH = Tile((64, 2, 256), num_warps=8)
"""Pivots of a step, lines at most and rows that one program searches for."""

Numbers = tuple[int, ...]


class _Axis(NamedTuple):
    """An axis of a strided or transposed layer, as `map_kernels` solves q + p = o·s + j·dil.

    Args:
        common: g, the greatest common divisor of stride and dilation.
        inverse: of dil/g modulo the period.
        period: s/g, the distance of the kernel places that one input meets.
        places: how many of them there are at most.
    """

    stride: int = 1
    padding: int = 0
    dilation: int = 1
    kernel: int = 1
    common: int = 1
    inverse: int = 0
    period: int = 1
    places: int = 1

    @classmethod
    def of(cls, kernel: int, stride: int, padding: int, dilation: int, mode: str) -> _Axis:
        """Of a layer's geometry; a transposed layer's input meets every place."""
        if mode == "transposed":
            return cls(stride, padding, dilation, kernel, places=kernel)
        common = math.gcd(stride, dilation)
        period = stride // common
        inverse = pow(dilation // common, -1, period)
        places = -(-kernel // period)
        return cls(stride, padding, dilation, kernel, common, inverse, period, places)


def survey(rows: Tensor) -> tuple[tuple[Numbers, Numbers], bool]:
    """The lowest and highest value of each column, and whether the rows ascend: one read."""
    count, columns = rows.shape
    programs = -(-count // ROWS)
    found = rows.new_empty((programs, 2 * columns + 1), dtype=torch.int64)
    _launch(map_kernels.survey_kernel, programs, [rows.contiguous(), found], [count], columns, ROWS)
    numbers = found.amax(0).tolist()
    lows, highs = (~low for low in numbers[:columns]), numbers[columns:-1]
    return (tuple(lows), tuple(highs)), not numbers[-1]


def pack(rows: Tensor, lows: Numbers, sizes: Numbers, dtype: torch.dtype) -> Tensor:
    """key = ((b · R0 + s0) · R1 + s1) · R2 + … of int32 rows that all lie in the box."""
    count, columns = rows.shape
    keys = rows.new_empty(count, dtype=dtype)
    numbers = [count, lows[0], *_front(lows[1:], 0), *_front(sizes[1:], 1)]
    programs = -(-count // ROWS)
    _launch(map_kernels.pack_kernel, programs, [rows, keys], numbers, columns, ROWS)
    return keys


def submanifold(
    keys: Tensor, order: Tensor | None, rows: Tensor, lows: Numbers, sizes: Numbers, shape: Geometry
) -> tuple[Tensor, Tensor | None]:
    """sources and back of ascending keys; `order` says which row each of them is."""
    sides = 1 if shape.symmetric else 2
    size = (sides, shape.num_offsets, len(keys))
    # in another order entries are scattered: only those that are there
    made = rows.new_empty(size) if order is None else rows.new_full(size, -1)
    operands = [keys, order, rows]
    _search([*operands, made[0], None], lows, sizes, shape, shape.begin)
    if shape.symmetric:
        return made[0], None
    # what reads q at offset k is q − offset: the kernel mirrored, with its places reversed
    ends = zip(shape.kernel_size, shape.dilation, shape.begin, strict=True)
    begin = tuple((k - 1) * d - b for k, d, b in ends)
    _search([*operands, None, made[1]], lows, sizes, shape, begin)
    return made[0], made[1]


def _search(
    operands: list[Tensor | None], lows: Numbers, sizes: Numbers, shape: Geometry, begin: Numbers
) -> None:
    keys = operands[0]
    assert keys is not None
    count, plan = keys.shape[0], _plan(shape, begin, keys.dtype, SEARCH)
    box = (*_front(lows[1:], 0), *_front(sizes[1:], 1))
    numbers = (count, *plan.counts, *box, *plan.axes)
    programs = -(-count // SEARCH.blocks[-1]) * plan.tiles
    warps = SEARCH.num_warps
    _launch(
        map_kernels.search_kernel, programs, operands, numbers, *plan.constants, num_warps=warps
    )


class _Plan(NamedTuple):
    """What of a search follows from the geometry alone.

    Args:
        counts: offsets and lines of the kernel.
        axes: lines, dilation and begin of each axis.
        tiles: programs that share rows.
        constants: of the kernel.
    """

    counts: Numbers
    axes: Numbers
    tiles: int
    constants: tuple[Any, ...]


@functools.lru_cache(maxsize=256)
def _plan(shape: Geometry, begin: Numbers, dtype: torch.dtype, tile: Tile) -> _Plan:
    num, last, gap = shape.num_offsets, shape.kernel_size[-1], shape.dilation[-1]
    if last * gap > WALK:
        last, gap = 1, 1
    lines = num // last
    kernel = _front((*shape.kernel_size[:-1], shape.kernel_size[-1] // last), 1)
    searched = max(1, lines - shape.symmetric)
    pivots, most_lines, block = tile.blocks
    together = min(most_lines, 1 << (searched - 1).bit_length())
    most, columns = torch.iinfo(dtype).max, 1 + len(begin)
    constants = (columns, shape.symmetric, last, gap, most, pivots, together, block)
    axes = (*kernel[1:], *_front(shape.dilation, 1), *_front(begin, 0))
    return _Plan((num, lines), axes, -(-searched // together), constants)


def resample(
    rows: Tensor, sizes: Numbers, dtype: torch.dtype, shape: Geometry
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sources, targets, output rows and their ascending keys of a strided or transposed layer.

    Each row names the outputs that it meets; their keys are sorted and counted: one read.

    Args:
        rows: (N, 1 + d) int32, not negative.
        sizes: batch size and output shape.
        dtype: that holds the keys of this box, and one number more.
        shape: the geometry.
    """
    count, columns = rows.shape
    axes = [_Axis.of(*axis, shape.mode) for axis in zip(*shape[1:], strict=True)]
    axes = [_Axis()] * (AXES - len(axes)) + axes
    chances = math.prod(axis.places for axis in axes)
    keys = rows.new_empty(chances * count, dtype=dtype)
    offsets = rows.new_empty(chances * count)
    box, most = _front(sizes[1:], 1), torch.iinfo(dtype).max
    *given, places = zip(*axes, strict=True)
    numbers = [count, *box, *itertools.chain(*given), *places[1:]]
    constants = (columns, shape.mode == "transposed", most, PAIRS)
    programs = -(-count // PAIRS) * chances
    _launch(map_kernels.candidates_kernel, programs, [rows, keys, offsets], numbers, *constants)

    keys, standing = torch.sort(keys)
    fresh = keys != most
    fresh[1:] &= keys[1:] != keys[:-1]
    counts = fresh.cumsum(0, dtype=torch.int32)
    outputs = int(counts[-1])

    sources = rows.new_full((shape.num_offsets, outputs), -1)
    targets = rows.new_full((shape.num_offsets, count), -1)
    out_keys, out_rows = keys.new_empty(outputs), rows.new_empty((outputs, columns))
    operands = [keys, standing, counts, offsets, sources, targets, out_keys, out_rows]
    numbers = [len(keys), count, outputs, *box]
    programs = -(-len(keys) // PAIRS)
    _launch(map_kernels.outputs_kernel, programs, operands, numbers, columns, most, PAIRS)
    return sources, targets, out_rows, out_keys


def _front(numbers: Sequence[int], missing: int) -> list[int]:
    """One number for each of the kernels' axes: the last are there."""
    return [missing] * (AXES - len(numbers)) + list(numbers)


_compiled: dict[Any, Any] = {}


def _launch(
    kernel: Any,
    programs: int,
    operands: Sequence[Tensor | None],
    numbers: Sequence[int],
    *constants: Any,
    num_warps: int = 4,
) -> None:
    """kernel[(programs,)](*operands, *numbers, *constants), compiled once for dtypes and constants.

    Triton's own door binds and inspects every argument at every call; numbers here have declared
    types and are not specialised, so the compiled kernel depends on nothing else.
    """
    if recording():
        names = kernel.arg_names[-len(constants) :]
        shown = dict(zip(names, map(int, constants), strict=True))
        record(Launch("triton", kernel.__name__, shown, programs, 0))
    if interpreted():
        kernel[(programs,)](*operands, *numbers, *constants)
        return
    first = operands[0]
    assert first is not None
    pointers = [None if t is None else t.data_ptr() for t in operands]
    dtypes = tuple(None if t is None else t.dtype for t in operands)
    aligned = tuple(p is None or p & 15 == 0 for p in pointers)
    key = (kernel.__name__, first.device, constants, num_warps, dtypes, aligned)
    with _current(first.device):
        compiled = _compiled.get(key)
        if compiled is None:
            launch = kernel[(programs,)]
            _compiled[key] = launch(*operands, *numbers, *constants, num_warps=num_warps)
            return
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        code = (compiled.function, compiled.packed_metadata, None, None, None)
        compiled.run(programs, 1, 1, stream, *code, *pointers, *numbers, *constants)


_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes a device current."""
    return _NOTHING if device.index == torch._C._cuda_getDevice() else torch.cuda.device(device)
