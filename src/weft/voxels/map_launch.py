"""Keys and kernel maps on a GPU: few launches, and a read only where the host must know a number.

Each function gives the same bits as the torch code that it stands in for; its numbers are handed
over at every call, so another count of voxels never compiles again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from weft.core.launcher import Call, Tile, compile_together, current_device
from weft.voxels import cell_kernels, map_kernels
from weft.voxels.geometry import Geometry
from weft.voxels.preparation import calls_for_tiles, kernel_for, tiles_of

__all__ = [
    "WALK",
    "Flags",
    "pack",
    "resample",
    "settle",
    "submanifold",
    "survey",
]

WALK = 8
"""Cells of the last axis that a search walks over; a longer line is searched place by place."""

AXES = 4

BITS = 32
"""Offsets whose bits a word holds."""

ROWS, PAIRS = 512, 512
"""Rows that a program packs, pairs that one places."""

SURVEY, PACK, PLACE = Tile((2 * ROWS,)), Tile((ROWS,)), Tile((PAIRS,))

SEARCH = Tile((64, 2, 256), num_warps=8)
"""Pivots of a step, lines at most and rows that one program searches for."""

MARK, LOOK = Tile((128,), num_warps=1), Tile((128,))
"""Rows of a program that marks cells, and of one that looks them up."""

MANY, MANY_SEARCHED = 2**17, 2**19
"""Rows from which on cells are marked, and from which on half of the lines are searched: for fewer,
two more launches take longer than that saves."""

SIDE = 2**29
"""The longest axis of a box that is marked, and of a kernel there: int32 holds their sum."""

ROOM = 256
"""Cells of a box for each of its voxels, up to which they are marked: 64 bytes for each voxel."""

Numbers = tuple[int, ...]


class _Axis(NamedTuple):
    """An axis of a strided or transposed layer, as `map_kernels` solves q + p = o·s + j·dil.

    Args:
        common: g, the greatest common divisor of stride and dilation.
        inverse: of dil/g modulo the period.
        period: s/g, the distance of the kernel places that one input meets.
        places: how many of them there are at most.
    """

    stride: int = 1
    padding: int = 0
    dilation: int = 1
    kernel: int = 1
    common: int = 1
    inverse: int = 0
    period: int = 1
    places: int = 1

    @classmethod
    def of(cls, kernel: int, stride: int, padding: int, dilation: int, mode: str) -> _Axis:
        """Of a layer's geometry; a transposed layer's input meets every place."""
        if mode == "transposed":
            return cls(stride, padding, dilation, kernel, places=kernel)
        common = math.gcd(stride, dilation)
        period = stride // common
        inverse = pow(dilation // common, -1, period)
        places = -(-kernel // period)
        return cls(stride, padding, dilation, kernel, common, inverse, period, places)


class Flags:
    """Truths that kernels write into the host's memory: once they have run, nothing is copied.

    Whether rows are outside of their box, whether they descend, whether sorted keys repeat.  The
    places are parts of one piece of memory that stays, since a kernel may write late: one that was
    waited for is the next to be taken, another the last.
    """

    WIDTH, MANY = 4, 256
    _free: ClassVar[dict[torch.device, deque[_Place]]] = {}

    def __init__(self, device: torch.device) -> None:
        free = self._free.setdefault(device, deque())
        if not free:
            on_gpu = device.type == "cuda"
            shape = self.MANY, self.WIDTH
            memory = torch.zeros(shape, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
            free.extend(_Place(row, device) for row in memory)
        self._place = free.pop()
        self._place.wait()
        self._place.seen.fill(0)

    @property
    def tensor(self) -> Tensor:
        """Where kernels write them."""
        return self._place.tensor

    def written(self) -> None:
        """What is launched by now will have written them."""
        self._place.record()

    def read(self) -> list[bool]:
        """What they are; the host waits for the kernels that write them, not for later ones."""
        self._place.wait()
        return [flag != 0 for flag in self._place.seen.tolist()]

    def __del__(self) -> None:
        free = self._free[self._place.device]
        (free.append if self._place.waited else free.appendleft)(self._place)


class _Place:
    """Memory of flags that the GPU and the host see, and when it is written."""

    __slots__ = ("_event", "device", "seen", "tensor", "waited")

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self.tensor, self.seen, self.device, self.waited = tensor, tensor.numpy(), device, True
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        if self._event is not None:
            handle = torch._C._cuda_getCurrentRawStream(self.device.index)
            self._event.record(_stream(self.device, handle))
        self.waited = False

    def wait(self) -> None:
        if not self.waited and self._event is not None:
            self._event.synchronize()
        self.waited = True


@functools.lru_cache(maxsize=64)
def _stream(device: torch.device, handle: int) -> torch.cuda.Stream:
    """The current stream of a device, whose handle is known: torch takes longer to make one."""
    return torch.cuda.current_stream(device)


def survey(rows: Tensor) -> tuple[tuple[Numbers, Numbers], bool]:
    """The lowest and highest value of each column, and whether the rows ascend: one read."""
    count, columns = rows.shape
    programs = -(-count // SURVEY.blocks[0])
    found = rows.new_empty((programs, 2 * columns + 1), dtype=torch.int64)
    _launch(
        map_kernels.survey_kernel,
        programs,
        [rows.contiguous(), found],
        (count,),
        (columns,),
        SURVEY,
    )
    numbers = found.amax(0).tolist()
    lows, highs = (~low for low in numbers[:columns]), numbers[columns:-1]
    return (tuple(lows), tuple(highs)), not numbers[-1]


def pack(
    rows: Tensor, lows: Numbers, sizes: Numbers, dtype: torch.dtype, flags: Flags | None = None
) -> Tensor:
    """key = ((b · R0 + s0) · R1 + s1) · R2 + … of rows in the box.

    With flags, rows may be of any integer type; the key of one outside of the box is −1.
    """
    count, columns = rows.shape
    keys = rows.new_empty(count, dtype=dtype)
    box = lows[0], *_front(lows[1:], 0), sizes[0], *_front(sizes[1:], 1)
    operands = [rows, keys, None if flags is None else flags.tensor]
    _launch(map_kernels.pack_kernel, -(-count // ROWS), operands, (count, *box), (columns,), PACK)
    return keys


def settle(keys: Tensor, places: Tensor, flags: Flags) -> Tensor:
    """The places as int32; a flag says whether some sorted key stands twice."""
    count = keys.shape[0]
    order = places.new_empty(count, dtype=torch.int32)
    operands = [keys, places, order, flags.tensor]
    _launch(map_kernels.settle_kernel, -(-count // ROWS), operands, (count,), (), PACK)
    return order


def submanifold(
    keys: Tensor, order: Tensor | None, rows: Tensor, lows: Numbers, sizes: Numbers, shape: Geometry
) -> tuple[Tensor, Tensor | None]:
    """table and back of ascending keys; `order` says which row each of them is.

    The table's tiles are made with it: no layer does without them, and the search leaves the masks.
    Of keys that do not ascend the tables say nothing, but are made.
    """
    voxels = keys, order, rows, _marked(keys, sizes, shape)
    table, parts = _search(voxels, lows, sizes, shape, shape.begin, mirrored=False)
    with current_device(table):
        tiles_of(table, order, parts)
    if shape.symmetric:
        return table, None
    # what reads q at offset k is q − offset: the kernel mirrored, with its places reversed
    ends = zip(shape.kernel_size, shape.dilation, shape.begin, strict=True)
    begin = tuple((k - 1) * d - b for k, d, b in ends)
    return table, _search(voxels, lows, sizes, shape, begin, mirrored=True)[0]


def _marked(keys: Tensor, sizes: Numbers, shape: Geometry) -> Tensor | None:
    """The words of a box's cells, see `cell_kernels`; None: it is too wide, or the voxels few."""
    count, cells = keys.shape[0], math.prod(sizes)
    reach = (k * d for k, d in zip(shape.kernel_size, shape.dilation, strict=True))
    if count < MANY or cells > ROOM * count or max(*sizes, *reach) > SIDE:
        return None
    words = keys.new_zeros(-(-cells // BITS), dtype=torch.int64)
    programs = -(-count // MARK.blocks[0])
    _launch(cell_kernels.mark_kernel, programs, [keys, words], (count,), (), MARK)
    return words


def _search(
    voxels: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    lows: Numbers,
    sizes: Numbers,
    shape: Geometry,
    begin: Numbers,
    mirrored: bool,
) -> tuple[Tensor, Tensor | None]:
    """(a table, what its tiles can be made of: see `tiles_of`)"""
    keys, order, rows, words = voxels
    count = keys.shape[0]
    half = shape.symmetric and words is None and count >= MANY_SEARCHED
    plan = _plan(shape, begin, keys.dtype, SEARCH, mirrored, half)
    tiles = plan.tiles if words is None else 1
    table = rows.new_empty((plan.counts[0], count), dtype=torch.int32)
    if half:
        table[: plan.counts[0] // 2].fill_(-1)
    parts = table.new_empty((tiles, count)) if plan.counts[0] <= BITS and not half else None
    box = (*_front(lows[1:], 0), *_front(sizes[1:], 1))
    numbers = (count, *plan.counts, *box, *plan.axes)
    if words is None:
        kernel, tile, constants = map_kernels.search_kernel, plan.tile, plan.constants
        operands = [keys, order, rows, table, parts]
    else:
        kernel, tile = cell_kernels.look_kernel, LOOK
        constants = (plan.constants[0], *plan.constants[2:5])
        operands = [keys, order, rows, words, table, parts]
    programs = -(-count // tile.blocks[-1]) * tiles
    left = 0 if parts is None else tiles
    later = None if mirrored else functools.partial(calls_for_tiles, table, order, left)
    _launch(kernel, programs, operands, numbers, constants, tile, later)
    return table, parts


class _Plan(NamedTuple):
    """What of a search follows from the geometry alone.

    Args:
        counts: offsets and lines of the kernel.
        axes: lines, dilation and begin of each axis.
        tiles: programs that share rows.
        constants: of the kernel.
        tile: of the kernel.
    """

    counts: Numbers
    axes: Numbers
    tiles: int
    constants: tuple[Any, ...]
    tile: Tile


@functools.lru_cache(maxsize=256)
def _plan(
    shape: Geometry, begin: Numbers, dtype: torch.dtype, tile: Tile, mirrored: bool, half: bool
) -> _Plan:
    num, last, gap = shape.num_offsets, shape.kernel_size[-1], shape.dilation[-1]
    if last * gap > WALK:
        last, gap = 1, 1
    lines = num // last
    kernel = _front((*shape.kernel_size[:-1], shape.kernel_size[-1] // last), 1)
    searched = max(1, lines // 2 if half else lines - shape.symmetric)
    pivots, most_lines, block = tile.blocks
    together = min(most_lines, 1 << (searched - 1).bit_length())
    most, columns = torch.iinfo(dtype).max, 1 + len(begin)
    constants = (columns, shape.symmetric, mirrored, last, gap, most, half)
    axes = (*kernel[1:], *_front(shape.dilation, 1), *_front(begin, 0))
    tiles, blocks = -(-searched // together), (pivots, together, block)
    return _Plan((num, lines), axes, tiles, constants, tile._replace(blocks=blocks))


def resample(
    rows: Tensor, order: Tensor | None, sizes: Numbers, dtype: torch.dtype, shape: Geometry
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """table, back, output rows and their ascending keys of a strided or transposed layer.

    Each row names the outputs that it meets; their keys are sorted and counted: one read.

    Args:
        rows: (N, 1 + d) int32, not negative.
        order: (N,) the rows in canonical order; None: they stand so.
        sizes: batch size and output shape.
        dtype: that holds the keys of this box, and one number more.
        shape: the geometry.
    """
    count, columns = rows.shape
    axes = [_Axis.of(*axis, shape.mode) for axis in zip(*shape[1:], strict=True)]
    axes = [_Axis()] * (AXES - len(axes)) + axes
    chances = math.prod(axis.places for axis in axes)
    keys = rows.new_empty(chances * count, dtype=dtype)
    offsets = rows.new_empty(chances * count)
    box, most = _front(sizes[1:], 1), torch.iinfo(dtype).max
    *given, places = zip(*axes, strict=True)
    numbers = [count, *box, *itertools.chain(*given), *places[1:]]
    constants = (columns, shape.mode == "transposed", most)
    programs = -(-count // PAIRS) * chances
    _launch(
        map_kernels.candidates_kernel,
        programs,
        [rows, order, keys, offsets],
        tuple(numbers),
        constants,
        PLACE,
    )

    keys, standing = torch.sort(keys)
    fresh = keys != most
    fresh[1:] &= keys[1:] != keys[:-1]
    counts = fresh.cumsum(0, dtype=torch.int32)
    outputs = int(counts[-1])

    table = rows.new_full((shape.num_offsets, outputs), -1)
    back = rows.new_full((shape.num_offsets, count), -1)
    out_keys, out_rows = keys.new_empty(outputs), rows.new_empty((outputs, columns))
    operands = [keys, standing, counts, offsets, order, table, back, out_keys, out_rows]
    programs, free = -(-len(keys) // PAIRS), (len(keys), count, outputs, *box)
    _launch(map_kernels.outputs_kernel, programs, operands, free, (columns, most), PLACE)
    return table, back, out_rows, out_keys


def _front(numbers: Sequence[int], missing: int) -> list[int]:
    """One number for each of the kernels' axes: the last are there."""
    return [missing] * (AXES - len(numbers)) + list(numbers)


def _launch(
    function: Any,
    programs: int,
    operands: Sequence[Tensor | None],
    numbers: Numbers,
    constants: tuple[Any, ...],
    tile: Tile,
    later: Callable[[], list[Call]] | None = None,
) -> None:
    """Numbers have declared types and are not specialised: code depends on nothing else.

    What is called later is compiled with it.
    """
    first = operands[0]
    assert first is not None
    dtypes = [None if t is None else t.dtype for t in operands]
    with current_device(first):
        kernel = kernel_for(function, (), constants, tile, first.device, *dtypes)
        if later is not None and not kernel.compiled:
            compile_together([Call(kernel, operands, numbers), *later()])
        kernel(programs, operands, numbers)
