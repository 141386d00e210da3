"""Reductions between the bounds of an indptr along its last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.compat.torch_scatter.layout import between
from torchweft.compat.torch_scatter.reductions import added, chosen, extreme, mean
from torchweft.compat.torch_scatter.segment_coo import gather_coo

__all__ = [
    "gather_csr",
    "segment_add_csr",
    "segment_csr",
    "segment_max_csr",
    "segment_mean_csr",
    "segment_min_csr",
    "segment_sum_csr",
]


def segment_sum_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Σ src[…, t, …] over t from indptr[…, m] to indptr[…, m+1] - 1.

    Args:
        src: real numbers or integers; its first dimensions are those of indptr.
        indptr: (…, M+1), not decreasing along M; dimensions before it may be 1.
        out: (…, M, …) is overwritten and returned.
    """
    return _written(added(between(src, indptr), src, None), out)


def segment_add_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """`segment_sum_csr`."""
    return segment_sum_csr(src, indptr, out)


def segment_mean_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """`segment_sum_csr` over the number of rows, at least 1; integers are rounded down."""
    return _written(mean(between(src, indptr), src, None), out)


def segment_min_csr(
    src: Tensor, indptr: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The least of the rows of each segment, and the first that is it; 0 and T for none."""
    values, place = extreme(between(src, indptr), src, None, largest=False)
    return _written(values, out), place


def segment_max_csr(
    src: Tensor, indptr: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The greatest of the rows of each segment, and the first that is it; 0 and T for none."""
    values, place = extreme(between(src, indptr), src, None, largest=True)
    return _written(values, out), place


def segment_csr(
    src: Tensor, indptr: Tensor, out: Tensor | None = None, reduce: str = "sum"
) -> Tensor:
    """`segment_{reduce}_csr`, of "sum", "add", "mean", "min" and "max", without the places."""
    return chosen(reduce, _FUNCTIONS)(src, indptr, out)


def gather_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Row m of src, as often as segment m has rows; written into `out` if it is given."""
    dim = indptr.dim() - 1
    size = int(indptr.reshape(-1)[-1]) if out is None and src.numel() else 0
    size = size if out is None else out.shape[dim]
    numbers = torch.arange(size, device=indptr.device).expand(*indptr.shape[:-1], size)
    rows = torch.searchsorted(indptr[..., 1:].contiguous(), numbers.contiguous(), right=True)
    return gather_coo(src, rows, out)


def _written(z: Tensor, out: Tensor | None) -> Tensor:
    return z if out is None else out.copy_(z)


_FUNCTIONS = {
    "sum": segment_sum_csr,
    "add": segment_add_csr,
    "mean": segment_mean_csr,
    "min": segment_min_csr,
    "max": segment_max_csr,
}
