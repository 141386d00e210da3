"""The operators by which a compiled or exported graph checks voxels, sorts them and builds maps.

    voxel_rows    the rows of new voxels, checked against their box
    voxel_order   their canonical order
    voxel_map     the tables of a map, and the rows of its outputs where these are not the inputs
    voxel_onto    the tables of a map onto given voxels

Their bodies are what eager calls run.  How many outputs a map has is a size that is not known
before the graph runs (an unbacked size of torch).  A body finds the voxels of a level by the
identity of their rows, so all maps of a level share one sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchweft.core.operators.operator import register
from torchweft.errors import ShapeError
from torchweft.voxels.grid import Geometry, whole
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.kernel_map import build_map, meet

__all__ = ["voxels_of"]

Sizes = Sequence[int]

LEAST = 2
"""Voxels that a map in a graph writes; torch's norms compare them with 0 and 1 in the graph."""

_GRID = "SymInt[]? spatial_shape, SymInt? batch_size"
_GEOMETRY = "str mode, int[] kernel_size, int[] stride, int[] padding, int[] dilation"

_known: Any = WeakTensorKeyDictionary()
"""The voxels of rows in a graph.  No voxels hold the rows that they are found by."""


def voxels_of(rows: Tensor, spatial_shape: Sizes | None, batch_size: int | None) -> Coordinates:
    """The voxels of rows that nobody writes to, checked and sorted once for these rows."""
    found: Coordinates | None = _known.get(rows)
    if found is None:
        found = _known[rows] = Coordinates(rows, spatial_shape, batch_size)
    return found


def _rows_of(voxels: Coordinates) -> Tensor:
    """The rows of voxels as a tensor of the graph, by which the voxels are found."""
    rows = voxels.rows.clone()
    _known[rows] = voxels
    return rows


def _rows(rows: Tensor, spatial_shape: Sizes, batch_size: int) -> Tensor:
    return _rows_of(Coordinates(rows, spatial_shape, batch_size))


def _rows_fake(rows: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(rows.shape, dtype=torch.int32)


def _order(rows: Tensor, spatial_shape: Sizes | None, batch_size: int | None) -> Tensor:
    order = voxels_of(rows, spatial_shape, batch_size).order
    if order is None:
        return torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    return order.clone()


def _order_fake(rows: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(rows.shape[0], dtype=torch.int32)


def _map(
    rows: Tensor, spatial_shape: Sizes | None, batch_size: int | None, *numbers: Any
) -> list[Tensor]:
    inputs, shape = voxels_of(rows, spatial_shape, batch_size), _geometry(numbers)
    kept, back, outputs = build_map(inputs, shape)
    if outputs is not None and len(outputs) < LEAST:
        raise ShapeError(
            f"a {shape.mode} layer in a compiled or exported network has {len(outputs)} voxels to "
            f"write: torch takes sizes below {LEAST} for constants there, so that there must be "
            f"{LEAST} or more. Call the network itself for such clouds, without torch.compile."
        )
    if len(kept) != _rows_kept(rows, shape):
        kept = whole(kept, inputs.order, shape.num_offsets)[: _rows_kept(rows, shape)]
    found = [kept] if back is None else [kept, back]
    return found if outputs is None else [*found, _rows_of(outputs)]


def _map_fake(rows: Tensor, _: Any, __: Any, *numbers: Any) -> list[Tensor]:
    shape, count = _geometry(numbers), rows.shape[0]
    resampled = shape.has_outputs
    outputs = torch.library.get_ctx().new_dynamic_size(min=LEAST) if resampled else count
    found = [rows.new_empty((_rows_kept(rows, shape), outputs), dtype=torch.int32)]
    if shape.mode != "submanifold" or not shape.symmetric:
        found.append(rows.new_empty((shape.num_offsets, count), dtype=torch.int32))
    if resampled:
        found.append(rows.new_empty((outputs, rows.shape[1]), dtype=torch.int32))
    return found


def _rows_kept(rows: Tensor, shape: Geometry) -> int:
    """Rows of a table: half of them where the other half follows from it and kernels read it."""
    halved = shape.mode == "submanifold" and shape.symmetric and rows.is_cuda
    return shape.num_offsets // 2 + 1 if halved else shape.num_offsets


def _onto(
    rows: Tensor,
    spatial_shape: Sizes | None,
    batch_size: int | None,
    out_rows: Tensor,
    out_shape: Sizes | None,
    out_batch_size: int | None,
    *numbers: Any,
) -> tuple[Tensor, Tensor]:
    inputs = voxels_of(rows, spatial_shape, batch_size)
    outputs = voxels_of(out_rows, out_shape, out_batch_size)
    return meet(inputs, outputs, _geometry(numbers))


def _onto_fake(
    rows: Tensor, _: Any, __: Any, out_rows: Tensor, ___: Any, ____: Any, *numbers: Any
) -> tuple[Tensor, Tensor]:
    offsets = _geometry(numbers).num_offsets
    count = rows.shape[0]
    return (
        rows.new_empty((offsets, out_rows.shape[0]), dtype=torch.int32),
        rows.new_empty((offsets, count), dtype=torch.int32),
    )


def _geometry(numbers: Sequence[Any]) -> Geometry:
    mode, *axes = numbers
    return Geometry(mode, *map(tuple, axes))


register(
    "voxel_rows",
    "(Tensor rows, SymInt[] spatial_shape, SymInt batch_size) -> Tensor",
    _rows,
    _rows_fake,
)
register("voxel_order", f"(Tensor rows, {_GRID}) -> Tensor", _order, _order_fake)
register("voxel_map", f"(Tensor rows, {_GRID}, {_GEOMETRY}) -> Tensor[]", _map, _map_fake)
register(
    "voxel_onto",
    f"(Tensor rows, {_GRID}, Tensor out_rows, SymInt[]? out_shape, SymInt? out_batch_size, "
    f"{_GEOMETRY}) -> (Tensor, Tensor)",
    _onto,
    _onto_fake,
)
