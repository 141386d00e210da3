"""Clusters with the conventions of pykeops.numpy.cluster: the cells of a grid begin at 0."""

from __future__ import annotations

from typing import Any

from torchweft.reductions.cluster import points
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


def grid_cluster(x: Any, size: Any) -> Any:
    """l_i = rank of ⌊x_i / size⌋ among the cells that hold a point

    See `torchweft.reductions.cluster.grid_cluster`, whose cells begin at min x.
    """
    return points.grid_cluster(x, size, origin=0.0)
