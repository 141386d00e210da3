"""Exact nearest neighbours: a cloud is halved into blocks, and blocks look at near blocks only."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["nearest", "split"]

BLOCK = 256  # points that look for their neighbours together

Array = np.ndarray[Any, Any]


def split(points: Tensor, size: int) -> list[Tensor]:
    """Blocks of at most `size` rows that lie together: halved at the median of the longest side."""
    return [torch.from_numpy(rows) for rows in _split(points.numpy(), size)]


def nearest(points: Tensor, k: int) -> Tensor:
    """(N, k) rows of the k nearest other points, in no order.

    The k-th nearest within the own block bounds the search: what is farther from the block's box
    is left out, and nothing is lost.
    """
    cloud = points.numpy()
    blocks = _split(cloud, BLOCK)
    low = np.stack([cloud[rows].min(0) for rows in blocks])
    high = np.stack([cloud[rows].max(0) for rows in blocks])
    found = np.empty((len(cloud), k), dtype=np.int64)
    for rows, lowest, highest in zip(blocks, low, high, strict=True):
        own = cloud[rows]
        reach = np.partition(_squares(own, own), k, axis=1)[:, k].max()  # the 0-th is the point
        gap = np.maximum(low - highest, lowest - high).clip(min=0)
        near = np.concatenate([blocks[i] for i in np.flatnonzero((gap**2).sum(1) <= reach)])
        outside = cloud[near] - cloud[near].clip(lowest, highest)
        near = near[(outside**2).sum(1) <= reach]
        squares = _squares(own, cloud[near])
        squares[rows[:, None] == near] = np.inf
        found[rows] = near[np.argpartition(squares, k - 1, axis=1)[:, :k]]
    return torch.from_numpy(found)


def _split(cloud: Array, size: int) -> list[Array]:
    ready, waiting = [], [np.arange(len(cloud))]
    while waiting:
        rows = waiting.pop()
        if len(rows) <= size:
            ready.append(rows)
            continue
        inside = cloud[rows]
        side = np.ptp(inside, axis=0).argmax()
        waiting += np.array_split(rows[inside[:, side].argsort(kind="stable")], 2)
    return ready


def _squares(a: Array, b: Array) -> Array:
    """(N, M) squared distances, by differences: matrix products cancel at large coordinates."""
    columns = zip(a.T, b.T, strict=True)
    squares: Array = sum((x[:, None] - y) ** 2 for x, y in columns)
    return squares
