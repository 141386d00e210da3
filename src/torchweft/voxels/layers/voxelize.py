"""From points to voxels and back.

    voxelize         voxel = ⌊(point − origin) / size⌋; features of a voxel's points become its own
    devoxelize       each point reads its voxel, or interpolates between the centres of 2^d voxels
    point_to_voxel   the first points of each voxel in a box, as they are

The floor is that of the exact quotient of the float64 numbers, so that a point on an edge belongs
to the same voxel on every device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchweft.core.operators.operands import check_tensors
from torchweft.core.tables import sort_rows
from torchweft.errors import DeviceError, DTypeError, IndexRangeError, ShapeError
from torchweft.voxels.grid import integer
from torchweft.voxels.layers.pooling import (
    apart,
    largest,
    lengths,
    together,
    walks_rows,
    wide,
)
from torchweft.voxels.maps.checks import MOST_DIMENSIONS
from torchweft.voxels.maps.packing import HIGH, LOW, Packing
from torchweft.voxels.maps.shards import refuse
from torchweft.voxels.maps.tensor import SparseTensor, check_sparse

__all__ = ["Numbers", "devoxelize", "point_to_voxel", "voxelize", "weighted_rows"]

Numbers = float | Sequence[float] | Tensor
"""One number for all axes, or one per axis."""

POINT_REDUCTIONS = ("mean", "sum", "max", "first")


def voxelize(
    points: Tensor,
    size: Numbers,
    feats: Tensor | None = None,
    batch: Tensor | None = None,
    reduce: str = "mean",
    *,
    origin: Numbers = 0.0,
    spatial_shape: Sequence[int] | None = None,
    batch_size: int | None = None,
) -> tuple[SparseTensor, Tensor]:
    """The voxels ⌊(point − origin) / size⌋ that contain a point, and the voxel of each point.

    Args:
        points: (P, d) floating-point positions, d = 1 to 4.
        size: the edge of a voxel in the unit of the points, one number or d.
        feats: (P, C) features of the points; None: the points themselves, so that the mean is the
            centre of a voxel's points.
        batch: (P,) integers, the sample of each point; None: one sample.
        reduce: combines the features of a voxel's points by channel: "mean", "sum", "max", or
            takes those of the "first" point.
        origin: the corner of voxel 0; `points.amin(0)` makes all coordinates ≥ 0.
        spatial_shape: number of voxels by axis; None: the box [0, max + 1).
        batch_size: number of samples; None: the largest number in batch + 1.

    Returns:
        The tensor, voxels ascending by (batch, s0, s1, …), and the (P,) int64 row of each point.

    Raises:
        ShapeError, DTypeError, DeviceError: arguments that do not fit each other.
        IndexRangeError: a point that is not finite, or outside of int32 or spatial_shape.

    Differentiable in feats (of the maximum, to the first largest).  Sums run over points in their
    order: the same bits at every call.

    Cost: one sort of the points.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> points = torch.tensor([[0.1, 0.2], [0.3, 0.4], [1.7, 0.6]])
        >>> tensor, row = voxels.voxelize(points, 0.5)
        >>> tensor.C[:, 1:].tolist(), row.tolist()
        ([[0, 0], [3, 1]], [0, 0, 1])
    """
    feats = points if feats is None else feats
    _check_points(points, feats, batch)
    if reduce not in POINT_REDUCTIONS:
        raise ShapeError(
            f"reduce is {reduce!r}: it must be one of {', '.join(POINT_REDUCTIONS)}. "
            'Pass reduce="mean".'
        )
    cells = _cells(points, _edges(points, size), _axes(points, "origin", origin))
    sample = cells.new_zeros(len(cells)) if batch is None else batch.long()
    rows = torch.cat([sample.unsqueeze(1), cells], 1)
    packing = Packing(rows, *_ranges(rows))
    keys, order = torch.sort(packing.keys(rows), stable=True)
    new = torch.ones_like(keys, dtype=torch.bool)
    new[1:] = keys[1:] != keys[:-1]
    begin = new.nonzero().squeeze(1)
    voxel = torch.empty_like(order).index_copy_(0, order, new.cumsum(0) - 1)
    values = _reduced(feats, voxel, order, begin, reduce)
    voxels = packing.rows(keys.index_select(0, begin))
    samples = 1 if batch is None and batch_size is None else batch_size
    return SparseTensor(values, voxels, spatial_shape, samples), voxel


def devoxelize(
    tensor: SparseTensor,
    points: Tensor,
    size: Numbers,
    batch: Tensor | None = None,
    mode: str = "nearest",
    *,
    origin: Numbers = 0.0,
) -> Tensor:
    """The features of each point's voxel, or interpolated between voxels.

    "nearest": the features of the voxel that contains the point, 0 where there is none.
    "trilinear" (for any d): Σ_v w_v x[v] / Σ_v w_v over those of the 2^d voxels around the point
    that are active, w_v = Π (1 − distance of the centre in voxels); 0 where none is.

    Args:
        tensor: voxels of edge size · tensor.stride.
        points: (P, d) floating-point positions.
        size: the edge of a voxel of the finest level, as given to `voxelize`.
        batch: (P,) integers, the sample of each point; None: sample 0.
        mode: "nearest" or "trilinear".
        origin: as given to `voxelize`.

    Returns:
        (P, C) in the tensor's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError, IndexRangeError: as `voxelize`.

    Differentiable to any order in the features and, for "trilinear", the points; the same bits at
    every call.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> points = torch.tensor([[0.1, 0.2], [0.3, 0.4], [1.7, 0.6]])
        >>> tensor, row = voxels.voxelize(points, 0.5, feats=torch.tensor([[1.0], [3.0], [5.0]]))
        >>> voxels.devoxelize(tensor, points, 0.5).flatten()
        tensor([2., 2., 5.])
    """
    check_sparse(tensor)
    remedy = "Look up this rank's voxels with tensor.find."
    refuse(tensor.coordinates, "devoxelize", remedy)
    _check_points(points, tensor.feats, batch, like=tensor)
    if mode not in ("nearest", "trilinear"):
        raise ShapeError(
            f'mode is {mode!r}: it must be "nearest" or "trilinear". Pass one of them.'
        )
    edges = _edges(points, size) * _axes(points, "stride", tensor.stride)
    corner = _axes(points, "origin", origin)
    if mode == "nearest":
        cells = _cells(points, edges, corner).unsqueeze(1)
        shares = torch.ones_like(cells[..., 0], dtype=torch.float64)
    else:
        cells, shares = _corners(points, edges, corner)
    sample = torch.zeros_like(cells[:, 0, 0]) if batch is None else _samples(batch)
    sample = sample.view(-1, 1, 1).expand(*cells.shape[:2], 1)
    return _weighted(tensor, torch.cat([sample, cells], 2), shares)


def point_to_voxel(
    points: Tensor,
    voxel_size: Numbers,
    box: Sequence[float] | Tensor,
    max_points: int,
    max_voxels: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The points of each voxel in a box: hard voxelization, as in LiDAR detectors.

    Voxels are numbered by their first point.  The first `max_voxels` are kept, with their first
    `max_points` points in the order of the rows; later points still join voxels that are kept.
    Points outside of the box, half-open on every axis, and points with a coordinate that is NaN are
    dropped.  The box is divided into round((max − min) / size) voxels along each axis; points
    beyond the last voxel are dropped too.

    Args:
        points: (N, C) floating-point rows: d positions, then features.
        voxel_size: the edge of a voxel, one number or d.
        box: 2d numbers (min…, max…), d = 1 to 4, in the order of the points' columns.
        max_points: P, the most points of a voxel.
        max_voxels: the most voxels.

    Returns:
        voxels (V, P, C) in points' dtype, 0 past the last point; coords (V, 1 + d) int32 (batch 0,
        s0, s1, …) in the order of the points' columns; counts (V,) int64, 1 to P.

    Raises:
        ShapeError, DTypeError: arguments that do not fit each other, a box without voxels.

    Differentiable in the points that are kept.  The same bits at every call and on every device.

    Cost: one sort of the points; the host waits for a GPU.

    Source: the rules are those of spconv's PointToVoxel, https://github.com/traveller59/spconv.

    Example:
        >>> import torch
        >>> from torchweft.voxels import point_to_voxel
        >>> rows = [[0.7, 0.1, 5.0], [0.2, 0.3, 6.0], [0.9, 0.4, 7.0], [9.0, 9.0, 8.0]]
        >>> points, box = torch.tensor(rows), (0, 0, 1, 1)
        >>> kept, coords, counts = point_to_voxel(points, 0.5, box, max_points=2, max_voxels=9)
        >>> coords.tolist(), counts.tolist(), kept[..., 2].tolist()
        ([[0, 1, 0], [0, 0, 0]], [2, 1], [[5.0, 7.0], [6.0, 0.0]])
    """
    low, high, edges, sizes = _grid_of_box(points, voxel_size, box)
    most = [
        integer(f"{name} is", number, f". Pass {name}=32, for example.")
        for name, number in (("max_points", max_points), ("max_voxels", max_voxels))
    ]
    if min(most) < 1:
        raise ShapeError(
            f"max_points is {most[0]} and max_voxels {most[1]}: both must be at least 1. Correct "
            "them."
        )
    places = points[:, : len(sizes)].detach().double()
    cells = torch.div(places - low, edges, rounding_mode="floor")
    limits = torch.tensor(sizes, device=points.device)
    inside = (places >= low) & (places < high) & (cells < limits)  # False for NaN
    rows = inside.all(1).nonzero().squeeze(1)
    cells = cells.index_select(0, rows).long()
    point, number, slot, first = _in_first_order(cells, sizes, most[1])
    kept = slot < most[0]
    place = (number * most[0] + slot)[kept]
    chosen = points.index_select(0, rows[point[kept]])
    voxels = points.new_zeros(len(first) * most[0], points.shape[1]).index_copy(0, place, chosen)
    counts = torch.bincount(number, minlength=len(first)).clamp(max=most[0])
    coords = torch.nn.functional.pad(cells.index_select(0, first), (1, 0)).int()
    return voxels.view(len(first), most[0], points.shape[1]), coords, counts


def _in_first_order(
    cells: Tensor, sizes: Sequence[int], most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Points by voxel: their rows, voxels and places in these; and the first point of each voxel.

    Voxels are numbered by their first points; those from `most` on are left out.
    """
    packing = Packing(cells, (0,) * len(sizes), sizes)
    keys, point = torch.sort(packing.keys(cells), stable=True)
    new = torch.ones_like(keys, dtype=torch.bool)
    new[1:] = keys[1:] != keys[:-1]
    begin, group = new.nonzero().squeeze(1), new.cumsum(0) - 1
    first, by_first = torch.sort(point.index_select(0, begin))
    rank = torch.empty_like(by_first)
    rank[by_first] = torch.arange(len(rank), device=rank.device)
    number = rank.index_select(0, group)
    slot = torch.arange(len(group), device=group.device) - begin.index_select(0, group)
    kept = number < most
    return point[kept], number[kept], slot[kept], first[:most]


def _grid_of_box(
    points: Tensor, voxel_size: Numbers, box: Sequence[float] | Tensor
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """The corners of a box, the edges of its voxels, and their number by axis."""
    check_tensors(points=points)
    if not points.is_floating_point():
        raise DTypeError(
            f"points are {points.dtype}: they must be floating-point. Pass points.float()."
        )
    corners = torch.as_tensor(box, dtype=torch.float64, device=points.device).flatten()
    dim = corners.numel() // 2
    if corners.numel() % 2 or not 1 <= dim <= MOST_DIMENSIONS:
        raise ShapeError(
            f"box has {corners.numel()} numbers: it must have the least and the greatest corner "
            "of 1 to 4 axes. Pass box=(x0, y0, z0, x1, y1, z1), for example."
        )
    if points.dim() != 2 or points.shape[1] < dim:
        raise ShapeError(
            f"points are {tuple(points.shape)} but box has {dim} axes: points must be (N, C) with "
            f"C ≥ {dim}. Pass positions in the first {dim} columns, without a batch column."
        )
    low, high = corners[:dim], corners[dim:]
    edges = _edges(points[:, :dim], voxel_size, "voxel_size")
    sizes = ((high - low) / edges).round()
    if not bool(((sizes >= 1) & (sizes <= HIGH)).all()):
        raise ShapeError(
            f"box {tuple(corners.tolist())} has {sizes.tolist()} voxels of size {edges.tolist()} "
            f"an axis: each must have 1 to {HIGH}. Correct box (min…, max…) or voxel_size."
        )
    return low, high, edges, tuple(int(n) for n in sizes.tolist())


def _corners(points: Tensor, edges: Tensor, corner: Tensor) -> tuple[Tensor, Tensor]:
    """(P, 2^d, d) the voxels whose centres are around a point, and (P, 2^d) their shares."""
    low = _cells(points, edges, corner + edges / 2)  # by the next lower centre on every axis
    part = ((points.double() - corner) / edges - 0.5 - low).clamp(0, 1).unsqueeze(1)
    axes = points.shape[1]
    steps = torch.tensor(list(itertools.product((0, 1), repeat=axes)), device=points.device)
    return low.unsqueeze(1) + steps, torch.where(steps == 1, part, 1 - part).prod(2)


def _weighted(tensor: SparseTensor, voxels: Tensor, shares: Tensor) -> Tensor:
    """Σ_v s_v x[v] / Σ_v s_v over the voxels (P, Q, 1 + d) that exist, 0 where none exists."""
    rows = tensor.coordinates.find(voxels.flatten(0, 1)).view(shares.shape)
    shares = shares.masked_fill(rows < 0, 0)
    total = shares.sum(1, keepdim=True)
    return weighted_rows(tensor.feats, rows, shares / total.masked_fill(total == 0, 1))


def weighted_rows(feats: Tensor, rows: Tensor, shares: Tensor) -> Tensor:
    """(P, C) Σ_v s_v x[v] in feats' dtype, without the rows that are −1 or have no share.

    Args:
        feats: (N, C).
        rows: (P, Q) integers below N.
        shares: (P, Q).
    """
    point, place = ((rows >= 0) & (shares != 0)).nonzero().unbind(1)
    rows = rows[point, place]
    terms = wide(apart(feats, rows, sort_rows(rows)))
    terms = terms * shares[point, place].unsqueeze(1).to(terms.dtype)
    return together(terms, point, None, len(shares)).to(feats.dtype)


def _reduced(feats: Tensor, voxel: Tensor, order: Tensor, begin: Tensor, reduce: str) -> Tensor:
    """The features of each voxel from those of its points, order[begin[voxel]:]."""
    segments = voxel, order, begin.numel()
    if reduce == "first":
        return feats.index_select(0, order.index_select(0, begin))
    if reduce == "max":
        return largest(feats, *segments)
    total = together(wide(feats), *segments)
    if reduce == "mean":
        total = total / lengths(*segments).unsqueeze(1)
    return total.to(feats.dtype)


def _cells(points: Tensor, edges: Tensor, corner: Tensor) -> Tensor:
    """(P, d) int64 ⌊(point − corner) / edge⌋; div takes the exact remainder first."""
    cells = torch.div(points.detach().double() - corner, edges, rounding_mode="floor")
    if len(cells):
        low, high = torch.stack(torch.aminmax(cells)).tolist()
        if not (low >= LOW and high <= HIGH):  # also where they are NaN
            raise IndexRangeError(
                f"points fall into voxels {low:.0f} to {high:.0f}: they must be finite, and "
                f"voxels lie in {LOW}..{HIGH}. Drop such points, or pass a larger size or an "
                "origin nearby."
            )
    return cells.long()


def _samples(batch: Tensor) -> Tensor:
    """The sample of each point; checked on the CPU alone, as the host would wait for a GPU."""
    if walks_rows(batch.device.type) and len(batch) and (low := int(batch.min())) < 0:
        raise IndexRangeError(
            f"batch has the value {low}: samples count from 0. Correct batch, or drop these points."
        )
    return batch.long()


def _ranges(rows: Tensor) -> tuple[list[int], list[int]]:
    """The lowest value of each column, and the size of its range."""
    if not len(rows):
        return [0] * rows.shape[1], [1] * rows.shape[1]
    low, high = torch.stack(torch.aminmax(rows, dim=0)).tolist()
    return low, [h - v + 1 for v, h in zip(low, high, strict=True)]


def _edges(points: Tensor, size: Numbers, name: str = "size") -> Tensor:
    edges = _axes(points, name, size)
    if not bool((edges > 0).all()) or not bool(edges.isfinite().all()):
        raise ShapeError(
            f"{name} is {edges.tolist()}: the edge of a voxel must be positive and finite. "
            f"Pass {name}=0.05, for example."
        )
    return edges


def _axes(points: Tensor, name: str, numbers: Numbers) -> Tensor:
    """(d,) float64."""
    try:
        found = torch.as_tensor(numbers, dtype=torch.float64, device=points.device).detach()
    except (TypeError, ValueError):
        raise DTypeError(
            f"{name} is {numbers!r}: one number or {points.shape[1]} are needed. Correct {name}."
        ) from None
    if found.dim() > 1 or found.numel() not in (1, points.shape[1]):
        raise ShapeError(
            f"{name} is {tuple(found.shape)} but points have {points.shape[1]} axes: one number "
            f"or {points.shape[1]} are needed. Correct {name}."
        )
    return found.expand(points.shape[1])


def _check_points(
    points: Tensor, feats: Tensor, batch: Tensor | None, like: SparseTensor | None = None
) -> None:
    check_tensors(points=points, feats=feats)
    if batch is not None:
        check_tensors(batch=batch)
    dims = [like.dim] if like is not None else range(1, MOST_DIMENSIONS + 1)
    if points.dim() != 2 or points.shape[1] not in dims:
        needed = f"{like.dim}, as the voxels have" if like is not None else "1 to 4"
        raise ShapeError(
            f"points are {tuple(points.shape)}: they must be (P, d) with d = {needed}. "
            "Pass one row of coordinates a point, without a batch column (see batch)."
        )
    for name, given in (("points", points), ("feats", feats)):
        if not given.is_floating_point():
            raise DTypeError(
                f"{name} are {given.dtype}: they must be floating-point. Pass {name}.float()."
            )
    if like is None and (feats.dim() != 2 or len(feats) != len(points)):
        raise ShapeError(
            f"feats are {tuple(feats.shape)} but there are {len(points)} points: feats must be "
            f"({len(points)}, C). Pass one feature row a point."
        )
    if batch is not None and (batch.dim() != 1 or len(batch) != len(points)):
        raise ShapeError(
            f"batch is {tuple(batch.shape)} but there are {len(points)} points: batch must be "
            f"({len(points)},). Pass the sample of each point."
        )
    if batch is not None and (
        batch.dtype == torch.bool or batch.dtype.is_floating_point or batch.is_complex()
    ):
        raise DTypeError(f"batch is {batch.dtype}: it must hold integers. Pass batch.long().")
    for name, other in (("feats", feats), ("batch", batch)):
        if other is not None and other.device != points.device:
            raise DeviceError(
                f"{name} are on {other.device}, points on {points.device}: all must be on one "
                "device. Move one of them with .to(device)."
            )
