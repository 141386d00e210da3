"""Coordinates: distinct voxels (batch, s0, s1, …) with exact keys, sorted once.

Keys are integers that ascend in (batch, s0, s1, …).  A key is the mixed-radix number of a voxel's
columns, each less its lowest value:

    key = ((b · R0 + s0) · R1 + s1) · R2 + …

Where the product of the ranges passes 2⁶³, the columns before are replaced by their rank among
those that occur, which is below 2³¹: one more column of any int32 range fits then.  Nothing is
hashed, so no two voxels ever share a key.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchweft.core.backend import choose
from torchweft.core.operators.operator import below_transforms, outside_graphs
from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.voxels.grid.geometry import Geometry
from torchweft.voxels.grid.host_flags import Flags

__all__ = ["Coordinates", "Packing", "kernels_serve", "rank"]

T = TypeVar("T")
Bounds = tuple[tuple[int, ...], tuple[int, ...]]
LOW, HIGH, MOST_DIMENSIONS = -(2**31), 2**31 - 1, 4
_UNSIGNED = torch.uint16, torch.uint32, torch.uint64
"""torch compares none of them."""


class Coordinates:
    """N distinct voxels, immutable; what is derived from them is made when first needed.

    On a GPU, whether rows lie in a box that was given, and ascend, is known when a kernel has read
    them.  The host does not wait for that: it goes on as if they were, or as those before them in
    that box were, and asks before it hands anything out, see `valid`.

    Args:
        rows: (N, 1 + d) integers (batch, s0, s1, …) on any device, in any order.
        spatial_shape: d lengths; None is the box [0, max + 1) of the voxels.
        batch_size: None is the largest batch number + 1.
        stride: voxels of the finest level that one voxel spans, for each axis.

    Raises:
        DTypeError, ShapeError: not integers, not 2 to 5 columns.
        IndexRangeError: a negative batch number, a voxel outside of the shape or of int32; on a
            GPU where shape and batch size are given, when rows, keys or a map are first asked for.
        ShapeError: a voxel that occurs twice, when they are first sorted.
    """

    _rows: Tensor
    _ascends: bool

    def __init__(
        self,
        rows: Tensor,
        spatial_shape: Sequence[int] | None = None,
        batch_size: int | None = None,
        stride: Sequence[int] | None = None,
    ) -> None:
        _check_rows(rows)
        rows = rows.long() if rows.dtype in _UNSIGNED else rows
        self.dim = rows.shape[1] - 1
        box = spatial_shape
        self.given_shape = None if box is None else self._axes("spatial_shape", box)
        self._batch = None if batch_size is None else _samples(batch_size)
        self.stride = (1,) * self.dim if stride is None else self._axes("stride", stride)
        self._packing: Packing | None = None
        self._keys: Tensor | None = None  # as the rows stand
        self._sorted: tuple[Tensor, Tensor | None] | None = None
        self._words: Tensor | None = None  # of cells, that sorting left for the first map
        self._flags: Flags | None = None  # what kernels will have found; None: all is known
        self._given: Tensor | None = None  # the rows, until it is known what they are
        if not self._fits(rows):
            self._survey(rows)
        self.tables: dict[Any, Any] = {}  # of kernel maps, by geometry: see kernel_map.py

    @classmethod
    def ascending(
        cls,
        packing: Packing,
        keys: Tensor,
        spatial_shape: Sequence[int],
        batch_size: int,
        stride: Sequence[int],
        rows: Tensor | None = None,
    ) -> Coordinates:
        """Those of ascending distinct keys, which need no check and no sort; perhaps their rows."""
        found = cls.__new__(cls)
        found.dim = len(spatial_shape)
        found.given_shape, found._batch = tuple(spatial_shape), batch_size
        found.stride = tuple(stride)
        found._bounds = (0,) * (1 + found.dim), tuple(n - 1 for n in (batch_size, *spatial_shape))
        found._rows = packing.rows(keys) if rows is None else rows
        found._packing, found._sorted, found._ascends = packing, (keys, None), True
        found._keys = found._flags = found._given = found._words = None
        found.tables = {}
        return found

    def __getstate__(self) -> dict[str, Any]:
        self._holds()  # copies wait for no kernel
        return self.__dict__

    def __len__(self) -> int:
        return self._rows.shape[0]

    def __repr__(self) -> str:
        box = f"d={self.dim}, shape {self.given_shape}"
        return f"Coordinates({len(self)} voxels, {box}, on {self.device})"

    @property
    def device(self) -> torch.device:
        """Where they live."""
        return self._rows.device

    @property
    def rows(self) -> Tensor:
        """(N, 1 + d) int32."""
        self._holds()
        return self._rows

    @property
    def batch_size(self) -> int:
        """How many samples, empty ones too."""
        return self._batch if self._batch is not None else self._bounds[1][0] + 1

    @property
    def spatial_shape(self) -> tuple[int, ...]:
        """The box of the voxels.

        Raises:
            IndexRangeError: no shape was given and a coordinate is negative.
        """
        if self.given_shape is not None:
            return self.given_shape
        lows, highs = self._bounds
        if min(lows[1:]) < 0:
            axis = next(a for a, low in enumerate(lows[1:]) if low < 0)
            raise IndexRangeError(
                f"axis {axis} has the coordinate {lows[1 + axis]} and no spatial_shape was "
                "given: the box [0, max + 1) needs coordinates ≥ 0. Shift the coordinates, or "
                "use submanifold layers, which need no box."
            )
        return tuple(high + 1 for high in highs[1:])

    @property
    @below_transforms
    def packing(self) -> Packing:
        """How voxels become keys."""
        if self._packing is None:
            lows, highs = self._bounds
            sizes = [max(high - low + 1, 1) for low, high in zip(lows, highs, strict=True)]
            self._packing = Packing(self._rows, lows, sizes)
        return self._packing

    @property
    def keys(self) -> Tensor:
        """(N,) of the packing's dtype, ascending."""
        return self.valid(self.unchecked)[0]

    @property
    def order(self) -> Tensor | None:
        """(N,) int32: rows in ascending order of (batch, s0, s1, …); None: as they stand."""
        if self._sorted is not None and self._given is None and self._flags is None:
            return self._sorted[1]  # known to hold
        return self.valid(self.unchecked)[1]

    @property
    def seem_sorted(self) -> bool:
        """Whether the rows are thought to ascend; nobody waits."""
        return self._ascends

    def valid(self, build: Callable[[], T]) -> T:
        """What is built of `unchecked`, once that is known to hold: what it queues runs meanwhile.

        It is built again where the rows do not ascend as they were thought to.

        Raises:
            IndexRangeError: a voxel outside of the shape.
            ShapeError: a voxel that stands twice.
        """
        found = build()
        while not self._holds():
            found = build()
        return found

    @below_transforms
    def unchecked(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Keys, order and rows, for `valid`."""
        if self._sorted is None:
            self._pack_given()
            keys = self.packing.pack(self._rows) if self._keys is None else self._keys
            self._sorted = (keys, None) if self._ascends else self._in_order(keys)
            self._keys = None if self._flags is None else keys  # they may be asked for yet
        return *self._sorted, self._rows

    @outside_graphs
    def _in_order(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The keys ascending, and their order as int32."""
        if len(keys) and kernels_serve(keys.device.type):
            from torchweft.voxels.maps_gpu import launch as map_launch

            flags = self._flags = self._flags or Flags(keys.device)
            keys, order, self._words = map_launch.ascending(keys, self.packing.sizes, flags)
            flags.written()
            return keys, order
        placed, places = torch.sort(keys)
        if bool((placed[1:] == placed[:-1]).any()):
            raise _stands_twice(self._rows, keys)
        return placed, places.int()

    def _holds(self) -> bool:
        """Whether what `unchecked` gave last holds; waits for the kernels."""
        self._pack_given()
        flags = self._flags
        if flags is None:
            return True
        outside, descends, repeats, _ = flags.read()
        self._words = None
        if outside:
            assert self._given is not None  # who packs rows keeps them
            self._survey(self._given)  # raises, or they were changed since
            self._packing = self._keys = self._sorted = self._flags = self._given = None
            return False
        if repeats and self._keys is not None:
            raise _stands_twice(self._rows, self._keys)
        guessed, self._flags, self._given = self._given is not None, None, None
        if guessed and (box := _box(self.packing.sizes)) is not None:
            box.ascended[0] = not descends
            if self._sorted is None or self._ascends == descends:
                self._ascends, self._sorted = not descends, None
                return False
        self._keys = None
        return True

    def find(self, rows: Tensor) -> Tensor:
        """For each of (M, 1 + d) voxels the row where it stands, int32; −1: it is not there."""
        return self.find_keys(self.packing.keys(rows))

    def find_keys(self, keys: Tensor) -> Tensor:
        """The same for keys; a negative one is not there."""
        place, absent = self.place_keys(keys)
        order = self.order
        found = place.int() if order is None or not len(self) else order.index_select(0, place)
        return found.masked_fill_(absent, -1)

    def place_keys(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The place of each key among those of the voxels, and whether it is not there."""
        return rank(self.keys, keys.to(self.keys.dtype))

    def to(self, device: torch.device | str) -> Coordinates:
        """The same voxels on another device, sorted if they were."""
        self._holds()
        found = object.__new__(Coordinates)
        found.__dict__.update(self.__dict__)
        found._rows, found.tables = self._rows.to(device), {}
        found._packing = None if self._packing is None else self._packing.to(device)
        found._keys = None if self._keys is None else self._keys.to(device)
        if self._sorted is not None:
            keys, order = self._sorted
            found._sorted = keys.to(device), None if order is None else order.to(device)
        return found

    def _fits(self, rows: Tensor) -> bool:
        """Whether rows are taken to lie in the box that was given: see `_pack_given`."""
        if self.given_shape is None or self._batch is None or not len(rows):
            return False
        box = _box((self._batch, *self.given_shape))
        if box is None or not kernels_serve(rows.device.type):
            return False
        self._packing, self._bounds, self._ascends = box.packing, box.bounds, box.ascended[0]
        self._given, self._rows = rows, _as_int32(rows)
        if rows.dtype != torch.int32:
            self._pack_given()  # who gave them may write there again, and these are copies
        return True

    def _pack_given(self) -> None:
        """One launch makes the keys of rows that were given.

        That waits until they are needed: by then a layer's own kernels are being compiled.
        """
        if self._given is not None and self._flags is None:
            self._keys, self._flags = _packed(self._given, self.packing)

    def cells(self) -> Tensor | None:
        """The words of their cells, if sorting left them: they are given away."""
        words, self._words = self._words, None
        return words

    def compile_ahead(self, shape: Geometry) -> None:
        """Begin to compile what a submanifold map calls, the keys of given rows included."""
        from torchweft.voxels.maps_gpu import launch as map_launch

        packing = self.packing
        packed = self._given is None or self._flags is not None
        box = packing.lows, packing.sizes
        map_launch.compile_ahead(self._rows, packed, self._ascends, box, packing.dtype, shape)

    def _survey(self, rows: Tensor) -> None:
        """Read the columns' bounds and whether rows ascend; raise if they are out of range."""
        self._bounds, self._ascends, self._rows = _read(rows)
        self._check_range()

    def _axes(self, name: str, numbers: Sequence[int]) -> tuple[int, ...]:
        try:
            found = tuple(map(operator.index, numbers))
        except TypeError:
            raise DTypeError(
                f"{name} is {numbers}: it must hold {self.dim} integers, one for each spatial "
                f"column of coords. Pass {name}={(64,) * self.dim}, say."
            ) from None
        if len(found) != self.dim or min(found) < 0:
            raise ShapeError(
                f"{name} is {found} but coords have {self.dim} spatial columns: {self.dim} numbers "
                f"≥ 0 are needed. Correct {name}, or the columns of coords (batch first)."
            )
        return found

    def _check_range(self) -> None:
        """Read the columns' bounds against int32 and what was given."""
        given = (self._batch, *(self.given_shape or (None,) * self.dim))
        for column, (low, high, size) in enumerate(zip(*self._bounds, given, strict=True)):
            name = f"axis {column - 1}" if column else "the batch column"
            if low < LOW or high > HIGH:
                value = low if low < LOW else high
                raise IndexRangeError(
                    f"{name} of coords has the value {value}: values must lie in {LOW}..{HIGH}. "
                    "Divide by the voxel size first, or shift the cloud towards the origin."
                )
            if low < 0 and (size is not None or not column):
                why = " within spatial_shape" if column else ", batch numbers count from 0"
                raise IndexRangeError(
                    f"{name} of coords has the value {low}: it must be ≥ 0{why}. "
                    "Correct coords; their columns are (batch, s0, s1, …)."
                )
            if size is not None and high >= size and high >= 0:
                what = "batch_size" if not column else f"spatial_shape[{column - 1}]"
                raise IndexRangeError(
                    f"{name} of coords has the value {high} but {what} is {size}: values must lie "
                    f"in 0..{size - 1}. Pass a larger {what}, or drop these voxels."
                )


class _Box(NamedTuple):
    """A box from 0 on, and whether the rows in it ascended when they were last read."""

    packing: Packing
    bounds: Bounds
    ascended: list[bool]


@functools.lru_cache(maxsize=1024)
def _box(sizes: tuple[int, ...]) -> _Box | None:
    """The box of (batch, *shape); None: one integer does not hold it.  Rows are thought to ascend.

    Equal sizes give the same box, which learns.
    """
    if not 0 < math.prod(sizes) < 2**63 or max(sizes) > HIGH or sizes[0] < 1:
        return None
    packing = Packing(torch.empty(0, len(sizes)), (0,) * len(sizes), sizes)
    return _Box(packing, (packing.lows, tuple(n - 1 for n in sizes)), [True])


def _stands_twice(rows: Tensor, keys: Tensor) -> ShapeError:
    keys, order = torch.sort(keys, stable=True)
    twice = keys[1:] == keys[:-1]
    at = int(twice.nonzero()[0, 0])
    first, second = order[at : at + 2].tolist()
    return ShapeError(
        f"voxel {tuple(rows[first].tolist())} stands in rows {first} and {second} of coords "
        f"({int(twice.sum())} rows repeat another): voxels must be distinct. Merge them: "
        'voxelize(points, size, reduce="mean"), or drop repeats.'
    )


def _samples(batch_size: int) -> int:
    try:
        found = operator.index(batch_size)
    except TypeError:
        raise DTypeError(
            f"batch_size is {batch_size}: it must be an integer. Pass batch_size=1, say."
        ) from None
    if found < 0:
        raise ShapeError(
            f"batch_size is {found}: it must be at least 0. Pass the number of samples, empty ones "
            "too, or None."
        )
    return found


def _check_rows(rows: Tensor) -> None:
    if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise DTypeError(
            f"coords are {rows.dtype}: they must be integers. Use voxelize(points, size) for "
            "points, or coords.int()."
        )
    if rows.dim() != 2 or not 2 <= rows.shape[1] <= 1 + MOST_DIMENSIONS:
        raise ShapeError(
            f"coords are {tuple(rows.shape)}: they must be (N, 1 + d), batch number first, then "
            f"d = 1 to {MOST_DIMENSIONS} axes. Add the batch column, or use sparse_collate."
        )


@below_transforms
def _as_int32(rows: Tensor) -> Tensor:
    return rows.int().contiguous()


@below_transforms
def _packed(rows: Tensor, packing: Packing) -> tuple[Tensor, Flags]:
    """The keys of rows in a box from 0 on, and what the kernel will have found."""
    from torchweft.voxels.maps_gpu import launch as map_launch

    rows, flags = rows.contiguous(), Flags(rows.device)
    keys = map_launch.pack(rows, packing.lows, packing.sizes, packing.dtype, flags)
    flags.written()
    return keys, flags


@below_transforms
def _read(rows: Tensor) -> tuple[Bounds, bool, Tensor]:
    """What `_survey` finds, and the rows as int32."""
    return *_survey(rows), _as_int32(rows)


def _survey(rows: Tensor) -> tuple[Bounds, bool]:
    """The lowest and highest value of each column, and whether each row is below the next.

    Rows that ascend are sorted already, and distinct: most clouds come so.
    """
    if not rows.shape[0]:
        return ((0,) * rows.shape[1], (-1,) * rows.shape[1]), True
    if kernels_serve(rows.device.type):
        from torchweft.voxels.maps_gpu import launch as map_launch

        return map_launch.survey(rows)
    low, high = torch.stack(torch.aminmax(rows.long(), dim=0)).tolist()
    first, second = rows[:-1], rows[1:]
    below = torch.zeros_like(first[:, 0], dtype=torch.bool)
    for column in reversed(range(rows.shape[1])):
        a, b = first[:, column], second[:, column]
        below = (a < b) | ((a == b) & below)
    return (tuple(low), tuple(high)), bool(below.all())


@functools.cache
def kernels_serve(device: str) -> bool:
    """Whether `map_launch` serves tensors on a kind of device; the torch code serves all."""
    return device == "cuda" and choose(None, device) == "triton"


class Word(NamedTuple):
    """Columns packed into one integer after the rank of those before.

    Args:
        columns: the first and one past the last.
        known: ascending packed prefixes that occur, whose place is their rank; None for the first
            word, which has no prefix.
    """

    columns: tuple[int, int]
    known: Tensor | None


class Packing:
    """How rows of integers become keys: exact, and ascending in lexicographic order.

    Args:
        rows: (N, columns) integers that the keys must tell apart.
        lows: of each column, the lowest value.
        sizes: of each column, how many values it may have.
    """

    def __init__(self, rows: Tensor, lows: Sequence[int], sizes: Sequence[int]) -> None:
        self.lows, self.sizes = tuple(lows), tuple(sizes)
        self.words: list[Word] = []
        begin, room, known = 0, 1, None
        for column, size in enumerate(self.sizes):
            if room * size >= 2**63:
                self.words.append(Word((begin, column), known))
                known = torch.unique(self._key(rows))
                begin, room = column, max(known.numel(), 1)
            room *= size
        self.words.append(Word((begin, len(self.sizes)), known))

    def to(self, device: torch.device | str) -> Packing:
        """The same for rows on another device."""
        found = object.__new__(Packing)
        found.lows, found.sizes = self.lows, self.sizes
        found.words = [Word(c, None if t is None else t.to(device)) for c, t in self.words]
        return found

    @property
    def single(self) -> bool:
        """Whether one integer holds all columns: neighbours then differ by a constant."""
        return len(self.words) == 1

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Of the keys: int32 where it holds them all, which halves the bytes of the sort."""
        return torch.int32 if math.prod(self.sizes) < 2**31 else torch.int64

    def step(self, offset: Sequence[int]) -> int:
        """key(row + offset) − key(row), where all columns stay in range and `single` holds."""
        found = 0
        for size, o in zip(self.sizes, offset, strict=True):
            found = found * size + o
        return found

    def inside(self, rows: Tensor, offset: Sequence[int] | None = None) -> Tensor:
        """Whether all columns of row + offset are in their ranges."""
        found = None
        for column, (low, size) in enumerate(zip(self.lows, self.sizes, strict=True)):
            o = offset[column] if offset else 0
            if offset and not o:
                continue  # the rows themselves are inside
            values = rows[:, column].long()  # an int32 compares wrongly with what lies outside
            within = (values >= low - o) & (values < low + size - o)
            found = within if found is None else found & within
        return rows.new_ones(rows.shape[0], dtype=torch.bool) if found is None else found

    def keys(self, rows: Tensor) -> Tensor:
        """The keys (N,); −1 where a row is out of range or has no known prefix."""
        return torch.where(self.inside(rows), self._key(rows), -1).to(self.dtype)

    def pack(self, rows: Tensor) -> Tensor:
        """The keys (N,) of int32 rows that this packing was made for."""
        if self.single and rows.shape[0] and kernels_serve(rows.device.type):
            from torchweft.voxels.maps_gpu import launch as map_launch

            return map_launch.pack(rows, self.lows, self.sizes, self.dtype)
        return self._key(rows).to(self.dtype)

    def _key(self, rows: Tensor) -> Tensor:
        key = rows.new_zeros(rows.shape[0], dtype=torch.int64)
        absent = None
        for word in self.words:
            if word.known is not None:
                key, missing = rank(word.known, key)
                absent = missing if absent is None else absent | missing
            for column in range(*word.columns):
                value = rows[:, column].long() - self.lows[column]
                key = key * self.sizes[column] + value
        return key if absent is None else torch.where(absent, -1, key)

    def rows(self, keys: Tensor) -> Tensor:
        """The (N, columns) int32 rows of keys that occur."""
        columns: list[Tensor] = []
        for word in reversed(self.words):
            for column in reversed(range(*word.columns)):
                columns.append(keys % self.sizes[column] + self.lows[column])
                keys = torch.div(keys, self.sizes[column], rounding_mode="floor")
            if word.known is not None:
                keys = word.known.index_select(0, keys)
        return torch.stack(columns[::-1], 1).int()


def rank(known: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The place (int64) of each key among the known ones, and whether it is not there."""
    if not known.numel():
        return key.new_zeros(key.shape, dtype=torch.int64), torch.ones_like(key, dtype=torch.bool)
    place = torch.searchsorted(known, key).clamp_(max=known.numel() - 1)
    return place, known.index_select(0, place) != key
