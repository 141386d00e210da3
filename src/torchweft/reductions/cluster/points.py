"""Clusters of points, and which clusters meet: what block-sparse reductions are made from.

    label    l_i = rank of the cell ⌊(x_i − origin) / size⌋ among the cells that hold a point
    centroid c_k = Σ_{i: l_i = k} w_i x_i / Σ_{i: l_i = k} w_i
    ranges   cluster k is start_k ≤ i < end_k of the points sorted by label

Names and conventions follow pykeops.torch.cluster.  Arrays of NumPy give arrays of NumPy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchweft.core.operators.operands import check_tensors
from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.reductions.arrays import arrays, tensors

__all__ = [
    "Ranges",
    "cluster_centroids",
    "cluster_ranges",
    "cluster_ranges_centroids",
    "from_matrix",
    "grid_cluster",
    "sort_clusters",
    "swap_axes",
]

Ranges = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""(ranges_i, slices_i, redranges_j, ranges_j, slices_j, redranges_i), see `from_matrix`."""

P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X", bound=Tensor | tuple[Tensor, ...] | list[Tensor])


def _takes_arrays(function: Callable[P, R]) -> Callable[P, R]:
    """The function, also from NumPy's arrays to NumPy's arrays."""

    @functools.wraps(function)
    def either(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _holds_array((args, *kwargs.values())):
            return function(*args, **kwargs)
        result = function(*tensors(args), **{k: tensors(v) for k, v in kwargs.items()})
        return arrays(result)  # type: ignore[no-any-return]

    return either


def _holds_array(value: object) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_holds_array, value))
    return isinstance(value, np.ndarray)


@_takes_arrays
def grid_cluster(x: Tensor, size: float | Tensor, origin: float | Tensor | None = None) -> Tensor:
    """l_i = rank of ⌊(x_i − origin) / size⌋ among the cells that hold a point

    The quotient is that of the float64 numbers, so that a point on an edge has the same cell on
    every device.

    Args:
        x: (M, D) points, any D.
        size: edge of the cells, one number or (D,).
        origin: corner of a cell, one number or (D,); min x if None, as in pykeops.torch.

    Returns:
        (M,) int64 labels 0 … C − 1, in lexicographic order of the cells: first coordinate slowest.

    Raises:
        ShapeError: x is no matrix, size neither a positive number nor (D,) of them, or origin
            neither a number nor (D,).

    Cost: a sort of M numbers for each coordinate.

    Example:
        >>> import torch
        >>> from torchweft.reductions.cluster import grid_cluster
        >>> grid_cluster(torch.tensor([[0.2], [7.0], [0.9]]), 1.0).tolist()
        [0, 1, 0]
    """
    check_tensors(x=x)
    if x.ndim != 2:
        raise ShapeError(
            f"x is {tuple(x.shape)}: points are (M, D). Pass x.view(-1, 1) for points of a line."
        )
    edge = _of_coordinates("size", size, x)
    given = size if isinstance(size, Tensor) else torch.as_tensor(size, device="cpu")
    if given.device.type == "cpu" and not (given > 0).all():  # nobody waits for a device
        raise ShapeError(
            f"size is {given.tolist()}: the edge of a cell must be positive. Pass a length of the "
            "data, for example a hundredth of their diameter."
        )
    labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    if not x.numel():
        return labels
    points = x.detach().double()
    corner = points.amin(0) if origin is None else _of_coordinates("origin", origin, x)
    cells = ((points - corner) / edge).floor()
    # ranks of ranks: no cell number is packed into few bits, so any number of cells will do
    for column in cells.unbind(1):
        ranks = _ranks(column)
        labels = _ranks(labels * (ranks.amax() + 1) + ranks)
    return labels


@_takes_arrays
def sort_clusters(x: X, lab: Tensor) -> tuple[X, Tensor]:
    """Points and labels in the order of the labels; points of one cluster keep their order.

    Args:
        x: (M, …) tensor, or a tuple or list of such.
        lab: (M,) integer labels.

    Returns:
        The sorted tensor, tuple or list, and the sorted labels.

    Raises:
        ShapeError: there are not as many labels as points.

    Example:
        >>> import torch
        >>> from torchweft.reductions.cluster import sort_clusters
        >>> x, labels = sort_clusters(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1, 0, 1]))
        >>> x.tolist(), labels.tolist()
        ([1.0, 3.0, 2.0], [0, 1, 1])
    """
    parts: Sequence[Any] = x if isinstance(x, tuple | list) else [x]
    for part in parts:
        check_tensors(x=part)
    check_tensors(lab=lab)
    labels, perm = lab.reshape(-1).sort(stable=True)
    for part in parts:
        if part.shape[:1] != labels.shape:
            raise ShapeError(
                f"x is {tuple(part.shape)} but there are {len(labels)} labels: each point has one. "
                "Pass the labels of these very points."
            )
    found = [part.index_select(0, perm) for part in parts]
    ordered: Any = type(x)(found) if isinstance(x, tuple | list) else found[0]
    return ordered, labels


@_takes_arrays
def cluster_ranges(lab: Tensor, Nlab: Tensor | None = None) -> Tensor:  # noqa: N803
    """[start_k, end_k) of cluster k among the sorted points; start_k = Σ_{l < k} N_l

    Args:
        lab: (M,) integer labels ≥ 0 in any order; an unused one has an empty range.
        Nlab: (C,) number of points of each cluster; counted if None.

    Returns:
        (C, 2) int64.

    Raises:
        DTypeError: labels that are not integers.
        IndexRangeError: a negative label.

    Example:
        >>> import torch
        >>> from torchweft.reductions.cluster import cluster_ranges
        >>> cluster_ranges(torch.tensor([1, 0, 1])).tolist()
        [[0, 1], [1, 3]]
    """
    counts = _counts(lab) if Nlab is None else Nlab.to(torch.int64)
    ends = counts.cumsum(0)
    return torch.stack([ends - counts, ends], dim=1)


@_takes_arrays
def cluster_centroids(
    x: Tensor,
    lab: Tensor,
    Nlab: Tensor | None = None,  # noqa: N803
    weights: Tensor | None = None,
    weights_c: Tensor | None = None,
) -> Tensor:
    """c_k = Σ_{i: l_i = k} w_i x_i / Σ_{i: l_i = k} w_i

    Sums are in float64, in the order of the points.  Differentiable once in x and the weights.

    Args:
        x: (M, D) points.
        lab: (M,) integer labels ≥ 0, in any order.
        Nlab: (C,) number of points of each cluster; counted if None.
        weights: (M,) weights; 1 if None.
        weights_c: (C,) total weight of each cluster; summed if None.

    Returns:
        (C, D) in the dtype of x; NaN for an unused label, which has no centre.

    Raises:
        ShapeError: x is no matrix, or there are not as many labels as points.
        DTypeError: labels that are not integers.

    Example:
        >>> import torch
        >>> from torchweft.reductions.cluster import cluster_centroids
        >>> x, labels = torch.tensor([[3.0], [1.0], [5.0]]), torch.tensor([1, 0, 1])
        >>> cluster_centroids(x, labels).tolist()
        [[1.0], [4.0]]
    """
    _check_points(x, lab)
    counts = _counts(lab) if Nlab is None else Nlab.to(torch.int64)
    if weights is None:
        return (_sums(x.double(), lab, counts) / counts.unsqueeze(1)).to(x.dtype)
    w = weights.double().view(-1, 1)
    total = _sums(w, lab, counts) if weights_c is None else weights_c.double().view(-1, 1)
    return (_sums(w * x.double(), lab, counts) / total).to(x.dtype)


@_takes_arrays
def cluster_ranges_centroids(
    x: Tensor, lab: Tensor, weights: Tensor | None = None, min_weight: float = 1e-9
) -> tuple[Tensor, Tensor, Tensor]:
    """Ranges, centroids and total weights of clusters: see `cluster_ranges`, `cluster_centroids`.

    Args:
        x: (M, D) points.
        lab: (M,) integer labels ≥ 0, in any order.
        weights: (M,) weights; 1 if None.
        min_weight: smaller weights are taken as this, so that every cluster has a centre.

    Returns:
        (C, 2) int64, (C, D) in the dtype of x, and (C,) total weights, which are numbers of points
        if no weights are given.

    Raises:
        ShapeError: x is no matrix, or there are not as many labels as points.
        DTypeError: labels that are not integers.

    Example:
        >>> import torch
        >>> from torchweft.reductions.cluster import cluster_ranges_centroids
        >>> x, labels = torch.tensor([[3.0], [1.0], [5.0]]), torch.tensor([1, 0, 1])
        >>> ranges, centroids, weights = cluster_ranges_centroids(x, labels)
        >>> ranges.tolist(), centroids.tolist(), weights.tolist()
        ([[0, 1], [1, 3]], [[1.0], [4.0]], [1.0, 2.0])
    """
    _check_points(x, lab)
    counts = _counts(lab)
    ranges = cluster_ranges(lab, counts)
    if weights is None:
        total = counts.to(torch.promote_types(x.dtype, torch.float32))
        return ranges, cluster_centroids(x, lab, counts), total
    w = weights.double().clamp(min=min_weight)
    total = _sums(w.view(-1, 1), lab, counts)
    return ranges, cluster_centroids(x, lab, counts, w, total), total.view(-1).to(weights.dtype)


@_takes_arrays
def from_matrix(ranges_i: Tensor, ranges_j: Tensor, keep: Tensor) -> Ranges:
    """The pairs of clusters where `keep` is true, as the 6-tuple that reductions take.

    Block k of ranges_i reduces over the intervals slices_i[k − 1] … slices_i[k] − 1 of
    redranges_j (slices_i[−1] is 0): the rows of ranges_j where keep[k] is true.  The second half
    says the same of keep's transpose, for reductions over i.

    Args:
        ranges_i: (Ci, 2) integers, [start, end) of each cluster of i.
        ranges_j: (Cj, 2) integers, of each cluster of j.
        keep: (Ci, Cj) booleans.

    Returns:
        (ranges_i, slices_i, redranges_j, ranges_j, slices_j, redranges_i), all int64.

    Raises:
        ShapeError: keep is not (Ci, Cj), or ranges are not (C, 2).

    Example:
        >>> import torch
        >>> from torchweft.reductions.cluster import from_matrix
        >>> blocks = torch.tensor([[0, 2], [2, 5]])
        >>> _, slices, intervals, *_ = from_matrix(blocks, blocks, torch.eye(2) > 0)
        >>> slices.tolist(), intervals.tolist()
        ([1, 2], [[0, 2], [2, 5]])
    """
    check_tensors(ranges_i=ranges_i, ranges_j=ranges_j, keep=keep)
    for name, ranges in (("ranges_i", ranges_i), ("ranges_j", ranges_j)):
        if ranges.ndim != 2 or ranges.shape[1] != 2:
            raise ShapeError(
                f"{name} is {tuple(ranges.shape)}: it must be (C, 2), a start and an end for each "
                f"cluster. Take {name} from cluster_ranges."
            )
    if keep.shape != (len(ranges_i), len(ranges_j)):
        raise ShapeError(
            f"keep is {tuple(keep.shape)} but there are {len(ranges_i)} ranges of i and "
            f"{len(ranges_j)} of j: keep must be ({len(ranges_i)}, {len(ranges_j)}). "
            "Give it a row for each cluster of i and a column for each cluster of j."
        )
    ranges_i, ranges_j, keep = ranges_i.to(torch.int64), ranges_j.to(torch.int64), keep.bool()
    return (*_half(ranges_i, ranges_j, keep), *_half(ranges_j, ranges_i, keep.T))


def swap_axes(ranges: Ranges | None) -> Ranges | None:
    """The ranges of the transposed matrix: i and j change places.

    Args:
        ranges: the 6-tuple of `from_matrix`, or None.

    Returns:
        The 6-tuple with its halves exchanged; None for None.

    Example:
        >>> import torch
        >>> from torchweft.reductions.cluster import from_matrix, swap_axes
        >>> rows, columns = torch.tensor([[0, 2]]), torch.tensor([[0, 7]])
        >>> swap_axes(from_matrix(rows, columns, torch.ones(1, 1)))[0].tolist()
        [[0, 7]]
    """
    return None if ranges is None else (*ranges[3:], *ranges[:3])


def _of_coordinates(name: str, value: float | Tensor, x: Tensor) -> Tensor:
    """One number, or one for each coordinate of x, in float64."""
    found = torch.as_tensor(value, dtype=torch.float64, device=x.device)
    if found.shape not in ((), (1,), x.shape[1:]):
        raise ShapeError(
            f"{name} is {tuple(found.shape)} but x is {tuple(x.shape)}: {name} is one number or "
            f"one for each of the {x.shape[1]} coordinates. Pass {name} with shape "
            f"({x.shape[1]},)."
        )
    return found


def _ranks(values: Tensor) -> Tensor:
    """The rank of each value among the different values, ascending."""
    ranks: Tensor = torch.unique(values, return_inverse=True)[1]
    return ranks


def _half(rows: Tensor, columns: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    chosen = keep.nonzero()[:, 1]
    # numbers one by one: a GPU gathers short rows slowly
    intervals = torch.stack([bound.index_select(0, chosen) for bound in columns.unbind(1)], 1)
    return rows, keep.sum(1).cumsum(0), intervals


def _counts(lab: Tensor) -> Tensor:
    """(C,) points of each label."""
    _check_labels(lab)
    labels = lab.reshape(-1)
    if len(labels) and (least := int(labels.amin())) < 0:
        raise IndexRangeError(
            f"lab holds {least}: labels are 0 … C − 1. Take points without a cluster out first."
        )
    return torch.bincount(labels)


def _check_points(x: Tensor, lab: Tensor) -> None:
    check_tensors(x=x)
    _check_labels(lab)
    if x.dim() != 2 or len(x) != lab.numel():
        raise ShapeError(
            f"x is {tuple(x.shape)} but there are {lab.numel()} labels: points are (M, D), and "
            "each has a label. Pass the labels of these very points."
        )


def _check_labels(lab: Tensor) -> None:
    check_tensors(lab=lab)
    if lab.is_floating_point() or lab.is_complex() or lab.dtype == torch.bool:
        raise DTypeError(
            f"lab is {lab.dtype}: labels are integers. Pass lab.long(), or labels of grid_cluster."
        )


def _sums(values: Tensor, lab: Tensor, counts: Tensor) -> Tensor:
    """(C, D) sums of the rows of each label, in the order of the rows, without atomics."""
    if not len(counts):
        return values.new_zeros(0, values.shape[1])
    perm = lab.reshape(-1).argsort(stable=True)
    sums: Tensor = torch.segment_reduce(
        values.index_select(0, perm), "sum", lengths=counts, axis=0, initial=0
    )
    return sums
