"""The Triton path of the sparse convolution: what is prepared from its tables, and the launches.

Everything is sized by K, N and C alone: counts of pairs stay on the GPU, the host never waits.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.cache import TensorCache
from weft.core.launcher import Call, Kernel, Tile, compile_together, current_device
from weft.voxels import kernels, preparation_kernels, tiles
from weft.voxels.epilogue import PLAIN, Epilogue
from weft.voxels.map_launch import PARTS

__all__ = ["convolve", "prepare", "weight_gradient"]

PANEL = 128
"""Rows of a panel, see `layout`."""

NEAR = 2**20
"""Rows that are sorted by mask among themselves: neighbours whose sources stay in L2."""

MOST_SORTED = 2**18
"""Rows up to which tiles run longest first: with more, the last ones matter less than L2."""

BLOCK = 512
"""Rows whose keys are made together; their pairs are counted and compacted by panels."""

SHARES = 32
"""Shares of pairs that one program places."""

FEW = 2**14
"""Rows up to which each is compared with all: the launches of a sort would take longer."""

RANKED = Tile((32, 256), 8)
"""Rows of a program, and of those it compares them with at once."""

REDUCED = Tile((16, 128))
"""Shares and numbers that a program adds up at once."""


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
        parts: rows of which the search of the table made a mask.

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
def _kernel(
    kernel: Any, numbers: tuple[int, ...], constants: tuple[Any, ...], tile: Tile, *_: Hashable
) -> Kernel:
    """One for each device, the dtypes of its tensors and which of them are None."""
    return Kernel(kernel, numbers, constants, tile)


def prepare(table: Tensor, order: Tensor | None, gradient: bool) -> None:
    """Make now what `convolve` and, with gradient, `weight_gradient` keep of a table."""
    with current_device(table):
        _tiles_of(table, order)
        if gradient:
            _pairs_of(table, order)


def _tiles_of(table: Tensor, order: Tensor | None) -> Tiles:
    return _TILES.get((table, order), None, lambda: _make_tiles(table.contiguous(), order))


def _pairs_of(table: Tensor, order: Tensor | None) -> Pairs:
    made = _tiles_of(table, order)
    return _PAIRS.get((table, order), None, lambda: _make_pairs(table.contiguous(), order, made))


def _parts_of(table: Tensor) -> Tensor:
    """(parts, N): one row for each word of masks, or more where the search has left them."""
    return PARTS.get((table,), None, lambda: _make_parts(table))


def _make_parts(table: Tensor) -> Tensor:
    k, count = table.shape
    words = -(-k // 32)
    masks = table.new_empty((words, count))
    mask = _kernel(preparation_kernels.mask_kernel, (), (k,), Tile((256,)), table.device)
    mask(words * -(-count // 256), (table, masks), (count,))
    return masks


class _Preparation(NamedTuple):
    """The kernels that prepare tables of one kind, and the dtype of the keys that they sort."""

    key: Kernel
    rank: Kernel
    panel: Kernel
    tally: Kernel
    pair: Kernel
    keys: torch.dtype


@functools.lru_cache(maxsize=256)
def _preparation(
    device: torch.device,
    k: int,
    parts: int,
    near_bits: int,
    in_order: bool,
    wide: bool,
    few: bool,
) -> _Preparation:
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
    most, offsets, kind = torch.iinfo(keys).max, _padded(k), (device, in_order)
    bits = min(k, most.bit_length() - near_bits)
    return _Preparation(
        _kernel(
            preparation_kernels.key_kernel,
            (),
            (k, parts, bits, offsets, max(16, 8192 // offsets), NEAR),
            Tile((BLOCK,), 8),
            *kind,
        ),
        _kernel(preparation_kernels.rank_kernel, (), (most,), RANKED, device),
        _kernel(preparation_kernels.list_kernel, (), (k, wide), Tile((), 1), *kind, few),
        _kernel(preparation_kernels.tally_kernel, (), (k,), Tile((1024,), 8), *kind),
        _kernel(preparation_kernels.pair_kernel, (), (k, offsets, wide), Tile((PANEL,)), *kind),
        keys,
    )


def _recipe(table: Tensor, order: Tensor | None, parts: int) -> _Preparation:
    k, count = table.shape
    near_bits = (-(-count // NEAR) - 1).bit_length()
    wide = k * (count + PANEL) >= 2**31
    return _preparation(table.device, k, parts, near_bits, order is None, wide, count <= FEW)


def _calls_for_tiles(table: Tensor, order: Tensor | None) -> list[Call]:
    """What `_make_tiles` calls; any table of int32 stands for those that are not there yet."""
    parts = _parts_of(table).shape[0] // -(-table.shape[0] // 32)
    recipe, few = _recipe(table, order, parts), table.shape[1] <= FEW
    keys = table.new_empty(0, dtype=recipe.keys)
    by_mask = table if few else table.new_empty(0, dtype=torch.int64)
    calls = [
        Call(recipe.key, (table, None if parts == 1 else table, keys, table), (2, 2)),
        Call(recipe.panel, (table, table, order, by_mask, table, table, table), (2,)),
        Call(recipe.tally, (table,) * 5, (2, 2)),
    ]
    return [*calls, Call(recipe.rank, (keys, table), (2,))] if few else calls


def _make_tiles(table: Tensor, order: Tensor | None) -> Tiles:
    k, count = table.shape
    words, panels = -(-k // 32), -(-count // PANEL)
    found = _parts_of(table)
    parts = found.shape[0] // words
    recipe = _recipe(table, order, parts)
    if not recipe.tally.compiled:
        compile_together(_calls_for_tiles(table, order))
    turns = 3 * panels if panels * PANEL <= MOST_SORTED else 0
    sizes = (0 if parts == 1 else count, k * panels, k * panels, k, panels * PANEL)
    pieces = _ints(table, (*sizes, 2 * panels * words, turns, panels * k * PANEL))
    masks, counts, starts, totals, slots, halves, turned, lists = pieces
    masks, joined = (found, None) if parts == 1 else (masks, masks)
    keys = table.new_empty(count, dtype=recipe.keys)
    recipe.key(-(-count // BLOCK), (found, joined, keys, counts), (count, panels))
    if count <= FEW:
        by_mask = table.new_empty(count)
        recipe.rank(-(-count // RANKED.blocks[0]), (keys, by_mask), (count,))
    else:
        by_mask = torch.sort(keys, stable=True)[1]
    recipe.panel(words * panels, (table, masks, order, by_mask, slots, lists, halves), (count,))
    programs = k + (2 * (k + 1) if turns else 0)
    recipe.tally(programs, (counts, starts, totals, halves, turned), (panels, panels))
    longest = (turned[: 2 * panels], turned[2 * panels : turns]) if turns else (None, None)
    return Tiles(slots, lists, halves, longest, masks, starts, totals, parts)


def _ints(like: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
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


def _turns_of(pairs: Pairs, k: int, shares: int) -> Tensor | None:
    """Shares in their turns; 0: there are none."""
    if shares == 0:
        return None
    if shares not in pairs.turns:
        turns = pairs.totals.new_empty(shares)
        kernel = _share_kernel(k, turns.device)
        kernel(-(-shares // SHARES), (pairs.totals, turns), (shares,))
        pairs.turns[shares] = turns
    return pairs.turns[shares]


def _share_kernel(k: int, device: torch.device) -> Kernel:
    return _kernel(preparation_kernels.share_kernel, (), (k, _padded(k)), Tile((SHARES,)), device)


def _padded(size: int) -> int:
    """The next power of two, at least 32."""
    return max(32, 1 << (size - 1).bit_length())


def convolve(
    x: Tensor,
    weight: Tensor,
    table: Tensor,
    order: Tensor | None,
    *,
    groups: int,
    precision: str,
    after: Epilogue = PLAIN,
    flip: bool = False,
) -> Tensor:
    """y[o] = Σ_k x[sources[k,o]] @ weight[k], summed over k in one order for all rows.

    Args:
        x: (N_in, C_in), any strides.
        weight: (K, C_in / groups, C_out), any strides.
        table: (K, N_out) int32, −1 for none: sources[k, order[i]] in column i.
        order: (N_out,) the output rows in canonical order; None: they stand so.
        groups: of channels.
        precision: of float32, "ieee", "tf32" or "tf32x3".
        after: what is done to the sums before they are rounded.
        flip: weight[K − 1 − k] instead of weight[k].  The input gradient of a submanifold
            convolution with an odd kernel needs no table of its own.

    Returns:
        (N_out, C_out) in x's dtype, rounded once.
    """
    rows, d = table.shape[1], weight.shape[2]
    y = x.new_empty(rows, d)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    scale, shift, residual = (None if t is None else t.contiguous() for t in after[:3])
    with current_device(x):
        slots = -(-rows // PANEL) * PANEL
        extents = (_extent(x), y.numel(), weight.numel(), slots * len(weight))
        wide = max(extents) >= 2**31
        precision = precision if x.dtype == torch.float32 else "ieee"
        kinds = tuple(None if t is None else t.dtype for t in (scale, shift, residual))
        flags = _Flags(flip, wide, after.activation, kinds, slots > MOST_SORTED)
        stride = x.stride(0)
        recipe = _convolver(
            x.device, x.dtype, weight.shape, weight.stride(), stride, groups, precision, flags
        )
        kernel, columns, parts = recipe
        operands = (x, weight, y, scale, shift, residual)
        if not kernel.compiled:
            table = table.contiguous()
            turns = None if flags.as_they_stand else table
            first = Call(kernel, (*operands, table, table, table, turns))
            compile_together([first, *_calls_for_tiles(table, order)])
        made = _tiles_of(table, order)
        tables = (made.lists, made.halves, made.rows, made.turns[parts - 1])
        kernel(slots // (PANEL // 2) // parts * columns, (*operands, *tables))
    return y


class _Flags(NamedTuple):
    """What a kernel of `convolve` is compiled for beside shapes.

    Args:
        flip, wide, activation: its constants.
        after: the dtypes of scale, shift and residual, None where one is not there.
        as_they_stand: whether tiles run in their own order.
    """

    flip: bool
    wide: bool
    activation: str | None
    after: tuple[torch.dtype | None, ...]
    as_they_stand: bool


@functools.lru_cache(maxsize=1024)
def _convolver(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    strides: tuple[int, int, int],
    stride: int,
    groups: int,
    precision: str,
    flags: _Flags,
) -> tuple[Kernel, int, int]:
    """(kernel, programs of a tile, halves of a panel in a tile) of calls of one kind."""
    k, c, d = shape[0], shape[1], shape[2] // groups
    size, gpu = dtype.itemsize, tiles.gpu_of(device)
    constants: tuple[Any, ...] = (k, *flags[:3])
    if groups > 1 and c == 1:
        function, tile = kernels.depthwise_kernel, tiles.depthwise_tile(shape[2], size)
        numbers: tuple[int, ...] = (d, shape[2], stride, strides[0], strides[2])
        columns = -(-shape[2] // tile.blocks[1])
    else:
        numbers = (c, d, groups, stride, *strides)
        constants += (precision if gpu.tf32 else "ieee",)
        if c <= tiles.FOLDED:
            function, tile = kernels.fold_kernel, tiles.fold_tile(d, size)
            constants += (1 << (c - 1).bit_length(),)
        else:
            along = strides[2] == 1
            crowded = flags.after[2] is not None or flags.activation == "gelu"
            function = kernels.convolve_kernel
            tile = tiles.convolve_tile(c, d, size, along, gpu, crowded)
        columns = groups * -(-d // tile.blocks[1])
    kernel = _kernel(function, numbers, constants, tile, device, dtype, flags)
    return kernel, columns, 2 * tile.blocks[0] // PANEL


def weight_gradient(
    x: Tensor,
    g: Tensor,
    table: Tensor,
    order: Tensor | None,
    *,
    groups: int,
    precision: str,
) -> Tensor:
    """dw[k] = Σ_o x[sources[k,o]]ᵀ g[o], summed over o in canonical order.

    Args:
        x: (N_in, C_in), any strides.
        g: (N_out, C_out), any strides.
        table: (K, N_out) int32, −1 for none: sources[k, order[i]] in column i.
        order: (N_out,) the output rows in canonical order; None: they stand so.
        groups: of channels.
        precision: of float32, "ieee", "tf32" or "tf32x3".

    Returns:
        (K, C_in / groups, C_out) in x's dtype, rounded once.
    """
    k, rows = table.shape
    dw = x.new_empty(k, x.shape[1] // groups, g.shape[1])
    if dw.numel() == 0 or rows == 0:
        return dw.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    g = g if g.stride(1) == 1 else g.contiguous()
    with current_device(x):
        wide = max(_extent(x), _extent(g)) >= 2**31
        precision = precision if x.dtype == torch.float32 else "ieee"
        strides = (x.stride(0), g.stride(0))
        made = _differentiator(x.device, x.dtype, dw.shape, strides, rows, groups, precision, wide)
        kernel, reduction, matrix_tiles, shares = made
        z = dw
        if shares:
            sums = torch.float64 if dw.dtype == torch.float64 else torch.float32
            z = dw.new_empty((shares + k, *dw.shape[1:]), dtype=sums)
        if not kernel.compiled:
            compile_together(_calls_for_gradient(made, (x, g, z, dw), table.contiguous(), order))
        pairs = _pairs_of(table, order)
        tensors = (x, g, z, pairs.inputs, pairs.outputs, pairs.totals, _turns_of(pairs, k, shares))
        kernel((shares or k) * matrix_tiles, tensors, (shares,))
        if shares:
            numbers = k * -(-dw[0].numel() // REDUCED.blocks[1])
            reduction(numbers, (z, dw, pairs.totals), (shares,))
    return dw


def _calls_for_gradient(
    made: tuple[Kernel, Kernel, int, int],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    table: Tensor,
    order: Tensor | None,
) -> list[Call]:
    """What `weight_gradient` calls; any table of int32 stands for those that are not there yet."""
    kernel, reduction, _, shares = made
    *xgz, dw = tensors
    pair = _recipe(table, order, _tiles_of(table, order).parts).pair
    calls = [
        Call(pair, (table, table, order, *(table,) * 4), (2, 2)),
        Call(kernel, (*xgz, *(table,) * 3, table if shares else None), (shares,)),
    ]
    if not shares:
        return calls
    share = Call(_share_kernel(len(table), table.device), (table, table), (shares,))
    return [*calls, share, Call(reduction, (xgz[2], dw, table), (shares,))]


@functools.lru_cache(maxsize=1024)
def _differentiator(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    strides: tuple[int, int],
    rows: int,
    groups: int,
    precision: str,
    wide: bool,
) -> tuple[Kernel, Kernel, int, int]:
    """(kernel, reduction, tiles of a matrix, shares) of weight gradients of one kind."""
    k, c, d = shape[0], shape[1], shape[2] // groups
    gpu = tiles.gpu_of(device)
    more: tuple[Any, ...] = ()
    if groups > 1 and c == 1:
        tile = tiles.depthwise_tile(shape[2], dtype.itemsize)
        tile = tile._replace(blocks=tile.blocks[1:])
        matrix_tiles = -(-shape[2] // tile.blocks[0])
        function = kernels.depthwise_gradient_kernel
        numbers: tuple[int, ...] = (d, shape[2], *strides)
    else:
        tile = tiles.gradient_tile(c, d, dtype.itemsize, gpu)
        matrix_tiles = groups * -(-c // tile.blocks[0]) * -(-d // tile.blocks[1])
        function, numbers = kernels.weight_gradient_kernel, (c, d, groups, *strides)
        more = (precision if gpu.tf32 else "ieee",)
    shares = tiles.num_shares(rows, k, matrix_tiles, tile)
    constants = (k, _padded(k), shares == 0, wide, *more)
    kernel = _kernel(function, numbers, constants, tile, device, dtype)
    reduction = _kernel(
        kernels.reduce_kernel, (c * shape[2],), constants[:2], REDUCED, device, dtype
    )
    return kernel, reduction, matrix_tiles, shares


def _extent(rows: Tensor) -> int:
    """Elements from the first row to the end of the last, gaps included."""
    return len(rows) * max(rows.stride(0), rows.shape[1])
