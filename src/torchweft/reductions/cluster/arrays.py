"""Clusters with the conventions of pykeops.numpy.cluster: the cells of a grid begin at 0."""

# ruff: noqa: D103 - the functions that are typed here for arrays are documented in points

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from torchweft.reductions.cluster import points

if TYPE_CHECKING:
    Array: TypeAlias = np.ndarray[Any, Any]
    Ranges: TypeAlias = tuple[Array, Array, Array, Array, Array, Array]

    X = TypeVar("X", bound=Array | tuple[Array, ...] | list[Array])

    def sort_clusters(x: X, lab: Array) -> tuple[X, Array]: ...
    def cluster_ranges(lab: Array, Nlab: Array | None = None) -> Array: ...  # noqa: N803
    def cluster_centroids(
        x: Array,
        lab: Array,
        Nlab: Array | None = None,  # noqa: N803
        weights: Array | None = None,
        weights_c: Array | None = None,
    ) -> Array: ...
    def cluster_ranges_centroids(
        x: Array, lab: Array, weights: Array | None = None, min_weight: float = 1e-9
    ) -> tuple[Array, Array, Array]: ...
    def from_matrix(ranges_i: Array, ranges_j: Array, keep: Array) -> Ranges: ...
    def swap_axes(ranges: Ranges | None) -> Ranges | None: ...
else:
    from torchweft.reductions.cluster.points import (
        cluster_centroids,
        cluster_ranges,
        cluster_ranges_centroids,
        from_matrix,
        sort_clusters,
        swap_axes,
    )

__all__ = [
    "cluster_centroids",
    "cluster_ranges",
    "cluster_ranges_centroids",
    "from_matrix",
    "grid_cluster",
    "sort_clusters",
    "swap_axes",
]


def grid_cluster(x: Array, size: float | Array) -> Array:
    """l_i = rank of ⌊x_i / size⌋ among the cells that hold a point

    Args:
        x: (M, D) points, an array.
        size: edge of the cells, one number or (D,).

    Returns:
        (M,) int64 labels, see `torchweft.reductions.cluster.grid_cluster`, whose cells begin at
        min x.

    Example:
        >>> import numpy as np
        >>> from torchweft.reductions.numpy import cluster
        >>> cluster.grid_cluster(np.array([[0.2], [7.0], [0.9]]), 1.0)
        array([0, 1, 0])
    """
    return points.grid_cluster(x, size, origin=0.0)  # type: ignore[arg-type, return-value]
