"""One step of Sinkhorn's iterations: the soft minimum of costs less potentials, over a cloud.

f_i = −ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε),   C(x, y) = |x − y|^p / p,   ε = length^p
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from weft.reductions.formula import Node, node, var
from weft.reductions.reduction import reduce
from weft.reductions.sparsity import BlockSparsity

__all__ = ["Cloud", "log_weights", "softmin"]


class Cloud(NamedTuple):
    """Points (*batch, N, D) and the logarithms of their weights (*batch, N, 1)."""

    points: Tensor
    log_weights: Tensor


def log_weights(weights: Tensor) -> Tensor:
    """(*batch, N, 1), −∞ where a weight is 0."""
    return weights.detach().log().unsqueeze(-1)


def softmin(
    p: int,
    length: float,
    x: Tensor,
    source: Cloud,
    potential: Tensor,
    mask: BlockSparsity | None = None,
) -> Tensor:
    """−ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε), (*batch, M), ε = length^p

    The source is held: a gradient sees the points where a potential is taken.
    """
    eps = length**p
    scale = (p * eps) ** (-1 / p)
    scores = source.log_weights + potential.unsqueeze(-1) / eps
    columns = (scale * x, scale * source.points.detach(), scores)
    ranges = None if mask is None else mask.ranges
    result = reduce("LogSumExp", _score(p, x.shape[-1]), columns, 1, ranges=ranges)
    assert isinstance(result, Tensor)
    return -eps * result.squeeze(-1)


@functools.cache
def _score(p: int, dim: int) -> Node:
    """h_j − |x_i − y_j|^p, of points in units of (p ε)^(1/p)."""
    square = node("sqdist", var(0, dim, 0), var(1, dim, 1))
    return var(2, 1, 1) - (square if p == 2 else node("sqrt", square))
