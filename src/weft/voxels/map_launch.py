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
from weft.voxels.geometry import Geometry
from weft.voxels.preparation import calls_for_tiles, kernel_for, tiles_of

__all__ = [
    "WALK",
    "Flags",
    "ascending",
    "pack",
    "resample",
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

SURVEY, PACK, PLACE = Tile((2 * ROWS,)), Tile((ROWS,), num_warps=8), Tile((PAIRS,))

SEARCH = Tile((64, 2, 256), num_warps=8)
"""Pivots of a step, lines at most and rows that one program searches for."""

MARK, LOOK = Tile((128,), num_warps=1), Tile((128,))
"""Rows of a program that marks cells, and of one that looks them up."""

WORDS = Tile((4096,), num_warps=8)
"""Words of a program that counts or numbers them."""

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
        "map_kernels.survey_kernel",
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
    _launch("map_kernels.pack_kernel", -(-count // ROWS), operands, (count, *box), (columns,), PACK)
    return keys


def ascending(keys: Tensor, sizes: Numbers, flags: Flags) -> tuple[Tensor, Tensor, Tensor | None]:
    """(the keys ascending, the row (int32) of each, the words of their cells if it found them).

    A flag says whether some key stands twice.  Of boxes past int32 the keys are sorted: a program
    that numbers words adds up the counts of all before it.
    """
    count, cells = keys.shape[0], math.prod(sizes)
    if keys.dtype == torch.int32 and _crowded(count, cells):
        return _arranged(keys, cells, flags)
    keys, places = torch.sort(keys)
    order = places.new_empty(count, dtype=torch.int32)
    operands = [keys, places, order, flags.tensor]
    _launch("map_kernels.settle_kernel", -(-count // ROWS), operands, (count,), (), PACK)
    return keys, order, None


def _crowded(count: int, cells: int) -> bool:
    """Whether the cells of a box are marked."""
    return count >= MANY and cells <= ROOM * count


def _num_words(cells: int) -> int:
    """Of all cells, and one past the last: see `cell_kernels`."""
    return -(-cells // BITS) + 1


def _arranged(keys: Tensor, cells: int, flags: Flags) -> tuple[Tensor, Tensor, Tensor]:
    """`ascending` by the words of the cells: a voxel's place is the number of those before it."""
    count, programs = keys.shape[0], -(-_num_words(cells) // WORDS.blocks[0])
    bits = keys.new_zeros(programs * WORDS.blocks[0], dtype=torch.int32)
    words = torch.empty_like(bits, dtype=torch.int64)
    counts, total = bits.new_empty(programs), bits.new_empty(1)
    placed, order = torch.empty_like(keys), bits.new_empty(count)
    rows, row_programs = (count,), -(-count // ROWS)
    arranged = [keys, words, total, placed, order, flags.tensor]
    calls = [
        (row_programs, _call("cell_kernels.take_kernel", [keys, bits], rows, (), PACK)),
        (programs, _call("cell_kernels.count_kernel", [bits, counts], (), (), WORDS)),
        (
            programs,
            _call("cell_kernels.number_kernel", [bits, counts, words, total], (), (), WORDS),
        ),
        (row_programs, _call("cell_kernels.arrange_kernel", arranged, rows, (), PACK)),
    ]
    with current_device(keys):
        if not all(call.kernel.compiled for _, call in calls):
            compile_together([call for _, call in calls])
        for number, (kernel, operands, numbers) in calls:
            kernel(number, operands, numbers)
    return placed, order, words


def submanifold(
    keys: Tensor,
    order: Tensor | None,
    rows: Tensor,
    words: Tensor | None,
    lows: Numbers,
    sizes: Numbers,
    shape: Geometry,
) -> tuple[Tensor, Tensor | None]:
    """table and back of ascending keys; `order` says which row each of them is.

    Words of their cells may be there already.  The table's tiles are made with it: no layer does
    without them, and the search leaves the masks.
    Of keys that do not ascend the tables say nothing, but are made.
    """
    voxels = keys, order, rows, _marked(keys, words, sizes, shape)
    table, parts = _search(voxels, lows, sizes, shape, shape.begin, mirrored=False)
    with current_device(table):
        tiles_of(table, order, parts)
    if shape.symmetric:
        return table, None
    # what reads q at offset k is q − offset: the kernel mirrored, with its places reversed
    ends = zip(shape.kernel_size, shape.dilation, shape.begin, strict=True)
    begin = tuple((k - 1) * d - b for k, d, b in ends)
    return table, _search(voxels, lows, sizes, shape, begin, mirrored=True)[0]


def _marked(keys: Tensor, words: Tensor | None, sizes: Numbers, shape: Geometry) -> Tensor | None:
    """The words of a box's cells, see `cell_kernels`; None: it is too wide, or the voxels few."""
    count, cells = keys.shape[0], math.prod(sizes)
    reach = (k * d for k, d in zip(shape.kernel_size, shape.dilation, strict=True))
    if not _crowded(count, cells) or max(*sizes, *reach) > SIDE:
        return None
    if words is not None:
        return words
    words = keys.new_zeros(_num_words(cells), dtype=torch.int64)
    programs = -(-count // MARK.blocks[0])
    _launch("cell_kernels.mark_kernel", programs, [keys, words], (count,), (), MARK)
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
    told = plan.counts[0] <= BITS and not half and not mirrored
    parts = table.new_empty((tiles, count)) if told else None
    box = (*_front(lows[1:], 0), *_front(sizes[1:], 1))
    counts = plan.counts
    if words is None:
        kernel, tile, constants = "map_kernels.search_kernel", plan.tile, plan.constants
        operands = [keys, order, rows, table, parts]
    else:
        kernel, tile = "cell_kernels.look_kernel", LOOK
        constants, counts = (plan.constants[0], *plan.constants[2:5]), counts[:1]
        operands = [keys, order, rows, words, table, parts]
    programs = -(-count // tile.blocks[-1]) * tiles
    left = 0 if parts is None else tiles
    later = None if mirrored else functools.partial(calls_for_tiles, table, order, left)
    _launch(kernel, programs, operands, (count, *counts, *box, *plan.axes), constants, tile, later)
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
        "map_kernels.candidates_kernel",
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
    _launch("map_kernels.outputs_kernel", programs, operands, free, (columns, most), PLACE)
    return table, back, out_rows, out_keys


def _front(numbers: Sequence[int], missing: int) -> list[int]:
    """One number for each of the kernels' axes: the last are there."""
    return [missing] * (AXES - len(numbers)) + list(numbers)


def _launch(
    function: str,
    programs: int,
    operands: Sequence[Tensor | None],
    numbers: Numbers,
    constants: tuple[Any, ...],
    tile: Tile,
    later: Callable[[], list[Call]] | None = None,
) -> None:
    """What is called later is compiled with it."""
    call = _call(function, operands, numbers, constants, tile)
    first = operands[0]
    assert first is not None
    with current_device(first):
        if later is not None and not call.kernel.compiled:
            compile_together([call, *later()])
        call.kernel(programs, operands, numbers)


def _call(
    function: str,
    operands: Sequence[Tensor | None],
    numbers: Numbers,
    constants: tuple[Any, ...],
    tile: Tile,
) -> Call:
    """Numbers have declared types and are not specialised: code depends on nothing else."""
    first = operands[0]
    assert first is not None
    dtypes = [None if t is None else t.dtype for t in operands]
    kernel = kernel_for(function, (), constants, tile, first.device, *dtypes)
    return Call(kernel, operands, numbers)
