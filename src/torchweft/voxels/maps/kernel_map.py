"""Kernel maps: for each offset of a kernel, which input row meets which output row.

    sources[k, o] = q   ⇔   targets[k, q] = o   ⇔   input row q meets output row o at offset k

Both sides name a row at most once an offset, so a map is two tables, one by output row and one by
input row, −1 where nobody is met: a convolution reads the first, its gradient by the input the
second.  What is kept has its columns in canonical order, ascending by (batch, s0, s1, …),

    table[k, i] = sources[k, order[i]]           back[k, i] = targets[k, order[i]]

the order in which they are found, and in which sums over rows run: nothing is scattered.  A map is
built once for its coordinates and kept with them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.operators.operator import below_transforms, compiling, outside_graphs
from torchweft.core.tables.tensor_cache import TensorCache
from torchweft.errors import IndexRangeError, ShapeError
from torchweft.voxels.grid.geometry import Geometry
from torchweft.voxels.grid.mirror import whole
from torchweft.voxels.maps.coordinates import Coordinates, Packing, kernels_serve

__all__ = ["KernelMap", "Maps", "mode_of"]


class KernelMap(NamedTuple):
    """Who meets whom in one layer.

    Args:
        kept: the table; perhaps its first K // 2 + 1 rows alone where `back` is None, see `mirror`.
        back: (K, N_in) int32, the output row of each input in canonical order; None where that
            is the table with the offsets reversed, as in a submanifold layer with an odd kernel.
        inputs: the voxels that are read.
        outputs: the voxels that are written.
        geometry: the layer's; of an inverse layer, that of the layer it undoes.
        inverse: whether the two sides are swapped.
    """

    kept: Tensor
    back: Tensor | None
    inputs: Coordinates
    outputs: Coordinates
    geometry: Geometry
    inverse: bool = False

    def __repr__(self) -> str:
        sides = f"{len(self.inputs)} → {len(self.outputs)} voxels"
        return f"KernelMap({self.geometry.num_offsets} offsets, {sides}, {self.geometry.mode})"

    @property
    def table(self) -> Tensor:
        """(K, N_out) int32, the input row of each output in canonical order, −1 for none."""
        return whole(self.kept, self.outputs.order, self.geometry.num_offsets)

    @property
    def sources(self) -> Tensor:
        """(K, N_out) int32, the input row of each output row, −1 for none."""
        return _by_row(self.table, self.outputs.order)

    @property
    def targets(self) -> Tensor:
        """(K, N_in) int32, the output row of each input row, −1 for none."""
        return self.sources.flip(0) if self.back is None else _by_row(self.back, self.inputs.order)

    @property
    def counts(self) -> Tensor:
        """(K,) int64: pairs of each offset."""
        found = (self.kept >= 0).sum(1)
        missing = self.geometry.num_offsets - len(found)
        return torch.cat([found, found[:missing].flip(0)]) if missing else found

    @property
    def offsets(self) -> Tensor:
        """(K, d): output o reads the voxel at o·stride + offsets[k].

        A transposed or inverse layer: input q writes the voxel at q·stride + offsets[k].
        """
        return torch.tensor(self.geometry.offsets(), device=self.kept.device)

    def pairs(self, k: int) -> tuple[Tensor, Tensor]:
        """(input rows, output rows) that meet at offset k, output rows ascending."""
        sources = self.sources[k]
        out_rows = (sources >= 0).nonzero().squeeze(1)
        return sources.index_select(0, out_rows).long(), out_rows

    def transpose(self) -> KernelMap:
        """The map with its sides swapped, the same k."""
        back = self.table.flip(0) if self.back is None else self.back
        swapped = back, self.table, self.outputs, self.inputs
        return KernelMap(*swapped, self.geometry, not self.inverse)


_ROWS: TensorCache[Tensor] = TensorCache()


def _by_row(table: Tensor, order: Tensor | None) -> Tensor:
    """A table's columns as the rows stand."""
    if order is None:
        return table
    if compiling():
        return _put_back(table, order)
    return _ROWS.get((table, order), None, lambda: below_transforms(_put_back)(table, order))


def _put_back(table: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(table).index_copy_(1, order.long(), table)


class Maps:
    """The named maps of a cloud and of all that was derived from it.

    Tables live with the coordinates that they read, by their geometry.  Coordinates hold tables and
    the coordinates these write, never those they were made from: nothing waits for a garbage
    collector.
    """

    def __init__(self) -> None:
        self._named: dict[str, KernelMap] = {}

    def get(self, inputs: Coordinates, shape: Geometry, name: str | None = None) -> KernelMap:
        """The map of coordinates under a geometry, built when first asked for; perhaps named."""
        named = None if name is None else self._named.get(name)
        if named is not None and (named.inputs is not inputs or named.geometry != shape):
            raise ShapeError(
                f"indice_key={name!r} names the map of {_described(named.geometry)} on "
                f"{len(named.inputs)} voxels, but was given with {_described(shape)} on "
                f"{'the same' if named.inputs is inputs else f'{len(inputs)} other'} voxels: a "
                "key names one map. Give this layer another indice_key, or none."
            )
        tables = inputs.tables.get(shape)
        if tables is None:
            tables = inputs.tables[shape] = _build(inputs, shape)
        table, back, outputs = tables
        found = KernelMap(table, back, inputs, inputs if outputs is None else outputs, shape)
        if name is not None:
            self._named[name] = found
        return found

    def named(self, name: str) -> KernelMap:
        """The map that a layer has named.

        Raises:
            ShapeError: no layer has.
        """
        if name not in self._named:
            raise ShapeError(
                f"indice_key={name!r} names no map of this tensor; its keys are "
                f"{sorted(self._named)}: an inverse layer undoes a layer that ran before. Give "
                f"that layer indice_key={name!r}."
            )
        return self._named[name]


def mode_of(submanifold: bool, transposed: bool) -> str:
    """The word of `geometry` for two flags.

    Raises:
        ShapeError: both are set.
    """
    if submanifold and transposed:
        raise ShapeError(
            "transposed=True was given with submanifold=True: a submanifold layer keeps its voxels "
            "and has no transpose of its own. Pass submanifold=False for a transposed layer."
        )
    return "submanifold" if submanifold else "transposed" if transposed else "strided"


Tables = tuple[Tensor, Tensor | None, Coordinates | None]
"""What is kept of a map's table, back, and its outputs; None where they are the inputs."""


@below_transforms
@outside_graphs
def _build(inputs: Coordinates, shape: Geometry) -> Tables:
    """The tables of coordinates under a geometry."""
    build = _submanifold if shape.mode == "submanifold" else _resampled
    return inputs.valid(lambda: build(inputs, shape))


def _kernels_serve(inputs: Coordinates, packing: Packing, shape: Geometry) -> bool:
    """Whether `map_launch` builds a map: its integers must hold all numbers on the way."""
    if not kernels_serve(inputs.device.type) or not 0 < len(inputs) < 2**30:
        return False
    return packing.single and _moderate(shape)


@functools.lru_cache(maxsize=1024)
def _moderate(shape: Geometry) -> bool:
    return all(number < 2**31 for axis in shape[1:] for number in axis)


def _submanifold(inputs: Coordinates, shape: Geometry) -> Tables:
    if _kernels_serve(inputs, inputs.packing, shape):
        return _submanifold_by_kernels(inputs, shape)
    offsets = shape.offsets()
    num, count = len(offsets), len(inputs)
    empty = functools.partial(torch.full, dtype=torch.int32, device=inputs.device)
    table = empty((num, count), -1)
    back = None if shape.symmetric else empty((num, count), -1)
    rows, own = _in_order(inputs)
    for k, offset in enumerate(offsets[: (num + 1) // 2] if shape.symmetric else offsets):
        place, absent = _neighbours(inputs, rows, offset)
        table[k] = own[place].masked_fill_(absent, -1)
        met = place[~absent]
        turned = table[num - 1 - k] if back is None else back[k]
        turned.index_copy_(0, met, own[~absent])
    return table, back, None


def _in_order(inputs: Coordinates) -> tuple[Tensor, Tensor]:
    """The voxels in canonical order, and the row (int32) where each of them stands."""
    order = inputs.order
    if order is None:
        return inputs.rows, torch.arange(len(inputs), dtype=torch.int32, device=inputs.device)
    return inputs.rows.index_select(0, order), order


def _submanifold_by_kernels(inputs: Coordinates, shape: Geometry) -> Tables:
    from torchweft.voxels.maps_gpu import launch as map_launch

    box = inputs.packing.lows, inputs.packing.sizes
    inputs.compile_ahead(shape)
    return *map_launch.submanifold(inputs.unchecked(), inputs.cells, *box, shape), None


def _neighbours(inputs: Coordinates, rows: Tensor, offset: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The place of the voxel at an offset from each of the voxels in order, see `place_keys`."""
    packing, away = inputs.packing, (0, *offset)
    if packing.single:
        keys = torch.where(packing.inside(rows, away), inputs.keys.long() + packing.step(away), -1)
    else:
        moved = rows.long() + torch.tensor(away, device=rows.device)
        keys = packing.keys(moved)
    return inputs.place_keys(keys)


def _resampled(inputs: Coordinates, shape: Geometry) -> Tables:
    """Strided and transposed: the outputs are all voxels with a pair, ascending."""
    spatial, size = shape.output_shape(inputs.spatial_shape), inputs.batch_size
    _check_extent(spatial, shape)
    packing = Packing(inputs.rows[:0], (0,) * (1 + inputs.dim), (max(size, 1), *_positive(spatial)))
    stride = _output_stride(inputs.stride, shape)
    if 0 not in spatial and _kernels_serve(inputs, packing, shape):
        from torchweft.voxels.maps_gpu import launch as map_launch

        voxels = inputs.rows, inputs.order  # distinct, or two candidates would be one pair
        table, back, rows, keys = map_launch.resample(*voxels, packing.sizes, packing.dtype, shape)
        return table, back, Coordinates.ascending(packing, keys, spatial, size, stride, rows)
    packing = packing if packing.single else _wide_packing(inputs, shape, spatial)
    reached = [_reached(inputs, shape, packing, spatial, offset) for offset in shape.offsets()]
    pieces = [keys for _, keys in reached]
    keys = torch.unique(torch.cat(pieces))
    outputs = Coordinates.ascending(packing, keys, spatial, size, stride)
    table = inputs.rows.new_full((shape.num_offsets, len(outputs)), -1)
    back = inputs.rows.new_full((shape.num_offsets, len(inputs)), -1)
    _, own = _in_order(inputs)
    for k, (met, found) in enumerate(reached):
        places = torch.searchsorted(keys, found)
        table[k].index_copy_(0, places, own[met])
        back[k].index_copy_(0, met, places.int())
    return table, back, outputs


def _check_extent(spatial: Sequence[int], shape: Geometry) -> None:
    if max(spatial) > 2**31:
        raise IndexRangeError(
            f"the output of {_described(shape)} would have the shape {tuple(spatial)}: an axis "
            f"has at most {2**31} voxels. Pass a smaller spatial_shape, or shift the cloud to 0."
        )


def _positive(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(max(n, 1) for n in shape)


def _output_stride(stride: Sequence[int], shape: Geometry) -> tuple[int, ...]:
    """Voxels of the finest level that an output spans; at least 1 after a transposed layer."""
    pairs = zip(stride, shape.stride, strict=True)
    if shape.mode == "transposed":
        return tuple(max(1, a // s) for a, s in pairs)
    return tuple(a * s for a, s in pairs)


def _outputs(
    inputs: Coordinates, shape: Geometry, spatial: Sequence[int], offset: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(inputs in order, the voxels that they meet) at an offset, inside the output's box."""
    rows = _in_order(inputs)[0].long()
    columns = [rows[:, 0]]
    met = torch.ones_like(columns[0], dtype=torch.bool)
    for axis, (size, s, o) in enumerate(zip(spatial, shape.stride, offset, strict=True)):
        q = rows[:, 1 + axis]
        if shape.mode == "transposed":
            place = q * s + o
        else:
            place = torch.div(q - o, s, rounding_mode="floor")
            met &= place * s == q - o
        met &= (place >= 0) & (place < size)
        columns.append(place)
    found = met.nonzero().squeeze(1)
    return found, torch.stack(columns, 1).index_select(0, found)


def _reached(
    inputs: Coordinates,
    shape: Geometry,
    packing: Packing,
    spatial: Sequence[int],
    offset: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """(inputs in order, keys of the outputs that they meet) at an offset."""
    met, voxels = _outputs(inputs, shape, spatial, offset)
    return met, packing.keys(voxels)


def _wide_packing(inputs: Coordinates, shape: Geometry, spatial: Sequence[int]) -> Packing:
    """A packing for boxes past 2⁶³, which needs the voxels that it is to tell apart."""
    reached = [_outputs(inputs, shape, spatial, offset)[1] for offset in shape.offsets()]
    sizes = (max(inputs.batch_size, 1), *_positive(spatial))
    return Packing(torch.cat(reached), (0,) * len(sizes), sizes)


def _described(shape: Geometry) -> str:
    return (
        f"a {shape.mode} layer with kernel {shape.kernel_size}, stride {shape.stride}, padding "
        f"{shape.padding}, dilation {shape.dilation}"
    )
