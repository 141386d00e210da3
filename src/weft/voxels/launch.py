"""The Triton path of the sparse convolution: what is prepared from its tables, and the launches.

Everything is sized by K, N and C alone: counts of pairs stay on the GPU, the host never waits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.backend import interpreted
from weft.core.cache import TensorCache
from weft.core.explain import Launch, record, recording
from weft.core.launcher import Tile
from weft.voxels import kernels, tiles

__all__ = ["convolve", "prepare", "weight_gradient"]

PANEL = 128
"""Rows of a panel, see `kernels`."""

NEAR = 65_536
"""Rows that are sorted by mask among themselves: neighbours whose sources stay in L2."""

MOST_SORTED = 4 * NEAR
"""Rows up to which tiles run longest first: with more, the last ones matter less than L2."""

BLOCK = 512
"""Rows whose pairs are counted and compacted together."""

SOME = 8
"""Offsets that one program compacts."""


class Tiles(NamedTuple):
    """Sorted rows in panels, see `kernels`.

    Args:
        rows: (P * 128,) the row in each slot, −1 past the last.
        lists: (P, K, 128) the rows they read.
        halves: (2 P, words) the offsets that half a panel needs.
        turns: tiles of 64 and of 128 rows, longest first; None: as they stand.
        masks: (words, N) the offsets of each row.
        counts: (K, blocks) pairs of each block of the canonical order.
    """

    rows: Tensor
    lists: Tensor
    halves: Tensor
    turns: tuple[Tensor | None, Tensor | None]
    masks: Tensor
    counts: Tensor


class Pairs(NamedTuple):
    """Pairs by offset, in canonical order, each offset filled up to units of 64 with −1.

    Args:
        inputs: rows read; as many as there could be, the rest is not defined.
        outputs: rows written.
        totals: (K,) pairs of each offset.
    """

    inputs: Tensor
    outputs: Tensor
    totals: Tensor


_TILES: TensorCache[Tiles] = TensorCache()
_PAIRS: TensorCache[Pairs] = TensorCache()


class _Kernel:
    """`kernel[(programs,)](*tensors, *free, *numbers, *constants, *tile.blocks)` for any cloud.

    Triton's own launcher binds, inspects and hashes every argument at every call.  This one keeps
    the compiled kernel by all it depends on.  `free` counts rows: the code does not depend on it.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._ready: dict[Any, Any] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor | None],
        free: tuple[int, ...] = (),
        numbers: tuple[int, ...] = (),
        constants: tuple[Any, ...] = (),
        tile: Tile = Tile(()),  # noqa: B008 (immutable)
    ) -> None:
        if programs == 0:
            return
        if recording():
            names = self._kernel.arg_names[len(tensors) + len(free) + len(numbers) :]
            shown = dict(zip(names, (*constants, *tile.blocks), strict=True))
            shown |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            record(Launch("triton", self._kernel.__name__, shown, programs))
        settled = (*free, *numbers, *constants, *tile.blocks)
        if interpreted():
            self._kernel[(programs,)](*tensors, *settled)
            return
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        dtypes = tuple(None if t is None else t.dtype for t in tensors)
        odd = tuple((p or 0) & 15 and 1 for p in pointers)
        device = torch._C._cuda_getDevice()
        key = (device, dtypes, odd, numbers, constants, tile)
        code = self._ready.get(key)
        if code is None:
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            code = self._kernel[(programs,)](*tensors, *settled, **options)
            self._ready[key] = (code.run, code.function, code.packed_metadata)
            return
        run, function, metadata = code
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *settled)


@functools.cache
def _kernel(name: str) -> _Kernel:
    return _Kernel(getattr(kernels, f"{name}_kernel"))


def prepare(sources: Tensor, order: Tensor | None, gradient: bool) -> None:
    """Make now what `convolve` and, with gradient, `weight_gradient` keep of the tables."""
    with _current(sources):
        _tiles_of(sources, order)
        if gradient:
            _pairs_of(sources, order)


def _tiles_of(sources: Tensor, order: Tensor | None) -> Tiles:
    return _TILES.get((sources, order), None, lambda: _make_tiles(sources, order))


def _pairs_of(sources: Tensor, order: Tensor | None) -> Pairs:
    return _PAIRS.get((sources, order), None, lambda: _make_pairs(sources, order))


def _make_tiles(sources: Tensor, order: Tensor | None) -> Tiles:
    sources = sources.contiguous()
    offsets, rows = sources.shape
    words, panels, blocks = -(-offsets // 32), -(-rows // PANEL), -(-rows // BLOCK)
    near_bits = (-(-rows // NEAR) - 1).bit_length()
    wide = offsets + near_bits > 31
    bits = min(offsets, (63 if wide else 31) - near_bits)
    ints = functools.partial(torch.empty, dtype=torch.int32, device=sources.device)
    masks, place, counts = ints((words, rows)), ints(offsets), ints((offsets, blocks))
    keys = torch.empty(rows, dtype=torch.int64 if wide else torch.int32, device=sources.device)
    padded = _padded(offsets)
    mask_programs = words * -(-rows // 256)
    _kernel("mask")(mask_programs, (sources, masks), (rows,), (), (offsets,), Tile((256,)))
    constants = (offsets, bits, padded)
    sampling = Tile((max(16, 16384 // padded),), 8)
    _kernel("place")(1, (masks, order, place), (rows,), (), constants, sampling)
    constants = (offsets, bits, NEAR)
    tensors: tuple[Tensor | None, ...] = (masks, order, place, keys, counts)
    _kernel("key")(blocks, tensors, (rows, blocks), (), constants, Tile((BLOCK,), 8))
    by_mask = torch.sort(keys, stable=True).indices
    slots, halves = ints(panels * PANEL), ints((2 * panels, words))
    lists = ints((panels, offsets, PANEL))
    tensors = (sources, masks, order, by_mask, slots, lists, halves)
    _kernel("list")(panels * words, tensors, (rows,), (), (offsets,), Tile((), 4))
    turns = (_turns(halves, offsets, 1), _turns(halves, offsets, 2))
    return Tiles(slots, lists, halves, turns, masks, counts)


def _turns(halves: Tensor, offsets: int, parts: int) -> Tensor | None:
    """Tiles of so many halves, longest first."""
    count, words = halves.shape
    if count * PANEL > 2 * MOST_SORTED:
        return None
    turns = torch.empty(count // parts, dtype=torch.int32, device=halves.device)
    tile = Tile((1024,))
    _kernel("longest")(offsets + 1, (halves, turns), (count // parts,), (), (words, parts), tile)
    return turns


def _make_pairs(sources: Tensor, order: Tensor | None) -> Pairs:
    made = _tiles_of(sources, order)
    sources = sources.contiguous()
    offsets, rows = sources.shape
    ints = functools.partial(torch.empty, dtype=torch.int32, device=sources.device)
    starts, totals = made.counts.clone(), ints(offsets)
    blocks = starts.shape[1]
    _kernel("scan")(offsets, (starts, totals), (blocks,), (), (), Tile((1024,)))
    capacity = offsets * (-(-rows // tiles.UNIT) * tiles.UNIT)
    inputs, outputs = ints(capacity), ints(capacity)
    tensors = (sources, made.masks, order, starts, totals, inputs, outputs)
    constants = (offsets, _padded(offsets), SOME)
    programs = blocks * -(-offsets // SOME)
    _kernel("pair")(programs, tensors, (rows, blocks), (), constants, Tile((BLOCK,)))
    return Pairs(inputs, outputs, totals)


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
    bias: Tensor | None = None,
    flip: bool = False,
) -> Tensor:
    """y[o] = bias + Σ_k x[sources[k,o]] @ weight[k], summed over k in one order for all rows.

    Args:
        x: (N_in, C_in), any strides.
        weight: (K, C_in / groups, C_out), any strides.
        sources: (K, N_out) int32, −1 for none.
        order: (N_out,) the output rows in canonical order; None: they stand so.
        groups: of channels.
        precision: of float32, "ieee", "tf32" or "tf32x3".
        bias: (C_out,); None is 0.
        flip: weight[K − 1 − k] instead of weight[k].  The input gradient of a submanifold
            convolution with an odd kernel needs no table of its own: `sources`, flipped.

    Returns:
        (N_out, C_out) in x's dtype, rounded once.
    """
    offsets, rows = sources.shape
    d = weight.shape[2]
    y = x.new_empty(rows, d)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    bias = None if bias is None else bias.contiguous()
    with _current(x):
        made = _tiles_of(sources, order)
        wide = max(x.numel(), y.numel(), made.lists.numel()) >= 2**31
        launch = _launch_depthwise if groups > 1 and weight.shape[1] == 1 else _launch_dots
        launch((x, weight, bias, y), made, groups, (offsets, flip, wide), precision)
    return y


Operands = tuple[Tensor, Tensor, Tensor | None, Tensor]
Constants = tuple[int, bool, bool]


def _launch_dots(
    operands: Operands, made: Tiles, groups: int, constants: Constants, precision: str
) -> None:
    x, weight = operands[:2]
    gpu = tiles.gpu_of(x.device)
    c, d, size = weight.shape[1], weight.shape[2] // groups, x.element_size()
    more: tuple[Any, ...] = (_precision(x, precision),)
    if c <= tiles.FOLDED:
        name, tile = "fold", tiles.fold_tile(d, size)
        more += (1 << (c - 1).bit_length(),)
    else:
        name, tile = "convolve", tiles.convolve_tile(c, d, size, gpu)
    tables, num_tiles = _tables(made, tile)
    programs = num_tiles * groups * -(-d // tile.blocks[1])
    numbers = (c, d, groups, x.stride(0), *weight.stride())
    _kernel(name)(programs, (*operands, *tables), (), numbers, (*constants, *more), tile)


def _launch_depthwise(
    operands: Operands, made: Tiles, groups: int, constants: Constants, _: str
) -> None:
    x, weight = operands[:2]
    d = weight.shape[2]
    tile = tiles.depthwise_tile(d, x.element_size())
    tables, num_tiles = _tables(made, tile)
    numbers = (d // groups, d, x.stride(0), weight.stride(0), weight.stride(2))
    programs = num_tiles * -(-d // tile.blocks[1])
    _kernel("depthwise")(programs, (*operands, *tables), (), numbers, constants, tile)


def _tables(made: Tiles, tile: Tile) -> tuple[tuple[Tensor | None, ...], int]:
    """What a kernel reads of the tiles, and how many there are."""
    parts = 2 * tile.blocks[0] // PANEL
    return (made.lists, made.halves, made.rows, made.turns[parts - 1]), len(made.halves) // parts


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
    offsets = sources.shape[0]
    c, d = x.shape[1] // groups, g.shape[1]
    dw = x.new_empty(offsets, c, d)
    if dw.numel() == 0 or sources.shape[1] == 0:
        return dw.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    g = g if g.stride(1) == 1 else g.contiguous()
    with _current(x):
        pairs = _pairs_of(sources, order)
        wide = max(x.numel(), g.numel(), len(pairs.inputs)) >= 2**31
        launch = _launch_depthwise_gradient if groups > 1 and c == 1 else _launch_gradient
        launch(x, g, dw, pairs, groups, wide, precision)
    return dw


def _launch_gradient(
    x: Tensor, g: Tensor, dw: Tensor, pairs: Pairs, groups: int, wide: bool, precision: str
) -> None:
    offsets, c, d = dw.shape
    tile = tiles.gradient_tile(c, d // groups, x.element_size(), tiles.gpu_of(x.device))
    block_c, block_d = tile.blocks
    matrix_tiles = groups * -(-c // block_c) * -(-d // groups // block_d)
    shares = tiles.num_shares(len(g), offsets, matrix_tiles, tile)
    z = _partial_sums(dw, shares)
    constants = (offsets, _padded(offsets), shares == 0, wide, _precision(x, precision))
    numbers = (c, d // groups, groups, x.stride(0), g.stride(0))
    programs = (shares or offsets) * matrix_tiles
    _kernel("weight_gradient")(programs, (x, g, z, *pairs), (shares,), numbers, constants, tile)
    _add_up(z, dw, pairs.totals, shares)


def _launch_depthwise_gradient(
    x: Tensor, g: Tensor, dw: Tensor, pairs: Pairs, groups: int, wide: bool, _: str
) -> None:
    offsets, d = len(dw), dw.shape[2]
    tile = tiles.depthwise_tile(d, x.element_size())
    tile = tile._replace(blocks=tile.blocks[1:])
    programs = -(-d // tile.blocks[0])
    shares = max(1, tiles.num_shares(len(g), offsets, programs, tile))
    z = _partial_sums(dw, shares)
    numbers = (d // groups, d, x.stride(0), g.stride(0))
    constants = (offsets, _padded(offsets), wide)
    kernel = _kernel("depthwise_gradient")
    kernel(shares * programs, (x, g, z, *pairs), (shares,), numbers, constants, tile)
    _add_up(z, dw, pairs.totals, shares)


def _partial_sums(dw: Tensor, shares: int) -> Tensor:
    """Room for a sum of each share and offset; the result itself where nothing is shared."""
    if shares == 0:
        return dw
    wide = torch.float64 if dw.dtype == torch.float64 else torch.float32
    return dw.new_empty((shares + len(dw), *dw.shape[1:]), dtype=wide)


def _add_up(z: Tensor, dw: Tensor, totals: Tensor, shares: int) -> None:
    if z is dw:
        return
    offsets, size = len(dw), dw[0].numel()
    tile = Tile((1024,))
    programs = offsets * -(-size // tile.blocks[0])
    constants = (offsets, _padded(offsets))
    _kernel("reduce")(programs, (z, dw, totals), (shares,), (size,), constants, tile)


def _precision(x: Tensor, precision: str) -> str:
    """How dots form products; TF32 is for float32 where there is any."""
    return precision if x.dtype == torch.float32 and tiles.gpu_of(x.device).tf32 else "ieee"


def _current(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's device current, as launches need it."""
    if not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
