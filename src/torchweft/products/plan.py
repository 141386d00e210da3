"""Index tables of a product, checked once and made into a plan; and the infos that carry them.

The roles of a product plan: `x` and `y` are rows of the two inputs, `z` rows of the output, `t`
is the term (where its scale stands), `k` the entry (the loop variable of a segment).
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.tables.plan import Plan
from torchweft.core.tables.segments import rows_of
from torchweft.core.tables.tensor_cache import TensorCache
from torchweft.errors import IndexRangeError

__all__ = ["ROLES", "Sizes", "Tables", "largest", "product_plan"]

ROLES = "xyztk"


class Tables(NamedTuple):
    """The index tensors of a call, as the caller gave them; None is the identity."""

    index1: Tensor | None = None
    index2: Tensor | None = None
    seg: Tensor | None = None
    gather_index: Tensor | None = None
    index_out: Tensor | None = None


class Sizes(NamedTuple):
    """Rows of each role, in the order of `ROLES`."""

    x: int
    y: int
    z: int
    t: int
    k: int


_plans: TensorCache[Plan] = TensorCache()
_maxima: TensorCache[int] = TensorCache()


def product_plan(
    tables: tuple[Tensor | None, ...], sizes: tuple[int, ...], device: torch.device
) -> Plan:
    """The plan of `Tables` and `Sizes`: built and checked once, found again afterwards.

    Raises:
        IndexRangeError: a value points outside its rows (checked on the CPU always, on a GPU
            where the environment has TORCHWEFT_CHECK=1).
    """
    return _plans.get(
        tables, (sizes, device), lambda: _build(Tables(*tables), Sizes(*sizes), device)
    )


def largest(index_out: Tensor) -> int:
    """max(index_out), -1 if empty; remembered, so that it synchronises once."""
    return _maxima.get(
        (index_out,), "max", lambda: int(index_out.max()) if index_out.numel() else -1
    )


def _build(tables: Tables, sizes: Sizes, device: torch.device) -> Plan:
    if device.type == "cpu" or os.environ.get("TORCHWEFT_CHECK") == "1":
        _check(tables, sizes)
    index1, index2, seg, gather, index_out = tables
    rows = {
        "x": _through(index1, gather),
        "y": _through(index2, gather),
        "z": index_out,
        "t": gather,
        "k": None,
    }
    sorted_by = partial = None
    if seg is not None:
        owner = rows_of(seg.contiguous(), sizes.k)
        if int(seg[-1]) - int(seg[0]) < sizes.k:
            partial = "z"
        if index_out is None:
            rows["z"] = owner
            num_more = sizes.z - (seg.numel() - 1)
            sorted_by = ("z", torch.cat([seg, seg[-1:].expand(num_more)]))
            owner[owner == seg.numel() - 1] = sizes.z
        else:
            rows["z"] = torch.cat([index_out, index_out.new_tensor([sizes.z])])[owner]
    return Plan(rows, sizes._asdict(), sizes.k, device, sorted_by, partial)


def _through(index: Tensor | None, gather: Tensor | None) -> Tensor | None:
    """Rows read at entry k, for t = gather[k]."""
    if index is None or gather is None:
        return gather if index is None else index
    return index[gather.long()]


def _check(tables: Tables, sizes: Sizes) -> None:
    if tables.seg is not None:
        _check_segments(tables.seg, sizes.k, tables.gather_index is not None)
    limits = {
        "index1": (sizes.x, "rows of input1"),
        "index2": (sizes.y, "rows of input2"),
        "gather_index": (sizes.t, "terms"),
        "index_out": (sizes.z, "output rows (out_size)"),
    }
    for name, (limit, what) in limits.items():
        index = getattr(tables, name)
        if index is None or not index.numel():
            continue
        low, high = (int(v) for v in index.aminmax())
        if low < 0 or high >= limit:
            value = low if low < 0 else high
            where = int((index == value).nonzero()[0, 0])
            raise IndexRangeError(
                f"{name}[{where}] is {value} but there are {limit} {what}: every value must lie "
                f"in 0..{limit - 1}. Correct {name}, or pass "
                + ("a larger out_size." if name == "index_out" else "an input with more rows.")
            )


def _check_segments(seg: Tensor, num_entries: int, gathered: bool) -> None:
    what = "entries of gather_index" if gathered else "terms"
    fault = (seg.diff() < 0).nonzero()
    if fault.numel():
        m = int(fault[0, 0])
        raise IndexRangeError(
            f"seg decreases from seg[{m}] = {int(seg[m])} to seg[{m + 1}] = {int(seg[m + 1])}: "
            "segment bounds must not decrease. Sort the terms by output row and pass the running "
            "count, or use sparse_product_info, which does both."
        )
    for m in (0, seg.numel() - 1):
        value = int(seg[m])
        if not 0 <= value <= num_entries:
            raise IndexRangeError(
                f"seg[{m}] is {value} but there are {num_entries} {what}: bounds must lie in "
                f"0..{num_entries}. Pass bounds that end at {num_entries} or before."
            )
