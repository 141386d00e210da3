"""Exact nearest neighbours whose distances tensor cores bound from below.

|u_i − v_j|² = |u_i|² + |v_j|² − 2 u_i·v_j, the product in float16: with a share ε of |u|² + |v|²
taken off for its error, it is never above the distance.  Of these bounds, a row's least in every
group of columns is stored:

    low_ig ≤ |u_i − v_j|² − (1 − ε) |u_i|²    for j in group g

The k-th least of them, with twice the error added, is above the k-th nearest distance, so only
groups at or below it have neighbours.  Their distances are computed from differences in float32:
the result is that of all pairs, and ties go to the smallest index.  Points of few coordinates go
into the product as high and low parts, with |v|² (see `gaussians`).

A group consists of columns that one thread of a product has, so its least bound costs one
instruction a pair and no exchange.  Where many groups of many rows are left, or where squares are
not finite, the guard makes the kernel of all pairs run instead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.core.gpu.launcher import Kernel, Tile, current_device
from torchweft.core.printing.modules import imported
from torchweft.reductions.call import ReductionData
from torchweft.reductions.formula.evaluate import evaluate
from torchweft.reductions.formula.kernel_forms import WIDEST
from torchweft.reductions.formula.node import Node
from torchweft.reductions.gpu.gaussians import allowed, cached_kernel, high_low, padded

__all__ = ["MOST_NEIGHBOURS", "NEIGHBOUR_KERNELS", "bounded", "nearest", "nearest_by_bounds"]

NEIGHBOUR_KERNELS = "torchweft.reductions.gpu.neighbours_kernels"

MOST_NEIGHBOURS = 64
"""Largest length of a list of neighbours."""

GROUPS_PER_NEIGHBOUR = 16
"""Groups for each neighbour from which most of them can be left out."""

LEAST_ROWS, LEAST_PAIRS = 2**10, 2**26
"""Rows, and pairs of an entry of the batch, from which bounds are worth their preparation."""

SPLIT_DIMENSIONS = 10
"""Coordinates up to which points go into the product as high and low parts."""

PRODUCT_ERROR, SPLIT_PRODUCT_ERROR = 1.25 * 2.0**-10, 2.0**-15
"""ε: operands of 11 bits, rounded, err by 2⁻¹⁰ of |u||v|; parts by 2⁻²¹, and of the 32 numbers that
tensor cores add up each loses 2⁻²² of the largest: the rest is a margin for centring and for the
distances' own rounding."""

SCALED_RANGE = 6
"""Points are scaled by a power of 2 below 2⁶, their squares below 2¹²."""

LOST_BELOW_RANGE = 2.0**-23
"""Error of numbers below float16's range, 2⁻²⁵ of each coordinate, beside ε."""

LEAST_SQUARE, LARGEST_SQUARE = 2.0**-60, 2.0**90
"""The range of the largest square in which the scaled ones are float32."""

PADDED_BOUND = 6e4
"""The bound of a column that fills a group up."""

BYTES_OF_BOUNDS = 2**27
"""Bytes of the bounds of the rows that are processed at a time."""

GROUP_TILES = {True: Tile((128, 128, 4), 8, 3), False: Tile((128, 128, 1), 8, 2)}
"""Tiles of products of parts, and of plain ones; the last number counts the tiles of a group."""

PROGRAMS_PER_PROCESSOR = 8
"""Programs for each processor."""

SHARE_OF_GROUPS = 8
"""The part of all groups, 1 / 8, that rows may look at on average."""


def bounded(f: Node, k: int, data: ReductionData) -> tuple[Node, Node] | None:
    """u and v of f = |u_i − v_j|², where bounds find its nearest neighbours faster; else None."""
    if f.op != "sqdist":
        return None
    u, v = f.args if 0 in f.args[0].cats else f.args[::-1]
    _, rows, columns = data.sizes
    enough = rows >= LEAST_ROWS and rows * columns >= LEAST_PAIRS and columns < 2**31 - 2**16
    size = _size(GROUP_TILES[u.dim <= SPLIT_DIMENSIONS])
    few = k <= MOST_NEIGHBOURS and GROUPS_PER_NEIGHBOUR * k * size <= columns
    plain = 1 not in u.cats and 0 not in v.cats and u.dim <= WIDEST
    return (u, v) if enough and few and plain and allowed(data) else None


def nearest_by_bounds(
    points: tuple[Node, Node], k: int, data: ReductionData, out: Tensor, processors: int
) -> Tensor:
    """Write the k nearest of v for each of u into out (B, M, k, 1), and return the guard."""
    batch, *lengths = data.sizes
    u, v = (
        evaluate(part, data.values).expand(batch, length, part.dim).contiguous()
        for part, length in zip(points, lengths, strict=True)
    )
    with current_device(out):
        return nearest(u, v, k, out[..., 0], processors)


class _Operands(NamedTuple):
    """Operands of the kernels.

    Args:
        guard: one int32, 1 where all bounds hold, else 0.
        x: rows (B, M, width).
        y: columns (B, whole groups of N, width).
        b: (1 − ε)|v|², if it is not in y.
        slack: (B, M), added to a row's k-th least bound to bound its distance from above.
        above: (1 − ε)|u|², (B, M).
        scale: one number, the factor of squares in all of them.
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
        k: at most MOST_NEIGHBOURS.
        out: (B, M, k) int64.
        processors: of the device.
    """
    batch, rows, dim = u.shape
    width = imported(NEIGHBOUR_KERNELS).WIDTH
    tile = GROUP_TILES[dim <= SPLIT_DIMENSIONS]
    size = _size(tile)
    made = _operands(u, v, 4 * size)
    columns = made.y.shape[1]
    groups = columns // size
    pitch = -(-groups // width) * width
    height = tile.blocks[0]
    some = min(rows, max(BYTES_OF_BOUNDS // (4 * pitch) // height, 1) * height)
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
            parts = min(-(-PROGRAMS_PER_PROCESSOR * processors // tiles), groups // 4)
            length = -(-groups // 4 // parts) * 4 * size
            numbers = (count, columns, -(-columns // length), length, pitch)
            programs = tiles * numbers[2]
            product(programs, [x[here], y, b, guard, lows], numbers, workspace)
            bound(count, [lows, slack[here], guard, bounds, counts], (pitch // width, k))
            guard.mul_(counts[:count].sum() <= groups * count // SHARE_OF_GROUPS)
            given = [u[entry][here], v[entry], lows, bounds, above[here], made.scale, guard]
            choose(count, [*given, out[entry][here]], (v.shape[1], pitch // width))
    return guard


def _size(tile: Tile) -> int:
    """Columns of a group: a thread has one in 4 of each tile."""
    return tile.blocks[1] // 4 * tile.blocks[2]


def _kernels(dim: int, k: int, split: bool, device: torch.device) -> list[Kernel]:
    """The kernels of bounds of groups, of bounds of rows, and of distances."""
    tile, one = GROUP_TILES[split], Tile((), 1, 1)
    step = min(1 << max(dim - 1, 0).bit_length(), 64)
    each: tuple[tuple[str, tuple[int, ...], Tile], ...] = (
        ("lows_kernel", (_width(dim, split),), tile),
        ("bounds_kernel", (), one),
        ("nearest_kernel", (dim, step, k, 1 << (k - 1).bit_length(), *tile.blocks[1:]), one),
    )
    return [cached_kernel(NEIGHBOUR_KERNELS, *of, device) for of in each]


def _width(dim: int, split: bool) -> int:
    """Numbers of a product."""
    return max(16, 1 << ((3 * dim + 2 if split else dim) - 1).bit_length())


def _operands(u: Tensor, v: Tensor, multiple: int) -> _Operands:
    split = u.shape[-1] <= SPLIT_DIMENSIONS
    error = SPLIT_PRODUCT_ERROR if split else PRODUCT_ERROR
    centre = v.mean(1, keepdim=True)
    u, v = (u - centre).double(), (v - centre).double()
    u2, v2 = u.square().sum(-1), v.square().sum(-1)
    most = torch.maximum(u2.amax(), v2.amax())
    guard = ((most >= LEAST_SQUARE) & (most <= LARGEST_SQUARE)).to(torch.int32)  # NaN: not within
    scale = torch.exp2(SCALED_RANGE - torch.ceil(torch.log2(most) / 2))
    u, v, u2, v2 = u * scale, v * scale, u2 * scale.square(), v2 * scale.square()
    slack = (2.5 * error * (u2 + v2.amax(1, keepdim=True)) + 3 * LOST_BELOW_RANGE).float()
    numbers = slack, ((1 - error) * u2).float(), scale.square().float()
    more = -v.shape[1] % multiple
    low = pad((1 - error) * v2 - LOST_BELOW_RANGE, (0, more), value=PADDED_BOUND)
    left, right = high_low(-2 * u), high_low(pad(v, (0, 0, 0, more)))
    if not split:
        x, y = padded(left[0]), padded(right[0])
        return _Operands(guard, x, y, low.float(), *numbers)
    one = torch.ones_like(left[0][..., :1])
    x = torch.cat((left[0], left[0], left[1], one, one), -1)
    y = torch.cat((right[0], right[1], right[0], *high_low(low[..., None])), -1)
    return _Operands(guard, padded(x), padded(y), None, *numbers)
