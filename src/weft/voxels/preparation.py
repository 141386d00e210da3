"""What a sparse convolution needs of its table beside it: sorted tiles of rows, and lists of pairs.

Everything is sized by K and N alone: counts of pairs stay on the GPU, the host never waits.  It is
made once for a table and kept with it.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.cache import TensorCache
from weft.core.generated import written
from weft.core.launcher import Call, Kernel, Tile, compile_together, current_device

__all__ = [
    "MOST_SORTED",
    "PANEL",
    "Pairs",
    "Tiles",
    "call_for_pairs",
    "call_for_shares",
    "calls_for_tiles",
    "kernel_for",
    "padded",
    "pairs_of",
    "prepare",
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
        parts: rows of which the search of the table made each word of a mask.

    Those with several axes are flat here, and may be longer.
    """

    rows: Tensor
    lists: Tensor
    halves: Tensor
    turns: tuple[Tensor | None, Tensor | None]
    masks: Tensor
    starts: Tensor
    totals: Tensor
    parts: int


class Pairs(NamedTuple):
    """Pairs by offset, in canonical order.

    Args:
        inputs: rows read; there is room for K N, what lies past the last pair is not defined.
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
    module, function = name.split(".")
    return Kernel(written(f"weft.voxels.{module}", function), numbers, constants, tile)


def prepare(table: Tensor, order: Tensor | None, gradient: bool) -> None:
    """Make now what a convolution and, with gradient, its weight's gradient keep of a table."""
    with current_device(table):
        if gradient:
            pairs_of(table, order)
        else:
            tiles_of(table, order)


def tiles_of(table: Tensor, order: Tensor | None, parts: Tensor | None = None) -> Tiles:
    """The sorted tiles of a table, on the current device.

    Args:
        table: (K, N) int32, −1 for none.
        order: (N,) the rows of its columns; None: they stand so.
        parts: (parts, N) int32, which joined are the masks of the columns, bit k for a row at
            offset k, of tables of up to 32 offsets: a search leaves them.
    """
    return _TILES.get((table, order), None, lambda: _make_tiles(table.contiguous(), order, parts))


def pairs_of(table: Tensor, order: Tensor | None) -> Pairs:
    """The pairs of a table by offset, on the current device."""
    made = tiles_of(table, order)
    return _PAIRS.get((table, order), None, lambda: _make_pairs(table.contiguous(), order, made))


class _Recipe(NamedTuple):
    """The kernels that prepare tables of one kind, and the dtype of the keys that they sort."""

    mask: Kernel
    key: Kernel
    rank: Kernel
    panel: Kernel
    tally: Kernel
    pair: Kernel
    keys: torch.dtype


@functools.lru_cache(maxsize=256)
def _kernels(
    device: torch.device,
    k: int,
    parts: int,
    near_bits: int,
    in_order: bool,
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
        wide: whether K N reaches 2^31.
        few: whether rows are ranked, not sorted.
    """
    keys = torch.int64 if k + near_bits > 31 else torch.int32
    most, offsets, kind = torch.iinfo(keys).max, padded(k), (device, in_order)
    bits = min(k, most.bit_length() - near_bits)
    return _Recipe(
        kernel_for("preparation_kernels.mask_kernel", (), (k,), MASKED, device),
        kernel_for(
            "preparation_kernels.key_kernel",
            (),
            (k, parts, bits, offsets, max(16, 8192 // offsets), NEAR),
            KEYED,
            *kind,
        ),
        kernel_for("preparation_kernels.rank_kernel", (), (most,), RANKED, device),
        kernel_for("preparation_kernels.list_kernel", (), (k, wide), Tile((), 1), *kind, few),
        kernel_for("preparation_kernels.tally_kernel", (), (k,), Tile((1024,), 8), *kind),
        kernel_for(
            "preparation_kernels.pair_kernel", (), (k, offsets, wide), Tile((PANEL,)), *kind
        ),
        keys,
    )


def _recipe(table: Tensor, order: Tensor | None, parts: int) -> _Recipe:
    k, count = table.shape
    near_bits = (-(-count // NEAR) - 1).bit_length()
    wide = k * (count + PANEL) >= 2**31
    return _kernels(table.device, k, parts, near_bits, order is None, wide, count <= FEW)


def calls_for_tiles(table: Tensor, order: Tensor | None, parts: int = 0) -> list[Call]:
    """What `tiles_of` calls; any table of int32 stands for those that are not there yet.

    Args:
        table: (K, N); its numbers are not read.
        order: see there.
        parts: how many of them a search leaves; 0: none, the masks are those of the table.
    """
    if _TILES.keeps((table, order), None):
        return []
    recipe, few = _recipe(table, order, parts or 1), table.shape[1] <= FEW
    keys = table.new_empty(0, dtype=recipe.keys)
    by_mask = table if few else table.new_empty(0, dtype=torch.int64)
    calls = [
        Call(recipe.key, (table, table if parts > 1 else None, keys, table), (2, 2)),
        Call(recipe.panel, (table, table, order, by_mask, table, table, table), (2,)),
        Call(recipe.tally, (table,) * 5, (2,)),
    ]
    if few:
        calls.append(Call(recipe.rank, (keys, table), (2,)))
    if not parts:
        calls.append(Call(recipe.mask, (table, table), (2,)))
    return calls


def call_for_pairs(table: Tensor, order: Tensor | None) -> Call:
    """What `pairs_of` calls beside."""
    parts = tiles_of(table, order).parts if _TILES.keeps((table, order), None) else 1
    recipe = _recipe(table, order, parts)
    return Call(recipe.pair, (table, table, order, *(table,) * 4), (2, 2))


def _make_tiles(table: Tensor, order: Tensor | None, found: Tensor | None) -> Tiles:
    k, count = table.shape
    words, panels = -(-k // 32), -(-count // PANEL)
    parts = 1 if found is None else found.shape[0]
    recipe = _recipe(table, order, parts)
    if not recipe.tally.compiled:
        compile_together(calls_for_tiles(table, order, 0 if found is None else parts))
    turned = panels * PANEL <= MOST_SORTED
    left = found is not None and parts == 1  # a search has left the masks themselves
    own = 0 if left else words * count
    sizes = [own, k * panels, k, panels * PANEL, 2 * panels * words, panels * k * PANEL]
    pieces = _ints(table, [*sizes, 2 * panels, panels] if turned else sizes)
    masks, starts, totals, slots, halves, lists, *turns = pieces
    if found is None:
        recipe.mask(words * -(-count // MASKED.blocks[0]), (table, masks), (count,))
        found = masks
    elif left:
        masks = found
    keys = table.new_empty(count, dtype=recipe.keys)
    joined = None if parts == 1 else masks
    recipe.key(-(-count // KEYED.blocks[0]), (found, joined, keys, starts), (count, panels))
    if count <= FEW:
        by_mask = table.new_empty(count)
        recipe.rank(-(-count // RANKED.blocks[0]), (keys, by_mask), (count,))
    else:
        by_mask = torch.sort(keys, stable=True)[1]
    recipe.panel(words * panels, (table, masks, order, by_mask, slots, lists, halves), (count,))
    long, longer = turns or (halves, halves)  # in their place: not written
    programs = k + (2 * (k + 1) if turned else 0)
    recipe.tally(programs, (starts, totals, halves, long, longer), (panels,))
    orders = (long, longer) if turned else (None, None)
    return Tiles(slots, lists, halves, orders, masks, starts, totals, parts)


def _ints(like: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Tables of int32 that share one allocation, each aligned to 16 bytes and as long or longer."""
    room = [size + -size % 4 for size in sizes]
    return torch.split_with_sizes(like.new_empty(sum(room), dtype=torch.int32), room)


def _make_pairs(table: Tensor, order: Tensor | None, made: Tiles) -> Pairs:
    k, count = table.shape
    panels = -(-count // PANEL)
    inputs, outputs = _ints(table, (k * count, k * count))
    tensors = (table, made.masks, order, made.starts, made.totals, inputs, outputs)
    _recipe(table, order, made.parts).pair(panels * -(-k // 16), tensors, (count, panels))
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


def call_for_shares(table: Tensor, shares: int) -> Call:
    """What `turns_of` calls."""
    return Call(_share_kernel(len(table), table.device), (table, table), (shares,))


def _share_kernel(k: int, device: torch.device) -> Kernel:
    return kernel_for(
        "preparation_kernels.share_kernel", (), (k, padded(k)), Tile((SHARES,)), device
    )


def padded(size: int) -> int:
    """The next power of two, at least 32."""
    return max(32, 1 << (size - 1).bit_length())
