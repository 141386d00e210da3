"""Kernels for gpytorch whose matrices are never stored.

    from torchweft.reductions.gpytorch import RBFKernel

    covar_module = gpytorch.kernels.ScaleKernel(RBFKernel(ard_num_dims=3))

They take the place of gpytorch's, with the same arguments, parameters and state dict.  Products
with the matrix are reductions, for gpytorch's conjugate gradients, preconditioners and Lanczos
methods; rows and the diagonal are computed where these ask for them.  What is smaller than
`gpytorch.settings.max_cholesky_size` gpytorch factorizes as a dense matrix.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchweft.errors import ShapeError
from torchweft.reductions.lazy import LazyTensor, Vi, Vj

try:
    from gpytorch import kernels
    from linear_operator.operators import KernelLinearOperator
except ImportError as error:
    raise ImportError(
        "torchweft.reductions.gpytorch is imported but gpytorch is not installed: its kernels are "
        "classes of gpytorch's. Install it: pip install gpytorch."
    ) from error

__all__ = ["MaternKernel", "RBFKernel"]


class RBFKernel(kernels.RBFKernel):  # type: ignore[misc]
    """exp(−|x − y|² / 2 l²), l the lengthscale, as `gpytorch.kernels.RBFKernel`.

    Args:
        ard_num_dims: number of dimensions with a lengthscale each; None: one for all.
        batch_shape: batch dimensions of the lengthscales.
        active_dims: the dimensions of the data that are used; None: all.
        lengthscale_prior: a prior of gpytorch's.
        lengthscale_constraint: a constraint of gpytorch's; None: positive.

    Differentiable in the data and in the lengthscales.
    """

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        """The matrix (..., N, M) as a linear operator, or its diagonal."""
        return _matrix(self, x1, x2, math.inf, diag, params)


class MaternKernel(kernels.MaternKernel):  # type: ignore[misc]
    """p(√(2ν) r) exp(−√(2ν) r), r = |x − y| / l, as `gpytorch.kernels.MaternKernel`.

    p is 1 for ν = 1/2, 1 + s for 3/2, and 1 + s + s²/3 for 5/2.

    Args:
        nu: ν, 0.5, 1.5 or 2.5.
        ard_num_dims: number of dimensions with a lengthscale each; None: one for all.
        batch_shape: batch dimensions of the lengthscales.
        active_dims: the dimensions of the data that are used; None: all.
        lengthscale_prior: a prior of gpytorch's.
        lengthscale_constraint: a constraint of gpytorch's; None: positive.

    Differentiable in the data and in the lengthscales, with the slope 0 at r = 0.
    """

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        """The matrix (..., N, M) as a linear operator, or its diagonal."""
        return _matrix(self, x1, x2, self.nu, diag, params)


def _matrix(
    kernel: Any, x1: Tensor, x2: Tensor, nu: float, diag: bool, params: dict[str, Any]
) -> Any:
    if params.get("last_dim_is_batch"):
        raise ShapeError(
            f"{type(kernel).__name__} is called with last_dim_is_batch: each dimension of the data "
            "would be a kernel of its own. Move it: x.mT[..., None]."
        )
    centre = x1.detach().mean(-2, keepdim=True)  # distances lose no digits to far data
    x, y = ((t - centre) / kernel.lengthscale for t in (x1, x2))
    if diag:
        return _value((x - y).square().sum(-1), nu)
    return _KernelMatrix(x, y, covar_func=_dense, nu=nu)


def _value(square: Any, nu: float) -> Any:
    """The kernel of |x − y|² / l², a tensor or a lazy tensor."""
    if nu == math.inf:
        return (-square / 2.0).exp()
    if isinstance(square, LazyTensor):  # its square root has the slope 0 at 0
        scaled = (2 * nu * square).sqrt()
    else:
        scaled = (2 * nu * torch.where(square > 0, square, 1)).sqrt() * (square > 0)
    decay = (-scaled).exp()
    if nu == 0.5:
        return decay
    polynomial = scaled + 1.0
    return (polynomial if nu == 1.5 else polynomial + (2 * nu / 3) * square) * decay


def _dense(x: Tensor, y: Tensor, nu: float) -> Tensor:
    """The matrix (..., N, M), by one dimension of the data after the other."""
    square = sum(
        (a[..., :, None] - b[..., None, :]).square()
        for a, b in zip(x.unbind(-1), y.unbind(-1), strict=True)
    )
    return torch.as_tensor(_value(square, nu))


class _KernelMatrix(KernelLinearOperator):  # type: ignore[misc]
    """The matrix of scaled data; products with it are reductions."""

    def _matmul(self, rhs: Tensor) -> Tensor:
        columns = rhs[..., None] if rhs.dim() == 1 else rhs
        lazy = _value(Vi(self.x1).sqdist(Vj(self.x2)), self.nontensor_params["nu"])
        found: Tensor = lazy @ columns.contiguous()
        return found[..., 0] if rhs.dim() == 1 else found

    def to_dense(self) -> Tensor:
        """The matrix as a tensor."""
        return _dense(self.x1, self.x2, **self.nontensor_params)
