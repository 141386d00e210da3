"""Reductions in a layout, with the result that torch_scatter's functions are given as `out`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchweft import products
from torchweft.compat.torch_scatter.layout import Layout
from torchweft.errors import ShapeError
from torchweft.products.segments.functions import segment_extreme

__all__ = ["added", "chosen", "counts", "extreme", "mean"]


def added(layout: Layout, src: Tensor, out: Tensor | None) -> Tensor:
    """Sums, added to `out`."""
    z = layout.result(products.segment_sum(layout.rows(src), **layout.options))
    return z if out is None else out.add_(z)


def counts(layout: Layout, src: Tensor) -> Tensor:
    """(…, M, …) entries of each place."""
    rows = layout.rows(src)
    ones = torch.ones(rows.shape[0], dtype=torch.int64, device=src.device)
    number = products.segment_sum(ones, **layout.options)
    number = number.reshape(-1, *(1,) * (rows.dim() - 1)).expand(-1, *rows.shape[1:])
    return layout.result(number)


def mean(layout: Layout, src: Tensor, out: Tensor | None) -> Tensor:
    """(out + sums) / counts."""
    if out is None and src.is_floating_point():
        return layout.result(products.segment_mean(layout.rows(src), **layout.options))
    total = added(layout, src, out)
    number = counts(layout, src).clamp(min=1)
    if total.is_floating_point():
        return total.div_(number)
    return total.div_(number, rounding_mode="floor")


def extreme(
    layout: Layout, src: Tensor, out: Tensor | None, largest: bool
) -> tuple[Tensor, Tensor]:
    """Extremes and their places; where `out` is as extreme, it stays."""
    values, place = segment_extreme(layout.rows(src), **layout.options, largest=largest)
    count = src.shape[layout.dim]
    values, place = layout.result(values), layout.places(place)
    if out is None:
        return values.masked_fill(place == count, 0), place
    better = (values > out if largest else values < out) & (place < count)
    out.copy_(torch.where(better, values, out))
    return out, place.where(better, count)


def chosen(
    reduce: str, functions: Mapping[str, Callable[..., Tensor | tuple[Tensor, Tensor]]]
) -> Callable[..., Tensor]:
    """The function of a reduction, without the places of extremes.

    Raises:
        ShapeError: there is none of this name.
    """
    if reduce not in functions:
        raise ShapeError(
            f"reduce is {reduce!r}: it must be one of {', '.join(functions)}. Pass one of these."
        )

    def reduced(*arguments: object) -> Tensor:
        found = functions[reduce](*arguments)
        return found[0] if isinstance(found, tuple) else found

    return reduced
