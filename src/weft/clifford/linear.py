"""Matrices by grade, z_j = x_j @ W[grade of j]: the blades of a grade are rows of one product.

`sizes` are the numbers of blades of each grade, 1, n, …, n, 1: grades g and n − g are as large, so
that they are one batched product, written to its place.  So few, large products fill a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.fused_op import FusedOperator, Gradients

__all__ = ["add_input_gradient", "bias_gradient", "linear", "outputs", "weight_gradient"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> Tensor:
    """(B, rows, F_in), (n+1, F_in, F_out), (F_out,) or None → (B, rows, F_out)."""
    return _fused(x, weight, bias, sizes)


def outputs(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> Tensor:
    """The products, each written to its place."""
    x, z = x.contiguous(), x.new_empty((*x.shape[:-1], weight.shape[-1]))
    for pair in _pairs(sizes):
        torch.bmm(pair.rows(x), pair.matrices(weight), out=pair.rows(z))
    if bias is not None:
        z[0] += bias
    return z


def add_input_gradient(total: Tensor, grad: Tensor, weight: Tensor, sizes: Sequence[int]) -> None:
    """total_j += grad_j @ W[grade of j]ᵀ, in the accumulator of the matrix product."""
    for pair in _pairs(sizes):
        place = pair.rows(total)
        torch.baddbmm(place, pair.rows(grad), pair.matrices(weight).mT, out=place)


def weight_gradient(x: Tensor, grad: Tensor, sizes: Sequence[int]) -> Tensor:
    """Σ over blades of a grade and rows of x_j ⊗ grad_j, a matrix a grade.

    A product a blade, then sums over blades: few outputs with long sums would leave a GPU idle.
    """
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    if narrow and x.is_cuda:
        found = torch.bmm(x.mT, grad, out_dtype=torch.float32)
    else:
        wide = torch.float32 if narrow else x.dtype
        found = torch.bmm(x.mT.to(wide), grad.to(wide))
    result = found.new_empty((len(sizes), x.shape[-1], grad.shape[-1]))
    for blades, place in zip(found.split_with_sizes(list(sizes)), result, strict=True):
        torch.sum(blades, 0, out=place)
    return result.to(x.dtype)


def bias_gradient(grad: Tensor) -> Tensor:
    """The sum of the scalars over the rows."""
    return grad[0].sum(0)


class _Pair(NamedTuple):
    """Grades g and n − g, or the middle one alone.

    Args:
        first, last: the grades.
        start: of the first one's blades.
        size: how many each has.
        distance: blades from the first one's to the last one's.
    """

    first: int
    last: int
    start: int
    size: int
    distance: int

    def rows(self, x: Tensor) -> Tensor:
        """(grades, blades · rows, F) of a contiguous (B, rows, F)."""
        _, rows, features = x.shape
        number = 1 + (self.last > self.first)
        shape = (number, self.size * rows, features)
        strides = (max(self.distance, 1) * rows * features, features, 1)
        return x.as_strided(shape, strides, x.storage_offset() + self.start * rows * features)

    def matrices(self, weight: Tensor) -> Tensor:
        """(grades, F_in, F_out)."""
        return weight[self.first : self.last + 1 : max(self.last - self.first, 1)]


def _pairs(sizes: Sequence[int]) -> Iterator[_Pair]:
    starts, n = list(itertools.accumulate(sizes, initial=0)), len(sizes) - 1
    for first in range(n // 2 + 1):
        distance = starts[n - first] - starts[first]
        yield _Pair(first, n - first, starts[first], sizes[first], distance)


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
    z = torch.cat(
        [part @ matrix for part, matrix in zip(x.split_with_sizes(sizes), weight, strict=True)]
    )
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
