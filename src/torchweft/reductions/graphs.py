"""Graphs of near points: an edge from each neighbour, src, to the point it is near to, dst.

    k nearest:  |x_src − x_dst| among the k smallest of dst        radius:  |x_src − x_dst| < r

They are `torchweft.products.knn_graph` and `radius_graph`.  Nearest points are those of
`reductions.nearest`, or of a block-sparse reduction where a batch has many small items.  Points
within a radius lie in cells of its size, whose neighbours are looked at: vesin's lists, which o3
uses, are of three dimensions and of one structure a call, and scipy's trees are of the CPU.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.core.operators.operands import check_tensors
from torchweft.core.table_copies import mark_constant
from torchweft.errors import BackendError, DeviceError, DTypeError, ShapeError
from torchweft.reductions.cluster.sparsity import BlockSparsity
from torchweft.reductions.engine.nearest import nearest
from torchweft.reductions.engine.reduction import reduce
from torchweft.reductions.engine.whole import whole
from torchweft.reductions.formula.node import node, var

__all__ = ["knn_graph", "radius_graph"]

Graph = tuple[Tensor, Tensor]
"""src (E,) and dst (E,)."""

MOST_AXES = 3  # that cells divide: nearest's, and of a radius the three that are longest
POINTS_IN_CELLS = 2048  # points of an item from which cells are faster than all pairs
PAIRS_PER_CHUNK = 2**20  # pairs that are looked at together
MOST_CELLS = 2**30  # of an axis
ROUNDING = 2.0**-20  # part of the radius by which cells exceed it, so that no pair is lost


def knn_graph(x: Tensor, k: int, batch: Tensor | None = None, loop: bool = False) -> Graph:
    """Edges to each point from the k points nearest to it.

    Exact: squared distances are sums of squares of differences, in float32 or float64; of equal
    ones the smallest index goes first.  A point has fewer neighbours where its item has no more.

    Args:
        x: (N, D) points, or (N,) of one dimension.
        k: how many.
        batch: (N,) integers in any order, the item of each point; points of two items are no
            neighbours.  None: one item.
        loop: whether a point counts as a neighbour of its own.

    Returns:
        src (E,) and dst (E,) int64, the neighbours and their points, sorted by dst, then by
        distance.  They are `torchweft.constant`.  Torch Geometric's edge_index of its default
        flow is torch.stack([src, dst]).

    Raises:
        ShapeError: other shapes, k below 1, points that are NaN or infinite.
        DTypeError, DeviceError: points that are not real numbers, a batch that has no integers or
            is on another device.
        BackendError: inside `distributed.all_pairs`, where rows are those of several ranks.

    Cost: that of `reductions.nearest` for each item; all pairs of an item where D > 3, or where
    items have fewer than 2048 points on average.  The host waits for a GPU.

    Source: names and edges of torch_cluster, which leaves out its last neighbour where the point
    itself is not found among points in the same place.

    Example:
        >>> import torch
        >>> from torchweft import products
        >>> src, dst = products.knn_graph(torch.tensor([0.0, 1.0, 3.0, 7.0]), 2)
        >>> src.tolist(), dst.tolist()
        ([1, 2, 0, 2, 1, 0, 2, 1], [0, 0, 1, 1, 2, 2, 3, 3])
    """
    if k < 1:
        raise ShapeError(f"k is {k}: a point must have at least one neighbour. Pass k=1 or more.")
    points, items = _checked(x, batch)
    points = points.to(torch.promote_types(points.dtype, torch.float32))
    near = _nearest(points, items, k + (not loop))
    dst = torch.arange(len(points), device=points.device)[:, None].expand_as(near)
    there = near >= 0
    if not loop:
        there &= near != dst
        there &= there.cumsum(1) <= k  # k + 1 points in one place may lack this one
    return _constant(near[there], dst[there])


def radius_graph(
    x: Tensor,
    r: float,
    batch: Tensor | None = None,
    loop: bool = False,
    max_neighbors: int | None = None,
) -> Graph:
    """Edges to each point from the points that are closer to it than r.

    Exact: |x_src − x_dst|² < r² in float64, as sums of squares of differences.

    Args:
        x: (N, D) points, or (N,) of one dimension.
        r: the length that edges do not reach, positive.
        batch: (N,) integers in any order, the item of each point; points of two items are no
            neighbours.  None: one item.
        loop: whether a point counts as a neighbour of its own.
        max_neighbors: keeps the nearest of a point's neighbours, of equal ones those of the
            smallest index.  None: all of them.

    Returns:
        src (E,) and dst (E,) int64, the neighbours and their points, sorted by dst, then by src.
        They are `torchweft.constant`.  Torch Geometric's edge_index of its default flow is
        torch.stack([src, dst]).

    Raises:
        ShapeError: other shapes, r or max_neighbors not positive, points that are NaN or infinite.
        DTypeError, DeviceError: points that are not real numbers, a batch that has no integers or
            is on another device.
        BackendError: inside `distributed.all_pairs`, where rows are those of several ranks.

    Cost: about 27/4.2 pairs looked at for each edge where D = 3, and two sorts, of points and of
    edges.  The host waits for a GPU.

    Source: names and edges of torch_cluster, whose max_num_neighbors is 32 where nothing is said
    and keeps neighbours in no certain order.

    Example:
        >>> import torch
        >>> from torchweft import products
        >>> src, dst = products.radius_graph(torch.tensor([0.0, 1.0, 3.0, 7.0]), 2.5)
        >>> src.tolist(), dst.tolist()
        ([1, 0, 2, 1], [0, 1, 1, 2])
    """
    if not 0 < r < math.inf:
        raise ShapeError(f"r is {r}: it is the radius, positive and finite. Pass one, e.g. r=1.0.")
    if max_neighbors is not None and max_neighbors < 1:
        raise ShapeError(
            f"max_neighbors is {max_neighbors}: a point must be allowed at least one neighbour. "
            "Pass 1 or more, or None for all."
        )
    points, items = _checked(x, batch)
    columns = points.double().t().contiguous()
    pairs = _pairs_within(columns, float(r), items, loop)
    dst, src = pairs // max(len(points), 1), pairs % max(len(points), 1)
    if max_neighbors is not None:
        kept = _rank_by_distance(columns, src, dst) < max_neighbors
        src, dst = src[kept], dst[kept]
    return _constant(src, dst)


def _constant(src: Tensor, dst: Tensor) -> Graph:
    mark_constant(src, dst)
    return src, dst


def _checked(x: Tensor, batch: Tensor | None) -> Graph:
    """(N, D) points, and (N,) their items."""
    check_tensors(x=x)
    if not x.is_floating_point():
        raise DTypeError(f"x is {x.dtype}: points are real numbers. Pass x.double(), for example.")
    points = x.detach()[:, None] if x.dim() == 1 else x.detach()
    if points.dim() != 2 or not points.shape[1]:
        raise ShapeError(
            f"x is {tuple(x.shape)}: it must be (N, D), a row a point. Reshape it, and pass batch= "
            "for several items."
        )
    if not points.isfinite().all():
        row = int((~points.isfinite()).any(1).nonzero()[0, 0])
        raise ShapeError(
            f"x[{row}] is {points[row].tolist()}: points must be finite. Leave such rows out."
        )
    if whole().spread:
        raise BackendError(
            "a graph was asked for inside distributed.all_pairs, where each rank has rows of its "
            "own: its edges would name rows of several ranks. Build it outside, and pass it to "
            "distributed.shard."
        )
    if batch is None:
        return points, torch.zeros(len(points), dtype=torch.int64, device=points.device)
    check_tensors(batch=batch)
    if batch.dtype not in (torch.int64, torch.int32):
        raise DTypeError(f"batch is {batch.dtype}: items are int64 or int32. Pass batch.long().")
    if batch.shape != points.shape[:1]:
        raise ShapeError(
            f"batch is {tuple(batch.shape)} and there are {len(points)} points: it must have the "
            f"item of each, ({len(points)},). Pass zeros for one item, or None."
        )
    if batch.device != points.device:
        raise DeviceError(
            f"batch is on {batch.device} and x on {points.device}: they must be on one device. "
            f"Pass batch.to({str(points.device)!r})."
        )
    return points, torch.unique(batch, return_inverse=True)[1]


def _nearest(x: Tensor, items: Tensor, k: int) -> Tensor:
    """(N, ≤ k) the nearest points of the same item, −1 where there are no more."""
    order = items.argsort(stable=True)  # within an item as before: ties stay as they are
    sizes = items.bincount().tolist()
    k = min(k, max(sizes, default=0))
    x = x[order]
    if len(sizes) < 2:
        found = nearest(x, x, k) if k else items.new_zeros(0, 0)
    elif x.shape[1] <= MOST_AXES and len(x) >= POINTS_IN_CELLS * len(sizes):
        starts = itertools.accumulate([0, *sizes[:-1]])
        items_of = zip(torch.split(x, sizes), starts, strict=True)
        found = torch.cat([_shifted(nearest(part, part, k), start) for part, start in items_of])
    else:
        found = _nearest_of_blocks(x, items[order], k)
    rows = torch.empty_like(found)
    rows[order] = torch.where(found < 0, -1, order[found.clamp(min=0)])
    return rows


def _shifted(found: Tensor, start: int) -> Tensor:
    return torch.where(found < 0, -1, found + start)


def _nearest_of_blocks(x: Tensor, items: Tensor, k: int) -> Tensor:
    """All pairs of each item, for points in the order of items."""
    dim = x.shape[1]
    formula = node("sqdist", var(0, dim, 0), var(1, dim, 1))
    mask = BlockSparsity.from_batch(items, items)
    found = reduce("ArgKMin", formula, (x, x), 1, k=k, ranges=mask)
    assert isinstance(found, Tensor)
    return found


def _pairs_within(columns: Tensor, r: float, items: Tensor, loop: bool) -> Tensor:
    """(E,) N · dst + src of the pairs that are closer than r, ascending."""
    count = len(items)
    if not count:
        return items
    keys, steps = _cells(columns, r, items)
    keys, order = keys.sort()
    columns = columns[:, order]  # points of a cell stand together, as those of a run of cells
    starts = torch.searchsorted(keys, keys[:, None] + (steps - 1))
    lengths = torch.searchsorted(keys, keys[:, None] + (steps + 1), right=True) - starts
    ends = lengths.sum(1).cumsum(0)
    marks = torch.arange(0, int(ends[-1]), PAIRS_PER_CHUNK, device=ends.device)
    bounds = {0, *torch.searchsorted(ends, marks[1:]).tolist(), count}
    found = []
    for first, last in itertools.pairwise(sorted(bounds)):
        run, src = _members(starts[first:last].flatten(), lengths[first:last].flatten())
        dst = first + run // len(steps)
        near = _square(columns, src, dst) < r * r
        near = near if loop else near & (src != dst)
        found.append(order[dst[near]] * count + order[src[near]])
    return torch.cat(found).sort().values


def _cells(columns: Tensor, r: float, items: Tensor) -> Graph:
    """(N,) numbers of the points' cells, and what leads to those around, the last axis aside.

    A cell is not smaller than r, so that points closer than r are in cells that touch.  Each axis
    has an empty cell at either end, and items follow each other.
    """
    low, high = columns.amin(1), columns.amax(1)
    axes = (high - low).topk(min(MOST_AXES, len(columns))).indices
    most = min(MOST_CELLS, int((2**62 // (int(items.max()) + 1)) ** (1 / len(axes))) - 3)
    size = max(r * (1 + ROUNDING), float((high - low).amax()) / most)
    key = items
    strides: list[int] = []
    for axis in axes.tolist():
        cell = ((columns[axis] - low[axis]) / size).to(torch.int64)
        width = int(cell.max()) + 3
        key, strides = key * width + cell + 1, [*(s * width for s in strides), 1]
    around = itertools.product((-1, 0, 1), repeat=len(axes) - 1)
    steps = [sum(map(math.prod, zip(step, strides, strict=False))) for step in around]
    return key, torch.tensor(steps, device=items.device)


def _members(starts: Tensor, lengths: Tensor) -> Graph:
    """The runs starts .. starts + lengths − 1, one after the other: the run of each, and each."""
    ends = lengths.cumsum(0)
    run = torch.arange(len(lengths), device=lengths.device)
    run = run.repeat_interleave(lengths, output_size=int(ends[-1]))
    places = (starts - ends + lengths).index_select(0, run)
    return run, places.add_(torch.arange(len(run), device=run.device))


def _square(columns: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """(E,) squared lengths."""
    square = columns.new_zeros(len(src))
    for column in columns:
        across = column.index_select(0, src).sub_(column.index_select(0, dst))
        square += across.square_()
    return square


def _rank_by_distance(columns: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """(E,) how many edges of the same dst are shorter, for edges sorted by dst, then by src."""
    order = _square(columns, src, dst).argsort(stable=True)
    order = order[dst[order].argsort(stable=True)]
    starts = pad(dst.bincount(minlength=columns.shape[1]).cumsum(0), (1, 0))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - starts[dst]
    return rank
