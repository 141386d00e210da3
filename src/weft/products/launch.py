"""The Triton path of the products: which kernel, grid and tile serve a call, and its workspaces.

Three rules keep it short.  A sum over n against an operand that all n share is taken first: it
commutes with the product.  A segment that is too long for one program is cut into pieces, a sum
over n into parts: both give partial rows in fp32 (fp64 for fp64) that the rows kernel adds in
order.  Everything that a launch depends on is read from shapes, strides and the plan on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft.core.launcher import launch
from weft.core.plan import Plan, Table
from weft.core.segments import Slices, cut
from weft.products import kernels
from weft.products.forms import PRODUCTS
from weft.products.tiles import LEAST_DOT, group_tile, outer_tile, precision, rows_tile, batch_tile

__all__ = ["product"]


class _Call(NamedTuple):
    """A product after validation: what to compute, and the shape of what it gives."""

    op: str
    x: Tensor
    y: Tensor | None
    scale: Tensor | None
    batched: tuple[bool, bool]  # whether x and y have a leading N
    batch: int | None  # N, None where neither has one
    accumulate: bool  # sum over n; then both are batched, or x alone for "scale"
    channels: tuple[int, ...]  # of a result row
    dtype: torch.dtype  # of the result
...
