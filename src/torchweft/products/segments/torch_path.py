"""Extremes of segments by torch's own operations, on any device, in any dtype.

Beside a path of its own it gives, on every path, gradients of gradients: `select` is linear in x.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["extreme_torch", "fill_of", "places", "select"]


def fill_of(dtype: torch.dtype, largest: bool) -> float | int:
    """What a maximum (minimum) of nothing is: -inf (inf), or the least (greatest) integer."""
    if dtype.is_floating_point:
        return float("-inf" if largest else "inf")
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def places(x: Tensor, rows: Tensor, num_segments: int, largest: bool) -> Tensor:
    """The first row of each segment that holds its maximum or minimum, in each column.

    Args:
        x: (T, C); NaN is more than every number, and less.
        rows: (T,) int64, the segment of each row; num_segments: of none.
        num_segments: M.
        largest: of maximum, else of minimum.

    Returns:
        (M, C) int64; T for a segment without rows.
    """
    count = x.shape[0]
    where = rows.unsqueeze(1).expand(x.shape)
    size = num_segments + 1, x.shape[1]
    reduce = "amax" if largest else "amin"
    best = x.new_full(size, fill_of(x.dtype, largest)).scatter_reduce(0, where, x, reduce)
    found = (x == best.gather(0, where)) | (x != x)
    numbers = torch.arange(count, device=x.device).unsqueeze(1)
    first = torch.full(size, count, device=x.device)
    return first.scatter_reduce(0, where, numbers.where(found, count), "amin")[:num_segments]


def select(x: Tensor, place: Tensor, largest: bool) -> Tensor:
    """x[place[m,c], c], or what an extreme of nothing is."""
    count, fill = x.shape[0], fill_of(x.dtype, largest)
    if not count:
        return x.sum(0, dtype=x.dtype) + x.new_full(place.shape, fill)
    return x.gather(0, place.clamp(max=count - 1)).masked_fill(place == count, fill)


def extreme_torch(x: Tensor, rows: Tensor, num_segments: int, largest: bool) -> list[Tensor]:
    """Values and places, see `torchweft.products.segments.operator`; rows as for `places`."""
    place = places(x, rows, num_segments, largest)
    return [select(x, place, largest), place]
