"""The step of Sinkhorn's iterations, for each way to give the cost of a pair.

    softmin  f_i = −ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε),   ε = length^p

The cost is |x − y|^p / p, or one of the user's: a formula of X and Y, a function of lazy tensors,
or a function that returns the matrix of all pairs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.errors import DTypeError, ShapeError
from torchweft.reductions.cluster.sparsity import BlockSparsity
from torchweft.reductions.engine.reduction import reduce
from torchweft.reductions.formula.node import Node, const, node, var
from torchweft.reductions.formula.parse import parse
from torchweft.reductions.lazy import LazyTensor, Vi, Vj

__all__ = [
    "Cloud",
    "Step",
    "formula_of_points",
    "log_weights",
    "require_lazy",
    "softmin",
    "softmin_of_squares",
    "step_of",
]

Step = Callable[[float, Tensor], Tensor]
"""The softmin at x, of the length and the potential of the source."""


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
    """−ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε), (*batch, M), C = |x − y|^p / p, ε = length^p

    The source is constant: gradients are in x alone.
    """
    eps = length**p
    ranges = None if mask is None else mask.ranges
    columns = _columns(p, eps, x, source, potential)
    return -eps * _log_sum(_score(p, x.shape[-1]), columns, ranges)


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


def _log_sum(score: Node, columns: tuple[Tensor, ...], ranges: Any = None) -> Tensor:
    result = reduce("LogSumExp", score, columns, 1, ranges=ranges)
    assert isinstance(result, Tensor)
    return result.squeeze(-1)


def _columns(
    p: int, eps: float, x: Tensor, source: Cloud, potential: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x and y in units of (p ε)^(1/p), and the scores of y."""
    scale = (p * eps) ** (-1 / p)
    scores = _scores(eps, source, potential)
    return scale * x, scale * source.points.detach(), scores


def _scores(eps: float, source: Cloud, potential: Tensor) -> Tensor:
    """log b_j + g_j / ε, (*batch, N, 1)"""
    return source.log_weights + potential.unsqueeze(-1) / eps


@functools.cache
def _score(p: int, dim: int) -> Node:
    """h_j − |x_i − y_j|^p"""
    square = node("sqdist", var(0, dim, 0), var(1, dim, 1))
    return var(2, 1, 1) - (square if p == 2 else node("sqrt", square))


@functools.cache
def _away(dim: int) -> Node:
    """1 and x_i − y_j"""
    return node("concat", const(1), var(0, dim, 0) - var(1, dim, 1))


# costs of the user's


def step_of(
    cost: str | Callable[..., Any], lazily: bool, p: float, x: Tensor, source: Cloud
) -> Step:
    """The softmin at x of a cost; gradients are in x alone, and sources constant.

    Args:
        cost: a formula of X and Y, or a function of x and y.
        lazily: whether the function is of lazy tensors.
        p: the temperature is length^p.
        x: (*batch, M, D)
        source: the cloud of the columns.

    Raises:
        ShapeError: the formula is no number, or the function returns no (B, M, N).
        DTypeError: the function returns no lazy tensor where it is given some, or no tensor.
    """
    y = source.points.detach()
    if isinstance(cost, str):
        step = _step_of_formula(formula_of_points("cost", cost, x.shape[-1]), x, source)
    elif lazily:
        step = _step_of_lazy_tensor(require_lazy("cost", cost(Vi(x), Vj(y))), source)
    else:
        step = _step_of_matrix(_matrix(cost, x, y), source)
    return lambda length, potential: step(length**p, potential)


@functools.cache
def formula_of_points(name: str, text: str, dim: int) -> Node:
    """The number for each pair that a formula of X and Y is, of variables 0 and 1.

    Raises:
        FormulaError: the text is no formula of X and Y.
        ShapeError: it has several components.
    """
    formula = parse(text, {"X": var(0, dim, 0), "Y": var(1, dim, 1)})
    if formula.dim != 1:
        raise ShapeError(
            f"{name} {text!r} has {formula.dim} components at points of {dim} coordinates: it must "
            "be one number for each pair. Sum the components, such as by Sum(…) or Norm2(…)."
        )
    return formula


def require_lazy(name: str, found: Any) -> LazyTensor:
    """What a function returned, which must be a lazy tensor; raises DTypeError."""
    if not isinstance(found, LazyTensor):
        raise DTypeError(
            f"{name} returned a {type(found).__name__} under backend='online': it must return a "
            "LazyTensor there. Pass backend='tensorized' for a function that makes a matrix."
        )
    return found


def _step_of_formula(cost: Node, x: Tensor, source: Cloud) -> Step:
    score = var(2, 1, 1) - var(3, 1, 2) * cost  # 1 / ε is data: it changes, and compiles nothing
    y = source.points.detach()

    def step(eps: float, potential: Tensor) -> Tensor:
        columns = x, y, _scores(eps, source, potential), x.new_full((1,), 1 / eps)
        return -eps * _log_sum(score, columns)

    return step


def _step_of_lazy_tensor(cost: LazyTensor, source: Cloud) -> Step:
    def step(eps: float, potential: Tensor) -> Tensor:
        score = Vj(_scores(eps, source, potential)) - cost * (1 / eps)
        found: Tensor = score.logsumexp(score.dim() - 2).squeeze(-1)
        return -eps * found

    return step


def _step_of_matrix(cost: Tensor, source: Cloud) -> Step:
    def step(eps: float, potential: Tensor) -> Tensor:
        return -eps * (_scores(eps, source, potential).mT - cost / eps).logsumexp(-1)

    return step


def _matrix(cost: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """(*batch, M, N), of a function that takes one batch dimension."""
    batch, of_pairs = x.shape[:-2], (x.shape[-2], y.shape[-2])
    x, y = (z.reshape(-1, *z.shape[-2:]) for z in (x, y))
    found = cost(x, y)
    needed = (len(x), *of_pairs)
    if not isinstance(found, Tensor):
        raise DTypeError(
            f"cost returned a {type(found).__name__} for tensors x and y: it must return the "
            f"matrix of all pairs, a tensor {needed}. Pass backend='online' for a function of lazy "
            "tensors."
        )
    if found.shape != needed:
        raise ShapeError(
            f"cost returned {tuple(found.shape)} for x {tuple(x.shape)} and y {tuple(y.shape)}: "
            f"it must return the matrix of all pairs. Return {needed}."
        )
    return found.reshape(*batch, *of_pairs)
