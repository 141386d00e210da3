"""Reductions over an index along its last dimension, which may stand in any order here."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.compat.torch_scatter.layout import Layout, of_index, spread
from torchweft.compat.torch_scatter.reductions import added, chosen, counts, extreme, mean

__all__ = [
    "gather_coo",
    "segment_add_coo",
    "segment_coo",
    "segment_max_coo",
    "segment_mean_coo",
    "segment_min_coo",
    "segment_sum_coo",
]


def _layout(src: Tensor, index: Tensor, out: Tensor | None, dim_size: int | None) -> Layout:
    dim = index.dim() - 1
    return of_index(tuple(src.shape), index, dim, dim_size if out is None else out.size(dim))


def segment_sum_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """out[…, m, …] (0 if not given) + Σ src[…, t, …] over t with index[…, t] = m.

    Args:
        src: real numbers or integers; its first dimensions are those of the index.
        index: (…, T); dimensions before T may be 1.
        out: is added to, in place, and returned.
        dim_size: places of the result; max(index) + 1 if left out.
    """
    return added(_layout(src, index, out, dim_size), src, out)


def segment_add_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """`segment_sum_coo`."""
    return segment_sum_coo(src, index, out, dim_size)


def segment_mean_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """(out + sum) over the number of entries; places without entries keep `out`."""
    layout = _layout(src, index, out, dim_size)
    if out is None:
        return mean(layout, src, None)
    return out.copy_(torch.where(counts(layout, src) > 0, mean(layout, src, out.clone()), out))


def segment_min_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The least of the entries of each place and the first that is it, as `scatter_min`."""
    return extreme(_layout(src, index, out, dim_size), src, out, largest=False)


def segment_max_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The greatest of the entries of each place and the first that is it, as `scatter_max`."""
    return extreme(_layout(src, index, out, dim_size), src, out, largest=True)


def segment_coo(
    src: Tensor,
    index: Tensor,
    out: Tensor | None = None,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:
    """`segment_{reduce}_coo`, of "sum", "add", "mean", "min" and "max", without the places."""
    return chosen(reduce, _FUNCTIONS)(src, index, out, dim_size)


def gather_coo(src: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """z[…, t, …] = src[…, index[…, t], …]; written into `out` if it is given."""
    dim = index.dim() - 1
    shape = (*src.shape[:dim], index.shape[dim], *src.shape[dim + 1 :])
    layout = of_index(shape, index, dim, src.shape[dim])
    assert layout.index is not None
    rows = layout._replace(shape=tuple(src.shape)).rows(src)
    z = layout.restored(spread(rows, layout.index))
    return z if out is None else out.copy_(z)


_FUNCTIONS = {
    "sum": segment_sum_coo,
    "add": segment_add_coo,
    "mean": segment_mean_coo,
    "min": segment_min_coo,
    "max": segment_max_coo,
}
