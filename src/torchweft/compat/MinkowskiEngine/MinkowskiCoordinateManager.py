"""CoordinateManager: the coordinate maps of a cloud and of the levels that layers make of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchweft.compat.MinkowskiEngine.coordinate_maps import (
    CoordinateMap,
    Region,
    Window,
    distinct,
    expanded,
    region,
    steps_of,
    turned,
)
from torchweft.compat.MinkowskiEngine.MinkowskiCommon import (
    GPUMemoryAllocatorType,
    MinkowskiAlgorithm,
    RegionType,
    convert_to_int_list,
)
from torchweft.compat.MinkowskiEngine.MinkowskiKernelGenerator import KernelGenerator
from torchweft.compat.voxels import rows_of
from torchweft.core.tables import sort_rows
from torchweft.errors import DTypeError, ShapeError
from torchweft.voxels.maps.kernel_map import KernelMap, Maps

__all__ = ["CoordinateManager", "CoordinateMapKey", "Segments", "set_gpu_allocator"]

T = TypeVar("T")
Key = tuple[tuple[int, ...], str]


class CoordinateMapKey:
    """The name of a coordinate map: its tensor stride and a string.

    >>> CoordinateMapKey([2, 2], "pruned").get_key()
    ([2, 2], 'pruned')

    Args:
        stride: the tensor stride; or 1 + the number of axes, for a key that is set later.
        string_id: the string.
    """

    def __init__(self, stride: int | Sequence[int], string_id: str = "") -> None:
        self._key: Key | None = None
        self._size = stride if isinstance(stride, int) else 1 + len(stride)
        if not isinstance(stride, int):
            self.set_key(stride, string_id)

    def set_key(self, stride: Any, string_id: str | None = None) -> None:
        """Name a map, by its tensor stride and string or by the pair of both."""
        if string_id is None:
            stride, string_id = stride
        self._key = tuple(convert_to_int_list(stride, self._size - 1)), string_id

    def is_key_set(self) -> bool:
        """Whether it names a map."""
        return self._key is not None

    def get_key(self) -> tuple[list[int], str]:
        """(tensor stride, string)."""
        stride, string_id = self.pair
        return list(stride), string_id

    def get_tensor_stride(self) -> list[int]:
        """One number per axis."""
        return list(self.pair[0])

    def get_coordinate_size(self) -> int:
        """1 + the number of axes."""
        return self._size

    @property
    def pair(self) -> Key:
        """What maps are found by.

        Raises:
            ShapeError: the key is not set.
        """
        if self._key is None:
            raise ShapeError(
                "a CoordinateMapKey that is not set was given: it must name a map. Pass "
                "tensor.coordinate_map_key, or what a method of the manager returns."
            )
        return self._key

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CoordinateMapKey) or self._key is None:
            return False
        return self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        stride, string_id = self._key or ("not set", "")
        return f"coordinate map key:{list(stride)}" + (f":{string_id}" if string_id else "")


class Segments(NamedTuple):
    """Rows that belong to other rows: their numbers, an order that sorts these, and how many."""

    owner: Tensor
    order: Tensor
    size: int


class CoordinateManager:
    """The coordinate maps and fields of one cloud, by key.

    A layer finds its output's map here by tensor stride and string, as in the original, so that a
    transposed layer returns to the voxels of the level that it comes back to.

    Args:
        D: number of axes.
        num_threads, coordinate_map_type, allocator_type: have no effect.
        minkowski_algorithm: kept; it has no effect.

    Raises:
        ShapeError: D that is not 1 to 4.
    """

    def __init__(
        self,
        D: int = 0,  # noqa: N803 - the original's name
        num_threads: int = -1,
        coordinate_map_type: int | None = None,
        allocator_type: int | None = None,
        minkowski_algorithm: int | None = None,
    ) -> None:
        if not 1 <= D <= 4:
            raise ShapeError(f"D is {D}: a manager has 1 to 4 axes. Pass D=3, say.")
        self.D = D
        self.minkowski_algorithm = minkowski_algorithm or MinkowskiAlgorithm.DEFAULT
        self._maps: dict[Key, CoordinateMap] = {}
        self._fields: dict[Key, Tensor] = {}
        self._given: list[Tensor] = []  # rows, the batch number first
        self._cells: dict[tuple[Key, Key], Segments] = {}  # of fine and coarse maps
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        maps = "".join(f"\n\t{list(t)}:{s!r}: {len(m)} voxels" for (t, s), m in self._maps.items())
        return f"CoordinateManager({maps}\n)"

    def insert_and_map(
        self, coordinates: Tensor, tensor_stride: Any = 1, string_id: str = ""
    ) -> tuple[CoordinateMapKey, tuple[Tensor, Tensor]]:
        """A map of coordinates, the first row of each voxel, and the voxel of each row.

        >>> manager = CoordinateManager(D=1)
        >>> rows = torch.tensor([[0, 7], [0, 3], [0, 7]], dtype=torch.int32)
        >>> key, (unique_map, inverse_map) = manager.insert_and_map(rows)
        >>> unique_map.tolist(), inverse_map.tolist(), manager.get_coordinates(key).tolist()
        ([0, 1], [0, 1, 0], [[0, 7], [0, 3]])

        Args:
            coordinates: (N, 1 + D) integers (batch, x0, …); multiples of the tensor stride are
                faster.
            tensor_stride: voxels of the finest level that a voxel spans.
            string_id: of the key; another one is made where the key exists.

        Raises:
            ShapeError, DTypeError: coordinates that are not so.
        """
        stride = convert_to_int_list(tensor_stride, self.D)
        _check_coordinates(coordinates, self.D)
        rows = turned(coordinates)
        unique, inverse = distinct(rows)
        if len(unique) < len(rows):
            rows = rows.index_select(0, unique)
        return self._insert(rows, stride, string_id), (unique, inverse)

    def adopt(self, key: Key, found: CoordinateMap) -> CoordinateMapKey:
        """Take over a map under a key."""
        self._maps[key] = found
        self._given.append(rows_of(found.level))
        return CoordinateMapKey(*key)

    def is_first(self, key: CoordinateMapKey) -> bool:
        """Whether it names the map that was inserted first, of which others are made."""
        return next(iter(self._maps)) == key.pair

    def insert_field(
        self, coordinates: Tensor, tensor_stride: Any = 1, string_id: str = ""
    ) -> CoordinateMapKey:
        """A field: (N, 1 + D) coordinates with fractions, the batch number first."""
        key = self._free(convert_to_int_list(tensor_stride, self.D), string_id, self._fields)
        self._fields[key.pair] = coordinates.float()
        self._given.append(coordinates)
        return key

    def field_to_sparse_insert_and_map(
        self, field_map_key: CoordinateMapKey, sparse_tensor_stride: Any, string_id: str = ""
    ) -> tuple[CoordinateMapKey, tuple[Tensor, Tensor]]:
        """The voxels of a tensor stride that hold a point; see `insert_and_map`."""
        stride = convert_to_int_list(sparse_tensor_stride, self.D)
        rows = _cells(self.get_coordinate_field(field_map_key), stride)
        rows = rows * torch.tensor(steps_of(stride), device=rows.device)
        unique, inverse = distinct(rows)
        key = self._insert(rows.index_select(0, unique), stride, string_id)
        return key, (unique, inverse)

    def field_to_sparse_map(
        self, field_map_key: CoordinateMapKey, sparse_map_key: CoordinateMapKey
    ) -> tuple[Tensor, Tensor]:
        """(rows of the map, rows of the field): the points whose voxel is in the map."""
        found = self.map_of(sparse_map_key)
        rows = _cells(self.get_coordinate_field(field_map_key), found.tensor_stride)
        voxel = found.find(rows)
        points = (voxel >= 0).nonzero().squeeze(1)
        return voxel.index_select(0, points).long(), points

    def stride(
        self, coordinate_map_key: CoordinateMapKey, stride: Any, string_id: str = ""
    ) -> CoordinateMapKey:
        """The map of the voxels ⌊c / (t s)⌋ t s, made at the first call; t is the tensor stride."""
        steps = convert_to_int_list(stride, self.D)
        old, name = coordinate_map_key.get_key()
        new = [t * s for t, s in zip(old, steps, strict=True)]
        key = CoordinateMapKey(new, string_id or name)
        if key.pair not in self._maps:
            self._maps[key.pair] = self.map_of(coordinate_map_key).strided(steps)
        return key

    def origin(self) -> CoordinateMapKey:
        """The map of one voxel at 0 for each sample that was given; its tensor stride is 0."""
        key = CoordinateMapKey([0] * self.D)
        if key.pair not in self._maps:
            batch = torch.unique(torch.cat([rows[:, 0].round().long() for rows in self._given]))
            rows = torch.nn.functional.pad(batch.unsqueeze(1), (0, self.D))
            self._maps[key.pair] = CoordinateMap.of(rows, [0] * self.D)
        return key

    origin_field = origin

    def prune(self, key: CoordinateMapKey, mask: Tensor) -> CoordinateMapKey:
        """The map of the voxels where the mask (N,) is True, in their order."""
        whole = self.map_of(key)
        kept = whole.level.select(mask.nonzero().squeeze(1))
        found = self._free(key.get_tensor_stride(), "pruned")
        self._maps[found.pair] = CoordinateMap(kept, whole.tensor_stride, whole.units)
        return found

    def union_map(
        self, in_keys: Sequence[CoordinateMapKey], out_key: CoordinateMapKey
    ) -> list[Tensor]:
        """(2, N) rows of each map and of their union, whose key is set; its stride is the least."""
        maps = [self.map_of(key) for key in in_keys]
        stride = [min(numbers) for numbers in zip(*(m.tensor_stride for m in maps), strict=True)]
        rows = torch.cat([m.finest.rows for m in maps])
        unique, inverse = distinct(rows)
        rows = rows.index_select(0, unique)
        out_key.set_key(self._free(stride, "merge").get_key())
        self._maps[out_key.pair] = CoordinateMap.of(rows, stride)
        parts = torch.split(inverse, [len(m) for m in maps])
        return [torch.stack((torch.arange(len(p), device=p.device), p)) for p in parts]

    def output_of(
        self, key: CoordinateMapKey, generator: KernelGenerator, transposed: bool
    ) -> CoordinateMapKey:
        """The map that a layer writes where none is given."""
        window, generative = generator.window, generator.expand_coordinates
        if not transposed and not generative:
            return self.stride(key, window.stride)
        if not generative:
            old = zip(key.get_tensor_stride(), window.stride, strict=True)
            known = CoordinateMapKey([t // s for t, s in old])
            if known.pair in self._maps:
                return known
        found = expanded(self.map_of(key), generator.offsets(), window, transposed)
        new = self._free(found.tensor_stride, "")
        self._maps[new.pair] = found
        return new

    def region(self, fine: CoordinateMapKey, coarse: CoordinateMapKey, window: Window) -> Region:
        """What a window joins on two maps; see `coordinate_maps.region`."""
        return region(self.map_of(fine), self.map_of(coarse), window)

    def pairs(
        self, in_key: CoordinateMapKey, out_key: CoordinateMapKey, window: Window, transposed: bool
    ) -> KernelMap:
        """torchweft's map of the pairs of a window, from the input to the output."""
        fine, coarse = (out_key, in_key) if transposed else (in_key, out_key)
        found = self.region(fine, coarse, window)
        pairs = Maps().get(found.fine, found.shape, onto=found.coarse)
        return pairs.transpose() if transposed else pairs

    def kernel_map(
        self,
        in_key: Any,
        out_key: Any,
        stride: Any = 1,
        kernel_size: Any = 3,
        dilation: Any = 1,
        region_type: int = RegionType.HYPER_CUBE,
        region_offset: Tensor | None = None,
        is_transpose: bool = False,
        is_pool: bool = False,
    ) -> dict[int, Tensor]:
        """(2, pairs) int32 input and output rows that meet, by offset; those without a pair miss.

        Args:
            in_key: a key, or a tensor stride, which stands for its first map.
            out_key: likewise.
            stride: of the layer.
            kernel_size: of the layer.
            dilation: of the layer.
            region_type: HYPER_CUBE or HYPER_CROSS.
            region_offset: must be None.
            is_transpose: of the layer.
            is_pool: with the kernel as large as the stride, every input has one pair, at offset 0.
        """
        keys = self._get_coordinate_map_key(in_key), self._get_coordinate_map_key(out_key)
        generator = KernelGenerator(
            kernel_size, stride, dilation, False, region_type, region_offset, dimension=self.D
        )
        if is_pool and generator.kernel_size == generator.kernel_stride:
            fine, coarse = keys[::-1] if is_transpose else keys
            owner = self.strided(fine, coarse).owner
            rows = torch.stack((torch.arange(len(owner), device=owner.device), owner)).int()
            return {0: rows.flip(0) if is_transpose else rows}
        pairs = self.pairs(*keys, generator.window, is_transpose)
        places = generator.places()
        numbers = range(generator.kernel_volume) if places is None else places.tolist()
        found = {k: torch.stack(pairs.pairs(n)).int() for k, n in enumerate(numbers)}
        return {k: rows for k, rows in found.items() if rows.shape[1]}

    get_kernel_map = kernel_map

    def stride_map(
        self, in_key: CoordinateMapKey, stride_key: CoordinateMapKey
    ) -> tuple[Tensor, Tensor]:
        """(rows of the map, rows of the coarser map that hold them)."""
        owner = self.strided(in_key, stride_key).owner
        return torch.arange(len(owner), device=owner.device), owner

    def strided(self, fine: CoordinateMapKey, coarse: CoordinateMapKey) -> Segments:
        """The coarse voxel of each fine one.

        Raises:
            ShapeError: one that the coarse map does not have.
        """
        known = self._cells.get((fine.pair, coarse.pair))
        if known is not None:
            return known
        inner, outer = self.map_of(fine), self.map_of(coarse)
        steps = torch.tensor(steps_of(outer.tensor_stride), device=inner.level.device)
        cells = torch.div(inner.finest.rows, steps, rounding_mode="floor")
        if 0 in outer.tensor_stride:
            cells[:, 1:] = 0
        found = _segments(outer.find(cells), len(outer), coarse)
        self._cells[fine.pair, coarse.pair] = found
        return found

    def field_samples(self, key: CoordinateMapKey, origin: CoordinateMapKey) -> Segments:
        """The sample's row in the origin map of each point of a field."""
        rows = _cells(self.get_coordinate_field(key), [0] * self.D)
        rows[:, 1:] = 0
        outer = self.map_of(origin)
        return _segments(outer.level.find(rows), len(outer), origin)

    def origin_map(self, key: CoordinateMapKey) -> tuple[Tensor, list[Tensor]]:
        """The samples' numbers, and the rows of each number from 0 to the largest."""
        return self._by_sample(self.map_of(key).level.rows[:, 0])

    def origin_field_map(self, key: CoordinateMapKey) -> tuple[Tensor, list[Tensor]]:
        """As `origin_map`, of a field."""
        return self._by_sample(self.get_coordinate_field(key)[:, 0].round().int())

    def interpolation_map_weight(
        self, key: CoordinateMapKey, samples: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(voxel rows, sample rows, weights): Π (1 − distance / t) of the 2^D voxels around.

        Args:
            key: of the voxels.
            samples: (P, 1 + D) coordinates with fractions, the batch number first.
        """
        found = self.map_of(key)
        corners = torch.cartesian_prod(*[torch.arange(2)] * self.D).view(-1, self.D)
        corners = corners.to(samples.device)
        places = turned(samples) / torch.tensor(
            steps_of(found.tensor_stride), device=samples.device
        )
        low = places[:, 1:].floor().unsqueeze(1) + corners
        weights = (1 - (places[:, 1:].unsqueeze(1) - low).abs()).prod(2)
        batch = places[:, :1].round().unsqueeze(1).expand(-1, len(corners), 1)
        rows = torch.cat((batch, low), 2).flatten(0, 1).long()
        voxel = found.find(rows).view(weights.shape)
        point, corner = (voxel >= 0).nonzero().unbind(1)
        return voxel[point, corner].long(), point, weights[point, corner].to(samples.dtype)

    def size(self, coordinate_map_key: CoordinateMapKey) -> int:
        """The number of voxels."""
        return len(self.map_of(coordinate_map_key))

    def get_coordinates(self, coords_key_or_tensor_strides: Any) -> Tensor:
        """(N, 1 + D) int32, a copy."""
        return self.map_of(self._get_coordinate_map_key(coords_key_or_tensor_strides)).coordinates

    def get_coordinate_field(self, coords_key_or_tensor_strides: CoordinateMapKey) -> Tensor:
        """(N, 1 + D) float32."""
        return _found(self._fields, coords_key_or_tensor_strides, "field")

    def number_of_unique_batch_indices(self) -> int:
        """The number of samples that were given."""
        return self.size(self.origin())

    def get_unique_coordinate_map_key(self, tensor_stride: Any) -> CoordinateMapKey:
        """A key that no map has."""
        return self._free(convert_to_int_list(tensor_stride, self.D), "")

    def map_of(self, key: CoordinateMapKey) -> CoordinateMap:
        """The map of a key.

        Raises:
            ShapeError: there is none.
        """
        return _found(self._maps, key, "map")

    def _get_coordinate_map_key(self, key_or_tensor_strides: Any) -> CoordinateMapKey:
        """The key itself, or that of the first map of a tensor stride."""
        if isinstance(key_or_tensor_strides, CoordinateMapKey):
            return key_or_tensor_strides
        stride = tuple(convert_to_int_list(key_or_tensor_strides, self.D))
        name = next((name for known, name in self._maps if known == stride), "")
        return CoordinateMapKey(stride, name)

    def _insert(self, rows: Tensor, stride: Sequence[int], string_id: str) -> CoordinateMapKey:
        key = self._free(stride, string_id)
        found = self._maps[key.pair] = CoordinateMap.of(rows, stride)
        self._given.append(found.level.rows)
        return key

    def _free(
        self, stride: Sequence[int], string_id: str, taken: dict[Key, Any] | None = None
    ) -> CoordinateMapKey:
        """A key that is not taken: with this string, or with a number behind it."""
        key = CoordinateMapKey(stride, string_id)
        while key.pair in (self._maps if taken is None else taken):
            key = CoordinateMapKey(stride, f"{string_id}-{next(self._numbers)}")
        return key

    def _by_sample(self, batch: Tensor) -> tuple[Tensor, list[Tensor]]:
        samples = self.map_of(self.origin()).level.rows[:, 0].long()
        count = int(samples.max()) + 1 if len(samples) else 0
        sizes = torch.bincount(batch, minlength=count).tolist()
        return samples, list(torch.split(sort_rows(batch), sizes))


def set_gpu_allocator(backend: GPUMemoryAllocatorType) -> None:
    """Has no effect: torch allocates."""


def _found(kept: dict[Key, T], key: CoordinateMapKey, what: str) -> T:
    if key.pair not in kept:
        known = ", ".join(f"{list(stride)}:{name!r}" for stride, name in kept)
        raise ShapeError(
            f"{key} names no {what} of this coordinate manager, which has {known or 'none'}: it "
            "must be one of these. Pass the key of a tensor with the same coordinate_manager."
        )
    return kept[key.pair]


def _segments(owner: Tensor, count: int, key: CoordinateMapKey) -> Segments:
    if bool((owner < 0).any()):
        raise ShapeError(
            f"{int((owner < 0).sum())} of {len(owner)} rows have no voxel in {key}, which has "
            f"{count}: every row must have one. Insert all samples before the first global "
            "pool, and pool onto a map that was strided from this one."
        )
    return Segments(owner.long(), sort_rows(owner), count)


def _check_coordinates(coordinates: Tensor, dim: int) -> None:
    if coordinates.dim() != 2 or coordinates.shape[1] != 1 + dim:
        raise ShapeError(
            f"coordinates are {tuple(coordinates.shape)}: they must be (N, {1 + dim}), the batch "
            "number first. Build them with MinkowskiEngine.utils.batched_coordinates."
        )
    if coordinates.is_floating_point():
        raise DTypeError(
            f"coordinates are {coordinates.dtype}: a map has integers. Pass "
            "coordinates.floor().int(), or build a TensorField."
        )


def _cells(field: Tensor, stride: Sequence[int]) -> Tensor:
    """(N, 1 + D) int64 turned rows of the voxels that hold the points of a field."""
    places = turned(field) / torch.tensor(steps_of(stride), device=field.device)
    return torch.cat((places[:, :1].round(), places[:, 1:].floor()), 1).long()
