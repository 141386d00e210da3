"""Coordinates: distinct voxels (batch, s0, s1, …) with exact keys, sorted once.

A key is an integer, the mixed-radix number of a voxel's columns, each less its lowest value:

    key = ((b · R0 + s0) · R1 + s1) · R2 + …

Keys ascend as (batch, s0, s1, …) does.  Where the product of the ranges passes 2⁶³, the leading
columns are replaced by their rank among those that occur, which is below 2³¹ and leaves room for
one more column of any int32 range.  Nothing is hashed, so two voxels never share a key.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchweft.core.backend import kernels_serve
from torchweft.core.operators.operands import check_tensors
from torchweft.core.operators.operator import below_transforms, compiling, outside_graphs
from torchweft.core.recorded import Current, varying
from torchweft.errors import CaptureError, DTypeError, IndexRangeError, ShapeError
from torchweft.voxels.grid import Geometry
from torchweft.voxels.maps import numba_path
from torchweft.voxels.maps.checks import (
    check_rows,
    check_same_device,
    checked_batch_size,
    repeated_voxel,
    written_since,
)
from torchweft.voxels.maps.gpu import launch as map_launch
from torchweft.voxels.maps.gpu.tiles import Flags
from torchweft.voxels.maps.packing import HIGH, LOW, Packing, packing_of, rank
from torchweft.voxels.maps.recipes import Key, Step
from torchweft.voxels.maps.shards import Shards

__all__ = [
    "Bounds",
    "Coordinates",
    "Grid",
    "bounds_of",
]

T = TypeVar("T")
_UNSIGNED = torch.uint16, torch.uint32, torch.uint64
"""Dtypes that torch cannot compare."""

Bounds = tuple[tuple[int, ...], tuple[int, ...]]
"""The lowest and the highest value of each column."""

Grid = tuple[tuple[int, ...] | None, int | None, tuple[int, ...], Bounds]
"""The given shape, the given batch size, the stride and the bounds of voxels."""


class Coordinates:
    """N distinct voxels, immutable; derived tensors are computed when first needed, and cached.

    The rows are a copy: keys and maps stay right when the caller writes to the tensor, the array or
    the memory that coordinates came from.

    On a GPU, a kernel finds out whether rows lie in a given box, and whether they ascend.  The host
    does not wait for its answer: it assumes that rows lie in the box, and that they ascend if the
    last rows in the same box did.  It checks these assumptions before it returns any result, see
    `valid`.

    Args:
        rows: (N, 1 + d) integers (batch, s0, s1, …) on any device, in any order.
        spatial_shape: d lengths; None is the box [0, max + 1) of the voxels.
        batch_size: None is the largest batch number + 1.
        stride: voxels of the finest level that one voxel spans, for each axis.

    Raises:
        DTypeError, ShapeError: not integers, not 2 to 5 columns.
        IndexRangeError: a negative batch number, a voxel outside of the shape or of int32; on a
            GPU with a given shape and batch size, on the first access to rows, keys or a map.
        ShapeError: a voxel that occurs twice, on the first sort.
    """

    tables: dict[Any, Any]
    """Tables of kernel maps by geometry, coarse voxels by stride, and the order in a graph."""
    foreseen: dict[Geometry, Any]
    """Tables that nobody has asked for yet: see together.py."""
    asked: dict[Key, Step]
    """What was asked of these voxels and of all derived from them."""
    level: int
    """The number of these voxels among them."""
    onto: weakref.WeakKeyDictionary[Coordinates, dict[Geometry, Any]]
    """Tables of maps to given outputs, by these: whoever keeps the outputs keeps the tables."""
    shards: Shards | None = None
    """How the voxels of all ranks are spread; None: all are here."""
    _rows: Tensor
    _ascends: bool
    _bounds: Bounds | None  # None: those of the rows, read when they are needed
    _packing: Packing | None = None
    _keys: Tensor | None = None  # in row order
    _sorted: tuple[Tensor, Tensor | None] | None = None  # ascending keys, and their rows
    _words: Tensor | None = None  # of cells, left by the sort for the first map
    _flags: Flags | None = None  # that kernels write; None: nothing is left to check
    _given: Tensor | None = None  # the rows, until they are checked

    def __init__(
        self,
        rows: Tensor,
        spatial_shape: Sequence[int] | None = None,
        batch_size: int | None = None,
        stride: Sequence[int] | None = None,
    ) -> None:
        check_rows(rows)
        rows = rows.long() if rows.dtype in _UNSIGNED else rows
        self.dim = rows.shape[1] - 1
        box = spatial_shape
        self.given_shape = None if box is None else self._axes("spatial_shape", box)
        self.given_batch_size = None if batch_size is None else checked_batch_size(batch_size)
        self.stride = (1,) * self.dim if stride is None else self._axes("stride", stride)
        if compiling():
            self._trace(rows)
        elif not self._assume_fit(rows):
            self._survey(rows)
        self._without_maps()

    @classmethod
    def ascending(
        cls,
        packing: Packing,
        keys: Tensor,
        spatial_shape: tuple[int, ...] | None,
        batch_size: int | None,
        stride: Sequence[int],
        bounds: Bounds,
        rows: Tensor | None = None,
    ) -> Coordinates:
        """The voxels of ascending distinct keys, without checks; their rows may be known."""
        rows = packing.rows(keys) if rows is None else rows
        found = cls.of_ascending(rows, spatial_shape, batch_size, stride, bounds)
        found._packing, found._sorted = packing, (keys, None)
        return found

    @classmethod
    def of_ascending(
        cls,
        rows: Tensor,
        spatial_shape: tuple[int, ...] | None,
        batch_size: int | None,
        stride: Sequence[int],
        bounds: Bounds | None,
    ) -> Coordinates:
        """The voxels of ascending distinct int32 rows, without checks."""
        found = cls.__new__(cls)
        found.dim, found.stride, found._bounds = len(stride), tuple(stride), bounds
        found.given_shape, found.given_batch_size = spatial_shape, batch_size
        found._rows, found._ascends = rows, True
        return found._without_maps()

    @classmethod
    def of_distinct(
        cls,
        rows: Tensor,
        spatial_shape: tuple[int, ...] | None,
        batch_size: int | None,
        stride: Sequence[int],
        bounds: Bounds,
    ) -> Coordinates:
        """The voxels of distinct int32 rows in any order, without checks and without a wait."""
        found = cls.of_ascending(rows, spatial_shape, batch_size, stride, bounds)
        keys, order = torch.sort(found.packing.pack(rows))
        found._ascends, found._sorted = False, (keys, order.int())
        return found

    def _without_maps(self) -> Coordinates:
        self.tables, self.onto = {}, weakref.WeakKeyDictionary()
        self.foreseen, self.asked, self.level = {}, {}, 0
        return self

    def __getstate__(self) -> dict[str, Any]:
        self._holds()  # a copy has no flags to wait for
        return {name: value for name, value in self.__dict__.items() if name != "onto"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, onto=weakref.WeakKeyDictionary())

    def __len__(self) -> int:
        return self._rows.shape[0]

    def __repr__(self) -> str:
        box = f"d={self.dim}, shape {self.given_shape}"
        return f"Coordinates({len(self)} voxels, {box}, on {self.device})"

    @property
    def device(self) -> torch.device:
        """The device of the voxels."""
        return self._rows.device

    @property
    def rows(self) -> Tensor:
        """(N, 1 + d) int32, which nobody may write to: keys and maps belong to them.

        Raises:
            CaptureError: in a record with room for other voxels: rows of padding are no voxels.
        """
        self._check_unpadded()
        return self.stored_rows

    def _check_unpadded(self) -> None:
        if varying(self._rows) is not None:
            raise CaptureError(
                "the voxels of a SparseTensor are read in a function that is recorded with room "
                "for other voxels: padding would count as voxels. Convolutions, batch norms and "
                "what acts on each row alone can be recorded so; compute what needs voxels, such "
                "as pools of a sample or dense(), outside of the function."
            )

    @property
    def stored_rows(self) -> Tensor:
        """The rows; those of padding are -1."""
        self._holds()
        return self._rows

    @property
    def num_unpadded(self) -> Tensor | None:
        """() int64, the number of voxels without padding, in a record with room for others.

        None outside of such a record, where there is no padding.
        """
        rows = self._rows
        if Current.run is None or (run := varying(rows)) is None:
            return None
        return run.value((rows,), "voxels", lambda: (rows[:, 0] >= 0).sum())

    @property
    def bounds(self) -> Bounds:
        """The lowest and the highest value of each column, or those of the box."""
        if self._bounds is None:
            if compiling():
                raise _unknown_box(self.given_shape, self.given_batch_size)
            self._bounds = _read(self.rows)[0]
        return self._bounds

    @property
    def batch_size(self) -> int:
        """The number of samples, including empty ones."""
        return self.given_batch_size if self.given_batch_size is not None else self.bounds[1][0] + 1

    @property
    def boxed(self) -> bool:
        """Whether the voxels have a box: one was given, or no coordinate is negative."""
        return self.given_shape is not None or min(self.bounds[0][1:]) >= 0

    @property
    def spatial_shape(self) -> tuple[int, ...]:
        """The box of the voxels.

        Raises:
            IndexRangeError: no shape was given and a coordinate is negative.
        """
        if self.given_shape is not None:
            return self.given_shape
        lows, highs = self.bounds
        if not self.boxed:
            axis = next(a for a, low in enumerate(lows[1:]) if low < 0)
            raise IndexRangeError(
                f"axis {axis} has the coordinate {lows[1 + axis]} and no spatial_shape was "
                "given: the box [0, max + 1) needs coordinates ≥ 0. Shift the coordinates, or use "
                "submanifold layers or outputs='floor', which need no box."
            )
        return tuple(high + 1 for high in highs[1:])

    @property
    @below_transforms
    def packing(self) -> Packing:
        """How voxels become keys."""
        if self._packing is None:
            lows, highs = self.bounds
            sizes = [max(high - low + 1, 1) for low, high in zip(lows, highs, strict=True)]
            self._packing = Packing(self._rows, lows, sizes)
        return self._packing

    @property
    def keys(self) -> Tensor:
        """(N,) ascending, in the packing's dtype; raises as `rows` does."""
        self._check_unpadded()
        return self.valid(self.unchecked)[0]

    @property
    def order(self) -> Tensor | None:
        """(N,) int32: rows in ascending order of (batch, s0, s1, …); None: rows ascend."""
        if self._given is None and self._flags is None:  # nothing is left to check
            if self._sorted is not None:
                return self._sorted[1]
            if self._ascends:
                return None
        known: Tensor | None = self.tables.get("order")
        if known is not None:
            return known
        if compiling():
            return self._order_in_graph()
        return self.valid(self.unchecked)[1]

    @property
    def known_order(self) -> Tensor | None:
        """The order where it has been found; None: rows ascend, or nobody has asked."""
        found: Tensor | None = self.tables.get("order")
        return found if self._sorted is None else self._sorted[1]

    def know(self, ascends: bool, order: Tensor | None) -> None:
        """Take over whether rows ascend, and their order if it was found."""
        self._ascends = ascends
        if order is not None:
            self.tables["order"] = order

    @property
    def grid(self) -> Grid:
        """Where the voxels lie; bounds are those of the box where it was given."""
        shape, size = self.given_shape, self.given_batch_size
        bounds = self.bounds if shape is None or size is None else bounds_of(size, shape)
        return shape, size, self.stride, bounds

    @property
    def seem_sorted(self) -> bool:
        """Whether rows are assumed to ascend; does not wait."""
        return self._ascends

    def valid(self, build: Callable[[], T]) -> T:
        """The result of a function of `unchecked`, once the assumptions are known to hold.

        The kernels that it launches run while the host waits.  Where rows do not ascend as assumed,
        the function is called again.

        Raises:
            IndexRangeError: a voxel outside of the shape.
            ShapeError: a voxel that occurs twice.
        """
        found = build()
        while not self._holds():
            found = build()
        return found

    @below_transforms
    def unchecked(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Ascending keys, their order, and rows, before the assumptions are checked."""
        if self._sorted is None:
            self._pack_given()
            keys = self.packing.pack(self._rows) if self._keys is None else self._keys
            self._sorted = (keys, None) if self._ascends else self._in_order(keys)
            self._keys = None if self._flags is None else keys  # needed if the check fails
        return *self._sorted, self._rows

    @outside_graphs
    def _in_order(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The keys ascending, and their order as int32."""
        if len(keys) and kernels_serve(keys.device.type):
            flags = self._flags = self._flags or Flags(keys.device)
            keys, order, self._words = map_launch.ascending(keys, self.packing.sizes, flags)
            flags.written()
            return keys, order
        if self.packing.single and numba_path.loops_serve(keys.device.type):
            placed, order = numba_path.ascending(keys, self.packing.sizes)
        else:
            placed, places = torch.sort(keys)
            order = places.int()
        if bool((placed[1:] == placed[:-1]).any()):
            raise repeated_voxel(self._rows, keys)
        return placed, order

    def _holds(self) -> bool:
        """Whether the assumptions of the last `unchecked` hold; waits for the kernels."""
        self._pack_given()
        flags = self._flags
        if flags is None:
            return True
        outside, descends, repeats, _ = flags.read()
        self._words = None
        if outside:
            assert self._given is not None  # kept while its keys are unchecked
            self._survey(self._given)
            raise written_since(self.given_shape, self.batch_size)
        if repeats and self._keys is not None:
            raise repeated_voxel(self._rows, self._keys)
        guessed, self._flags, self._given = self._given is not None, None, None
        if guessed and (box := packing_of(self.packing.sizes)) is not None:
            box.ascended = not descends
            if self._sorted is None or self._ascends == bool(descends):
                self._ascends, self._sorted = not descends, None
                return False
        self._keys = None
        return True

    def find(self, queries: Tensor) -> Tensor:
        """(M,) int32: the row of each voxel, −1 for one that does not exist.

        >>> voxels = Coordinates(torch.tensor([[0, 5, 5], [0, 2, -1]]))
        >>> voxels.find(torch.tensor([[0, 2, -1], [0, 2, 0]])).tolist()
        [1, -1]

        Args:
            queries: (M, 1 + d) integers (batch, s0, s1, …), in any order; they may repeat.

        Raises:
            DTypeError, ShapeError, DeviceError: queries that are not such rows on this device.

        Cost: one search for each query in the sorted keys.
        """
        check_tensors(queries=queries)
        check_rows(queries, "queries", self.dim)
        check_same_device(self.device, "queries", queries.device)
        rows = queries.long() if queries.dtype in _UNSIGNED else queries
        place, absent = self.place_keys(self.packing.keys(rows))
        order = self.order
        found = place.int() if order is None or not len(self) else order.index_select(0, place)
        return found.masked_fill_(absent, -1)

    @below_transforms
    def select(self, rows: Tensor) -> Coordinates:
        """The voxels of some (M,) ascending rows, with the same box, batch size and stride."""
        found = self._copied()
        found._rows = self._rows.index_select(0, rows)
        found._keys = found._sorted = None
        return found

    def coarse(self, shape: Geometry) -> Coordinates:
        """The voxels ⌊c / stride⌋ of all voxels c, ascending; itself where every stride is 1.

        They are kept: all layers of one stride share them.
        """
        if all(s == 1 for s in shape.stride):
            return self
        found: Coordinates | None = self.tables.get(shape.stride)
        if found is None:
            found = self.tables[shape.stride] = self._divided(shape)
        return found

    @below_transforms
    def _divided(self, shape: Geometry) -> Coordinates:
        rows, grid = self.rows, self.coarse_grid(shape)
        packing = self.cells_packing(shape)
        if packing is not None:
            found, keys = map_launch.floors(rows, packing.box, packing.dtype, shape.stride)
            return Coordinates.ascending(packing, keys, *grid, found)
        lows, highs = grid[3]
        divisors = torch.tensor((1, *shape.stride), device=rows.device)
        cells = torch.div(rows, divisors, rounding_mode="floor")
        sizes = [max(high - low + 1, 1) for low, high in zip(lows, highs, strict=True)]
        packing = Packing(cells, lows, sizes)
        if packing.single and numba_path.loops_serve(rows.device.type):
            keys = numba_path.distinct(packing.pack(cells), sizes).to(packing.dtype)
        else:
            keys = torch.unique(packing.keys(cells))
        return Coordinates.ascending(packing, keys, *grid)

    def cells_packing(self, shape: Geometry) -> Packing | None:
        """The packing of the voxels ⌊c / stride⌋ where kernels find them; batches count from 0."""
        if not (kernels_serve(self.device.type) and 0 < len(self) < 2**30):
            return None
        lows, highs = self.coarse_grid(shape)[3]
        lows = (0, *lows[1:])
        sizes = [high - low + 1 for low, high in zip(lows, highs, strict=True)]
        packing = Packing(self._rows[:0], lows, sizes)
        return packing if packing.single else None

    def coarse_grid(self, shape: Geometry) -> Grid:
        """Where the voxels ⌊c / stride⌋ lie."""
        steps = (1, *shape.stride)
        lows, highs = (
            tuple(n // s for n, s in zip(bound, steps, strict=True)) for bound in self.bounds
        )
        box = None if self.given_shape is None else shape.output_shape(self.given_shape)
        stride = tuple(a * s for a, s in zip(self.stride, shape.stride, strict=True))
        return box, self.given_batch_size, stride, (lows, highs)

    def place_keys(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The place of each key among the ascending keys, and whether it is absent."""
        return rank(self.keys, keys.to(self.keys.dtype))

    def to(self, device: torch.device | str) -> Coordinates:
        """The same voxels on another device, sorted if they were."""
        found = self._copied()
        found._rows = self._rows.to(device)
        found._packing = None if self._packing is None else self._packing.to(device)
        found._keys = None if self._keys is None else self._keys.to(device)
        if self._sorted is not None:
            keys, order = self._sorted
            found._sorted = keys.to(device), None if order is None else order.to(device)
        return found

    def _copied(self) -> Coordinates:
        """The same voxels, checked, without maps; raises as `rows` does."""
        self._check_unpadded()
        self._holds()
        found = object.__new__(Coordinates)
        found.__dict__.update(self.__dict__)
        return found._without_maps()

    def _assume_fit(self, rows: Tensor) -> bool:
        """Whether rows are assumed to lie in the box that was given."""
        if self.given_shape is None or self.given_batch_size is None or not len(rows):
            return False
        box = packing_of((self.given_batch_size, *self.given_shape))
        if box is None or not kernels_serve(rows.device.type):
            return False
        self._packing, self._ascends = box, box.ascended
        self._bounds = box.lows, tuple(n - 1 for n in box.sizes)
        self._rows = _as_int32(rows)
        narrow = rows.dtype == torch.int32
        self._given = self._rows if narrow else rows  # wider integers may be out of int32
        if not narrow:
            self._pack_given()  # the caller may write to these rows again
        return True

    def _pack_given(self) -> None:
        """Launch the kernel that checks given rows and computes their keys.

        It is launched when keys are needed: the kernels of a layer are compiled before.
        """
        if self._given is not None and self._flags is None:
            self._keys, self._flags = _packed(self._given, self.packing)

    def _trace(self, rows: Tensor) -> None:
        """Rows that a graph makes are checked when it runs, and their box is given."""
        if self.given_shape is None or self.given_batch_size is None:
            raise _unknown_box(self.given_shape, self.given_batch_size)
        box = self.given_shape, self.given_batch_size
        self._rows, self._ascends = torch.ops.torchweft.voxel_rows(rows, *box), False
        self._bounds = bounds_of(self.given_batch_size, self.given_shape)

    def traced(self) -> tuple[Tensor, tuple[int, ...] | None, int | None]:
        """The rows, checked or not, and the given box, by which operators of graphs know them."""
        rows = self._rows if self._given is None else self._given
        return rows, self.given_shape, self.given_batch_size

    def _order_in_graph(self) -> Tensor:
        order: Tensor = torch.ops.torchweft.voxel_order(*self.traced())
        self.tables["order"] = order
        return order

    def cells(self) -> Tensor | None:
        """The words of cells that sorting has left, at the first call; the caller owns them."""
        words, self._words = self._words, None
        return words

    def compile_ahead(self, shape: Geometry) -> None:
        """Compile in threads what a submanifold map launches, keys of given rows included."""
        packing, packed = self.packing, self._given is None or self._flags is not None
        given = self._rows, packed, self._ascends
        map_launch.compile_ahead(*given, packing.box, packing.dtype, shape)

    def _axes(self, name: str, numbers: Sequence[int]) -> tuple[int, ...]:
        try:
            found = tuple(map(operator.index, numbers))
        except TypeError:
            raise DTypeError(
                f"{name} is {numbers}: it must hold {self.dim} integers, one for each spatial "
                f"column of coords. Pass {name}={(64,) * self.dim}, for example."
            ) from None
        if len(found) != self.dim or min(found) < 0:
            raise ShapeError(
                f"{name} is {found} but coords have {self.dim} spatial columns: {self.dim} numbers "
                f"≥ 0 are needed. Correct {name}, or the columns of coords (batch first)."
            )
        return found

    def _survey(self, rows: Tensor) -> None:
        """Read the columns' bounds and whether rows ascend; raise if values are out of range."""
        self._bounds, self._ascends, self._rows = _read(rows)
        given = (self.given_batch_size, *(self.given_shape or (None,) * self.dim))
        for column, (low, high, size) in enumerate(zip(*self.bounds, given, strict=True)):
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


def _unknown_box(shape: tuple[int, ...] | None, size: int | None) -> ShapeError:
    return ShapeError(
        f"coords came with spatial_shape {shape} and batch_size {size} in a function that is "
        "compiled or exported: what coordinates hold is not known there, so both must be given. "
        "Pass them, or build the SparseTensor outside, with all maps of the network "
        "(voxels.prepare), and give it to the function."
    )


def bounds_of(batch_size: int, spatial_shape: Sequence[int]) -> Bounds:
    """The bounds of a box that begins at 0."""
    sizes = (batch_size, *spatial_shape)
    return (0,) * len(sizes), tuple(n - 1 for n in sizes)


@below_transforms
def _as_int32(rows: Tensor) -> Tensor:
    """A copy, contiguous."""
    return rows.to(torch.int32, copy=True, memory_format=torch.contiguous_format)


@below_transforms
def _packed(rows: Tensor, packing: Packing) -> tuple[Tensor, Flags]:
    """The keys of rows in a box that begins at 0, and the flags that the kernel writes."""
    rows, flags = rows.contiguous(), Flags(rows.device)
    keys = map_launch.pack(rows, packing.box, packing.dtype, flags)
    flags.written()
    return keys, flags


@below_transforms
def _read(rows: Tensor) -> tuple[Bounds, bool, Tensor]:
    """The bounds of the columns, whether each row is below the next, and the rows as int32.

    Rows that ascend are sorted and distinct, as those of most clouds are.
    """
    narrow = _as_int32(rows)
    if not rows.shape[0]:
        return ((0,) * rows.shape[1], (-1,) * rows.shape[1]), True, narrow
    if kernels_serve(rows.device.type):
        return *map_launch.survey(rows), narrow
    if numba_path.loops_serve(rows.device.type):
        return *numba_path.bounds(rows), narrow
    low, high = torch.stack(torch.aminmax(rows.long(), dim=0)).tolist()
    first, second = rows[:-1], rows[1:]
    below = torch.zeros_like(first[:, 0], dtype=torch.bool)
    for column in reversed(range(rows.shape[1])):
        a, b = first[:, column], second[:, column]
        below = (a < b) | ((a == b) & below)
    return (tuple(low), tuple(high)), bool(below.all()), narrow
