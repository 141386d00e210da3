"""One step of Sinkhorn's iterations: the soft minimum of costs less potentials, over a cloud.

f_i = −ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε),   C(x, y) = |x − y|^p / p,   ε = length^p
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.reductions.cluster.sparsity import BlockSparsity
from torchweft.reductions.engine.reduction import reduce
from torchweft.reductions.formula.node import Node, const, node, var

__all__ = ["Cloud", "log_weights", "softmin", "softmin_of_squares"]


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
    ranges = None if mask is None else mask.ranges
    columns = _columns(p, eps, x, source, potential)
    result = reduce("LogSumExp", _score(p, x.shape[-1]), columns, 1, ranges=ranges)
    assert isinstance(result, Tensor)
    return -eps * result.squeeze(-1)


def softmin_of_squares(
    length: float, x: Tensor, source: Cloud, potential: Tensor, mask: BlockSparsity | None = None
) -> Tensor:
    """`softmin` for p = 2, with its gradient x_i − Σ_j π_ij y_j from the same pass over the pairs.

    π_ij = b_j exp((f_i + g_j − C(x_i, y_j)) / ε), whose sum over j is 1.
    """
    eps, at = length**2, x.detach()
    columns = _columns(2, eps, at, source, potential)
    score, weight = _score(2, x.shape[-1]), _away(x.shape[-1])
    ranges = None if mask is None else mask.ranges
    found = reduce("Max_SumShiftExp", score, columns, 1, weight=weight, ranges=ranges)
    assert isinstance(found, Tensor)
    top, total, away = found[..., 0], found[..., 1], found[..., 2:]
    # the largest term is 1, or there is none
    slope = math.sqrt(2 * eps) * away / total.clamp(min=0.5).unsqueeze(-1)
    value = -eps * ((total + (top == -torch.inf)).log() + top)
    return value + (slope * (x - at)).sum(-1)


def _columns(
    p: int, eps: float, x: Tensor, source: Cloud, potential: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x and y in units of (p ε)^(1/p), and the scores of y."""
    scale = (p * eps) ** (-1 / p)
    scores = source.log_weights + potential.unsqueeze(-1) / eps
    return scale * x, scale * source.points.detach(), scores


@functools.cache
def _score(p: int, dim: int) -> Node:
    """h_j − |x_i − y_j|^p"""
    square = node("sqdist", var(0, dim, 0), var(1, dim, 1))
    return var(2, 1, 1) - (square if p == 2 else node("sqrt", square))


@functools.cache
def _away(dim: int) -> Node:
    """1 and x_i − y_j"""
    return node("concat", const(1), var(0, dim, 0) - var(1, dim, 1))
