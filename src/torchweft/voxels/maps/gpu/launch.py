"""Launches of the kernels of coordinates and kernel maps.

Each function returns the same bits as the torch code that it replaces.  Counts of voxels are
arguments that no kernel is specialised for, so a new count compiles nothing.  The host waits only
where it must know a number.
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
from torchweft.voxels.grid import Geometry
from torchweft.voxels.maps.gpu.jobs import Job
from torchweft.voxels.maps.gpu.tiles import (
    MASK_BITS,
    Flags,
    SearchRemains,
    calls_for_tiles,
    kernel_for,
    tiles_of,
)

__all__ = [
    "Candidates",
    "ascending",
    "candidates",
    "candidates_of_an_input",
    "cells",
    "compile_ahead",
    "floors",
    "level",
    "meet",
    "onto",
    "pack",
    "resample",
    "submanifold",
    "survey",
]

LONGEST_WALK = 8
"""Longest stretch of the last axis that a search walks over; longer ones are searched by offset."""

KERNEL_AXES = 4

SURVEY, PACK, PLACE = Tile((1024,)), Tile((512,), num_warps=8), Tile((512,))
"""Rows per program that reads columns, rows per program that packs keys, pairs per program that
places them."""

SEARCH = Tile((64, 2, 256), num_warps=8)
"""Pivots per step, most lines per program, and rows per program of a search."""

MARK, LOOK = Tile((128,), num_warps=1), Tile((128,))
"""Rows per program that marks cells, and per program that looks them up."""

LOOKED_UP = Tile((64, 256))
"""Pivots per step, and fine voxels per program that looks coarse ones up."""

WORDS = Tile((4096,), num_warps=8)
"""Words per program that counts or numbers them."""

LEAST_MARKED, LEAST_HALVED = 2**17, 2**19
"""Fewest rows for which cells are marked, and for which only half of the lines are searched: below,
two more launches take longer than they save."""

LONGEST_MARKED_AXIS = 2**29
"""Longest axis of a box and of a kernel whose cells are marked: int32 holds their sum."""

MOST_CELLS_PER_VOXEL = 256
"""Most cells per voxel of a box whose cells are marked: 64 bytes per voxel."""

Ints = tuple[int, ...]

Box = tuple[Ints, Ints]
"""The lowest value of each column, and the number of its values."""

Voxels = tuple[Tensor, Tensor | None, Tensor]
"""Ascending keys, the row of each key (None: in row order), and the rows."""

Words = Callable[[], Tensor | None]
"""Returns the words of cells that sorting has left, if there are any."""


def survey(rows: Tensor) -> tuple[Box, bool]:
    """The lowest and highest value of each column, and whether rows ascend: one read."""
    count, columns = rows.shape
    found = rows.new_empty((_programs(count, SURVEY), 2 * columns + 1), dtype=torch.int64)
    operands = [rows.contiguous(), found]
    _launch((len(found), _call("kernels.survey", operands, (count,), (columns,), SURVEY)))
    numbers = found.amax(0).tolist()
    lows, highs = (~low for low in numbers[:columns]), numbers[columns:-1]
    return (tuple(lows), tuple(highs)), not numbers[-1]


def pack(rows: Tensor, box: Box, dtype: torch.dtype, flags: Flags | None = None) -> Tensor:
    """key = ((b · R0 + s0) · R1 + s1) · R2 + … of rows in a box.

    With flags, rows may have any integer dtype; the key of a row outside of the box is −1.
    """
    keys = rows.new_empty(len(rows), dtype=dtype)
    call = _pack_call(rows, keys, None if flags is None else flags.tensor, box)
    _launch((_programs(len(rows), PACK), call))
    return keys


def _pack_call(rows: Tensor, keys: Tensor, flags: Tensor | None, box: Box) -> Call:
    lows, sizes = box
    numbers = len(rows), lows[0], *_front(lows[1:], 0), sizes[0], *_front(sizes[1:], 1)
    return _call("kernels.pack", [rows, keys, flags], numbers, (rows.shape[1],), PACK)


def ascending(keys: Tensor, sizes: Ints, flags: Flags) -> tuple[Tensor, Tensor, Tensor | None]:
    """(ascending keys, the row (int32) of each, the words of their cells where these were marked).

    The third flag says whether a key is repeated.  Keys of boxes past int32 are sorted: a program
    that numbers words adds up the counts of all words before.
    """
    count, cells = keys.shape[0], math.prod(sizes)
    if keys.dtype == torch.int32 and _crowded(count, cells):
        return _arranged(keys, cells, flags)
    keys, places = torch.sort(keys)
    order = places.new_empty(count, dtype=torch.int32)
    _launch((_programs(count, PACK), _settle_call(keys, places, order, flags.tensor)))
    return keys, order, None


def _settle_call(keys: Tensor, places: Tensor, order: Tensor, flags: Tensor) -> Call:
    return _call("kernels.settle", [keys, places, order, flags], (order.shape[-1],), (), PACK)


def _crowded(count: int, cells: int) -> bool:
    """Whether the cells of a box are marked."""
    return count >= LEAST_MARKED and cells <= MOST_CELLS_PER_VOXEL * count


def _num_words(cells: int) -> int:
    """Words of all cells, and one past the last."""
    return -(-cells // MASK_BITS) + 1


def _arranged(keys: Tensor, cells: int, flags: Flags) -> tuple[Tensor, Tensor, Tensor]:
    """`ascending` by marked cells: the place of a voxel is the number of voxels before it."""
    count, programs = keys.shape[0], _programs(_num_words(cells), WORDS)
    bits = keys.new_zeros(programs * WORDS.blocks[0], dtype=torch.int32)
    words = torch.empty_like(bits, dtype=torch.int64)
    counts, total = bits.new_empty(programs), bits.new_empty(1)
    placed, order = torch.empty_like(keys), bits.new_empty(count)
    rows, row_programs = (count,), _programs(count, PACK)
    arranged = [keys, words, total, placed, order, flags.tensor]
    _launch(
        (row_programs, _call("kernels.take", [keys, bits], rows, (), PACK)),
        (programs, _call("kernels.count", [bits, counts], (), (), WORDS)),
        (programs, _call("kernels.number", [bits, counts, words, total], (), (), WORDS)),
        (row_programs, _call("kernels.arrange", arranged, rows, (), PACK)),
    )
    return placed, order, words


def submanifold(
    voxels: Voxels, words: Words, box: Box, shape: Geometry, later: list[Job] | None = None
) -> tuple[Tensor, Tensor | None]:
    """The tables `kept` and `back` of a submanifold map, see `KernelMap`.

    The tiles of the table, which every layer needs, are built from what the search leaves; with a
    list, that is appended to it instead.  Where keys do not ascend the tables are built, but have
    no meaning.
    """
    marked = _marked(voxels[0], words(), box[1], shape)
    table, left = _search(voxels, marked, box, shape, mirrored=False)
    back = None if shape.symmetric else _search(voxels, marked, box, shape, mirrored=True)[0]
    del marked  # before memory for tiles is allocated
    job = Job(table, voxels[1], shape.num_offsets, left)
    if later is not None:
        later.append(job)
        return table, back
    with current_device(table):
        tiles_of(*job)
    return table, back


def _rows_kept(shape: Geometry) -> int:
    """Rows of a table that are kept."""
    return shape.num_offsets // 2 + 1 if shape.symmetric else shape.num_offsets


def _marked(keys: Tensor, words: Tensor | None, sizes: Ints, shape: Geometry) -> Tensor | None:
    """The words of the cells of a box; None: the box is too large for its voxels."""
    if not _is_marked(len(keys), sizes, shape):
        return None
    if words is None:
        words = keys.new_zeros(_num_words(math.prod(sizes)), dtype=torch.int64)
        call = _call("kernels.mark", [keys, words], (len(keys),), (), MARK)
        _launch((_programs(len(keys), MARK), call))
    return words


def _is_marked(count: int, sizes: Ints, shape: Geometry) -> bool:
    """Whether neighbours are looked up in marked cells, not searched."""
    reach = (k * d for k, d in zip(shape.kernel_size, shape.dilation, strict=True))
    return _crowded(count, math.prod(sizes)) and max(*sizes, *reach) <= LONGEST_MARKED_AXIS


_compiled_maps: set[tuple[Any, ...]] = set()
"""Signatures of maps that `compile_ahead` has seen."""


def compile_ahead(
    rows: Tensor, packed: bool, ordered: bool, box: Box, dtype: torch.dtype, shape: Geometry
) -> None:
    """Compile in threads all kernels of a submanifold map, unless its signature is known.

    Otherwise the kernels of keys and search would be compiled one after the other.

    Args:
        rows: (N, 1 + d) int32.
        packed: whether there are keys already.
        ordered: whether rows are assumed to ascend.
        box: of the rows.
        dtype: of the keys.
        shape: the geometry.
    """
    count = len(rows)
    marked = _is_marked(count, box[1], shape)
    kind = (rows.device, rows.shape[1], packed, ordered, dtype, shape, marked)
    if kind in _compiled_maps:
        return
    _compiled_maps.add(kind)
    keys, words = rows.new_empty(1, dtype=dtype), rows.new_empty(1, dtype=torch.int64)
    table = rows.new_empty(1).expand(_rows_kept(shape), count)
    order = None if ordered else table[0]
    rest = table if len(table) < shape.num_offsets else None
    given = (keys, order, rows), words if marked else None, table, rest
    found = _finder(count, dtype, marked, box, shape, mirrored=False)
    calls = [_find_call(found, *given, table if found.parts else None)]
    calls += [] if packed else [_pack_call(rows, keys, table, box)]
    calls += calls_for_tiles(table, order, shape.num_offsets, found.parts)
    if not shape.symmetric:
        end = _finder(count, dtype, marked, box, shape, mirrored=True)
        calls.append(_find_call(end, *given, None))
    if marked and ordered:
        calls.append(_call("kernels.mark", [keys, words], (count,), (), MARK))
    if not (ordered or marked):
        calls.append(_settle_call(keys, words, table, table))
    with current_device(rows):
        compile_together(calls)


def _search(
    voxels: Voxels, words: Tensor | None, box: Box, shape: Geometry, mirrored: bool
) -> tuple[Tensor, SearchRemains]:
    """The kept rows of a table, and what is left for its tiles."""
    keys, order, rows = voxels
    count, num, kept = len(rows), shape.num_offsets, _rows_kept(shape)
    found = _finder(count, keys.dtype, words is not None, box, shape, mirrored)
    table = rows.new_empty((kept, count), dtype=torch.int32)
    rest = table.new_empty((num - kept, count)) if num > kept else None
    if found.half:
        table[: num // 2].fill_(-1)
    parts = table.new_empty((found.parts, count)) if found.parts else None
    call = _find_call(found, voxels, words, table, rest, parts)
    with current_device(table):
        if not mirrored and not call.kernel.compiled:
            compile_together([call, *calls_for_tiles(table, order, num, found.parts)])
        call.kernel(found.programs, call.tensors, call.free)
    return table, SearchRemains(rest, parts)


class _Finder(NamedTuple):
    """The kernel that finds neighbours, and its arguments beside tensors.

    Args:
        half: whether it searches half of the offsets alone.
        parts: partial masks that it leaves; 0: none.
    """

    name: str
    programs: int
    numbers: Ints
    constants: tuple[Any, ...]
    tile: Tile
    half: bool
    parts: int


def _find_call(
    found: _Finder,
    voxels: Voxels,
    words: Tensor | None,
    table: Tensor,
    rest: Tensor | None,
    parts: Tensor | None,
) -> Call:
    operands = [*voxels, *([] if words is None else [words]), table, rest, parts]
    return _call(f"kernels.{found.name}", operands, found.numbers, found.constants, found.tile)


def _finder(
    count: int, dtype: torch.dtype, marked: bool, box: Box, shape: Geometry, mirrored: bool
) -> _Finder:
    """For `count` voxels with keys of a dtype in a box, whose cells may be marked."""
    half = shape.symmetric and not marked and count >= LEAST_HALVED
    lines, axes, together, constants, tile = _search_plan(shape, dtype, SEARCH, mirrored, half)
    num, lows, sizes = shape.num_offsets, *box
    name, counts = "search", [num, lines]
    if marked:
        name, tile, together, counts = "look", LOOK, 1, [num]
        constants = (constants[0], *constants[2:5])
    numbers = (count, *counts, *_front(lows[1:], 0), *_front(sizes[1:], 1), *axes)
    parts = together if num <= MASK_BITS and not half and not mirrored else 0
    return _Finder(name, _programs(count, tile) * together, numbers, constants, tile, half, parts)


@functools.lru_cache(maxsize=256)
def _search_plan(
    shape: Geometry, dtype: torch.dtype, tile: Tile, mirrored: bool, half: bool
) -> tuple[int, Ints, int, tuple[Any, ...], Tile]:
    """(lines of the kernel, numbers by axis, programs that share rows, constants, tile).

    A mirrored search reverses the kernel: who reads q at offset k is q − offset.
    """
    last, gap = shape.kernel_size[-1], shape.dilation[-1]
    if last * gap > LONGEST_WALK:
        last, gap = 1, 1
    lines, begin = shape.num_offsets // last, shape.begin
    if mirrored:
        ends = zip(shape.kernel_size, shape.dilation, begin, strict=True)
        begin = tuple((k - 1) * d - b for k, d, b in ends)
    kernel = _front((*shape.kernel_size[:-1], shape.kernel_size[-1] // last), 1)
    searched = max(1, lines // 2 if half else lines - shape.symmetric)
    pivots, most_lines, block = tile.blocks
    together = min(most_lines, 1 << (searched - 1).bit_length())
    most = torch.iinfo(dtype).max
    constants = (1 + len(begin), shape.symmetric, mirrored, last, gap, most, half)
    axes = (*kernel[1:], *_front(shape.dilation, 1), *_front(begin, 0))
    tile = tile._replace(blocks=(pivots, together, block))
    return lines, axes, -(-searched // together), constants, tile


def _axis(kernel: int, stride: int, padding: int, dilation: int, mode: str) -> Ints:
    """How a kernel solves q + p = o·s + j·dil along an axis of a strided or transposed layer.

    Returns:
        stride s, padding p, dilation, kernel size, g = gcd(s, dil), the inverse of dil/g modulo
        the period, the period s/g, which is the distance of the kernel positions that one input
        meets, and the most such positions; an input of a transposed layer meets every position.
    """
    if mode == "transposed":
        return stride, padding, dilation, kernel, 1, 0, 1, kernel
    common = math.gcd(stride, dilation)
    period = stride // common
    inverse = pow(dilation // common, -1, period)
    return stride, padding, dilation, kernel, common, inverse, period, -(-kernel // period)


class Candidates(NamedTuple):
    """The outputs that inputs may meet in a strided or transposed layer, sorted by their keys.

    Args:
        keys: (M,) ascending, past the last output the largest number of the dtype.
        source: (M,) the position m · N + i of each before the sort.
        counts: (M,) the number of different keys up to each.
        offsets: (M,) the offset k of the pair at each position.
        inputs: N.
    """

    keys: Tensor
    source: Tensor
    counts: Tensor
    offsets: Tensor
    inputs: int

    @property
    def most(self) -> int:
        """The key that no output has."""
        return torch.iinfo(self.keys.dtype).max


@functools.lru_cache(maxsize=256)
def _axes_of(shape: Geometry) -> tuple[int, Ints, Ints]:
    """(candidates of an input, the numbers of the axes, positions that one input meets)."""
    axes = [_axis(*axis, shape.mode) for axis in zip(*shape[1:], strict=True)]
    axes = [(1, 0, 1, 1, 1, 0, 1, 1)] * (KERNEL_AXES - len(axes)) + axes
    *given, places = zip(*axes, strict=True)
    return math.prod(places), tuple(itertools.chain(*given)), places


def candidates_of_an_input(shape: Geometry) -> int:
    """The most outputs that one input of a strided or transposed layer meets."""
    return _axes_of(shape)[0]


def candidates(
    rows: Tensor, order: Tensor | None, sizes: Ints, dtype: torch.dtype, shape: Geometry
) -> Candidates:
    """The outputs that rows may meet; the host does not wait.

    Args:
        rows: (N, 1 + d) int32, not negative, or voxels that do not exist, with batch number −1.
        order: (N,) the rows in canonical order; None: in row order.
        sizes: batch size and output shape.
        dtype: of keys; it holds one number more than the box has cells.
        shape: the geometry.
    """
    count, columns = rows.shape
    chances, given, places = _axes_of(shape)
    keys = rows.new_empty(chances * count, dtype=dtype)
    offsets, fresh = rows.new_empty(chances * count), rows.new_empty(chances * count)
    numbers = (count, *_front(sizes[1:], 1), *given, *places[1:])
    constants = (columns, shape.mode == "transposed", torch.iinfo(dtype).max)
    name, operands = "resample_kernels.candidates", [rows, order, keys, offsets]
    call = _call(name, operands, numbers, constants, PLACE)
    found = Candidates(keys, keys.new_empty(1, dtype=torch.int64), fresh, offsets, count)
    if not call.kernel.compiled:
        later = (
            _level_call(found, keys, rows, (sizes, sizes)),
            _outputs_call(found, order, rows, rows),
        )
        with current_device(rows):
            compile_together([call, _fresh_call(keys, fresh), *later])
    _launch((_programs(count, PLACE) * chances, call))
    keys, source = torch.sort(keys)
    _launch((_programs(len(keys), PLACE), _fresh_call(keys, fresh)))
    counts = fresh.cumsum(0, dtype=torch.int32)
    return Candidates(keys, source, counts, offsets, count)


def _fresh_call(keys: Tensor, fresh: Tensor) -> Call:
    most = torch.iinfo(keys.dtype).max
    return _call("resample_kernels.fresh", [keys, fresh], (len(keys),), (most,), PLACE)


def level(
    found: Candidates, box: Box, room: int, seen: Flags | None = None, place: int = 0
) -> tuple[Tensor, Tensor]:
    """(rows, ascending keys) of the outputs of candidates.

    Args:
        found: the candidates.
        box: of the outputs; batches count from 0.
        room: outputs that there is room for; past the last one, rows have the batch number −1.
        seen: numbers in host memory, of which that at `place` becomes the number of outputs.
        place: of the number.
    """
    rows, keys = found.offsets.new_empty((room, len(box[1]))), found.keys.new_empty(room)
    call = _level_call(found, keys, rows, box, seen, place)
    _launch((_programs(len(found.keys), PLACE), call))
    return rows, keys


def _level_call(
    found: Candidates,
    keys: Tensor,
    rows: Tensor,
    box: Box,
    seen: Flags | None = None,
    place: int = 0,
) -> Call:
    operands = [found.keys, found.counts, keys, rows, None if seen is None else seen.tensor]
    lows, sizes = box
    numbers = len(found.keys), len(rows), place, *_front(lows[1:], 0), *_front(sizes[1:], 1)
    constants = len(sizes), found.most
    return _call("resample_kernels.level", operands, numbers, constants, PLACE)


def meet(
    found: Candidates, order: Tensor | None, inputs: int, outputs: int, shape: Geometry
) -> tuple[Tensor, Tensor]:
    """`kept` and `back` of a map from its candidates, of which the first inputs are voxels."""
    table = found.offsets.new_full((shape.num_offsets, outputs), -1)
    back = found.offsets.new_full((shape.num_offsets, inputs), -1)
    call = _outputs_call(found, order, table, back)
    _launch((_programs(len(found.keys), PLACE), call))
    return table, back


def _outputs_call(found: Candidates, order: Tensor | None, table: Tensor, back: Tensor) -> Call:
    operands = [found.keys, found.source, found.counts, found.offsets, order, table, back]
    numbers = len(found.keys), found.inputs, back.shape[1], table.shape[1]
    return _call("resample_kernels.outputs", operands, numbers, (found.most,), PLACE)


def resample(
    rows: Tensor, order: Tensor | None, sizes: Ints, dtype: torch.dtype, shape: Geometry
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """table, back, output rows and their ascending keys of a strided or transposed layer.

    Each row lists the outputs that it meets; their keys are sorted and counted: one read.  See
    `candidates` for the arguments.
    """
    found = candidates(rows, order, sizes, dtype, shape)
    outputs = int(found.counts[-1])
    out_rows, out_keys = level(found, ((0,) * len(sizes), sizes), outputs)
    return *meet(found, order, len(rows), outputs, shape), out_rows, out_keys


def floors(rows: Tensor, box: Box, dtype: torch.dtype, strides: Ints) -> tuple[Tensor, Tensor]:
    """(rows, ascending keys) of ⌊c / stride⌋ of all voxels c, which a box holds: one read.

    See `candidates` for the arguments; batches count from 0.
    """
    found = candidates(rows, None, box[1], dtype, cells(box, strides))
    return level(found, box, int(found.counts[-1]))


def cells(box: Box, strides: Ints) -> Geometry:
    """The layer that writes ⌊c / stride⌋ of every voxel c, counted from the lowest in a box."""
    pads = tuple(-low * s for low, s in zip(box[0][1:], strides, strict=True))
    return Geometry("strided", strides, strides, pads, (1,) * len(strides))


def onto(
    fine: tuple[Tensor, Tensor | None],
    lows: Ints,
    coarse: tuple[Tensor, Tensor | None],
    box: Box,
    shape: Geometry,
) -> tuple[Tensor, Tensor]:
    """`kept` and `back` of a map that reads fine voxels and writes coarse ones; both are known.

    Args:
        fine: rows, and their canonical order; None: they ascend.
        lows: not above any column of the rows.
        coarse: ascending keys of voxels in a box, and their rows in this order.
        box: of the keys.
        shape: the geometry.
    """
    (rows, order), (keys, coarse_order), (low, sizes) = fine, coarse, box
    axes = zip(shape.kernel_size, shape.dilation, shape.begin, shape.stride, lows[1:], strict=True)
    # coarse voxels are counted from so far before that no candidate is negative
    before = [max(0, -(-((k - 1) * d - b - q) // s)) for k, d, b, s, q in axes]
    pads = tuple(b + n * s for b, n, s in zip(shape.begin, before, shape.stride, strict=True))
    chances, given, places = _axes_of(shape._replace(mode="strided", padding=pads))
    table = rows.new_full((shape.num_offsets, len(keys)), -1)
    back = rows.new_full((shape.num_offsets, len(rows)), -1)
    first = [n + q for n, q in zip(before, low[1:], strict=True)]
    numbers = (len(rows), len(keys), low[0], sizes[0], *_front(first, 0), *_front(sizes[1:], 1))
    numbers = (*numbers, *given, *places[1:])
    constants = rows.shape[1], torch.iinfo(keys.dtype).max
    operands = [rows, order, keys, coarse_order, table, back]
    call = _call("resample_kernels.onto", operands, numbers, constants, LOOKED_UP)
    _launch((_programs(len(rows), LOOKED_UP) * chances, call))
    return table, back


def _front(numbers: Sequence[int], missing: int) -> list[int]:
    """One number for each of the kernels' four axes; leading axes may be missing."""
    return [missing] * (KERNEL_AXES - len(numbers)) + list(numbers)


def _programs(count: int, tile: Tile) -> int:
    return -(-count // tile.blocks[-1])


def _launch(*launches: tuple[int, Call]) -> None:
    """Launch kernels, each with its number of programs, in order; compile new ones together."""
    calls = [call for _, call in launches]
    with current_device(_first(calls[0].tensors)):
        if len(calls) > 1 and not all(call.kernel.compiled for call in calls):
            compile_together(calls)
        for programs, (kernel, operands, numbers) in launches:
            kernel(programs, operands, numbers)


def _call(
    name: str,
    operands: Sequence[Tensor | None],
    numbers: Ints,
    constants: tuple[Any, ...],
    tile: Tile,
) -> Call:
    """A call of a kernel by its name; numbers have declared types and are not specialised."""
    dtypes = [None if t is None else t.dtype for t in operands]
    device = _first(operands).device
    kernel = kernel_for(f"maps.gpu.{name}_kernel", (), constants, tile, device, *dtypes)
    return Call(kernel, operands, numbers)


def _first(operands: Sequence[Tensor | None]) -> Tensor:
    first = operands[0]
    assert first is not None
    return first
