"""The three trilinear forms behind the seven products, and the one table of their derivatives.

    a, b, c vectors:          Σ_c   a_c b_c g_c      mul in each slot
    u, v vectors, W matrix:   Σ_cd  u_c W_cd v_d     vecmat, mat_t_vec, outer
    u, v vectors, a scalar:   Σ_c   a u_c v_c        vecsca, scavec, inner

Each product is such a form with one slot left open, so its derivatives are products again, of
any order.  `scavec(x, y) = vecsca(y, x)` and `mat_t_vec(x, y) = vecmat(y, x)`, so five products
need kernels; `scale` (no second operand) is the sixth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CANONICAL", "PRODUCTS", "Product", "accumulator", "result_channels"]


class Product(NamedTuple):
    """Dimensions behind the row axis of (first, second, result), and the derivatives.

    A derivative is (product, roles): which two of a (first), b (second), c (the gradient) it
    reads, in its own order, and the slot it gives.  A capital letter is a matrix transposed.
    """

    dims: tuple[int, int, int]
    first: tuple[str, str]
    second: tuple[str, str] | None


PRODUCTS = {
    "mul": Product((1, 1, 1), ("mul", "cba"), ("mul", "acb")),
    "outer": Product((1, 1, 2), ("vecmat", "bCa"), ("vecmat", "acb")),
    "inner": Product((1, 1, 0), ("vecsca", "bca"), ("vecsca", "acb")),
    "vecmat": Product((1, 2, 1), ("vecmat", "cBa"), ("outer", "acb")),
    "vecsca": Product((1, 0, 1), ("vecsca", "cba"), ("inner", "acb")),
    "scale": Product((1, 0, 1), ("scale", "c_a"), None),
}
"""The products that have kernels.  `scale`: z[n,m] = Σ_t s[t] x[n,index1[t]]."""

CANONICAL = {
    "mul": ("mul", False),
    "outer": ("outer", False),
    "inner": ("inner", False),
    "vecmat": ("vecmat", False),
    "vecsca": ("vecsca", False),
    "scavec": ("vecsca", True),
    "mat_t_vec": ("vecmat", True),
}
"""The seven public names: the product behind each, and whether its operands are exchanged."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products and sums of this dtype are formed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def result_channels(op: str, first: Tensor, second: Tensor | None) -> tuple[int, ...]:
    """The dimensions of a row of the result."""
    if op == "inner":
        return ()
    if op == "vecmat" and second is not None:
        return (second.shape[-1],)
    if op == "outer" and second is not None:
        return (first.shape[-1], second.shape[-1])
    return (first.shape[-1],)
