"""The operator of a batch norm with what follows it: one pass over the rows, two backward.

    y = act(z),   z = (x − mean) / √(var + eps) · weight + bias + residual

    kind       mean and var are
    "fixed"    given
    "batch"    those of x, which determines them
    "ranks"    those of x on all ranks

The first `valid` rows, () int64, are real.  The others are padding: they take no part in statistics
and sums, and are 0 in the result and its gradients.  None: all rows are real.  `count`, () float64,
is the number of rows of all ranks; None: those of x that are real.

Of the gradients of sums over rows, those of "batch" and "ranks" take part in ∂/∂x:

    ∂/∂x = weight / √(var + eps) · (∂/∂z − Σ ∂/∂z / n − x' Σ (∂/∂z x') / n),   x' = normalised x

Gradients of gradients are those of torch's operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core import private
from torchweft.core.collectives import all_sum
from torchweft.core.operators.operator import FusedOperator, Gradients
from torchweft.voxels.norms import launch, torch_path

__all__ = ["batch_norm_op"]


def _forward(x: Tensor, *rest: Any) -> list[Tensor]:
    weight, bias, residual, mean, var, valid, _, activation, _, _, eps = rest
    normal = launch.Normal(weight, bias, residual, mean, var, activation, eps, valid)
    return [launch.apply(x, normal)]


def _backward(
    args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    x, weight, bias, residual, mean, var, valid, count, activation, kind, group, eps = args
    normal = launch.Normal(weight, bias, residual, mean, var, activation, eps, valid)
    g = grad.contiguous()
    of_x, of_weight, of_bias, of_residual = needed[:4]
    dresidual = g if of_residual else None
    sums = dx = None
    of_z = of_residual and (activation is not None or valid is not None)  # else it is g
    if of_weight or of_bias or (of_x and kind != "fixed") or of_z:
        sums, dz = launch.gradient_sums(g, x, normal, of_z)
        dresidual = dresidual if dz is None else dz
        if dz is not None and activation == "relu":  # g or 0: no rounding, and no more to compute
            g, normal = dz, normal._replace(residual=None, activation=None)
    if of_x:
        of_all = None if kind == "fixed" else sums
        if kind == "ranks":
            assert sums is not None
            of_all = all_sum(sums, private.process_group(group))
        dx = launch.gradient(g, x, normal, of_all, count)
    dweight = dbias = None
    if sums is not None:
        dbias, dweight = sums.unbind(0)
    dweight = _gradient_of(weight, dweight, of_weight)
    dbias = _gradient_of(bias, dbias, of_bias)
    return dx, dweight, dbias, dresidual, None, None, None, None


def _gradient_of(parameter: Tensor | None, sums: Tensor | None, needed: bool) -> Tensor | None:
    """The sums as the gradient of a parameter, if it is needed."""
    if not needed or parameter is None or sums is None:
        return None
    return sums if sums.dtype == parameter.dtype else sums.to(parameter.dtype)


def _composition(x: Tensor, *rest: Any) -> Tensor:
    weight, bias, residual, mean, var, valid, _, activation, kind, group, eps = rest
    rows = torch_path.wide(x)  # once: its gradient is rounded once
    if kind == "batch":
        mean, var = torch_path.statistics(rows, valid)
    elif kind == "ranks":
        mean, var, _ = torch_path.rank_statistics(rows, private.process_group(group), valid)
    given = (weight, bias, residual, (mean, var), activation, eps, valid)
    return torch_path.normalised(rows, *given).to(x.dtype)


def _fake(x: Tensor, *_: Any) -> list[Tensor]:
    return [torch.empty_like(x)]


batch_norm_op = FusedOperator(
    "voxel_batch_norm",
    "Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor mean, Tensor var, "
    "Tensor? valid, Tensor? count, str? activation, str kind, str? group, float eps",
    8,
    _forward,
    _backward,
    _fake,
    _composition,
)
"""batch_norm_op(x, weight, bias, residual, mean, var, valid, count, activation, kind, group,
eps)"""
