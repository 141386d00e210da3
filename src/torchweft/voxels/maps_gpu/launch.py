"""Keys and kernel maps on a GPU: few launches, and a read only where the host must know a number.

Each function gives the same bits as the torch code that it stands in for; its numbers are handed
over at every call, so another count of voxels never compiles again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import Call, Tile, compile_together, current_device
from torchweft.voxels.grid.geometry import Geometry
from torchweft.voxels.grid.host_flags import Flags
from torchweft.voxels.maps_gpu.sorted_tiles import Remains, calls_for_tiles, kernel_for, tiles_of

__all__ = [
    "WALK",
    "ascending",
    "compile_ahead",
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

Voxels = tuple[Tensor, Tensor | None, Tensor]
"""Ascending keys, which row each of them is (None: they stand so), and the rows."""


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


def survey(rows: Tensor) -> tuple[tuple[Numbers, Numbers], bool]:
    """The lowest and highest value of each column, and whether the rows ascend: one read."""
    count, columns = rows.shape
    programs = -(-count // SURVEY.blocks[0])
    found = rows.new_empty((programs, 2 * columns + 1), dtype=torch.int64)
    operands = [rows.contiguous(), found]
    _launch("maps_gpu.kernels.survey_kernel", programs, operands, (count,), (columns,), SURVEY)
    numbers = found.amax(0).tolist()
    lows, highs = (~low for low in numbers[:columns]), numbers[columns:-1]
    return (tuple(lows), tuple(highs)), not numbers[-1]


def pack(
    rows: Tensor, lows: Numbers, sizes: Numbers, dtype: torch.dtype, flags: Flags | None = None
) -> Tensor:
    """key = ((b · R0 + s0) · R1 + s1) · R2 + … of rows in the box.

    With flags, rows may be of any integer type; the key of one outside of the box is −1.
    """
    count = len(rows)
    keys = rows.new_empty(count, dtype=dtype)
    call = _packer(rows, keys, None if flags is None else flags.tensor, lows, sizes)
    with current_device(rows):
        call.kernel(-(-count // ROWS), call.tensors, call.free)
    return keys


def _packer(
    rows: Tensor, keys: Tensor, flags: Tensor | None, lows: Numbers, sizes: Numbers
) -> Call:
    box = lows[0], *_front(lows[1:], 0), sizes[0], *_front(sizes[1:], 1)
    constants = (rows.shape[1],)
    return _call(
        "maps_gpu.kernels.pack_kernel", [rows, keys, flags], (len(rows), *box), constants, PACK
    )


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
    _launch("maps_gpu.kernels.settle_kernel", -(-count // ROWS), operands, (count,), (), PACK)
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
    numbered = [bits, counts, words, total]
    arranged = [keys, words, total, placed, order, flags.tensor]
    calls = [
        (row_programs, _call("maps_gpu.cell_kernels.take_kernel", [keys, bits], rows, (), PACK)),
        (programs, _call("maps_gpu.cell_kernels.count_kernel", [bits, counts], (), (), WORDS)),
        (programs, _call("maps_gpu.cell_kernels.number_kernel", numbered, (), (), WORDS)),
        (row_programs, _call("maps_gpu.cell_kernels.arrange_kernel", arranged, rows, (), PACK)),
    ]
    with current_device(keys):
        if not all(call.kernel.compiled for _, call in calls):
            compile_together([call for _, call in calls])
        for number, (kernel, operands, numbers) in calls:
            kernel(number, operands, numbers)
    return placed, order, words


def submanifold(
    voxels: Voxels,
    words: Callable[[], Tensor | None],
    lows: Numbers,
    sizes: Numbers,
    shape: Geometry,
) -> tuple[Tensor, Tensor | None]:
    """table and back of voxels with ascending keys; of a mirrored table what is kept, see `mirror`.

    Words of their cells may be there already, for this map alone.  The table's tiles are made with
    it, of what the search leaves: no layer does without them.
    Of keys that do not ascend the tables say nothing, but are made.
    """
    table, left, back = _searched(voxels, words, lows, sizes, shape)
    with current_device(table):
        tiles_of(table, voxels[1], shape.num_offsets, left)
    return table, back


def _searched(
    voxels: Voxels,
    words: Callable[[], Tensor | None],
    lows: Numbers,
    sizes: Numbers,
    shape: Geometry,
) -> tuple[Tensor, Remains, Tensor | None]:
    """The table, what is left for its tiles, and back; the words of cells are gone."""
    found = *voxels, _marked(voxels[0], words(), sizes, shape)
    table, left = _search(found, lows, sizes, shape, shape.begin, mirrored=False)
    if shape.symmetric:
        return table, left, None
    return table, left, _search(found, lows, sizes, shape, _reversed(shape), mirrored=True)[0]


def _rows_kept(shape: Geometry) -> int:
    """Rows of a table that are kept."""
    return shape.num_offsets // 2 + 1 if shape.symmetric else shape.num_offsets


def _reversed(shape: Geometry) -> Numbers:
    """Where a kernel begins whose places are reversed: who reads q at offset k is q − offset."""
    ends = zip(shape.kernel_size, shape.dilation, shape.begin, strict=True)
    return tuple((k - 1) * d - b for k, d, b in ends)


def _marked(keys: Tensor, words: Tensor | None, sizes: Numbers, shape: Geometry) -> Tensor | None:
    """The words of a box's cells, see `cell_kernels`; None: it is too wide, or the voxels few."""
    count, cells = keys.shape[0], math.prod(sizes)
    if not _is_marked(count, sizes, shape):
        return None
    if words is not None:
        return words
    words = keys.new_zeros(_num_words(cells), dtype=torch.int64)
    programs = -(-count // MARK.blocks[0])
    _launch("maps_gpu.cell_kernels.mark_kernel", programs, [keys, words], (count,), (), MARK)
    return words


def _is_marked(count: int, sizes: Numbers, shape: Geometry) -> bool:
    """Whether neighbours of so many voxels in a box are looked up, not searched."""
    reach = (k * d for k, d in zip(shape.kernel_size, shape.dilation, strict=True))
    return _crowded(count, math.prod(sizes)) and max(*sizes, *reach) <= SIDE


_AHEAD: set[tuple[Any, ...]] = set()
"""Kinds of maps that `compile_ahead` has seen."""


def compile_ahead(
    rows: Tensor,
    packed: bool,
    ordered: bool,
    box: tuple[Numbers, Numbers],
    dtype: torch.dtype,
    shape: Geometry,
) -> None:
    """Begin to compile what a submanifold map of rows calls, where it is of a new kind.

    Else its keys and its search are compiled one after the other.

    Args:
        rows: (N, 1 + d) int32.
        packed: whether there are keys already.
        ordered: whether they are thought to ascend.
        box: the lowest values of the columns, and how many there are.
        dtype: of the keys.
        shape: the geometry.
    """
    marked = _is_marked(len(rows), box[1], shape)
    kind = (rows.device, rows.shape[1], packed, ordered, dtype, shape, marked)
    if kind in _AHEAD:
        return
    _AHEAD.add(kind)
    keys, words = rows.new_empty(1, dtype=dtype), rows.new_empty(1, dtype=torch.int64)
    table = rows.new_empty(1).expand(_rows_kept(shape), len(rows))
    order = None if ordered else table[0]
    rest = table if len(table) < shape.num_offsets else None
    given = keys, order, rows, words if marked else None, table, rest
    found = _searcher(len(rows), dtype, marked, box, shape, shape.begin, mirrored=False)
    calls = [found.call(*given, table if found.parts else None)]
    calls += [] if packed else [_packer(rows, keys, table, *box)]
    calls += calls_for_tiles(table, order, shape.num_offsets, found.parts)
    if not shape.symmetric:
        end = _searcher(len(rows), dtype, marked, box, shape, _reversed(shape), mirrored=True)
        calls.append(end.call(*given, None))
    if marked and ordered:
        calls.append(
            _call("maps_gpu.cell_kernels.mark_kernel", [keys, words], (len(rows),), (), MARK)
        )
    if not (ordered or marked):
        settled = [keys, words, table, table]
        calls.append(_call("maps_gpu.kernels.settle_kernel", settled, (len(rows),), (), PACK))
    with current_device(rows):
        compile_together(calls)


def _search(
    voxels: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    lows: Numbers,
    sizes: Numbers,
    shape: Geometry,
    begin: Numbers,
    mirrored: bool,
) -> tuple[Tensor, Remains]:
    """What is kept of a table, and what is left for its tiles."""
    keys, order, rows, words = voxels
    count, marked = len(rows), words is not None
    found = _searcher(count, keys.dtype, marked, (lows, sizes), shape, begin, mirrored)
    kept = _rows_kept(shape)
    table = rows.new_empty((kept, count), dtype=torch.int32)
    missing = shape.num_offsets - kept
    rest = table.new_empty((missing, count)) if missing else None
    if found.half:
        table[: shape.num_offsets // 2].fill_(-1)
    parts = table.new_empty((found.parts, count)) if found.parts else None
    call = found.call(keys, order, rows, words, table, rest, parts)
    with current_device(table):
        if not mirrored and not call.kernel.compiled:
            tiled = calls_for_tiles(table, order, shape.num_offsets, found.parts)
            compile_together([call, *tiled])
        call.kernel(found.programs, call.tensors, call.free)
    return table, Remains(rest, parts)


class _Searcher(NamedTuple):
    """A kernel that finds neighbours, and what it is called with beside tensors.

    Args:
        half: whether it searches for half of the offsets alone.
        parts: rows of the masks' parts that it leaves; 0: none.
    """

    name: str
    programs: int
    numbers: Numbers
    constants: tuple[Any, ...]
    tile: Tile
    half: bool
    parts: int

    def call(
        self,
        keys: Tensor,
        order: Tensor | None,
        rows: Tensor,
        words: Tensor | None,
        table: Tensor,
        rest: Tensor | None,
        parts: Tensor | None,
    ) -> Call:
        """Its call for such tensors."""
        operands = [keys, order, rows, *([] if words is None else [words]), table, rest, parts]
        return _call(self.name, operands, self.numbers, self.constants, self.tile)


def _searcher(
    count: int,
    dtype: torch.dtype,
    marked: bool,
    box: tuple[Numbers, Numbers],
    shape: Geometry,
    begin: Numbers,
    mirrored: bool,
) -> _Searcher:
    """For so many voxels with keys of a dtype, in a box of lows and sizes, perhaps with words."""
    half = shape.symmetric and not marked and count >= MANY_SEARCHED
    plan = _plan(shape, begin, dtype, SEARCH, mirrored, half)
    name, tile, tiles = "maps_gpu.kernels.search_kernel", plan.tile, plan.tiles
    counts, constants = plan.counts, plan.constants
    if marked:
        name, tile, tiles = "maps_gpu.cell_kernels.look_kernel", LOOK, 1
        counts, constants = counts[:1], (constants[0], *constants[2:5])
    lows, sizes = box
    numbers = (count, *counts, *_front(lows[1:], 0), *_front(sizes[1:], 1), *plan.axes)
    programs = -(-count // tile.blocks[-1]) * tiles
    told = plan.counts[0] <= BITS and not half and not mirrored
    return _Searcher(name, programs, numbers, constants, tile, half, tiles if told else 0)


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
    operands = [rows, order, keys, offsets]
    function = "maps_gpu.kernels.candidates_kernel"
    _launch(function, programs, operands, tuple(numbers), constants, PLACE)

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
    _launch("maps_gpu.kernels.outputs_kernel", programs, operands, free, (columns, most), PLACE)
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
) -> None:
    call = _call(function, operands, numbers, constants, tile)
    first = operands[0]
    assert first is not None
    with current_device(first):
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
