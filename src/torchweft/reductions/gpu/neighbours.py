"""Exact nearest neighbours whose distances tensor cores bound from below.

|u_i − v_j|² = |u_i|² + |v_j|² − 2 u_i·v_j, the product in float16: with a share ε of |u|² + |v|²
taken off for its error, it is never above the distance.  Of these bounds, a row's least in every
group of columns is stored:

    low_ig ≤ |u_i − v_j|² − (1 − ε) |u_i|²    for j in group g

The k-th least of them, with twice the error added, is above the k-th nearest distance, so only
groups at or below it have neighbours.  Their distances are computed from differences in float32:
the result is that of all pairs, and ties go to the smallest index.  Points of few coordinates go
into the product as high and low parts, with |v|² (see tensor_cores).

A group is made of columns that one thread of a product has, so its least costs one instruction a
pair and no exchange.  Where many groups of many rows are left, or where squares are not finite, the
guard tells the kernel of all pairs to run instead.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.core.gpu.launcher import Kernel, Tile
from torchweft.core.printing.modules import imported, written
from torchweft.reductions.formula.kernel_forms import WIDEST
from torchweft.reductions.formula.node import Node
from torchweft.reductions.gpu.gaussian_products import high_low, to_power_of_2

__all__ = ["MOST", "distance", "nearest", "pays"]

KERNELS = "torchweft.reductions.gpu.neighbours_kernels"

MOST = 64
"""Neighbours that a list may have."""

FEWEST = 16
"""Groups for each neighbour from which most of them can be left out."""

ROWS, PAIRS = 2**10, 2**26
"""Rows, and pairs of an entry of the batch, from which bounds are worth their preparation."""

SPLIT = 10
"""Coordinates that are taken as high and low parts."""

ERROR, SPLIT_ERROR = 1.25 * 2.0**-10, 2.0**-15
"""ε: operands of 11 bits, rounded, err by 2⁻¹⁰ of |u||v|; parts by 2⁻²¹, and of the 32 numbers that
tensor cores add up each loses 2⁻²² of the largest: the rest is a margin for centring and for the
distances' own rounding."""

RANGE = 6
"""Points are scaled by a power of 2 below 2⁶, their squares below 2¹²."""

TINY = 2.0**-23
"""What float16 loses of numbers below its range: 2⁻²⁵ of each coordinate, beside ε."""

LEAST, LARGEST = 2.0**-60, 2.0**90
"""The range of the largest square in which the scaled ones are float32."""

OUTSIDE = 6e4
"""The bound of a column that fills a group up."""

SCRATCH = 2**27
"""Bytes of bounds that are kept at a time."""

TILES = {True: Tile((128, 128, 4), 8, 3), False: Tile((128, 128, 1), 8, 2)}
"""Of products of parts, and of plain ones; the last number counts the tiles of a group."""

PROGRAMS = 8
"""Programs for each processor."""

BUDGET = 8
"""The share of the groups that rows may look at, on average."""


def distance(f: Node) -> tuple[Node, Node] | None:
    """u and v of a formula |u_i − v_j|²; else None."""
    if f.op != "sqdist":
        return None
    u, v = f.args if 0 in f.args[0].cats else f.args[::-1]
    return (u, v) if 1 not in u.cats and 0 not in v.cats and u.dim <= WIDEST else None


def pays(dim: int, k: int, rows: int, columns: int) -> bool:
    """Whether there are many pairs, and most groups can be left out."""
    enough = rows >= ROWS and rows * columns >= PAIRS and columns < 2**31 - 2**16
    return enough and k <= MOST and FEWEST * k * _size(TILES[dim <= SPLIT]) <= columns


class _Operands(NamedTuple):
    """Of products.

    Args:
        guard: 1 where all bounds hold, else 0, int32, one number.
        x: rows (B, M, width).
        y: columns (B, whole groups of N, width).
        b: (1 − ε)|v|², if it is not in y.
        slack: what makes a row's bound one from above, (B, M).
        above: (1 − ε)|u|², (B, M).
        scale: of squares in all of them, one number.
    """

    guard: Tensor
    x: Tensor
    y: Tensor
    b: Tensor | None
    slack: Tensor
    above: Tensor
    scale: Tensor


def nearest(u: Tensor, v: Tensor, k: int, out: Tensor, processors: int) -> Tensor:
    """Write the k nearest of v for each of u; the guard is 0 where that is left to all pairs.

    Args:
        u: (B, M, D) float32, contiguous.
        v: (B, N, D).
        k: at most MOST.
        out: (B, M, k) int64.
        processors: of the device.
    """
    batch, rows, dim = u.shape
    width = imported(KERNELS).WIDTH
    tile = TILES[dim <= SPLIT]
    size = _size(tile)
    made = _operands(u, v, 4 * size)
    columns = made.y.shape[1]
    groups = columns // size
    pitch = -(-groups // width) * width
    height = tile.blocks[0]
    some = min(rows, max(SCRATCH // (4 * pitch) // height, 1) * height)
    lows = u.new_full((-(-some // height) * height, pitch), float("inf"))
    bounds = u.new_empty(some)
    counts = torch.empty(some, dtype=torch.int32, device=u.device)
    product, bound, choose = _kernels(dim, k, made.b is None, u.device)
    guard, workspace = made.guard, lows.nbytes + made.x.nbytes + made.y.nbytes
    for entry in range(batch):
        x, y, slack, above = (t[entry] for t in (made.x, made.y, made.slack, made.above))
        b = None if made.b is None else made.b[entry]
        for first in range(0, rows, some):
            count = min(some, rows - first)
            here = slice(first, first + count)
            tiles = -(-count // height)
            parts = min(-(-PROGRAMS * processors // tiles), groups // 4)
            length = -(-groups // 4 // parts) * 4 * size
            numbers = (count, columns, -(-columns // length), length, pitch)
            programs = tiles * numbers[2]
            product(programs, [x[here], y, b, guard, lows], numbers, workspace)
            bound(count, [lows, slack[here], guard, bounds, counts], (pitch // width, k))
            guard.mul_(counts[:count].sum() <= groups * count // BUDGET)
            given = [u[entry][here], v[entry], lows, bounds, above[here], made.scale, guard]
            choose(count, [*given, out[entry][here]], (v.shape[1], pitch // width))
    return guard


def _size(tile: Tile) -> int:
    """Columns of a group: a thread has one in 4 of each tile."""
    return tile.blocks[1] // 4 * tile.blocks[2]


@functools.lru_cache(maxsize=256)
def _kernels(dim: int, k: int, split: bool, device: torch.device) -> tuple[Kernel, Kernel, Kernel]:
    """Compiled code belongs to a device."""
    tile = TILES[split]
    step = min(1 << max(dim - 1, 0).bit_length(), 64)
    constants: tuple[Any, ...] = (dim, step, k, 1 << (k - 1).bit_length(), *tile.blocks[1:])
    one = Tile((), 1, 1)
    return (
        Kernel(written(KERNELS, "lows_kernel"), (), (_width(dim, split),), tile),
        Kernel(written(KERNELS, "bounds_kernel"), (), (), one),
        Kernel(written(KERNELS, "nearest_kernel"), (), constants, one),
    )


def _width(dim: int, split: bool) -> int:
    """Numbers of a product."""
    return max(16, 1 << ((3 * dim + 2 if split else dim) - 1).bit_length())


def _operands(u: Tensor, v: Tensor, multiple: int) -> _Operands:
    split = u.shape[-1] <= SPLIT
    error = SPLIT_ERROR if split else ERROR
    centre = v.mean(1, keepdim=True)
    u, v = (u - centre).double(), (v - centre).double()
    u2, v2 = u.square().sum(-1), v.square().sum(-1)
    most = torch.maximum(u2.amax(), v2.amax())
    guard = ((most >= LEAST) & (most <= LARGEST)).to(torch.int32)  # NaN: not within
    scale = torch.exp2(RANGE - torch.ceil(torch.log2(most) / 2))
    u, v, u2, v2 = u * scale, v * scale, u2 * scale.square(), v2 * scale.square()
    slack = (2.5 * error * (u2 + v2.amax(1, keepdim=True)) + 3 * TINY).float()
    numbers = slack, ((1 - error) * u2).float(), scale.square().float()
    more = -v.shape[1] % multiple
    low = pad((1 - error) * v2 - TINY, (0, more), value=OUTSIDE)
    left, right = high_low(-2 * u), high_low(pad(v, (0, 0, 0, more)))
    if not split:
        x, y = to_power_of_2(left[0]), to_power_of_2(right[0])
        return _Operands(guard, x, y, low.float(), *numbers)
    one = torch.ones_like(left[0][..., :1])
    x = torch.cat((left[0], left[0], left[1], one, one), -1)
    y = torch.cat((right[0], right[1], right[0], *high_low(low[..., None])), -1)
    return _Operands(guard, to_power_of_2(x), to_power_of_2(y), None, *numbers)
