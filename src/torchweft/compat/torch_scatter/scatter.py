"""Sums, means, products and extremes of entries that an index sends to one place."""

from __future__ import annotations

from torch import Tensor

from torchweft.compat.torch_scatter.layout import broadcast, of_index
from torchweft.compat.torch_scatter.reductions import added, chosen, extreme, mean

__all__ = [
    "scatter",
    "scatter_add",
    "scatter_max",
    "scatter_mean",
    "scatter_min",
    "scatter_mul",
    "scatter_sum",
]


def scatter_sum(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> Tensor:
    """out[…, m, …] (0 if not given) + Σ src[…, t, …] over t with index[t] = m.

    Args:
        src: any shape, real numbers or integers.
        index: broadcast to src; one dimension is that of `dim`.
        dim: along which to sum.
        out: is added to, in place, and returned.
        dim_size: places of the result along dim; max(index) + 1 if left out.
    """
    layout = of_index(tuple(src.shape), index, dim, _size(out, dim, dim_size))
    return added(layout, src, out)


def scatter_add(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> Tensor:
    """`scatter_sum`."""
    return scatter_sum(src, index, dim, out, dim_size)


def scatter_mean(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> Tensor:
    """`scatter_sum` over the number of entries, at least 1; integers are rounded down."""
    layout = of_index(tuple(src.shape), index, dim, _size(out, dim, dim_size))
    return mean(layout, src, out)


def scatter_mul(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> Tensor:
    """out[…, m, …] (1 if not given) · Π src[…, t, …] over t with index[t] = m.

    By torch's scatter_reduce: on a GPU the order of factors, and so the last bits, may vary.
    """
    dim %= max(src.dim(), 1)
    full = broadcast(index, tuple(src.shape), dim).long()
    if out is None:
        size = int(index.max()) + 1 if dim_size is None and index.numel() else dim_size or 0
        shape = (*src.shape[:dim], size, *src.shape[dim + 1 :])
        return src.new_ones(shape).scatter_reduce(dim, full, src, "prod")
    return out.scatter_reduce_(dim, full, src, "prod")


def scatter_min(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The least of the entries of each place, and the first of `src` that is it.

    0 and src.size(dim) where there are none.  `out` is the result, in place, where nothing is less.
    """
    layout = of_index(tuple(src.shape), index, dim, _size(out, dim, dim_size))
    return extreme(layout, src, out, largest=False)


def scatter_max(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The greatest of the entries of each place, and the first that is it, as `scatter_min`."""
    layout = of_index(tuple(src.shape), index, dim, _size(out, dim, dim_size))
    return extreme(layout, src, out, largest=True)


def scatter(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:
    """`scatter_{reduce}`, of "sum", "add", "mul", "mean", "min" and "max", without the places."""
    return chosen(reduce, _FUNCTIONS)(src, index, dim, out, dim_size)


def _size(out: Tensor | None, dim: int, dim_size: int | None) -> int | None:
    return dim_size if out is None else out.size(dim)


_FUNCTIONS = {
    "sum": scatter_sum,
    "add": scatter_add,
    "mul": scatter_mul,
    "mean": scatter_mean,
    "min": scatter_min,
    "max": scatter_max,
}
