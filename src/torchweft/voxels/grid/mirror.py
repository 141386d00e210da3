"""Mirrored tables: who reads row q at offset k is read by q at offset K − 1 − k.

Half of one says all: what is kept are its first K // 2 + 1 rows, the centre last, and the rest is
made when it is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.core.operators.operator import below_transforms, compiling
from torchweft.core.tables.tensor_cache import TensorCache

__all__ = ["whole"]

_WHOLE: TensorCache[Tensor] = TensorCache()


def whole(table: Tensor, order: Tensor | None, offsets: int) -> Tensor:
    """All K rows of a table of which perhaps half is kept.

    Args:
        table: (K, N) or (K // 2 + 1, N) int32, −1 for none.
        order: (N,) the rows of its columns; None: they stand so.
        offsets: K.
    """
    if len(table) == offsets:
        return table
    if compiling():
        return _made(table, order)
    return _WHOLE.get((table, order), None, lambda: below_transforms(_made)(table, order))


def _made(kept: Tensor, order: Tensor | None) -> Tensor:
    half, count = len(kept) - 1, kept.shape[1]
    column = torch.arange(count, dtype=torch.int32, device=kept.device)
    own = column if order is None else order
    place = own if order is None else torch.empty_like(order).index_copy_(0, order.long(), column)
    read = kept[:half].long()
    at = torch.where(read >= 0, place[read.clamp(min=0)].long(), count)  # none: past the last
    rest = kept.new_full((half, count + 1), -1).scatter_(1, at, own.expand(half, count))
    return torch.cat([kept, rest[:, :count].flip(0)])
