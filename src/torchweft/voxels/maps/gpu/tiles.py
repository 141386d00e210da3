"""Sorted tiles of rows and lists of pairs, which convolution kernels read beside a table.

Their sizes follow from K and N alone.  Only the lists of many rows' pairs have the size that the
pairs need: the GPU counts pairs before it sorts the rows, and the host reads the counts during the
sort.  Tiles and pairs are built once for a table and cached with it.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchweft.core import private
from torchweft.core.gpu.launcher import Call, Kernel, Tile, compile_together
from torchweft.core.operators.call_cache import CallCache
from torchweft.core.printing.modules import written
from torchweft.core.recorded import varying
from torchweft.core.tables import TensorCache
from torchweft.errors import CaptureError

__all__ = [
    "ASKED",
    "LISTED",
    "MOST_SORTED",
    "PANEL",
    "Asked",
    "Flags",
    "HostTotals",
    "OffsetPairs",
    "SearchRemains",
    "Tiles",
    "call_for_pairs",
    "calls_for_tiles",
    "empty_pairs",
    "empty_rest",
    "fill_rest",
    "has_turns",
    "keep_pairs",
    "keep_tiles",
    "kernel_for",
    "num_listed",
    "padded",
    "pair_dtype",
    "pairs_of",
    "samples",
    "split_ints",
    "tiles_of",
    "tiles_of_parts",
]

PANEL = 128
"""Rows of a panel, see `tile_kernels`."""

ROWS_PER_SORT = 2**20
"""Rows are sorted by mask within blocks of this size, so that their sources stay in L2."""

MOST_SORTED = 2**18
"""Up to this many rows, tiles with most offsets run first; with more rows, L2 matters more."""

MOST_RANKED = 2**14
"""Up to this many rows, rows are ranked by comparing all pairs: sorting needs more launches."""

MASKED, KEYED = Tile((256,)), Tile((1024,))
"""Rows per program when masks and keys are computed; pairs are counted by panels."""

SCANNED = Tile((1024,), 8)
"""Panels, or tiles, per step of a program that scans them."""

RESTED = Tile((1024,))
"""Columns per program, of one offset, that finds the rest of a mirrored table."""

RANKED = Tile((32, 256), 8)
"""Rows per program, and rows compared with them in one step."""

LISTED = 16
"""Offsets per program that lists pairs."""

MASK_BITS = 32
"""Offsets whose bits a word of a mask holds."""


class Tiles(NamedTuple):
    """Sorted rows in panels, see `tile_kernels`.

    Args:
        rows: (P * 128,) the row in each slot, −1 past the last row.
        lists: (P, K, 128) input rows that each slot reads.
        halves: (2 P, words) the offsets that half a panel needs, as bits.
        turns: tiles of 64 and of 128 rows, those with most offsets first; None: in their order.
        masks: (words, N) the offsets of each column of the table, as bits.
        starts: (K, panels) pairs of an offset before each 128 columns.
        totals: (K,) pairs of each offset.
        seen: None: there are few rows, or a graph is being captured.

    Tensors with several axes are flat here, and may be longer.
    """

    rows: Tensor
    lists: Tensor
    halves: Tensor
    turns: tuple[Tensor | None, Tensor | None]
    masks: Tensor
    starts: Tensor
    totals: Tensor
    seen: HostTotals | None


class HostTotals(NamedTuple):
    """Totals in host memory, which those of several tables may share for one wait of the host.

    Args:
        flags: what kernels write.
        begin: the place of the first total.
    """

    flags: Flags
    begin: int = 0

    @property
    def tensor(self) -> Tensor:
        """What `scan_kernel` writes."""
        return self.flags.tensor[self.begin :]

    def read(self, offsets: int) -> list[int]:
        """The first totals, see `Flags.read`."""
        return self.flags.read()[self.begin : self.begin + offsets]


class OffsetPairs(NamedTuple):
    """Pairs by offset, in canonical order; of a mirrored table, of the offsets up to its centre.

    Args:
        inputs: rows that are read; undefined past the last pair.
        outputs: rows that are written.
        totals: (K,) pairs of each offset, may be longer.
    """

    inputs: Tensor
    outputs: Tensor
    totals: Tensor


@dataclass(slots=True)
class SearchRemains:
    """Tensors that a search leaves beside its table; tiles are built from them, and free them.

    Args:
        rest: the rows of a mirrored table that are not kept.
        parts: (parts, N) int32, whose bitwise OR is the mask of each column: bit k for a row at
            offset k; of tables of up to 32 offsets.
    """

    rest: Tensor | None = None
    parts: Tensor | None = None


Asked = tuple[Tensor, Tensor | None, int]
"""A table, its order and K: tiles that were built."""

ASKED = "tiles that were built"
"""The note of a run, see `planned.py`."""

_tile_cache: TensorCache[Tiles] = TensorCache()
_part_cache: TensorCache[tuple[Tiles, ...]] = TensorCache()
_pair_cache: TensorCache[OffsetPairs] = TensorCache()


@functools.lru_cache(maxsize=1024)
def kernel_for(
    name: str, numbers: tuple[int, ...], constants: tuple[Any, ...], tile: Tile, *_: Hashable
) -> Kernel:
    """The kernel for a device, the dtypes of its tensors, and which of them are None.

    Args:
        name: a module of this package and its function.
        numbers: see `Kernel`, as for the next two.
        constants: the leading constexprs.
        tile: the trailing ones.
    """
    module, function = name.rsplit(".", 1)
    return Kernel(written(f"torchweft.voxels.{module}", function), numbers, constants, tile)


def tiles_of(
    table: Tensor,
    order: Tensor | None,
    offsets: int,
    left: SearchRemains | None = None,
    seen: HostTotals | None = None,
) -> Tiles:
    """The sorted tiles of a table, on the current device.

    Args:
        table: (K, N) int32, −1 for none; or its first K // 2 + 1 rows, see `whole`.
        order: (N,) the row of each column; None: columns are rows.
        offsets: K.
        left: what the search of the table left; it is emptied.
        seen: where the totals of many rows come to stand; None: in memory of their own.
    """

    def make() -> Tiles:
        kept, beside = table.contiguous(), left or SearchRemains()
        if beside.rest is None:
            beside.rest = _rest_of(kept, order, offsets)
        _note(table, order, offsets)
        return _make_tiles(kept, order, offsets, beside, seen)

    return _tile_cache.get((table, order), None, make)


def tiles_of_parts(
    table: Tensor, order: Tensor | None, offsets: int, parts: int
) -> tuple[Tiles, ...]:
    """The tiles of each third, or other equal part, of at most 31 offsets.

    Rows are sorted by their masks of that part alone: its tiles have fewer offsets that only some
    of their rows have.

    Args:
        table: see `tiles_of`, as for the next two.
        order: of the columns.
        offsets: K.
        parts: how many.
    """

    def make() -> tuple[Tiles, ...]:
        kept, masks = table.contiguous(), tiles_of(table, order, offsets).masks[: table.shape[1]]
        rest = _rest_of(kept, order, offsets)
        ends = [offsets * number // parts for number in range(parts + 1)]
        bits = [(1 << end) - (1 << begin) for begin, end in itertools.pairwise(ends)]
        left = [SearchRemains(rest, (masks & of_part)[None]) for of_part in bits]
        return tuple(_make_tiles(kept, order, offsets, remains, None) for remains in left)

    return _part_cache.get((table, order), parts, make)


def _note(table: Tensor, order: Tensor | None, offsets: int) -> None:
    """Note tiles of arguments that later runs with them will ask for, see `planned.py`."""
    run = varying(table)
    if run is not None and run.notes is not None and (order is None or run.varies((order,))):
        run.notes.setdefault(ASKED, []).append((table, order, offsets))


def empty_rest(table: Tensor, offsets: int) -> Tensor:
    """Memory for the rows of a mirrored table that are not kept."""
    return table.new_empty(offsets - len(table), table.shape[1])


def _rest_of(table: Tensor, order: Tensor | None, offsets: int) -> Tensor | None:
    """The rows of a mirrored table that are not kept; None: all are."""
    if len(table) == offsets:
        return None
    rest = empty_rest(table, offsets)
    fill_rest(table, order, rest)
    return rest


def fill_rest(table: Tensor, order: Tensor | None, rest: Tensor) -> None:
    """Write the rows of a mirrored table that are not kept, see `whole`."""
    place, count = order, table.shape[1]
    if order is not None:
        column = torch.arange(count, dtype=torch.int32, device=order.device)
        place = torch.empty_like(order).index_copy_(0, order.long(), column)
    kernel = _rest_kernel(table, order, len(rest))
    rest.fill_(-1)
    kernel(len(rest) * -(-count // RESTED.blocks[0]), (table, order, place, rest), (count,))


def keep_tiles(table: Tensor, order: Tensor | None, tiles: Tiles) -> None:
    """Keep tiles that were built elsewhere."""
    _tile_cache.get((table, order), None, lambda: tiles)


def keep_pairs(table: Tensor, order: Tensor | None, mirrored: bool, pairs: OffsetPairs) -> None:
    """Keep pairs that were listed elsewhere."""
    _pair_cache.get((table, order), mirrored, lambda: pairs)


def pairs_of(table: Tensor, order: Tensor | None, offsets: int, mirrored: bool) -> OffsetPairs:
    """The pairs of a table by offset, on the current device.

    mirrored: the pairs of offset K − 1 − k are those of k swapped, in the same order, as in a
    submanifold layer with an odd kernel.  Only the offsets up to the centre are then listed.
    """
    made = tiles_of(table, order, offsets)

    def make() -> OffsetPairs:
        return _make_pairs(table.contiguous(), order, made, offsets, mirrored)

    return _pair_cache.get((table, order), mirrored, make)


class _TileKernels(NamedTuple):
    """The kernels that build tiles, and the dtype of the keys that they sort."""

    mask: Kernel
    key: Kernel
    scan: Kernel
    rank: Kernel
    panel: Kernel
    turn: Kernel
    keys: torch.dtype


_tile_kernels: CallCache[_TileKernels] = CallCache()


def _kernels_of(table: Tensor, order: Tensor | None, k: int, parts: int) -> _TileKernels:
    """The kernels for K offsets whose masks are the bitwise OR of parts, cached by signature."""
    count, device, halved = table.shape[1], table.device, len(table) < k
    near_bits = (
        -(-count // ROWS_PER_SORT) - 1
    ).bit_length()  # of a key, for the number of its block
    few, wide, parts = count <= MOST_RANKED, _wide(k, count), max(parts, 1)
    signature = (device, order is None, halved, k, parts, near_bits, few, wide)
    found = _tile_kernels.get(signature)
    if found is None:
        keys = torch.int64 if k + near_bits > 31 else torch.int32
        most, offsets, kind = torch.iinfo(keys).max, padded(k), signature[:3]
        bits = min(k, most.bit_length() - near_bits)
        key_constants = (k, parts, bits, offsets, samples(offsets), ROWS_PER_SORT)
        found = _TileKernels(
            _kernel("mask", (k,), MASKED, device, halved),
            _kernel("key", key_constants, KEYED, *kind),
            _kernel("scan", (), SCANNED, device),
            _kernel("rank", (most,), RANKED, device),
            _kernel("list", (k, wide), Tile((), 1), *kind, few),
            _kernel("turn", (k,), SCANNED, device),
            keys,
        )
        _tile_kernels.keep(signature, found)
    return found


def _kernel(name: str, constants: tuple[Any, ...], tile: Tile, *kind: Hashable) -> Kernel:
    return kernel_for(f"maps.gpu.tile_kernels.{name}_kernel", (), constants, tile, *kind)


def samples(offsets: int) -> int:
    """Columns of a sample that finds how often each of the (padded) offsets has a row."""
    return max(16, 8192 // offsets)


def _wide(k: int, count: int) -> bool:
    """Whether entries are counted in int64."""
    return k * (count + PANEL) >= 2**31


def calls_for_tiles(
    table: Tensor, order: Tensor | None, offsets: int, parts: int | None = None
) -> list[Call]:
    """The calls of `tiles_of`, where any int32 tensor stands for one that does not exist yet.

    Args:
        table: see `tiles_of`; its values are not read.
        order: see `tiles_of`.
        offsets: K.
        parts: how many of them a search leaves; 0: masks are computed from the table; None: no
            search leaves anything, so the rest of half a table is found too.
    """
    if _tile_cache.keeps((table, order), None):
        return []
    left, few = parts or 0, table.shape[1] <= MOST_RANKED
    made = _kernels_of(table, order, offsets, left)
    rest = table if len(table) < offsets else None
    keys = table.new_empty(0, dtype=made.keys)
    by_mask = table if few else table.new_empty(0, dtype=torch.int64)
    calls = [
        Call(made.key, (table, table if left > 1 else None, keys, table), (2, 2)),
        Call(made.scan, (table,) * 3, (2,)),
        Call(made.panel, (table, rest, table, order, by_mask, *(table,) * 3), (2,)),
    ]
    if has_turns(table.shape[1]):
        calls.append(Call(made.turn, (table,) * 3, (2,)))
    if few:
        calls.append(Call(made.rank, (keys, table), (2,)))
    if not left:
        calls.append(Call(made.mask, (table, rest, table), (2,)))
    if parts is None and rest is not None:
        kernel = _rest_kernel(table, order, offsets // 2)
        calls.append(Call(kernel, (table, order, order, table), (2,)))
    return calls


def _rest_kernel(table: Tensor, order: Tensor | None, rows: int) -> Kernel:
    return _kernel("rest", (rows,), RESTED, table.device, order is None)


def has_turns(count: int) -> bool:
    """Whether tiles with most offsets run first."""
    return -(-count // PANEL) * PANEL <= MOST_SORTED


def call_for_pairs(table: Tensor, order: Tensor | None, offsets: int, mirrored: bool) -> Call:
    """The call of `pairs_of` after those of `tiles_of`."""
    kernel, _ = _pair_kernel(table, order, offsets, mirrored)
    pairs = table.new_empty(0, dtype=pair_dtype(table.shape[1], mirrored))
    return Call(kernel, (table, table, order, table, table, pairs, pairs), (2, 2))


def pair_dtype(count: int, mirrored: bool) -> torch.dtype:
    """The dtype of rows in lists of pairs; int16 lists have room for all pairs, so no host wait.

    A table that is not mirrored may have more inputs than columns.
    """
    return torch.int16 if mirrored and count <= MOST_RANKED else torch.int32


def _pair_kernel(
    table: Tensor, order: Tensor | None, offsets: int, mirrored: bool
) -> tuple[Kernel, int]:
    """The kernel, and the number of offsets whose pairs are listed."""
    listed, count = num_listed(offsets, mirrored), table.shape[1]
    constants = listed, padded(listed), _wide(listed, count)
    kind = table.device, order is None, pair_dtype(count, mirrored)
    return _kernel("pair", constants, Tile((PANEL,)), *kind), listed


def num_listed(offsets: int, mirrored: bool) -> int:
    """The number of offsets whose pairs are listed."""
    return offsets // 2 + 1 if mirrored else offsets


def _make_tiles(
    table: Tensor, order: Tensor | None, k: int, left: SearchRemains, seen: HostTotals | None
) -> Tiles:
    """Tensors are freed after their last use, and lists are allocated last, to limit memory."""
    count = table.shape[1]
    words, panels = -(-k // MASK_BITS), -(-count // PANEL)
    parts = 0 if left.parts is None else len(left.parts)
    made = _kernels_of(table, order, k, parts)
    if not made.panel.compiled:
        compile_together(calls_for_tiles(table, order, k, parts))
    own = 0 if parts == 1 else words * count  # a single part is the masks
    masks, starts, totals = split_ints(table, (own, k * panels, k))
    if left.parts is None:
        made.mask(words * -(-count // MASKED.blocks[0]), (table, left.rest, masks), (count,))
    elif parts == 1:
        masks = left.parts
    if seen is None and count > MOST_RANKED and not _unread(table):
        # aligned to 16 bytes, as code is specialised
        seen = HostTotals(Flags(totals.device, k + -k % 4))
    by_mask = _sorted(made, table, k, left, (masks, starts, totals), seen)
    turned = has_turns(count)
    sizes = [panels * PANEL, 2 * panels * words, panels * k * PANEL]
    slots, halves, lists, *turns = split_ints(
        table, [*sizes, 2 * panels, panels] if turned else sizes
    )
    tensors = (table, left.rest, masks, order, by_mask, slots, lists, halves)
    made.panel(words * panels, tensors, (count,))
    orders: tuple[Tensor | None, Tensor | None] = (None, None)
    if turned:
        orders = turns[0], turns[1]
        made.turn(2 * (k + 1), (halves, *turns), (panels,))
    return Tiles(slots, lists, halves, orders, masks, starts, totals, seen)


def _sorted(
    made: _TileKernels,
    table: Tensor,
    k: int,
    left: SearchRemains,
    filled: tuple[Tensor, Tensor, Tensor],
    seen: HostTotals | None,
) -> Tensor:
    """Columns in the order of their masks; fills the given tensors.

    filled: masks (where they are computed from parts), starts and totals.
    """
    masks, starts, totals = filled
    count, panels = table.shape[1], -(-table.shape[1] // PANEL)
    keys = table.new_empty(count, dtype=made.keys)
    joined = masks if left.parts is not None and len(left.parts) > 1 else None
    tensors = (masks if left.parts is None else left.parts, joined, keys, starts)
    made.key(-(-count // KEYED.blocks[0]), tensors, (count, panels))
    del tensors
    left.parts = None
    made.scan(k, (starts, totals, totals if seen is None else seen.tensor), (panels,))
    if seen is not None:
        seen.flags.written()
    if count > MOST_RANKED:
        return torch.sort(keys, stable=True)[1]
    by_mask = table.new_empty(count)
    made.rank(-(-count // RANKED.blocks[0]), (keys, by_mask), (count,))
    return by_mask


def _unread(table: Tensor) -> bool:
    """Whether the host may not wait for numbers of pairs: a record reads the table, or will."""
    return _captured(table) or varying(table) is not None


def _captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, so that the host cannot wait for kernels."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def split_ints(
    like: Tensor, sizes: Sequence[int], dtype: torch.dtype = torch.int32
) -> tuple[Tensor, ...]:
    """Tensors of one allocation, each aligned to 16 bytes and at least as long as its size."""
    room = [size + -size % 8 for size in sizes]
    return torch.split_with_sizes(like.new_empty(sum(room), dtype=dtype), room)


def _make_pairs(
    table: Tensor, order: Tensor | None, made: Tiles, offsets: int, mirrored: bool
) -> OffsetPairs:
    kernel, listed = _pair_kernel(table, order, offsets, mirrored)
    count, pairs = table.shape[1], empty_pairs(table, made, offsets, mirrored)
    panels = -(-count // PANEL)
    tensors = (table, made.masks, order, made.starts, made.totals, pairs.inputs, pairs.outputs)
    kernel(panels * -(-listed // LISTED), tensors, (count, panels))
    return pairs


def empty_pairs(table: Tensor, made: Tiles, offsets: int, mirrored: bool) -> OffsetPairs:
    """Memory for the pairs of a table, whose number the host may wait for."""
    listed, count = num_listed(offsets, mirrored), table.shape[1]
    room = listed * count
    if made.seen is not None and not _unread(table):
        room = sum(made.seen.read(listed))
    inputs, outputs = split_ints(table, (room, room), pair_dtype(count, mirrored))
    return OffsetPairs(inputs, outputs, made.totals)


def padded(size: int) -> int:
    """The next power of two, at least 32."""
    return max(32, 1 << (size - 1).bit_length())


class Flags:
    """Integers that kernels write into host memory, so that reading them copies nothing.

    Coordinates have flags for rows outside of their box, rows that descend, and repeated keys; a
    table has its numbers of pairs.  The memory comes from a pool and is never freed, since a kernel
    may still write to it: memory that was waited for is reused first.
    """

    tensor: Tensor
    WIDTH, MANY = 4, 256
    _free: ClassVar[dict[tuple[torch.device, int], deque[Any]]] = {}

    def __init__(self, device: torch.device, width: int = WIDTH) -> None:
        self._device, on_gpu = device, device.type == "cuda"
        self._pool = self._free.setdefault((device, width), deque())
        if not self._pool:
            shape = self.MANY, width
            memory = torch.zeros(shape, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
            event: Any = torch.cuda.Event if on_gpu else lambda: None
            self._pool.extend((row, row.numpy(), event(), True) for row in memory)
        self.tensor, self._seen, self._event, self._waited = self._pool.pop()
        self._wait()
        self._seen.fill(0)

    def written(self) -> None:
        """Note that the kernels launched by now write the flags."""
        if self._event is not None:
            handle = private.raw_stream(self._device.index)
            self._event.record(_stream(self._device, handle))
        self._waited = False

    def read(self) -> list[int]:
        """The flags; the host waits for the kernels that write them, not for later ones."""
        self._wait()
        found: list[int] = self._seen.tolist()
        return found

    def _wait(self) -> None:
        if not self._waited and self._event is not None:
            if _captured(self.tensor):
                raise CaptureError(
                    "coordinates or a kernel map are built while a CUDA graph is recorded: the "
                    "host must wait for their numbers of rows. Build the SparseTensor outside of "
                    "the function, call the network on it once, and let the function take the "
                    "features: network(tensor.replace(feats))."
                )
            self._event.synchronize()
        self._waited = True

    def __del__(self) -> None:
        put_back = self._pool.append if self._waited else self._pool.appendleft
        put_back((self.tensor, self._seen, self._event, self._waited))


@functools.lru_cache(maxsize=64)
def _stream(device: torch.device, handle: int) -> torch.cuda.Stream:
    """The current stream of a device, cached by its handle: torch takes longer to build one."""
    return torch.cuda.current_stream(device)
