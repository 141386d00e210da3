"""Sorted keys and kernel maps on the CPU by numba's loops, which are loaded at the first call."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweft.core.backend import choose
from torchweft.core.cpu.loops import share
from torchweft.voxels.grid import Geometry

Array = np.ndarray[Any, Any]

__all__ = ["ascending", "bounds", "loops_serve", "meet", "pack", "resample"]

SERIAL = 2**17
"""Voxels on all lines of a kernel below which one thread is faster."""

WIDE = 2**31
"""Pairs are numbered in int64 where a number may reach this."""

Voxels = tuple[Tensor, Tensor]
"""(N, 1 + d) int32 rows, ascending, and the number (int32) of each."""


def loops_serve(device: str) -> bool:
    """Whether numba's loops serve tensors on a type of device; the torch code serves all."""
    return device == "cpu" and choose(None, device) == "numba"


def bounds(rows: Tensor) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], bool]:
    """The bounds of the columns of one or more rows, and whether each row is below the next."""
    from torchweft.voxels.maps import numba_loops

    low, high = np.empty((2, rows.shape[1]), np.int64)
    narrow = rows.dtype == torch.int32
    ascends = numba_loops.bounds((rows if narrow else rows.long()).contiguous().numpy(), low, high)
    return (tuple(low.tolist()), tuple(high.tolist())), ascends


def pack(rows: Tensor, lows: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """(N,) int64 keys of int32 rows in a box, whose keys one integer holds."""
    from torchweft.voxels.maps import numba_loops

    keys = rows.new_empty(len(rows), dtype=torch.int64)
    numba_loops.keys_of(rows.numpy(), np.array(lows), np.array(sizes), keys.numpy())
    return keys


def ascending(keys: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The keys of a box ascending, and their stable order as int32."""
    from torchweft.voxels.maps import numba_loops

    order = np.arange(len(keys), dtype=np.int32)
    placed, order = numba_loops.sort(keys.long().numpy(), order, _bits(sizes))
    return torch.from_numpy(placed).to(keys.dtype), torch.from_numpy(order)


def distinct(keys: Tensor, sizes: Sequence[int]) -> Tensor:
    """The distinct keys of a box, ascending."""
    from torchweft.voxels.maps import numba_loops

    none = np.empty(0, np.int32)
    placed, _ = numba_loops.sort(keys.long().numpy(), none, _bits(sizes))
    return torch.from_numpy(placed[: numba_loops.squeeze(placed)].copy())


def _bits(sizes: Sequence[int]) -> int:
    return (math.prod(sizes) - 1).bit_length()


def resample(
    inputs: Voxels, sizes: Sequence[int], shape: Geometry
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A strided or transposed map: its two tables, and the keys (int64) and rows of its outputs.

    All pairs are sorted by the output that they write; outputs ascend.

    Args:
        inputs: voxels.
        sizes: of the columns of the outputs, which begin at 0.
        shape: the geometry.
    """
    from torchweft.voxels.maps import numba_loops

    (rows, owner), num_offsets = inputs, shape.num_offsets
    most = 1  # voxels that one row meets: strided, of every s / gcd(s, dilation) positions one
    for k, s, d in zip(shape.kernel_size, shape.stride, shape.dilation, strict=True):
        most *= k if shape.transposed else -(-k * math.gcd(s, d) // s)
    bits = (num_offsets - 1).bit_length()
    kind = np.int32 if len(rows) << bits < WIDE else np.int64
    keys, pairs = np.empty(most * len(rows), np.int64), np.empty(most * len(rows), kind)
    kernel, limits = np.array([*zip(shape.kernel_size, shape.stride, strict=True)]), np.array(sizes)
    given = rows.numpy(), kernel, _steps(shape), limits, shape.transposed, bits
    count = numba_loops.reach(*given, keys, pairs)
    keys, pairs = numba_loops.sort(keys[:count], pairs[:count], _bits(sizes))
    met = keys.copy()
    found = torch.from_numpy(met[: numba_loops.squeeze(met)].copy())
    outputs = rows.new_empty(len(found), len(sizes))
    numba_loops.rows_of(found.numpy(), limits, outputs.numpy())
    table, back = (rows.new_full((num_offsets, n), -1) for n in (len(found), len(rows)))
    numba_loops.enter(keys, pairs, bits, owner.numpy(), table.numpy(), back.numpy())
    return table, back, found, outputs


@functools.lru_cache(maxsize=256)
def _steps(shape: Geometry) -> Array:
    """(axes, positions, 2): quotient and rest of the offset of each position of the kernel.

    Strided, a coordinate q meets (q − offset) / stride; transposed, q stride + offset.
    """
    steps = np.zeros((len(shape.kernel_size), max(shape.kernel_size), 2), np.int64)
    for axis, (k, s) in enumerate(zip(shape.kernel_size, shape.stride, strict=True)):
        offsets = np.arange(k) * shape.dilation[axis] - shape.begin[axis]
        if shape.transposed:
            steps[axis, :k, 0] = offsets
        else:
            steps[axis, :k, 0], steps[axis, :k, 1] = -(offsets // s), offsets % s
    return steps


Box = tuple[Sequence[int], Sequence[int]]
"""The lowest value and the size of each column."""


def meet(
    coarse: Voxels, fine: Voxels, box: Box, shape: Geometry, mirror: bool
) -> tuple[Tensor, Tensor]:
    """The tables of the coarse and of the fine side of a map; a mirrored one is both.

    Args:
        coarse: voxels; each meets the fine ones at row · stride + offset.
        fine: voxels.
        box: of the fine rows.
        shape: the geometry.
        mirror: whether the two sides are one, and offset K − 1 − k is the opposite of k.
    """
    from torchweft.voxels.maps import numba_loops

    offsets, limits, along = np.array(shape.offsets()), np.array(box), shape.kernel_size[-1]
    rows, cells = coarse[0], fine[0]
    table = rows.new_full((len(offsets), len(rows)), -1)
    back = table if mirror else rows.new_full((len(offsets), len(cells)), -1)
    begin, keys = _lines(cells, limits)
    sides = (
        (rows.numpy(), coarse[1].numpy(), begin if rows is cells else _lines(rows, limits)[0]),
        (cells.numpy(), fine[1].numpy(), begin, keys),
    )
    lines = np.ascontiguousarray(offsets[::along, :-1])
    shifts = np.array(shape.stride), lines, np.ascontiguousarray(offsets[:along, -1])
    results = table.numpy(), back.numpy()

    def run(first: int, last: int) -> None:
        numba_loops.meet(first, last, *sides, limits, *shifts, mirror, *results)

    tasks = len(lines) // 2 + 1 if mirror else len(lines)
    share(run, tasks, tasks * (len(rows) + len(cells)), SERIAL)
    return table, back


def _lines(rows: Tensor, limits: Array) -> tuple[Array, Array]:
    """Where each line of ascending rows begins, and its key, which only a row in the box has."""
    from torchweft.voxels.maps import numba_loops

    begin, keys = np.empty(len(rows) + 1, np.int64), np.empty(len(rows), np.int64)
    count = numba_loops.lines_of(rows.numpy(), limits[0], limits[1], begin, keys)
    return begin[: count + 1], keys[:count]
