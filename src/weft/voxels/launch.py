"""The Triton path of the sparse convolution: what is prepared from its tables, and the launches.

Everything is sized by K, N and C alone: counts of pairs stay on the GPU, the host never waits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.backend import interpreted
from weft.core.cache import TensorCache
from weft.core.explain import Launch, record, recording
from weft.core.launcher import Tile
from weft.voxels import kernels, tiles
from weft.voxels.epilogue import PLAIN, Epilogue

__all__ = ["convolve", "prepare", "weight_gradient"]

PANEL = 128
"""Rows of a panel, see `kernels`."""

NEAR = 2**20
"""Rows that are sorted by mask among themselves: neighbours whose sources stay in L2."""

MOST_SORTED = 2**18
"""Rows up to which tiles run longest first: with more, the last ones matter less than L2."""

BLOCK = 512
"""Rows whose pairs are counted and compacted together."""

SHARES = 64
"""Shares of pairs that one program places."""

REDUCED = Tile((16, 128))
"""Shares and numbers that a program adds up at once."""


class Tiles(NamedTuple):
    """Sorted rows in panels, see `kernels`.

    Args:
        rows: (P * 128,) the row in each slot, −1 past the last.
        lists: (P, K, 128) the rows they read.
        halves: (2 P, words) the offsets that half a panel needs.
        turns: tiles of 64 and of 128 rows, longest first; None: as they stand.
        masks: (words, N) the offsets of each row, in canonical order.
        counts: (K, blocks) pairs of each block of that order.
    """

    rows: Tensor
    lists: Tensor
    halves: Tensor
    turns: tuple[Tensor | None, Tensor | None]
    masks: Tensor
    counts: Tensor


class Pairs(NamedTuple):
    """Pairs by offset, in canonical order.

    Args:
        inputs: rows read; there is room for K N, what lies past the last pair is not defined.
        outputs: rows written.
        totals: (K,) pairs of each offset.
        turns: of shares of the pairs, by how many shares: see `kernels.share_kernel`.
    """

    inputs: Tensor
    outputs: Tensor
    totals: Tensor
    turns: dict[int, Tensor]


_TILES: TensorCache[Tiles] = TensorCache()
_PAIRS: TensorCache[Pairs] = TensorCache()


class _Kernel:
    """`kernel[(programs,)](*tensors, *free, *numbers, *constants, *tile.blocks)` for any cloud.

    Triton's own launcher binds, inspects and hashes every argument at every call.  This one does
    so once for each combination of aligned tensors.  `free` counts rows: code does not depend
    on them.
    """

    def __init__(
        self, name: str, numbers: tuple[int, ...], constants: tuple[Any, ...], tile: Tile
    ) -> None:
        self._kernel = getattr(kernels, f"{name}_kernel")
        self._settled = (*numbers, *constants, *tile.blocks)
        self._options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        self._ready: dict[tuple[int, ...], Any] = {}
        self._aligned: Any = None
        self._constants = (*constants, *tile.blocks)

    def __call__(
        self, programs: int, tensors: Sequence[Tensor | None], free: tuple[int, ...] = ()
    ) -> None:
        """Launch on the current stream of the device that is current: the tensors' own."""
        if programs == 0:
            return
        if recording():
            names = self._kernel.arg_names[-len(self._constants) :]
            shown = dict(zip(names, self._constants, strict=True)) | self._options
            record(Launch("triton", self._kernel.__name__, shown, programs))
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        code = self._aligned
        for pointer in pointers:
            if pointer is not None and pointer & 15:
                code = self._ready.get(_alignment(pointers))
                break
        if code is None:
            self._launch_first(programs, tensors, pointers, free)
            return
        run, function, metadata = code
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        rest = (*pointers, *free, *self._settled)
        run(programs, 1, 1, stream, function, metadata, None, None, None, *rest)

    def _launch_first(
        self,
        programs: int,
        tensors: Sequence[Tensor | None],
        pointers: Sequence[int | None],
        free: tuple[int, ...],
    ) -> None:
        """Launch by Triton's own door, which compiles, and keep what it found."""
        launch = self._kernel[(programs,)]
        if interpreted():
            launch(*tensors, *free, *self._settled)
            return
        code = launch(*tensors, *free, *self._settled, **self._options)
        key = _alignment(pointers)
        self._ready[key] = (code.run, code.function, code.packed_metadata)
        if not any(key):
            self._aligned = self._ready[key]


def _alignment(pointers: Sequence[int | None]) -> tuple[int, ...]:
    return tuple((p or 0) & 15 and 1 for p in pointers)


@functools.lru_cache(maxsize=1024)
def _kernel(
    name: str,
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    tile: Tile,
    *_: Hashable,
) -> _Kernel:
    """A kernel keeps compiled code: device, dtypes and which tensors are None are in its key."""
    return _Kernel(name, numbers, constants, tile)


def prepare(sources: Tensor, order: Tensor | None, gradient: bool) -> None:
    """Make now what `convolve` and, with gradient, `weight_gradient` keep of the tables."""
    with _current(sources):
        _tiles_of(sources, order)
        if gradient:
            _pairs_of(sources, order)


def _tiles_of(sources: Tensor, order: Tensor | None) -> Tiles:
    return _TILES.get((sources, order), None, lambda: _make_tiles(sources.contiguous(), order))


def _pairs_of(sources: Tensor, order: Tensor | None) -> Pairs:
    made = _tiles_of(sources, order)
    return _PAIRS.get(
        (sources, order), None, lambda: _make_pairs(sources.contiguous(), order, made)
    )


def _make_tiles(sources: Tensor, order: Tensor | None) -> Tiles:
    k, rows = sources.shape
    near = NEAR
    words, panels, blocks = -(-k // 32), -(-rows // PANEL), -(-rows // BLOCK)
    near_bits = (-(-rows // near) - 1).bit_length()
    wide = k + near_bits > 31
    bits = min(k, (63 if wide else 31) - near_bits)
    ints = functools.partial(torch.empty, dtype=torch.int32, device=sources.device)
    masks, place, counts = ints((words, rows)), ints(k), ints((k, blocks))
    ordered = None if order is None else ints((words, rows))
    keys = torch.empty(rows, dtype=torch.int64 if wide else torch.int32, device=sources.device)
    key = (sources.device, None if order is None else order.dtype)
    mask = _kernel("mask", (), (k,), Tile((256,)), *key)
    mask(words * -(-rows // 256), (sources, masks), (rows,))
    sampling = Tile((max(16, 16384 // _padded(k)),), 8)
    _kernel("place", (), (k, bits, _padded(k)), sampling, *key)(1, (masks, order, place), (rows,))
    tensors: tuple[Tensor | None, ...] = (masks, order, place, keys, counts, ordered)
    _kernel("key", (), (k, bits, near), Tile((BLOCK,), 8), *key)(blocks, tensors, (rows, blocks))
    slots, halves, lists = ints(panels * PANEL), ints((2 * panels, words)), ints((panels, k, PANEL))
    by_mask = torch.sort(keys, stable=True).indices
    masks = masks if ordered is None else ordered
    tensors = (sources, masks, order, by_mask, slots, lists, halves)
    wide = lists.numel() >= 2**31
    _kernel("list", (), (k, wide), Tile((), 8), *key)(words * panels, tensors, (rows,))
    return Tiles(slots, lists, halves, _longest_first(halves, k), masks, counts)


def _longest_first(halves: Tensor, k: int) -> tuple[Tensor | None, Tensor | None]:
    """Tiles of one and of two halves of a panel by the number of offsets that they need."""
    panels = len(halves) // 2
    if panels * PANEL > MOST_SORTED:
        return None, None
    turns = torch.empty(3 * panels, dtype=torch.int32, device=halves.device)
    kernel = _kernel("longest", (), (k,), Tile((1024,)), halves.device)
    kernel(2 * (k + 1), (halves, turns), (panels,))
    return turns[: 2 * panels], turns[2 * panels :]


def _make_pairs(sources: Tensor, order: Tensor | None, made: Tiles) -> Pairs:
    k, rows = sources.shape
    ints = functools.partial(torch.empty, dtype=torch.int32, device=sources.device)
    starts, totals = torch.empty_like(made.counts), ints(k)
    blocks = starts.shape[1]
    key = (sources.device, None if order is None else order.dtype)
    _kernel("scan", (), (), Tile((1024,)), *key)(k, (made.counts, starts, totals), (blocks,))
    inputs, outputs = ints(k * rows), ints(k * rows)
    tensors = (sources, made.masks, order, starts, totals, inputs, outputs)
    wide = k * rows >= 2**31
    kernel = _kernel("pair", (), (k, _padded(k), wide), Tile((BLOCK,)), *key)
    kernel(blocks * -(-k // 8), tensors, (rows, blocks))
    return Pairs(inputs, outputs, totals, {})


def _turns_of(pairs: Pairs, shares: int) -> Tensor | None:
    """Shares in their turns; 0: there are none."""
    if shares == 0:
        return None
    if shares not in pairs.turns:
        k, device = len(pairs.totals), pairs.totals.device
        turns = torch.empty(shares, dtype=torch.int32, device=device)
        kernel = _kernel("share", (), (k, _padded(k)), Tile((SHARES,)), device)
        kernel(-(-shares // SHARES), (pairs.totals, turns), (shares,))
        pairs.turns[shares] = turns
    return pairs.turns[shares]


def _padded(size: int) -> int:
    """The next power of two, at least 32."""
    return max(32, 1 << (size - 1).bit_length())


def convolve(
    x: Tensor,
    weight: Tensor,
    sources: Tensor,
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
        sources: (K, N_out) int32, −1 for none.
        order: (N_out,) the output rows in canonical order; None: they stand so.
        groups: of channels.
        precision: of float32, "ieee", "tf32" or "tf32x3".
        after: what is done to the sums before they are rounded.
        flip: weight[K − 1 − k] instead of weight[k].  The input gradient of a submanifold
            convolution with an odd kernel needs no table of its own: `sources`, flipped.

    Returns:
        (N_out, C_out) in x's dtype, rounded once.
    """
    rows, d = sources.shape[1], weight.shape[2]
    y = x.new_empty(rows, d)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    scale, shift, residual = (None if t is None else t.contiguous() for t in after[:3])
    with _current(x):
        made = _tiles_of(sources, order)
        extents = (_extent(x), y.numel(), weight.numel(), made.lists.numel())
        wide = max(extents) >= 2**31
        precision = precision if x.dtype == torch.float32 else "ieee"
        kinds = tuple(None if t is None else t.dtype for t in (scale, shift, residual))
        flags = _Flags(flip, wide, after.activation, kinds, made.turns[0] is None)
        stride = x.stride(0)
        recipe = _convolver(
            x.device, x.dtype, weight.shape, weight.stride(), stride, groups, precision, flags
        )
        kernel, columns, parts = recipe
        tables = (made.lists, made.halves, made.rows, made.turns[parts - 1])
        operands = (x, weight, y, scale, shift, residual, *tables)
        kernel(len(made.halves) // parts * columns, operands)
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
) -> tuple[_Kernel, int, int]:
    """(kernel, programs of a tile, halves of a panel in a tile) of calls of one kind."""
    k, c, d = shape[0], shape[1], shape[2] // groups
    size, gpu = dtype.itemsize, tiles.gpu_of(device)
    constants: tuple[Any, ...] = (k, *flags[:3])
    if groups > 1 and c == 1:
        name, tile = "depthwise", tiles.depthwise_tile(shape[2], size)
        numbers: tuple[int, ...] = (d, shape[2], stride, strides[0], strides[2])
        columns = -(-shape[2] // tile.blocks[1])
    else:
        numbers = (c, d, groups, stride, *strides)
        constants += (precision if gpu.tf32 else "ieee",)
        if c <= tiles.FOLDED:
            name, tile = "fold", tiles.fold_tile(d, size)
            constants += (1 << (c - 1).bit_length(),)
        else:
            along = strides[2] == 1
            crowded = flags.after[2] is not None or flags.activation == "gelu"
            name, tile = "convolve", tiles.convolve_tile(c, d, size, along, gpu, crowded)
        columns = groups * -(-d // tile.blocks[1])
    kernel = _kernel(name, numbers, constants, tile, device, dtype, flags)
    return kernel, columns, 2 * tile.blocks[0] // PANEL


def weight_gradient(
    x: Tensor,
    g: Tensor,
    sources: Tensor,
    order: Tensor | None,
    *,
    groups: int,
    precision: str,
) -> Tensor:
    """dw[k] = Σ_o x[sources[k,o]]ᵀ g[o], summed over o in canonical order.

    Args:
        x: (N_in, C_in), any strides.
        g: (N_out, C_out), any strides.
        sources: (K, N_out) int32, −1 for none.
        order: (N_out,) the output rows in canonical order; None: they stand so.
        groups: of channels.
        precision: of float32, "ieee", "tf32" or "tf32x3".

    Returns:
        (K, C_in / groups, C_out) in x's dtype, rounded once.
    """
    k, rows = sources.shape
    dw = x.new_empty(k, x.shape[1] // groups, g.shape[1])
    if dw.numel() == 0 or rows == 0:
        return dw.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    g = g if g.stride(1) == 1 else g.contiguous()
    with _current(x):
        pairs = _pairs_of(sources, order)
        wide = max(_extent(x), _extent(g)) >= 2**31
        precision = precision if x.dtype == torch.float32 else "ieee"
        strides = (x.stride(0), g.stride(0))
        made = _differentiator(x.device, x.dtype, dw.shape, strides, rows, groups, precision, wide)
        kernel, reduction, matrix_tiles, shares = made
        z = dw
        if shares:
            sums = torch.float64 if dw.dtype == torch.float64 else torch.float32
            z = dw.new_empty((shares + k, *dw.shape[1:]), dtype=sums)
        tensors = (x, g, z, pairs.inputs, pairs.outputs, pairs.totals, _turns_of(pairs, shares))
        kernel((shares or k) * matrix_tiles, tensors, (shares,))
        if shares:
            numbers = k * -(-dw[0].numel() // REDUCED.blocks[1])
            reduction(numbers, (z, dw, pairs.totals), (shares,))
    return dw


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
) -> tuple[_Kernel, _Kernel, int, int]:
    """(kernel, reduction, tiles of a matrix, shares) of weight gradients of one kind."""
    k, c, d = shape[0], shape[1], shape[2] // groups
    gpu = tiles.gpu_of(device)
    more: tuple[Any, ...] = ()
    if groups > 1 and c == 1:
        tile = tiles.depthwise_tile(shape[2], dtype.itemsize)
        tile = tile._replace(blocks=tile.blocks[1:])
        matrix_tiles = -(-shape[2] // tile.blocks[0])
        name = "depthwise_gradient"
        numbers: tuple[int, ...] = (d, shape[2], *strides)
    else:
        tile = tiles.gradient_tile(c, d, dtype.itemsize, gpu)
        matrix_tiles = groups * -(-c // tile.blocks[0]) * -(-d // tile.blocks[1])
        name, numbers = "weight_gradient", (c, d, groups, *strides)
        more = (precision if gpu.tf32 else "ieee",)
    shares = tiles.num_shares(rows, k, matrix_tiles, tile)
    constants = (k, _padded(k), shares == 0, wide, *more)
    kernel = _kernel(name, numbers, constants, tile, device, dtype)
    reduction = _kernel("reduce", (c * shape[2],), constants[:2], REDUCED, device, dtype)
    return kernel, reduction, matrix_tiles, shares


def _extent(rows: Tensor) -> int:
    """Elements from the first row to the end of the last, gaps included."""
    return len(rows) * max(rows.stride(0), rows.shape[1])


def _current(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's device current, as launches need it."""
    if not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
