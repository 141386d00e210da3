"""Preconditioners of (μ + K) a = b from a factor of low rank, K ≈ B Bᵀ

    P⁻¹ = (λ_r + μ) U (Λ + μ)⁻¹ Uᵀ + (1 − U Uᵀ),   B Bᵀ = U Λ Uᵀ

nystrom            B = Y C⁻ᵀ, Y = K Ω + ν Ω, C Cᵀ = Ωᵀ Y: some columns of K, or its products with
                   random vectors; ν is the size of rounding errors (Frangella, Tropp and Udell,
                   "Randomized Nyström preconditioning", 2021).
pivoted_cholesky   B column by column, each at the largest entry of the diagonal of K − B Bᵀ
                   (Harbrecht, Peters and Schneider, "On the low-rank approximation by the pivoted
                   Cholesky decomposition", 2012).

U comes from BᵀB, which processes add up, in float64, and is orthogonalized twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweft.errors import WeftError
from torchweft.reductions.engine.whole import Whole, whole
from torchweft.reductions.kernel_matrix import Columns, KernelMatrix

__all__ = ["FACTORS", "ConvergenceError", "LowRank", "apply_low_rank", "low_rank", "sketched"]

LEAST_EIGENVALUE = 1e-13
"""Of BᵀB relative to the largest: smaller ones are rounding errors of float64."""


class ConvergenceError(WeftError, ArithmeticError):
    """An iteration that met NaN, or did not converge."""


class LowRank(NamedTuple):
    """P⁻¹ = 1 + U diag(weights) Uᵀ.

    Args:
        basis: U, with orthonormal columns or columns of 0: of the shape of a right-hand side,
            (*batch, points, components), or with one component for each column of it; then R.
        weights: (*batch, R, 1).
    """

    basis: Tensor
    weights: Tensor


def apply_low_rank(r: Tensor, basis: Tensor, weights: Tensor) -> Tensor:
    """P⁻¹ r, for r of the shape of a right-hand side."""
    batch = basis.shape[: weights.dim() - 2]
    rows = math.prod(basis.shape[len(batch) : -1])
    columns = 1 if basis.shape[:-1] == r.shape else r.shape[-1]
    basis = basis.reshape(*batch, rows, basis.shape[-1])
    inner = whole().total(basis.mT @ r.reshape(*batch, rows, columns))
    return r + (basis @ (weights * inner)).reshape(r.shape)


@torch.no_grad()
def low_rank(name: str, matrix: KernelMatrix, rank: int, ridge: Tensor) -> LowRank:
    """The preconditioner of ridge + K of this name.

    Args:
        name: "nystrom" or "pivoted_cholesky".
        matrix: K.
        rank: R; at most the number of rows of all processes.
        ridge: μ, a number, or one for each entry of the batch with two further dimensions.

    Cost: R columns of K, and R² products for each row.
    """
    there = whole()
    first, count = there.rows(matrix.rows)
    factor = FACTORS[name](matrix, min(rank, count), first, count, there)
    basis, weights = _diagonalized(factor, ridge, there)
    shape = (*matrix.batch, matrix.points, matrix.width)
    return LowRank(basis.reshape(*shape, basis.shape[-1]), weights)


@torch.no_grad()
def sketched(apply: Callable[[Tensor], Tensor], rhs: Tensor, rank: int, batch_dims: int) -> LowRank:
    """Nyström's preconditioner of an operator that is known by its products alone.

    Args:
        apply: v -> A v.
        rhs: gives the shape of v.
        rank: how many products.
        batch_dims: number of leading dimensions of rhs that index separate systems.
    """
    there = whole()
    shape = rhs.shape[:batch_dims]
    first, count = there.rows(math.prod(rhs.shape[batch_dims:]))
    draw = np.random.default_rng(first).standard_normal((min(rank, count), *rhs.shape))
    test = torch.from_numpy(draw).to(rhs)
    products = torch.stack([apply(v) for v in test])
    omega, y = (t.reshape(len(t), *shape, -1).movedim(0, -1).double() for t in (test, products))
    size = there.total(y.square().sum((-2, -1), keepdim=True)).sqrt()
    factor = _factor(y, omega, size, rhs.dtype, there)
    basis, weights = _diagonalized(factor, rhs.new_zeros(()), there)
    return LowRank(basis.reshape(*rhs.shape, basis.shape[-1]), weights)


def _nystrom(matrix: KernelMatrix, rank: int, first: int, count: int, there: Whole) -> Tensor:
    """B of columns that are drawn evenly over all rows."""
    draw = torch.from_numpy(np.random.default_rng(0).random(rank))  # not torch's, for vmap
    ends = torch.arange(rank + 1, device="cpu") * count // rank
    rows = ends[:-1] + (draw * ends.diff()).long()
    device = matrix.tensors[0].device
    rows = rows.to(device).view(rank, *[1] * len(matrix.batch)).expand(rank, *matrix.batch)
    row, ours, at = _placed(matrix, rows, first, there)
    y = matrix.columns(at)
    numbers = torch.arange(matrix.rows, device=device)[:, None]
    omega = (numbers == row.movedim(0, -1)[..., None, :]) & ours.movedim(0, -1)[..., None, :]
    size = there.total((omega * y).sum((-2, -1), keepdim=True))  # trace of K at these rows
    return _factor(y.double(), omega.double(), size.double(), y.dtype, there)


def _factor(y: Tensor, omega: Tensor, size: Tensor, dtype: torch.dtype, there: Whole) -> Tensor:
    """Y C⁻ᵀ; `size` bounds the norm of Y up to a small factor, and dtype is that of its errors."""
    shift = 2 * torch.finfo(dtype).eps + y.shape[-1] * torch.finfo(y.dtype).eps
    y = y + shift * size * omega
    inner = there.total(omega.mT @ y)
    try:
        lower = torch.linalg.cholesky((inner + inner.mT) / 2)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise ConvergenceError(
            "Nyström's preconditioner met a matrix that is not positive definite: rows of the "
            "operator that were drawn have a negative eigenvalue, or NaN. Check that the kernel "
            "is positive definite and its data finite, or pass preconditioner=None."
        ) from error
    factor: Tensor = torch.linalg.solve_triangular(lower, y.mT, upper=False).mT
    return factor


def _pivoted_cholesky(
    matrix: KernelMatrix, rank: int, first: int, count: int, there: Whole
) -> Tensor:
    """B of columns at the largest entries of what is left of the diagonal."""
    left = matrix.diagonal()
    factor = left.new_zeros(*left.shape, rank)
    numbers = torch.arange(first, first + matrix.rows, device=left.device)
    noise = 4 * torch.finfo(left.dtype).eps * _maximum(left, there)
    for n in range(rank):
        most = _maximum(left, there)
        candidates = torch.where(left == most, -numbers.double(), -count)
        pivot = -_maximum(candidates, there).long()[None, ..., 0]  # the first, over all processes
        here = (numbers == pivot[0][..., None])[..., None]
        before = there.total((here * factor).sum(-2, keepdim=True))
        _, _, at = _placed(matrix, pivot, first, there)
        column = matrix.columns(at)[..., 0] - (factor @ before.mT)[..., 0]
        column = column * torch.where(most > noise, most, torch.inf).rsqrt()
        factor[..., n] = column
        left = (left - column.square()).clamp(min=0)
        left = torch.where(here[..., 0], 0, left)
    return factor.double()


FACTORS = {"nystrom": _nystrom, "pivoted_cholesky": _pivoted_cholesky}
"""Functions that make B of a matrix, by the name of the preconditioner."""


def _maximum(x: Tensor, there: Whole) -> Tensor:
    """(*batch, 1): over the rows of all processes, which may have none here."""
    if not x.shape[-1]:
        return there.largest(x.new_full((*x.shape[:-1], 1), -torch.inf))
    return there.largest(x.amax(-1, keepdim=True))


def _placed(
    matrix: KernelMatrix, rows: Tensor, first: int, there: Whole
) -> tuple[Tensor, Tensor, Columns]:
    """Rows (R, *batch) counted here, whether they are here, and the variables of j at them."""
    ours = (rows >= first) & (rows < first + matrix.rows)
    row = torch.where(ours, rows - first, 0)
    return row, ours, {n: there.total(t) for n, t in matrix.at(row, ours).items()}


def _diagonalized(factor: Tensor, ridge: Tensor, there: Whole) -> tuple[Tensor, Tensor]:
    """U (*batch, rows, R) and the weights of B in float64; both in the dtype of the ridge."""
    eigenvalues, vectors = torch.linalg.eigh(there.total(factor.mT @ factor))
    kept = eigenvalues > LEAST_EIGENVALUE * eigenvalues[..., -1:]
    basis = factor @ (vectors * torch.where(kept, eigenvalues, torch.inf).rsqrt()[..., None, :])
    gram = there.total(basis.mT @ basis) + torch.diag_embed((~kept).double())
    basis = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), basis.mT, upper=False).mT
    mean = ridge.detach().double()
    mean = mean.mean((-2, -1)) if mean.dim() > 1 else mean.mean()
    shifted = torch.where(kept, eigenvalues, torch.inf) + mean[..., None]
    weights = torch.where(kept, shifted.amin(-1, keepdim=True) / shifted - 1, 0)
    return basis.to(ridge.dtype), weights[..., None].to(ridge.dtype)
