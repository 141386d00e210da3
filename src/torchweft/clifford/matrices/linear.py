"""Matrices by grade, z_j = x_j @ W[grade of j]: the blades of a grade are rows of one product.

Grades g and n − g have as many blades, so that they are one batched product, written to its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.core.backend import choose
from torchweft.core.operators.fused import FusedOperator, Gradients
from torchweft.core.operators.operator import constant_when_compiling

__all__ = ["add_input_gradient", "linear", "outputs", "weight_gradient"]

TILE, PRODUCTS = 64, 256
"""Rows and columns of a tile of a matrix product, and about how many of them fill a GPU."""

WORTH_TURNING = 2**33
"""Multiplications of a TF32 product, from which on it gains more than the turn of its matrices."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, signature: str) -> Tensor:
    """(B, rows, F_in), (n+1, F_in, F_out), (F_out,) or None → (B, rows, F_out)."""
    return _fused(x, weight, bias, signature)


def outputs(x: Tensor, weight: Tensor, bias: Tensor | None, signature: str) -> Tensor:
    """The products, each written to its place."""
    x, z = x.contiguous(), x.new_empty((*x.shape[:-1], weight.shape[-1]))
    if choose(None, x.device.type) == "triton":
        from torchweft.clifford.matrices import linear_launch

        if linear_launch.serves_rows(x, weight):
            linear_launch.rows(x, weight, bias, len(weight) - 1, z)
            return z
        if _pays_to_turn(x, weight):
            weight = linear_launch.turned(weight)
    for pair in _pairs(_sizes(signature)):
        rows, matrices, place = pair.rows(x), pair.matrices(weight), pair.rows(z)
        if pair.first or bias is None:
            torch.bmm(rows, matrices, out=place)
        else:  # inside the product: rounded once
            on_scalar = x.new_zeros(len(rows), 1, len(bias))
            on_scalar[0] = bias
            torch.baddbmm(on_scalar, rows, matrices, out=place)
    return z


def add_input_gradient(total: Tensor, grad: Tensor, weight: Tensor, signature: str) -> None:
    """total_j += grad_j @ W[grade of j]ᵀ, in the accumulator of the matrix product."""
    for pair in _pairs(_sizes(signature)):
        place = pair.rows(total)
        torch.baddbmm(place, pair.rows(grad), pair.matrices(weight).mT, out=place)


def weight_gradient(x: Tensor, grad: Tensor, signature: str) -> Tensor:
    """Σ over blades of a grade and rows of x_j ⊗ grad_j, a matrix a grade.

    A product for each blade and part of the rows, then the sums over them: few small products with
    long sums would leave a GPU idle.
    """
    parts = _parts(x, grad.shape[-1])
    left, right = (
        t.reshape(len(t) * parts, -1, t.shape[-1]) for t in (x.contiguous(), grad.contiguous())
    )
    found = _wide_product(left.mT, right)
    sizes = _sizes(signature)
    if choose(None, x.device.type) == "triton":
        from torchweft.clifford.matrices.linear_launch import sum_by_grade

        return sum_by_grade(found, len(sizes) - 1, parts, x.dtype)
    of_grade = found.split_with_sizes([size * parts for size in sizes])
    return torch.stack([part.sum(0) for part in of_grade]).to(x.dtype)


def _pays_to_turn(x: Tensor, weight: Tensor) -> bool:
    """Whether TF32's product gains more from turned matrices than it takes to turn them."""
    return (
        x.dtype == torch.float32
        and torch.backends.cuda.matmul.fp32_precision == "tf32"
        and weight.is_contiguous()
        and x.numel() * weight.shape[-1] >= WORTH_TURNING
    )


def _parts(x: Tensor, outputs: int) -> int:
    """Equal parts of the rows: as many products as fill a GPU, none too short."""
    blades, rows, features = x.shape
    tiles = blades * -(-features // TILE) * -(-outputs // TILE)
    most = max(1, min(PRODUCTS // tiles, rows // TILE)) if tiles else 1
    return max(part for part in range(1, most + 1) if rows % part == 0)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, batched; that of 16-bit numbers in float32."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


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


@constant_when_compiling
def _sizes(signature: str) -> list[int]:
    """How many blades each grade has."""
    return Algebra.from_signature(signature).sizes


def _pairs(sizes: Sequence[int]) -> Iterator[_Pair]:
    starts, n = list(itertools.accumulate(sizes, initial=0)), len(sizes) - 1
    for first in range(n // 2 + 1):
        distance = starts[n - first] - starts[first]
        yield _Pair(first, n - first, starts[first], sizes[first], distance)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, signature: str) -> list[Tensor]:
    return [outputs(x, weight, bias, signature)]


def _backward(
    args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    x, weight, _, signature = args
    return (
        outputs(grad, weight.mT, None, signature) if needed[0] else None,
        weight_gradient(x, grad, signature) if needed[1] else None,
        grad[0].sum(0) if needed[2] else None,
    )


def _composition(x: Tensor, weight: Tensor, bias: Tensor | None, signature: str) -> Tensor:
    z = torch.cat(
        [
            part @ matrix
            for part, matrix in zip(x.split_with_sizes(_sizes(signature)), weight, strict=True)
        ]
    )
    return z if bias is None else torch.cat([z[:1] + bias, z[1:]])


def _fake(x: Tensor, weight: Tensor, *_: Any) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[-1]))]


_fused = FusedOperator(
    "clifford_linear",
    "Tensor x, Tensor weight, Tensor? bias, str signature",
    3,
    _forward,
    _backward,
    _fake,
    _composition,
)
