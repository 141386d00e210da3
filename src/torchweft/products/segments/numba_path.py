"""The loop of extremes of segments: CPU tensors, segments in parallel, channels in vector lanes."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.core.cpu.arrays import as_array
from torchweft.core.cpu.loops import share
from torchweft.core.explain import Launch, record, recording
from torchweft.core.expressions.program import accumulator
from torchweft.core.tables import Plan
from torchweft.products.segments.torch_path import fill_of

__all__ = ["extreme_numba"]

SERIAL = 100_000
"""Comparisons below which one thread is faster."""


FEW = 32
"""Channels up to which values alone are found faster than with places: 1.2 times on average, up to
1.9 times.  Rows of 64 in order are slower so: few numbers are replaced, and a branch saves
stores."""


def extreme_numba(x: Tensor, plan: Plan, largest: bool, places: bool) -> list[Tensor]:
    """Values, and places or not, see `torchweft.products.segments.operator`.

    16-bit numbers are widened first, and integers; rows that are not contiguous are copied.
    """
    from torchweft.products.segments import loops  # numba need not be installed

    table = plan.table("x_z")
    wide = accumulator(x.dtype) if x.is_floating_point() else torch.int64
    rows = x.detach().resolve_neg().to(wide).contiguous()
    found = [rows.new_full((table.num_rows, x.shape[1]), fill_of(x.dtype, largest))]
    places |= x.shape[1] > FEW
    if places:
        found.append(torch.full_like(found[0], x.shape[0], dtype=torch.int64))
    tables = plan.derived("bounds and order", lambda: _complete(plan))
    arrays = [as_array(t) for t in (*tables, rows, *found)]
    loop = loops.extreme if places else loops.extreme_values
    if rows.numel():
        share(
            lambda first, last: loop(first, last, largest, *arrays),
            table.num_rows, rows.numel(), SERIAL,
        )  # fmt: skip
    if recording():
        room = rows.nbytes * (rows.data_ptr() != x.data_ptr())
        record(Launch("numba", "extreme", {}, table.num_rows, room))
    return [found[0].to(x.dtype), *found[1:]]


def _complete(plan: Plan) -> list[Tensor]:
    """indptr and order; a missing one is the identity."""
    table = plan.table("x_z")
    identity = torch.arange(table.num_entries + 1, dtype=torch.int32, device="cpu")
    return [identity if t is None else t for t in (table.indptr, table.index1)]
