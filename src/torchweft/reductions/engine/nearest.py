"""Exact nearest neighbours: in up to 3 dimensions cells and their neighbours, else all pairs.

On a CPU with numba a k-d tree takes the place of cells, see `tree`.

A query looks at the 3^D cells around its own.  What lies elsewhere is farther than the border of
these, so neighbours nearer than it are final; queries that have too few look again, two cells far,
then two of cells twice as wide.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import Tile, current_device
from torchweft.core.operators.operands import check_unmapped
from torchweft.errors import DTypeError, ShapeError
from torchweft.reductions.engine.reduction import reduce
from torchweft.reductions.engine.tree import nearest_by_tree, worth_a_tree
from torchweft.reductions.engine.whole import together, whole
from torchweft.reductions.formula.node import node, var
from torchweft.reductions.gpu.gaussians import cached_kernel
from torchweft.reductions.gpu.neighbours import MOST_NEIGHBOURS, NEIGHBOUR_KERNELS

__all__ = ["nearest"]

MOST_CELLS = 2**20  # of an axis: three axes and their borders fit 63 bits
PAIRS_PER_CHUNK = 2**22  # pairs of a query and a candidate that are looked at together
CELLS_PER_POINT = 16  # cells for each point up to which a table of all of them is made
POINTS_PER_LOOK = 32  # points that a program looks at together
RUNS = {1: (0,), 2: (-1, 2)}  # by reach: middles of three cells along the last axis that cover it
BORDER = 2, 3  # empty cells before and after those of an axis, where such runs end


@together
def nearest(x: Tensor, y: Tensor, k: int) -> Tensor:
    """The k points of y that are nearest to each point of x

    Exact: squared distances are sums of squares of differences, in float32 or float64, and the
    smallest index goes first where they are equal.

    Args:
        x: (M, D) queries.
        y: (N, D) points.
        k: how many.

    Returns:
        (M, k) int64 rows of y, nearest first; −1 where y has fewer than k points.

    Cost: D ≤ 3: about 14 k pairs a query where points are spread evenly, and on a CPU with numba
    log N + k boxes wherever they are; else all M · N pairs.

    Raises:
        ShapeError: x and y are not (points, D) of one D, k is below 1, or torch.vmap maps points.
        DTypeError: x and y are not of one floating dtype.

    Example:
        >>> import torch
        >>> from torchweft.reductions import nearest
        >>> nearest(torch.tensor([[0.0], [9.0]]), torch.tensor([[1.0], [5.0], [8.0]]), 2).tolist()
        [[0, 1], [2, 1]]
    """
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or k < 1:
        raise ShapeError(
            f"x is {tuple(x.shape)}, y is {tuple(y.shape)} and k is {k}: both must be (points, D) "
            "with the same D, and k at least 1. Reshape the points or correct k."
        )
    if x.dtype != y.dtype or not x.is_floating_point():
        raise DTypeError(
            f"x is {x.dtype} but y is {y.dtype}: both must be of one floating type. Pass "
            "y.to(x.dtype)."
        )
    check_unmapped("Call once for each cloud.", x=x, y=y)
    wide = torch.promote_types(x.dtype, torch.float32)
    return whole().nearest(_nearest, x.detach().to(wide), y.detach().to(wide), k)


def _nearest(x: Tensor, y: Tensor, k: int) -> Tensor:
    if x.shape[1] > 3 or not x.numel() or len(y) <= k:
        return _among_all(x, y, k)
    ends = torch.stack([*x.aminmax(dim=0), *y.aminmax(dim=0)]).double()
    *of_x, low, high = ends.tolist()  # the host waits once; NaN is the end of an axis that has one
    sides = map(operator.sub, high, low)
    if not all(map(math.isfinite, itertools.chain(*of_x, low, high, sides))):
        return _among_all(x, y, k)
    if not x.is_cuda and worth_a_tree(len(x), len(y), x.shape[1], k):
        return nearest_by_tree(x, y, k)
    return _among_cells(x, y, k, _Box(low, high, ends[2], ends[3]))


def _among_all(x: Tensor, y: Tensor, k: int) -> Tensor:
    dim = x.shape[1]
    formula = node("sqdist", var(0, dim, 0), var(1, dim, 1))
    found = reduce("ArgKMin", formula, (x, y), 1, k=k)
    assert isinstance(found, Tensor)
    return found


class _Box(NamedTuple):
    """The least and the largest coordinates of points, on the host and beside the points."""

    low: list[float]
    high: list[float]
    first: Tensor
    last: Tensor


class _Grid:
    """Points sorted by cell; cells are numbered row-major, with a border of empty ones.

    Args:
        y: (N, D) points.
        box: of the points.
        size: of a cell.

    Attributes:
        low: (D,) corner of cell 0.
        size: of a cell.
        rate: its inverse, by which torch multiplies on a GPU where a number of the host divides.
        most: (D,) the last cell of each axis.
        keys: (N,) cells' numbers, ascending.
        order: (N,) the points in that order.
    """

    def __init__(self, y: Tensor, box: _Box, size: float) -> None:
        self.low, self.size, self.rate = box.first, size, 1 / size
        ends = zip(box.low, box.high, strict=True)
        self._counts = [math.floor((high - low) * self.rate) + 1 for low, high in ends]
        self.most = ((box.last - box.first) * self.rate).floor()
        self.keys, self.order = self.key(self.cells(y)).sort(stable=True)

    def cells(self, points: Tensor) -> Tensor:
        """(M, D) cells; points outside count in the next one inside."""
        cells = ((points.double() - self.low) * self.rate).floor().clamp(min=0)
        return torch.minimum(cells, self.most).to(torch.int64)

    def numbers(self) -> int:
        """How many cells there are, with the border."""
        return math.prod(count + sum(BORDER) for count in self._counts)

    def key(self, cells: Tensor) -> Tensor:
        """Numbers of cells, those of the border too."""
        number = torch.zeros_like(cells[..., 0])
        for cell, count in zip(cells.unbind(-1), self._counts, strict=True):
            number = number * (count + sum(BORDER)) + cell + BORDER[0]
        return number

    @functools.cached_property
    def starts(self) -> Tensor:
        """(cells + 1,) where the points of each cell begin among the sorted ones."""
        every = torch.arange(self.numbers() + 1, device=self.keys.device)
        return torch.searchsorted(self.keys, every)


def _among_cells(x: Tensor, y: Tensor, k: int, box: _Box) -> Tensor:
    grid, reach = _first_grid(y, k, box), 1
    found, final = _look(grid, x, y, k, reach)
    left = final.logical_not().nonzero()[:, 0]
    while len(left):
        if reach == 2:
            grid = _Grid(y, box, 2 * grid.size)
        reach = 2
        found[left], final = _look(grid, x[left], y, k, reach)
        left = left[~final]
    return found


def _first_grid(y: Tensor, k: int, box: _Box) -> _Grid:
    """About k / 2 points in a cell that has points: most queries then end where they begin."""
    sides = [high - low for low, high in zip(box.low, box.high, strict=True)]
    wide = [side for side in sides if side > 0]
    if not wide:
        return _Grid(y, box, 1.0)  # all in one place
    least = max(max(sides) / MOST_CELLS, sys.float_info.min)
    root = 1 / len(wide)  # of each factor: their product may leave the range of floats
    size = (k / 2 / len(y)) ** root * math.prod(side**root for side in wide)
    grid = _Grid(y, box, max(size, least))
    # points of a curve or a surface fill few of the cells of their box
    while len(y) > k * (1 + int((grid.keys.diff() > 0).sum())) and grid.size > 2 * least:
        grid = _Grid(y, box, grid.size / 2)
    return grid


def _look(grid: _Grid, x: Tensor, y: Tensor, k: int, reach: int) -> tuple[Tensor, Tensor]:
    """(M, k) nearest in the cells `reach` around each, and whether nothing elsewhere is nearer."""
    cells, steps = grid.cells(x), _steps(x.shape[1], reach, x.device)
    border = _border(grid, x, cells, reach)
    if x.is_cuda and _has_kernel(grid, x, y, k):
        near, farthest = _by_kernel(grid, cells, steps, x, y, k)
        return near, (farthest.double().sqrt() < border) | border.isinf()
    starts, ends = _lists(grid, cells, steps)
    totals = (ends - starts).sum(1)
    order = totals.argsort(descending=True, stable=True)  # alike lengths together
    lengths = totals[order].tolist()
    near = torch.empty(len(x), k, dtype=torch.int64, device=x.device)
    final = torch.empty(len(x), dtype=torch.bool, device=x.device)
    first = 0
    while first < len(lengths):
        width = max(k, lengths[first])
        rows = order[first : first + max(1, PAIRS_PER_CHUNK // width)]
        candidates = _candidates(starts[rows], ends[rows], width)
        points = torch.where(candidates < 0, -1, grid.order[candidates.clamp(min=0)])
        near[rows], farthest = _smallest(x[rows], y, points, k)
        final[rows] = farthest.double().sqrt() < border[rows]
        first += len(rows)
    return near, final | border.isinf()


def _has_kernel(grid: _Grid, x: Tensor, y: Tensor, k: int) -> bool:
    plain = x.dtype == torch.float32 and k <= MOST_NEIGHBOURS and len(y) < 2**31 - POINTS_PER_LOOK
    few = grid.numbers() <= CELLS_PER_POINT * len(y) + PAIRS_PER_CHUNK
    return plain and few and torch.version.hip is None


def _by_kernel(
    grid: _Grid, cells: Tensor, steps: Tensor, x: Tensor, y: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The nearest of each query and the last one's squared distance, one program a query."""
    dim = x.shape[1]
    keys, rows = grid.key(cells).sort()  # neighbours read the same points
    runs = grid.key(steps) - grid.key(torch.zeros_like(steps))
    near = torch.empty(len(x), k, dtype=torch.int64, device=y.device)
    farthest = x.new_empty(len(x))
    tensors = [x[rows], y[grid.order].t().contiguous(), grid.order, grid.starts, keys, runs]
    constants = (dim, k, 1 << (k - 1).bit_length())
    with current_device(x):
        kernel = cached_kernel(
            NEIGHBOUR_KERNELS, "look_kernel", constants, Tile((POINTS_PER_LOOK,), 1, 1), x.device
        )
        kernel(len(x), [*tensors, near, farthest], (len(y), len(runs)))
    back = torch.empty_like(rows).scatter_(0, rows, torch.arange(len(x), device=x.device))
    return near[back], farthest[back]


def _steps(dim: int, reach: int, device: torch.device) -> Tensor:
    """(runs, D) from a cell to the middle one of each three along the last axis."""
    aside = [range(-reach, reach + 1)] * (dim - 1)
    steps = torch.tensor(list(itertools.product(*aside, RUNS[reach])), device="cpu")
    return steps.to(device, non_blocking=True)  # else the host waits for all that runs


def _lists(grid: _Grid, cells: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """(M, runs) starts and ends among the sorted points: cells along the last axis touch."""
    rows = cells.unsqueeze(1) + steps
    along = torch.zeros_like(steps[0])
    along[-1] = 1
    starts = torch.searchsorted(grid.keys, grid.key(rows - along))
    return starts, torch.searchsorted(grid.keys, grid.key(rows + along), right=True)


def _border(grid: _Grid, x: Tensor, cells: Tensor, reach: int) -> Tensor:
    """(M,) how far a point must be that is not in the cells around; +∞ where all points are."""
    place = (x.double() - grid.low) * grid.rate  # in cells
    below = torch.where(cells > reach, place - (cells - reach), torch.inf)
    above = torch.where(cells < grid.most - reach, cells + reach + 1 - place, torch.inf)
    # rounding may have put a point of the border on its other side
    return torch.minimum(below, above).amin(1) * grid.size * (1 - 1e-5)


def _candidates(starts: Tensor, ends: Tensor, width: int) -> Tensor:
    """(Q, width) the numbers of all lists of a query one after the other, then −1."""
    before = (ends - starts).cumsum(1)
    place = torch.arange(width, device=starts.device).expand(len(starts), -1).contiguous()
    which = torch.searchsorted(before, place, right=True)
    inside = which < starts.shape[1]
    which = which.clamp(max=starts.shape[1] - 1)
    number = ends.gather(1, which) - before.gather(1, which) + place
    return torch.where(inside, number, -1)


def _smallest(x: Tensor, y: Tensor, points: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(Q, k) the nearest of the points, and the squared distance of the last of them."""
    square = torch.zeros_like(points, dtype=x.dtype)
    for of_x, of_y in zip(x.unbind(1), y.unbind(1), strict=True):
        square += (of_x.unsqueeze(1) - of_y[points.clamp(min=0)]).square()
    square = torch.where(points < 0, torch.inf, square)
    if x.dtype == torch.float32:  # distance and index side by side in one integer
        packed = square.view(torch.int32).to(torch.int64) << 32 | points & 0xFFFFFFFF
        best = packed.topk(k, largest=False).values
        near, farthest = best & 0xFFFFFFFF, (best[:, -1] >> 32).to(torch.int32)
        return near, farthest.view(torch.float32)
    points, order = points.sort(1)
    square, by_distance = square.gather(1, order).sort(dim=1, stable=True)
    return points.gather(1, by_distance[:, :k]), square[:, k - 1]
