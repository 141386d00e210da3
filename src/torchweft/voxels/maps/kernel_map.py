"""Kernel maps: for each offset of a kernel, which input row meets which output row.

    sources[k, o] = q   ⇔   targets[k, q] = o   ⇔   input row q meets output row o at offset k

At one offset a row meets at most one row of the other side, so a map is two tables, one by output
row and one by input row, with −1 for none: a convolution reads the first, its gradient with respect
to the input the second.  Stored tables have their columns in canonical order, ascending by
(batch, s0, s1, …),

    table[k, i] = sources[k, order[i]]           back[k, i] = targets[k, order[i]]

which is the order in which a search finds them and in which sums over rows run.  A map is built
once for its coordinates and cached with them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.backend import kernels_serve
from torchweft.core.operators.operator import below_transforms, compiling, outside_graphs
from torchweft.core.tables import TensorCache
from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.voxels.grid import Geometry, cached_table, integer, whole
from torchweft.voxels.maps import numba_path
from torchweft.voxels.maps.checks import check_rows, check_same_device
from torchweft.voxels.maps.coordinates import Bounds, Coordinates, bounds_of
from torchweft.voxels.maps.gpu import launch as map_launch
from torchweft.voxels.maps.gpu.jobs import Job
from torchweft.voxels.maps.packing import Packing
from torchweft.voxels.maps.recipes import note
from torchweft.voxels.maps.shards import Around

__all__ = [
    "KernelMap",
    "MapTables",
    "Maps",
    "OutputGrid",
    "build_map",
    "given_outputs",
    "grid_after",
    "map_kernels_serve",
    "meet",
    "mode_of",
    "output_stride",
    "submanifold_tables",
    "tables_of",
]


class KernelMap(NamedTuple):
    """The pairs of input and output rows that meet in a layer, from `kernel_map`.

    Args:
        kept: the table of pairs, internal; see `pairs`, `counts` and `offsets`.
        back: (K, N_in) int32, the output row of each input in canonical order; None where that
            is the table with the offsets reversed, as in a submanifold layer with an odd kernel.
        inputs: the voxels that are read.
        outputs: the voxels that are written.
        geometry: kernel size, stride, padding and dilation; of an inverse layer, those of the layer
            that it undoes.
        inverse: whether inputs and outputs are swapped.
        around: of voxels that are spread over ranks, the rows that the tables number as inputs:
            this rank's, then those of others; None where no rank reads voxels of another.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> found = voxels.kernel_map(x, kernel_size=2, stride=2, submanifold=False)
        >>> found.pairs(0)  # rows of the input and of the output that meet at position 0
        (tensor([0]), tensor([0]))
    """

    kept: Tensor
    back: Tensor | None
    inputs: Coordinates
    outputs: Coordinates
    geometry: Geometry
    inverse: bool = False
    around: Around | None = None

    def __repr__(self) -> str:
        sides = f"{len(self.inputs)} → {len(self.outputs)} voxels"
        return f"KernelMap({self.geometry.num_offsets} offsets, {sides}, {self.geometry.mode})"

    @property
    def read(self) -> Coordinates:
        """The voxels that the tables number as inputs."""
        return self.inputs if self.around is None else self.around.voxels

    def rows(self, x: Tensor) -> Tensor:
        """The features of `read`, of those of the inputs."""
        return x if self.around is None else self.around.complete(x)

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
        return self.sources.flip(0) if self.back is None else _by_row(self.back, self.read.order)

    @property
    def counts(self) -> Tensor:
        """(K,) int64: pairs of each offset."""
        found = (self.kept >= 0).sum(1)
        missing = self.geometry.num_offsets - len(found)
        return torch.cat([found, found[:missing].flip(0)])

    @property
    def offsets(self) -> Tensor:
        """(K, d): output o reads the voxel at o·stride + offsets[k].

        A transposed or inverse layer: input q writes the voxel at q·stride + offsets[k].
        """
        return torch.tensor(self.geometry.offsets(), device=self.kept.device)

    def pairs(self, k: int) -> tuple[Tensor, Tensor]:
        """The rows of the input and of the output that meet at one kernel position.

        Args:
            k: the kernel position, 0 to K - 1.

        Returns:
            Input rows and output rows, int64, output rows ascending.

        Raises:
            IndexRangeError: no such position.
        """
        k, offsets = integer("k is", k, ". Pass 4, for example."), self.geometry.num_offsets
        if not -offsets <= k < offsets:
            raise IndexRangeError(
                f"k is {k} but the map has {offsets} offsets: it must lie in 0..{offsets - 1}. "
                "Pass the number of an offset, see offsets."
            )
        sources = self.sources[k]
        out_rows = (sources >= 0).nonzero().squeeze(1)
        return sources.index_select(0, out_rows).long(), out_rows

    def transpose(self) -> KernelMap:
        """The map with inputs and outputs swapped; kernel positions keep their numbers."""
        if self.around is not None:
            assert self.inputs.shards is not None
            return self.inputs.shards.transposed(self)
        back = self.table.flip(0) if self.back is None else self.back
        swapped = back, self.table, self.outputs, self.inputs
        return KernelMap(*swapped, self.geometry, not self.inverse)


_row_table_cache: TensorCache[Tensor] = TensorCache()


def _by_row(table: Tensor, order: Tensor | None) -> Tensor:
    """A table with its columns in the order of the rows."""
    if order is None:
        return table
    return cached_table(_row_table_cache, _put_back, table, order)


def _put_back(table: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(table).index_copy_(1, order.long(), table)


class Maps:
    """The named maps of a cloud and of all tensors that were derived from it.

    Tables are stored with the coordinates that they read, by geometry.  Coordinates refer to tables
    and to the coordinates that these write, never to those they were made from: reference counts
    free them, without the garbage collector.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, KernelMap] = {}

    def get(
        self,
        inputs: Coordinates,
        shape: Geometry,
        name: str | None = None,
        onto: Coordinates | None = None,
    ) -> KernelMap:
        """The map of coordinates for a geometry, built at the first call; may get a name.

        Args:
            inputs: the voxels that are read.
            shape: the geometry.
            name: a name for the map.
            onto: given outputs; None are those of the geometry.
        """
        named = None if name is None else self.by_name.get(name)
        if named is not None and (named.inputs is not inputs or named.geometry != shape):
            raise ShapeError(
                f"indice_key={name!r} names the map of {_described(named.geometry)} on "
                f"{len(named.inputs)} voxels, but was given with {_described(shape)} on "
                f"{'the same' if named.inputs is inputs else f'{len(inputs)} other'} voxels: a "
                "key names one map. Give this layer another indice_key, or none."
            )
        if inputs.shards is None:
            table, back, outputs = tables_of(inputs, shape, onto)
            found = KernelMap(table, back, inputs, inputs if outputs is None else outputs, shape)
        else:
            found = inputs.shards.kernel_map(inputs, shape, onto)
        if name is not None:
            self.by_name[name] = found
        return found

    def named(self, name: str) -> KernelMap:
        """The map that a layer has named.

        Raises:
            ShapeError: no map has this name.
        """
        if name not in self.by_name:
            raise ShapeError(
                f"indice_key={name!r} names no map of this tensor; its keys are "
                f"{sorted(self.by_name)}: an inverse layer undoes a layer that ran before. Give "
                f"that layer indice_key={name!r}."
            )
        return self.by_name[name]


def mode_of(submanifold: bool, transposed: bool, outputs: str = "torch") -> str:
    """The mode of a geometry from two flags and the rule of its outputs.

    Raises:
        ShapeError: arguments that contradict each other.
    """
    if outputs not in ("torch", "floor"):
        raise ShapeError(
            f'outputs is {outputs!r}: it must be "torch" or "floor". Pass one of them.'
        )
    if submanifold and transposed:
        raise ShapeError(
            "transposed=True was given with submanifold=True: a submanifold layer keeps its voxels "
            "and has no transpose of its own. Pass submanifold=False for a transposed layer."
        )
    if outputs == "torch":
        return "submanifold" if submanifold else "transposed" if transposed else "strided"
    if submanifold:
        raise ShapeError(
            "outputs='floor' was given to a submanifold layer, whose outputs are its inputs: only "
            "strided and transposed layers have it. Use SparseConv, or pass submanifold=False."
        )
    return "floor-transposed" if transposed else "floor"


def given_outputs(
    inputs: Coordinates, coordinates: Tensor | Coordinates | None, shape: Geometry
) -> Coordinates | None:
    """The voxels that a caller gives a layer as outputs, checked; None: those of the geometry.

    Raises:
        ShapeError, DTypeError, DeviceError: voxels that are none of this layer's level.
    """
    if coordinates is None:
        return None
    stride = output_stride(inputs.stride, shape)
    if isinstance(coordinates, Tensor):
        check_rows(coordinates, "coordinates", inputs.dim)
        check_same_device(inputs.device, "coordinates", coordinates.device)
        outputs = Coordinates(coordinates, None, inputs.given_batch_size, stride)
    elif isinstance(coordinates, Coordinates):
        check_same_device(inputs.device, "coordinates", coordinates.device)
        outputs = coordinates
    else:
        raise DTypeError(
            f"coordinates is a {type(coordinates).__name__}: it must be a tensor (N_out, 1 + d) or "
            "the coordinates of a SparseTensor. Pass other.coordinates."
        )
    if outputs.shards is not inputs.shards:
        raise ShapeError(
            "coordinates and the tensor are not spread over ranks alike: both must be of tensors "
            "that came from one call of shard_voxels. Pass coordinates=other.coordinates of such "
            "a tensor."
        )
    if outputs.dim != inputs.dim:
        raise ShapeError(
            f"coordinates have {outputs.dim} axes but the tensor has {inputs.dim}: both must have "
            "the same. Pass the coordinates of a tensor with as many axes."
        )
    if outputs.stride != stride:
        raise ShapeError(
            f"coordinates have stride {outputs.stride} but {_described(shape)} turns stride "
            f"{inputs.stride} into {stride}: they must be of the output's level. Pass the "
            "coordinates of a tensor of that level, or their rows as a tensor."
        )
    return outputs


MapTables = tuple[Tensor, Tensor | None, Coordinates | None]
"""`kept` and `back` of a map, and its outputs; None where they are the inputs."""


def tables_of(inputs: Coordinates, shape: Geometry, onto: Coordinates | None = None) -> MapTables:
    """The tables of a map: kept with the inputs, and with the outputs where these are given."""
    if onto is None:
        tables: MapTables | None = inputs.tables.get(shape)
        if tables is not None:
            return tables
        if compiling():
            tables = inputs.foreseen.get(shape) or _build_in_graph(inputs, shape)
            inputs.tables[shape] = tables
            return tables
        return _first_asked(inputs, shape)
    kept = inputs.onto.get(onto)
    if kept is None:
        kept = inputs.onto[onto] = {}
    if shape not in kept:
        kept[shape] = (_meet_in_graph if compiling() else meet)(inputs, onto, shape)
    return *kept[shape], onto


@outside_graphs
def _first_asked(inputs: Coordinates, shape: Geometry) -> MapTables:
    """Tables that were foreseen, or are built now."""
    tables: MapTables = inputs.foreseen.pop(shape, None) or build_map(inputs, shape)
    inputs.tables[shape] = tables
    note(inputs, shape, inputs if tables[2] is None else tables[2])  # which may be empty
    return tables


@below_transforms
@outside_graphs
def build_map(inputs: Coordinates, shape: Geometry) -> MapTables:
    """The tables of a map, and its outputs; None where they are the inputs."""
    build = {"submanifold": submanifold_tables, "floor": _floored}.get(shape.mode, _resampled)
    return inputs.valid(lambda: build(inputs, shape))


def _floored(inputs: Coordinates, shape: Geometry) -> MapTables:
    outputs = inputs.coarse(shape)
    return *meet(inputs, outputs, shape), None if outputs is inputs else outputs


def _build_in_graph(inputs: Coordinates, shape: Geometry) -> MapTables:
    found = torch.ops.torchweft.voxel_map(*inputs.traced(), *shape)
    if not shape.has_outputs:
        return found[0], found[1] if len(found) > 1 else None, None
    floor = shape.mode == "floor"
    grid = inputs.coarse_grid(shape) if floor else _output_grid(inputs, shape)
    return found[0], found[1], Coordinates.of_ascending(found[2], *grid)


def _meet_in_graph(
    inputs: Coordinates, outputs: Coordinates, shape: Geometry
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.torchweft.voxel_onto(
        *inputs.traced(), *outputs.traced(), *shape
    )
    return found


@below_transforms
@outside_graphs
def meet(inputs: Coordinates, outputs: Coordinates, shape: Geometry) -> tuple[Tensor, Tensor]:
    """The tables of a map between known voxels.

    Where kernels serve, each fine voxel looks up the coarse ones that it may meet.  Where numba
    serves, one merge for each line of offsets, see `numba_loops`.  Else one search for each offset
    and coarse voxel by torch's operations, whose number does not depend on what the voxels are.
    """
    coarse, fine = (inputs, outputs) if shape.transposed else (outputs, inputs)
    if len(coarse) and map_kernels_serve(fine, coarse.packing, shape):
        voxels, lows = (fine.rows, fine.order), fine.grid[3][0]
        known = coarse.keys, coarse.order
        table, back = map_launch.onto(voxels, lows, known, coarse.packing.box, shape)
    elif _loops_serve(fine, shape):
        sides = _in_order(coarse), _in_order(fine)
        table, back = numba_path.meet(*sides, fine.packing.box, shape, False)
    else:
        table, back = _searched(_in_order(coarse), _in_order(fine), fine, shape)
    return (back, table) if shape.transposed else (table, back)


def _searched(
    coarse: numba_path.Voxels, cells: numba_path.Voxels, fine: Coordinates, shape: Geometry
) -> tuple[Tensor, Tensor]:
    (rows, own), (_, owner) = coarse, cells
    offsets = torch.tensor([(0, *offset) for offset in shape.offsets()], device=rows.device)
    corners = rows.long() * torch.tensor((1, *shape.stride), device=rows.device)
    table = rows.new_full((len(offsets), len(rows)), -1)
    back = rows.new_full((len(offsets), len(fine) + 1), -1)  # the last column is for none
    for k, offset in enumerate(offsets if len(rows) and len(fine) else ()):
        place, absent = fine.place_keys(fine.packing.keys(corners + offset))
        table[k] = owner[place].masked_fill_(absent, -1)
        back[k].index_copy_(0, place.masked_fill(absent, len(fine)), own)
    return table, back[:, :-1].contiguous()


def map_kernels_serve(inputs: Coordinates, packing: Packing, shape: Geometry) -> bool:
    """Whether Triton kernels build a map: their integers must hold all intermediate numbers."""
    if not kernels_serve(inputs.device.type) or not 0 < len(inputs) < 2**30:
        return False
    return packing.single and _is_narrow(shape)


@functools.lru_cache(maxsize=1024)
def _is_narrow(shape: Geometry) -> bool:
    return all(number < 2**31 for axis in shape[1:] for number in axis)


def _loops_serve(fine: Coordinates, shape: Geometry) -> bool:
    """Whether numba's loops build a map: one integer must hold all intermediate numbers."""
    return numba_path.loops_serve(fine.device.type) and fine.packing.single and _is_narrow(shape)


def submanifold_tables(
    inputs: Coordinates, shape: Geometry, later: list[Job] | None = None
) -> MapTables:
    """The tables of a submanifold map; on a GPU the host does not wait, see `Coordinates.valid`.

    With a list, the tiles that kernels build from the table are left to it.
    """
    if map_kernels_serve(inputs, inputs.packing, shape):
        inputs.compile_ahead(shape)
        given = inputs.unchecked(), inputs.cells, inputs.packing.box, shape
        return *map_launch.submanifold(*given, later), None
    if _loops_serve(inputs, shape):
        voxels = _in_order(inputs)
        table, reverse = numba_path.meet(voxels, voxels, inputs.packing.box, shape, shape.symmetric)
        return table, None if shape.symmetric else reverse, None
    offsets = shape.offsets()
    num, count = len(offsets), len(inputs)
    empty = functools.partial(torch.full, dtype=torch.int32, device=inputs.device)
    table = empty((num, count), -1)
    back = None if shape.symmetric else empty((num, count), -1)
    rows, own = _in_order(inputs)
    for k, offset in enumerate(offsets[: (num + 1) // 2] if shape.symmetric else offsets):
        place, absent = _neighbours(inputs, rows, offset)
        table[k] = own[place].masked_fill_(absent, -1)
        turned = table[num - 1 - k] if back is None else back[k]
        turned.index_copy_(0, place[~absent], own[~absent])
    return table, back, None


def _in_order(inputs: Coordinates) -> tuple[Tensor, Tensor]:
    """The voxels in canonical order, and the row (int32) of each."""
    order = inputs.order
    if order is None:
        return inputs.rows, torch.arange(len(inputs), dtype=torch.int32, device=inputs.device)
    return inputs.rows.index_select(0, order), order


def _neighbours(inputs: Coordinates, rows: Tensor, offset: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The place of the voxel at an offset from each voxel in order, see `place_keys`."""
    packing, away = inputs.packing, (0, *offset)
    if packing.single:
        keys = torch.where(packing.inside(rows, away), inputs.keys.long() + packing.step(away), -1)
    else:
        keys = packing.keys(rows.long() + torch.tensor(away, device=rows.device))
    return inputs.place_keys(keys)


def _resampled(inputs: Coordinates, shape: Geometry) -> MapTables:
    """Strided and transposed maps: the outputs are all voxels with a pair, ascending."""
    if shape.outputs == "floor":
        raise ShapeError(
            "a transposed layer with outputs='floor' was given no coordinates: it writes the "
            "voxels of an earlier level. Pass coordinates=tensor.coordinates of that level, or use "
            "SparseInverseConv with the indice_key of the layer that left it."
        )
    packing, grid = grid_after(inputs, shape)
    spatial, lows, sizes = grid[0], packing.lows, packing.sizes
    if 0 not in spatial and map_kernels_serve(inputs, packing, shape):
        voxels = inputs.rows, inputs.order  # distinct, or two candidates would be one pair
        table, back, rows, keys = map_launch.resample(*voxels, sizes, packing.dtype, shape)
        return table, back, Coordinates.ascending(packing, keys, *grid, rows)
    if packing.single and _loops_serve(inputs, shape):
        made = numba_path.resample(_in_order(inputs), (grid[1], *spatial), shape)
        table, back, keys, rows = made
        return table, back, Coordinates.ascending(packing, keys.to(packing.dtype), *grid, rows)
    met, reached = zip(
        *[_outputs(inputs, shape, spatial, offset) for offset in shape.offsets()], strict=True
    )
    if not packing.single:
        packing = Packing(torch.cat(reached), lows, sizes)
    pieces = [packing.keys(voxels) for voxels in reached]
    keys = torch.unique(torch.cat(pieces))
    outputs = Coordinates.ascending(packing, keys, *grid)
    table = inputs.rows.new_full((shape.num_offsets, len(outputs)), -1)
    back = inputs.rows.new_full((shape.num_offsets, len(inputs)), -1)
    _, own = _in_order(inputs)
    for k, (rows, found) in enumerate(zip(met, pieces, strict=True)):
        places = torch.searchsorted(keys, found)
        table[k].index_copy_(0, places, own[rows])
        back[k].index_copy_(0, rows, places.int())
    return table, back, outputs


OutputGrid = tuple[tuple[int, ...], int, tuple[int, ...], Bounds]
"""A grid whose shape and batch size are known, see `coordinates.Grid`."""


def grid_after(inputs: Coordinates, shape: Geometry) -> tuple[Packing, OutputGrid]:
    """The box of the outputs of a strided or transposed layer, as a packing and as a grid."""
    grid = spatial, size, _, (lows, _) = _output_grid(inputs, shape)
    sizes = tuple(max(n, 1) for n in (size, *spatial))
    none = torch.empty(0, len(sizes), dtype=torch.int32, device=inputs.device)
    return Packing(none, lows, sizes), grid


def _output_grid(inputs: Coordinates, shape: Geometry) -> OutputGrid:
    """Where the outputs of a strided or transposed layer lie; raises IndexRangeError.

    The inputs have no box, or an axis of the output is too long.
    """
    spatial, size = shape.output_shape(inputs.spatial_shape), inputs.batch_size
    if max(spatial) > 2**31:
        raise IndexRangeError(
            f"the output of {_described(shape)} would have the shape {tuple(spatial)}: an axis "
            f"has at most {2**31} voxels. Pass a smaller spatial_shape, or shift the cloud to 0."
        )
    return spatial, size, output_stride(inputs.stride, shape), bounds_of(size, spatial)


def output_stride(stride: Sequence[int], shape: Geometry) -> tuple[int, ...]:
    """Voxels of the finest level that an output spans; at least 1 after a transposed layer."""
    pairs = zip(stride, shape.stride, strict=True)
    if shape.transposed:
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


def _described(shape: Geometry) -> str:
    return (
        f"a {shape.mode} layer with kernel {shape.kernel_size}, stride {shape.stride}, padding "
        f"{shape.padding}, dilation {shape.dilation}"
    )
