"""Softmax, its logarithm, log Σ exp, and standard deviations, of the entries of each place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchweft import products
from torchweft.compat.torch_scatter.layout import Layout, of_index, spread
from torchweft.compat.torch_scatter.reductions import added, counts
from torchweft.errors import DTypeError

__all__ = ["scatter_log_softmax", "scatter_logsumexp", "scatter_softmax", "scatter_std"]


def scatter_softmax(
    src: Tensor, index: Tensor, dim: int = -1, dim_size: int | None = None
) -> Tensor:
    """exp(src) over the sum of exp(src) at the same place, in the shape of src."""
    layout = _of_numbers("scatter_softmax", src, index, dim, dim_size)
    return layout.restored(products.segment_softmax(layout.rows(src), **layout.options))


def scatter_log_softmax(
    src: Tensor, index: Tensor, dim: int = -1, eps: float = 1e-12, dim_size: int | None = None
) -> Tensor:
    """The logarithm of `scatter_softmax`; eps is not needed and has no effect."""
    layout = _of_numbers("scatter_log_softmax", src, index, dim, dim_size)
    rows = layout.rows(src)
    logarithm = products.segment_logsumexp(rows, **layout.options)
    assert layout.index is not None
    return layout.restored(rows - spread(logarithm, layout.index))


def scatter_logsumexp(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
    eps: float = 1e-12,
) -> Tensor:
    """log Σ exp(src) of each place, 0 where there are no entries; eps has no effect.

    `out` is one more term of its place, and is written to and returned.
    """
    size = dim_size if out is None else out.size(dim)
    layout = _of_numbers("scatter_logsumexp", src, index, dim, size)
    z = layout.result(products.segment_logsumexp(layout.rows(src), **layout.options))
    if out is None:
        return z.masked_fill(z == -math.inf, 0)
    return out.copy_(torch.logaddexp(out, z))


def scatter_std(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
    unbiased: bool = True,
) -> Tensor:
    """√(Σ (src - mean)² / (n + 1e-6)) of each place, n its entries, one less if unbiased.

    `out` is added to the sum of squares, in place.
    """
    size = dim_size if out is None else out.size(dim)
    layout = _of_numbers("scatter_std", src, index, dim, size)
    rows = layout.rows(src)
    mean = products.segment_mean(rows, **layout.options)
    assert layout.index is not None
    squares = layout.restored((rows - spread(mean, layout.index)).square())
    number = counts(layout, src).sub(int(unbiased)).clamp(min=1)
    return (added(layout, squares, out) / (number.to(src.dtype) + 1e-6)).sqrt()


def _of_numbers(name: str, src: Tensor, index: Tensor, dim: int, size: int | None) -> Layout:
    if not src.is_floating_point():
        raise DTypeError(
            f"src of {name} is {src.dtype}: it must have a floating dtype. Pass src.float()."
        )
    return of_index(tuple(src.shape), index, dim, size)
