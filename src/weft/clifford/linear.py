"""Matrices by grade, z_j = x_j @ W[grade of j]: the blades of a grade are one matrix product.

`sizes` are the numbers of blades of each grade.  The fused form writes each grade's product to its
place, without a copy; the bias enters the product of the scalars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core.fused_op import FusedOperator, Gradients

__all__ = ["add_input_gradient", "linear", "outputs", "weight_gradient"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> Tensor:
    """(B, rows, F_in), (n+1, F_in, F_out), (F_out,) or None → (B, rows, F_out)."""
    return _fused(x, weight, bias, sizes)


def outputs(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> Tensor:
    """The products, each written to its place."""
    z = x.new_empty((*x.shape[:-1], weight.shape[-1]))
    for g, (rows, place) in enumerate(zip(_by_grade(x, sizes), _by_grade(z, sizes), strict=True)):
        if g == 0 and bias is not None:
            torch.addmm(bias, rows, weight[g], out=place)
        else:
            torch.mm(rows, weight[g], out=place)
    return z


def add_input_gradient(total: Tensor, grad: Tensor, weight: Tensor, sizes: Sequence[int]) -> None:
    """total_j += grad_j @ W[grade of j]ᵀ, in the accumulator of the matrix product."""
    for g, (place, rows) in enumerate(
        zip(_by_grade(total, sizes), _by_grade(grad, sizes), strict=True)
    ):
        torch.addmm(place, rows, weight[g].T, out=place)


def weight_gradient(x: Tensor, grad: Tensor, sizes: Sequence[int]) -> Tensor:
    """Σ over blades of a grade and rows of x_j ⊗ grad_j, a matrix a grade."""
    result = x.new_empty((len(sizes), x.shape[-1], grad.shape[-1]))
    for g, (rows, grads) in enumerate(
        zip(_by_grade(x, sizes), _by_grade(grad, sizes), strict=True)
    ):
        torch.mm(rows.T, grads, out=result[g])
    return result


def bias_gradient(grad: Tensor) -> Tensor:
    """The sum of the scalars over the rows."""
    return grad[0].sum(0)


def _by_grade(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The blades of each grade as rows of one matrix: views where x is contiguous."""
    return [part.flatten(0, 1) for part in x.split(list(sizes))]


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> list[Tensor]:
    return [outputs(x, weight, bias, sizes)]


def _backward(
    args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    x, weight, _, sizes = args
    return (
        outputs(grad, weight.mT, None, sizes) if needed[0] else None,
        weight_gradient(x, grad, sizes) if needed[1] else None,
        bias_gradient(grad) if needed[2] else None,
    )


def _composition(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> Tensor:
    z = torch.cat([part @ matrix for part, matrix in zip(x.split(sizes), weight, strict=True)])
    return z if bias is None else torch.cat([z[:1] + bias, z[1:]])


def _fake(x: Tensor, weight: Tensor, *_: Any) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[-1]))]


_fused = FusedOperator(
    "clifford_linear",
    "Tensor x, Tensor weight, Tensor? bias, int[] sizes",
    3,
    _forward,
    _backward,
    _fake,
    _composition,
)
