"""What a sparse convolution needs of its table beside it: sorted tiles of rows, and lists of pairs.

Tiles are sized by K and N alone.  Lists of many rows' pairs have the size that they need: their
counts are known before the rows are sorted, and the host reads them while these are.  It is made
once for a table and kept with it.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import Call, Kernel, Tile, compile_together
from torchweft.core.printing.modules import written
from torchweft.core.tables.tensor_cache import TensorCache
from torchweft.voxels.grid.host_flags import Flags
from torchweft.voxels.grid.mirror import whole

__all__ = [
    "MOST_SORTED",
    "PANEL",
    "Pairs",
    "Remains",
    "Tiles",
    "call_for_pairs",
    "call_for_shares",
    "calls_for_tiles",
    "kernel_for",
    "padded",
    "pair_dtype",
    "pairs_of",
    "tiles_of",
    "turns_of",
]


PANEL = 128
"""Rows of a panel, see `layout`."""

NEAR = 2**20
"""Rows that are sorted by mask among themselves: neighbours whose sources stay in L2."""

MOST_SORTED = 2**18
"""Rows up to which tiles run longest first: with more, the last ones matter less than L2."""

SHARES = 32
"""Shares of pairs that one program places."""

FEW = 2**14
"""Rows up to which each is compared with all: the launches of a sort would take longer."""

MASKED, KEYED = Tile((256,)), Tile((1024,))
"""Rows whose masks are made together, and whose keys are: their pairs are counted by panels."""

SCANNED = Tile((1024,), 8)
"""Panels, or tiles, that a program goes over at once."""

RANKED = Tile((32, 256), 8)
"""Rows of a program, and of those it compares them with at once."""


class Tiles(NamedTuple):
    """Sorted rows in panels, see `layout`.

    Args:
        rows: (P * 128,) the row in each slot, −1 past the last.
        lists: (P, K, 128) the rows they read.
        halves: (2 P, words) the offsets that half a panel needs.
        turns: tiles of 64 and of 128 rows, longest first; None: as they stand.
        masks: (words, N) the offsets of each column of the table.
        starts: (K, panels) pairs of an offset before each 128 columns.
        totals: (K,) pairs of each offset.
        seen: where the host reads these; None: the rows are few, or nothing has run yet.

    Those with several axes are flat here, and may be longer.
    """

    rows: Tensor
    lists: Tensor
    halves: Tensor
    turns: tuple[Tensor | None, Tensor | None]
    masks: Tensor
    starts: Tensor
    totals: Tensor
    seen: Flags | None


class Pairs(NamedTuple):
    """Pairs by offset, in canonical order; of a mirrored table, of the offsets up to its centre.

    Args:
        inputs: rows read; what lies past the last pair is not defined.
        outputs: rows written.
        totals: (K,) pairs of each offset, perhaps longer.
        turns: of shares of the pairs, by how many shares: see `preparation_kernels.share_kernel`.
    """

    inputs: Tensor
    outputs: Tensor
    totals: Tensor
    turns: dict[int, Tensor]


_TILES: TensorCache[Tiles] = TensorCache()
_PAIRS: TensorCache[Pairs] = TensorCache()


@functools.lru_cache(maxsize=1024)
def kernel_for(
    name: str, numbers: tuple[int, ...], constants: tuple[Any, ...], tile: Tile, *_: Hashable
) -> Kernel:
    """One for each device, the dtypes of its tensors and which of them are None.

    `name` is a module of this package and its function; see `Kernel` for the rest.
    """
    module, function = name.rsplit(".", 1)
    return Kernel(written(f"torchweft.voxels.{module}", function), numbers, constants, tile)


@dataclass(slots=True)
class Remains:
    """What a search leaves beside a table, which its tiles are made of and which then goes.

    Args:
        rest: the rows that are not kept of a mirrored table.
        parts: (parts, N) int32, which joined are the masks of the columns, bit k for a row at
            offset k, of tables of up to 32 offsets.
    """

    rest: Tensor | None = None
    parts: Tensor | None = None


def tiles_of(
    table: Tensor, order: Tensor | None, offsets: int, left: Remains | None = None
) -> Tiles:
    """The sorted tiles of a table, on the current device.

    Args:
        table: (K, N) int32, −1 for none; or its first K // 2 + 1 rows, see `mirror`.
        order: (N,) the rows of its columns; None: they stand so.
        offsets: K.
        left: by a search, which is emptied.
    """

    def make() -> Tiles:
        kept, beside = table.contiguous(), left or Remains()
        if len(kept) < offsets and beside.rest is None:
            beside.rest = whole(kept, order, offsets)[len(kept) :].contiguous()
        return _make_tiles(kept, order, offsets, beside)

    return _TILES.get((table, order), None, make)


def pairs_of(table: Tensor, order: Tensor | None, offsets: int, mirrored: bool) -> Pairs:
    """The pairs of a table by offset, on the current device.

    mirrored: the pairs of offset K − 1 − k are those of k swapped, as in a submanifold layer with
    an odd kernel.  They are in the same order: what is listed are the offsets up to the centre.
    """
    made = tiles_of(table, order, offsets)

    def make() -> Pairs:
        return _make_pairs(table.contiguous(), order, made, offsets, mirrored)

    return _PAIRS.get((table, order), mirrored, make)


class _Recipe(NamedTuple):
    """The kernels that prepare tables of one kind, and the dtype of the keys that they sort."""

    mask: Kernel
    key: Kernel
    scan: Kernel
    rank: Kernel
    panel: Kernel
    turn: Kernel
    keys: torch.dtype


@functools.lru_cache(maxsize=256)
def _kernels(
    device: torch.device,
    k: int,
    parts: int,
    near_bits: int,
    in_order: bool,
    halved: bool,
    wide: bool,
    few: bool,
) -> _Recipe:
    """Of K offsets whose masks come in so many parts, with so many bits for numbers of neighbours.

    Args:
        device: of the tables.
        k: K.
        parts: rows that make a word of the masks.
        near_bits: of a key.
        in_order: whether the rows stand in canonical order.
        halved: whether half of the table is kept apart.
        wide: whether K N reaches 2^31.
        few: whether rows are ranked, not sorted.
    """
    keys = torch.int64 if k + near_bits > 31 else torch.int32
    most, offsets, kind = torch.iinfo(keys).max, padded(k), (device, in_order, halved)
    bits = min(k, most.bit_length() - near_bits)
    return _Recipe(
        kernel_for("maps_gpu.tile_kernels.mask_kernel", (), (k,), MASKED, device, halved),
        kernel_for(
            "maps_gpu.tile_kernels.key_kernel",
            (),
            (k, parts, bits, offsets, max(16, 8192 // offsets), NEAR),
            KEYED,
            *kind,
        ),
        kernel_for("maps_gpu.tile_kernels.scan_kernel", (), (), SCANNED, device),
        kernel_for("maps_gpu.tile_kernels.rank_kernel", (), (most,), RANKED, device),
        kernel_for("maps_gpu.tile_kernels.list_kernel", (), (k, wide), Tile((), 1), *kind, few),
        kernel_for("maps_gpu.tile_kernels.turn_kernel", (), (k,), SCANNED, device),
        keys,
    )


def _recipe(table: Tensor, order: Tensor | None, k: int, parts: int) -> _Recipe:
    count, halved = table.shape[1], len(table) < k
    near_bits = (-(-count // NEAR) - 1).bit_length()
    kind = table.device, k, parts, near_bits, order is None, halved
    return _kernels(*kind, _wide(k, count), count <= FEW)


def _wide(k: int, count: int) -> bool:
    """Whether entries are counted in int64."""
    return k * (count + PANEL) >= 2**31


def calls_for_tiles(
    table: Tensor, order: Tensor | None, offsets: int, parts: int = 0
) -> list[Call]:
    """What `tiles_of` calls; any table of int32 stands for those that are not there yet.

    Args:
        table: see there; its numbers are not read.
        order: see there.
        offsets: K.
        parts: how many of them a search leaves; 0: none, the masks are those of the table.
    """
    if _TILES.keeps((table, order), None):
        return []
    recipe, few = _recipe(table, order, offsets, parts or 1), table.shape[1] <= FEW
    rest = table if len(table) < offsets else None
    keys = table.new_empty(0, dtype=recipe.keys)
    by_mask = table if few else table.new_empty(0, dtype=torch.int64)
    calls = [
        Call(recipe.key, (table, table if parts > 1 else None, keys, table), (2, 2)),
        Call(recipe.scan, (table,) * 3, (2,)),
        Call(recipe.panel, (table, rest, table, order, by_mask, *(table,) * 3), (2,)),
    ]
    if _turned(table.shape[1]):
        calls.append(Call(recipe.turn, (table,) * 3, (2,)))
    if few:
        calls.append(Call(recipe.rank, (keys, table), (2,)))
    if not parts:
        calls.append(Call(recipe.mask, (table, rest, table), (2,)))
    return calls


def _turned(count: int) -> bool:
    """Whether so many rows are few enough for tiles to run longest first."""
    return -(-count // PANEL) * PANEL <= MOST_SORTED


def call_for_pairs(table: Tensor, order: Tensor | None, offsets: int, mirrored: bool) -> Call:
    """What `pairs_of` calls beside."""
    kernel = _pair_kernel(table, order, offsets, mirrored)
    pairs = table.new_empty(0, dtype=pair_dtype(table.shape[1], mirrored))
    return Call(kernel, (table, table, order, table, table, pairs, pairs), (2, 2))


def _listed(offsets: int, mirrored: bool) -> int:
    """Offsets whose pairs are listed."""
    return offsets // 2 + 1 if mirrored else offsets


def pair_dtype(count: int, mirrored: bool) -> torch.dtype:
    """Of rows in lists of pairs: with few of them, lists have room for all, and nobody waits.

    Of a table that is not mirrored, inputs may be more than its columns.
    """
    return torch.int16 if mirrored and count <= FEW else torch.int32


def _pair_kernel(table: Tensor, order: Tensor | None, offsets: int, mirrored: bool) -> Kernel:
    listed, count = _listed(offsets, mirrored), table.shape[1]
    constants = listed, padded(listed), _wide(listed, count)
    kind = table.device, order is None, pair_dtype(count, mirrored)
    return kernel_for("maps_gpu.tile_kernels.pair_kernel", (), constants, Tile((PANEL,)), *kind)


def _make_tiles(table: Tensor, order: Tensor | None, k: int, left: Remains) -> Tiles:
    """What is read for the last time is let go, and lists come last: memory is what they need."""
    count = table.shape[1]
    words, panels = -(-k // 32), -(-count // PANEL)
    parts = 0 if left.parts is None else len(left.parts)
    recipe = _recipe(table, order, k, parts or 1)
    if not recipe.panel.compiled:
        compile_together(calls_for_tiles(table, order, k, parts))
    own = 0 if parts == 1 else words * count  # else a search has left the masks themselves
    masks, starts, totals = _ints(table, (own, k * panels, k))
    if left.parts is None:
        recipe.mask(words * -(-count // MASKED.blocks[0]), (table, left.rest, masks), (count,))
    elif parts == 1:
        masks = left.parts
    by_mask, seen = _sorted(recipe, table, k, left, (masks, starts, totals))
    turned = _turned(count)
    sizes = [panels * PANEL, 2 * panels * words, panels * k * PANEL]
    slots, halves, lists, *turns = _ints(table, [*sizes, 2 * panels, panels] if turned else sizes)
    tensors = (table, left.rest, masks, order, by_mask, slots, lists, halves)
    recipe.panel(words * panels, tensors, (count,))
    orders: tuple[Tensor | None, Tensor | None] = (None, None)
    if turned:
        orders = turns[0], turns[1]
        recipe.turn(2 * (k + 1), (halves, *turns), (panels,))
    return Tiles(slots, lists, halves, orders, masks, starts, totals, seen)


def _sorted(
    recipe: _Recipe,
    table: Tensor,
    k: int,
    left: Remains,
    made: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Flags | None]:
    """(columns in the order of their masks, where the host sees the totals); fills what is made.

    made: masks, starts and totals.
    """
    masks, starts, totals = made
    count, panels = table.shape[1], -(-table.shape[1] // PANEL)
    keys = table.new_empty(count, dtype=recipe.keys)
    joined = masks if left.parts is not None and len(left.parts) > 1 else None
    tensors = (masks if left.parts is None else left.parts, joined, keys, starts)
    recipe.key(-(-count // KEYED.blocks[0]), tensors, (count, panels))
    del tensors
    left.parts = None
    seen = _scanned(recipe, k, count <= FEW, starts, totals, panels)
    if count > FEW:
        return torch.sort(keys, stable=True)[1], seen
    by_mask = table.new_empty(count)
    recipe.rank(-(-count // RANKED.blocks[0]), (keys, by_mask), (count,))
    return by_mask, seen


def _scanned(
    recipe: _Recipe, k: int, few: bool, starts: Tensor, totals: Tensor, panels: int
) -> Flags | None:
    """Makes starts and totals of counts; returns where the host will see the totals."""
    if few or _for_a_graph(totals):
        recipe.scan(k, (starts, totals, totals), (panels,))
        return None
    seen = Flags(totals.device, k + -k % 4)  # all aligned to 16 bytes, or code would differ
    recipe.scan(k, (starts, totals, seen.tensor), (panels,))
    seen.written()
    return seen


def _for_a_graph(tensor: Tensor) -> bool:
    """Whether kernels are noted down, not run: the host cannot wait for them."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _ints(
    like: Tensor, sizes: Sequence[int], dtype: torch.dtype = torch.int32
) -> tuple[Tensor, ...]:
    """Tables that share one allocation, each aligned to 16 bytes and as long or longer."""
    room = [size + -size % 8 for size in sizes]
    return torch.split_with_sizes(like.new_empty(sum(room), dtype=dtype), room)


def _make_pairs(
    table: Tensor, order: Tensor | None, made: Tiles, offsets: int, mirrored: bool
) -> Pairs:
    listed, count = _listed(offsets, mirrored), table.shape[1]
    kernel = _pair_kernel(table, order, offsets, mirrored)
    panels, room = -(-count // PANEL), listed * count
    if made.seen is not None and not _for_a_graph(table):
        room = sum(made.seen.numbers()[:listed])
    inputs, outputs = _ints(table, (room, room), pair_dtype(count, mirrored))
    tensors = (table, made.masks, order, made.starts, made.totals, inputs, outputs)
    kernel(panels * -(-listed // 16), tensors, (count, panels))
    return Pairs(inputs, outputs, made.totals, {})


def turns_of(pairs: Pairs, k: int, shares: int) -> Tensor | None:
    """Shares in their turns; 0: there are none."""
    if shares == 0:
        return None
    if shares not in pairs.turns:
        turns = pairs.totals.new_empty(shares)
        kernel = _share_kernel(k, turns.device)
        kernel(-(-shares // SHARES), (pairs.totals, turns), (shares,))
        pairs.turns[shares] = turns
    return pairs.turns[shares]


def call_for_shares(table: Tensor, offsets: int, shares: int) -> Call:
    """What `turns_of` calls."""
    return Call(_share_kernel(offsets, table.device), (table, table), (shares,))


def _share_kernel(k: int, device: torch.device) -> Kernel:
    return kernel_for(
        "maps_gpu.tile_kernels.share_kernel", (), (k, padded(k)), Tile((SHARES,)), device
    )


def padded(size: int) -> int:
    """The next power of two, at least 32."""
    return max(32, 1 << (size - 1).bit_length())
