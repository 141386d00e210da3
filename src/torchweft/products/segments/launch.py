"""The Triton path of extremes of segments: one launch, and one more where segments are long."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import Launcher, Tile, current_device
from torchweft.core.printing.modules import written
from torchweft.core.tables import Plan, Table
from torchweft.products import tiles
from torchweft.products.launch import INT32_MAX, pieces_of
from torchweft.products.segments.torch_path import fill_of

__all__ = ["extreme_triton"]

STEPS = 4
"""Entries whose loads are on their way at once, in each of a program's segments."""


def extreme_triton(x: Tensor, plan: Plan, largest: bool, places: bool) -> list[Tensor]:
    """Values and, if asked, places; see `torchweft.products.segments.operator`.

    Long segments are cut into pieces, as in sums: the extremes of pieces are formed first.
    """
    table = plan.table("x_z")
    pieces = pieces_of(plan, "x_z", None)
    if pieces is None:
        indptr = plan.derived("bounds", lambda: _bounds(plan, table))
        return _launched("segments", x, plan, (indptr, table.index1), largest, places)
    values, *place = _launched("pieces", x, plan, (pieces.indptr, table.index1), largest, places)
    best, *piece = _launched("owners", values, plan, (pieces.owner_indptr, None), largest, places)
    return [best, *(p.gather(0, q) for p, q in zip(place, piece, strict=True))]


def _bounds(plan: Plan, table: Table) -> Tensor:
    """indptr, also where each row is a segment of its own."""
    if table.indptr is not None:
        return table.indptr
    return torch.arange(table.num_rows + 1, dtype=torch.int32, device=plan.device)


def _launched(
    name: str,
    x: Tensor,
    plan: Plan,
    tables: tuple[Tensor, Tensor | None],
    largest: bool,
    places: bool,
) -> list[Tensor]:
    """The extremes of segments: tables are their indptr, and the order of their entries."""
    values = x.new_empty(tables[0].numel() - 1, x.shape[1])
    found = [torch.empty(values.shape, dtype=torch.int64, device=x.device)] if places else []
    if values.numel():
        key = name, x.shape, x.stride(), x.dtype, largest, places
        launcher = plan.derived(key, lambda: _launcher(x, tables, largest))
        with current_device(x):
            launcher([x, values, found[0] if places else None])
    return [values, *found]


def _launcher(x: Tensor, tables: tuple[Tensor, Tensor | None], largest: bool) -> Launcher:
    (count, channels), segments = x.shape, tables[0].numel() - 1
    block_c = min(tiles.power_of_two(channels), 512 // x.itemsize)
    block_r = min(tiles.power_of_two(segments), max(1, 2048 // x.itemsize // block_c))
    span = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    wide = max(span, segments * channels) > INT32_MAX
    return Launcher(
        written("torchweft.products.segments.kernels", "extreme_kernel"),
        -(-segments // block_r) * -(-channels // block_c),
        tables,
        (segments, count, channels, *x.stride()),
        (largest, wide, None if x.is_floating_point() else fill_of(x.dtype, largest), STEPS),
        Tile((block_r, block_c)),
    )
