"""The Triton path of the sparse convolution: launches of its kernels, and their tiles.

Everything is sized by K, N and C alone: counts of pairs stay on the GPU, the host never waits.
Tiles follow from channels, dtype and what the GPU has.  They cut the sums too, so results depend on
shapes, never on the load of the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import Call, Kernel, Tile, compile_together, current_device
from torchweft.voxels.convolution.epilogue import PLAIN, Epilogue
from torchweft.voxels.maps.kernel_map import KernelMap
from torchweft.voxels.maps_gpu.sorted_tiles import (
    MOST_SORTED,
    PANEL,
    call_for_pairs,
    call_for_shares,
    calls_for_tiles,
    kernel_for,
    padded,
    pair_dtype,
    pairs_of,
    tiles_of,
    turns_of,
)

__all__ = [
    "FOLDED",
    "UNIT",
    "Gpu",
    "compile_ahead",
    "convolve",
    "convolve_tile",
    "depthwise_tile",
    "fold_tile",
    "gpu_of",
    "gradient_tile",
    "num_shares",
    "prepare",
    "weight_gradient",
]

REDUCED = Tile((16, 128))
"""Shares and numbers that a program adds up at once."""


def prepare(found: KernelMap, gradient: bool) -> None:
    """Make now what a convolution and, with gradient, its weight's gradient keep of a map."""
    table, order, offsets = found.kept, found.outputs.order, found.geometry.num_offsets
    with current_device(table):
        if gradient:
            pairs_of(table, order, offsets, mirrored=found.back is None)
        else:
            tiles_of(table, order, offsets)


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
        table: (K, N_out) int32, −1 for none: sources[k, order[i]] in column i; or half of it, see
            `mirror`.
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
    scale, shift, residual, activation = after
    scale = None if scale is None else scale.contiguous()
    shift = None if shift is None else shift.contiguous()
    residual = None if residual is None else residual.contiguous()
    with current_device(x):
        slots = -(-rows // PANEL) * PANEL
        operands = (x, weight, y, scale, shift, residual)
        kernel, columns, parts = _convolver_of(operands, groups, precision, activation, flip)
        if not kernel.compiled:
            read = table.contiguous()
            tiled = calls_for_tiles(read, order, len(weight))
            compile_together([_call_of(kernel, operands, read), *tiled])
        made = tiles_of(table, order, weight.shape[0])
        tables = (made.lists, made.halves, made.rows, made.turns[parts - 1])
        kernel(slots // (PANEL // 2) // parts * columns, (*operands, *tables))
    return y


Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""x, weight, y, and what is done to the sums: scale, shift, residual."""


def _convolver_of(
    operands: Operands, groups: int, precision: str, activation: str | None, flip: bool
) -> tuple[Kernel, int, int]:
    x, weight, y, *after = operands
    shape, strides = weight.shape, weight.stride()
    slots = -(-y.shape[0] // PANEL) * PANEL
    extents = (_extent(x), y.numel(), weight.numel(), slots * shape[0])
    precision = precision if x.dtype == torch.float32 else "ieee"
    kinds = tuple([None if t is None else t.dtype for t in after])
    flags = _Flags(flip, max(extents) >= 2**31, activation, kinds, slots > MOST_SORTED)
    return _convolver(x.device, x.dtype, shape, strides, x.stride(0), groups, precision, flags)


def _call_of(kernel: Kernel, operands: Operands, table: Tensor) -> Call:
    """Of a convolution; any table of int32 stands for those that are not there yet."""
    turns = table if -(-len(operands[2]) // PANEL) * PANEL <= MOST_SORTED else None
    return Call(kernel, (*operands, table, table, table, turns))


_AHEAD: set[tuple[Any, ...]] = set()
"""Kinds of convolutions that `compile_ahead` has seen."""


def compile_ahead(
    x: Tensor,
    weight: Tensor,
    turned: Callable[[], Tensor],
    bias: Tensor | None,
    table: Tensor,
    back: Tensor | None,
    in_order: Tensor | None,
    out_order: Tensor | None,
    *,
    groups: int,
    precision: str,
    needed: tuple[bool, bool],
    tiled: bool = False,
) -> None:
    """Compile at once what a convolution and its gradients call, where they are of a new kind.

    Else a training step compiles for each of them in turn.  `turned` makes the weight that the
    gradient of x reads, back is None where it reads the table flipped, `needed` says whether there
    will be gradients of x and of the weight, and `tiled` that the table's tiles are another's
    matter; the rest is `convolve`'s.
    """
    absent = (bias is None, back is None, in_order is None, out_order is None)
    kind = (x.device, x.dtype, weight.shape, groups, precision, absent, needed)
    if kind in _AHEAD or 0 in (x.numel(), weight.numel(), table.shape[1]):
        return
    _AHEAD.add(kind)
    x = x.detach().contiguous()
    y, dx, dw = x.new_empty(table.shape[1], weight.shape[2]), x, x.new_empty(weight.shape)
    with current_device(x):
        forward: Operands = (x, weight, y, None, bias, None)
        kernel = _convolver_of(forward, groups, precision, None, flip=False)[0]
        calls, reads = [_call_of(kernel, forward, table)], [(table, out_order)]
        if needed[0]:
            backward: Operands = (y, turned(), dx, None, None, None)
            kernel = _convolver_of(backward, groups, precision, None, flip=back is None)[0]
            calls.append(_call_of(kernel, backward, table))
            reads += [] if back is None else [(back, in_order)]
        if needed[1]:
            mirrored = back is None
            made = _differentiator_of(x, y, dw, groups, precision, mirrored)
            calls += _calls_for_gradient(made, (x, y, dw), table, out_order, mirrored)
        for read in [] if tiled else reads:
            calls += calls_for_tiles(*read, len(weight))
        compile_together(calls)


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
    size, gpu = dtype.itemsize, gpu_of(device)
    constants: tuple[Any, ...] = (k, *flags[:3])
    if groups > 1 and c == 1:
        function, tile = (
            "convolution.kernels.depthwise_kernel",
            depthwise_tile(shape[2], size),
        )
        numbers: tuple[int, ...] = (d, shape[2], stride, strides[0], strides[2])
        columns = -(-shape[2] // tile.blocks[1])
    else:
        numbers = (c, d, groups, stride, *strides)
        constants += (precision if gpu.tf32 else "ieee",)
        if c <= FOLDED:
            function, tile = "convolution.kernels.fold_kernel", fold_tile(d, size)
            constants += (1 << (c - 1).bit_length(),)
        else:
            along = strides[2] == 1
            crowded = flags.after[2] is not None or flags.activation == "gelu"
            function = "convolution.kernels.convolve_kernel"
            tile = convolve_tile(c, d, size, along, gpu, crowded)
        columns = groups * -(-d // tile.blocks[1])
    kernel = kernel_for(function, numbers, constants, tile, device, dtype, flags)
    return kernel, columns, 2 * tile.blocks[0] // PANEL


def weight_gradient(
    x: Tensor,
    g: Tensor,
    table: Tensor,
    order: Tensor | None,
    *,
    groups: int,
    precision: str,
    offsets: int | None = None,
    mirrored: bool = False,
) -> Tensor:
    """dw[k] = Σ_o x[sources[k,o]]ᵀ g[o], summed over o in canonical order.

    Args:
        x: (N_in, C_in), any strides.
        g: (N_out, C_out), any strides.
        table: (K, N_out) int32, −1 for none: sources[k, order[i]] in column i.
        order: (N_out,) the output rows in canonical order; None: they stand so.
        groups: of channels.
        precision: of float32, "ieee", "tf32" or "tf32x3".
        offsets: K; None: the table has so many rows, it is not half of one.
        mirrored: whether who reads q at offset k is read by q at K − 1 − k, see `pairs_of`.

    Returns:
        (K, C_in / groups, C_out) in x's dtype, rounded once.
    """
    k, rows = offsets or len(table), table.shape[1]
    dw = x.new_empty(k, x.shape[1] // groups, g.shape[1])
    if dw.numel() == 0 or rows == 0:
        return dw.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    g = g if g.stride(1) == 1 else g.contiguous()
    with current_device(x):
        made = _differentiator_of(x, g, dw, groups, precision, mirrored)
        kernel, reduction, matrix_tiles, shares = made
        z = dw.new_empty((shares + k, *dw.shape[1:]), dtype=_sums(dw)) if shares else dw
        if not kernel.compiled:
            read = table.contiguous()
            compile_together(_calls_for_gradient(made, (x, g, dw), read, order, mirrored))
        pairs = pairs_of(table, order, k, mirrored)
        tensors = (x, g, z, pairs.inputs, pairs.outputs, pairs.totals, turns_of(pairs, k, shares))
        kernel((shares or k) * matrix_tiles, tensors, (shares,))
        if shares:
            numbers = k * -(-dw[0].numel() // REDUCED.blocks[1])
            reduction(numbers, (z, dw, pairs.totals), (shares,))
    return dw


def _calls_for_gradient(
    made: tuple[Kernel, Kernel, int, int],
    tensors: tuple[Tensor, Tensor, Tensor],
    table: Tensor,
    order: Tensor | None,
    mirrored: bool,
) -> list[Call]:
    """What `weight_gradient` calls; any table of int32 stands for those that are not there yet."""
    kernel, reduction, _, shares = made
    x, g, dw = tensors
    z = dw.new_empty((0, *dw.shape[1:]), dtype=_sums(dw)) if shares else dw
    turns = table if shares else None
    pairs = table.new_empty(0, dtype=pair_dtype(table.shape[1], mirrored))
    calls = [Call(kernel, (x, g, z, pairs, pairs, table, turns), (shares,))]
    calls.append(call_for_pairs(table, order, len(dw), mirrored))
    if not shares:
        return calls
    return [
        *calls,
        call_for_shares(table, len(dw), shares),
        Call(reduction, (z, dw, table), (shares,)),
    ]


def _sums(dw: Tensor) -> torch.dtype:
    return torch.float64 if dw.dtype == torch.float64 else torch.float32


def _differentiator_of(
    x: Tensor, g: Tensor, dw: Tensor, groups: int, precision: str, mirrored: bool
) -> tuple[Kernel, Kernel, int, int]:
    flags = max(_extent(x), _extent(g)) >= 2**31, mirrored
    precision = precision if x.dtype == torch.float32 else "ieee"
    strides, kinds = (x.stride(0), g.stride(0)), (x.dtype, pair_dtype(g.shape[0], mirrored))
    return _differentiator(x.device, kinds, dw.shape, strides, g.shape[0], groups, precision, flags)


@functools.lru_cache(maxsize=1024)
def _differentiator(
    device: torch.device,
    kinds: tuple[torch.dtype, torch.dtype],
    shape: tuple[int, int, int],
    strides: tuple[int, int],
    rows: int,
    groups: int,
    precision: str,
    flags: tuple[bool, bool],
) -> tuple[Kernel, Kernel, int, int]:
    """(kernel, reduction, tiles of a matrix, shares) of weight gradients of one kind.

    kinds: of numbers and of the rows in lists of pairs.
    flags: whether numbers need int64, and whether the table is mirrored.
    """
    dtype, listed = kinds
    k, c, d = shape[0], shape[1], shape[2] // groups
    gpu = gpu_of(device)
    more: tuple[Any, ...] = ()
    if groups > 1 and c == 1:
        tile = depthwise_tile(shape[2], dtype.itemsize)
        tile = tile._replace(blocks=tile.blocks[1:])
        matrix_tiles = -(-shape[2] // tile.blocks[0])
        function = "convolution.kernels.depthwise_gradient_kernel"
        numbers: tuple[int, ...] = (d, shape[2], *strides)
    else:
        tile = gradient_tile(c, d, dtype.itemsize, gpu)
        matrix_tiles = groups * -(-c // tile.blocks[0]) * -(-d // tile.blocks[1])
        function, numbers = "convolution.kernels.weight_gradient_kernel", (c, d, groups, *strides)
        more = (precision if gpu.tf32 else "ieee",)
    shares = num_shares(rows, k, matrix_tiles, tile)
    constants = (k, padded(k), shares == 0, *flags, *more)
    kernel = kernel_for(function, numbers, constants, tile, device, dtype, listed)
    reduction = kernel_for(
        "convolution.kernels.reduce_kernel", (c * shape[2],), constants[:2], REDUCED, device, dtype
    )
    return kernel, reduction, matrix_tiles, shares


def _extent(rows: Tensor) -> int:
    """Elements from the first row to the end of the last, gaps included."""
    count, width = rows.shape
    return count * max(rows.stride(0), width)


LEAST_DOT = 16
"""The least size of each side of `tl.dot`."""

FOLDED = 8
"""Channels up to which several offsets share a dot."""

UNIT = 64
"""Pairs that the weight gradient sums at once."""

LEAST_UNITS = 8
"""Fewest units of pairs that are worth partial sums of their own, were every pair there."""


class Gpu(NamedTuple):
    """What tiles depend on.

    Args:
        wgmma: whether dots run by warp groups, which take larger tiles without spilling registers.
        tf32: whether it has TF32.
        shared: bytes of shared memory that one block may use.
    """

    wgmma: bool
    tf32: bool
    shared: int


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a tensor; for the interpreter, an H200."""
    if device.type != "cuda":
        return Gpu(True, True, 232_448)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Gpu(False, False, 65_536)
    shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Gpu(properties.major == 9, properties.major >= 8, shared)


def convolve_tile(
    c: int, d: int, itemsize: int, along: bool, gpu: Gpu, crowded: bool = False
) -> Tile:
    """(BLOCK_M, BLOCK_N, BLOCK_K) of `convolve_kernel` for c channels to d.

    Args:
        c: channels read.
        d: channels written.
        itemsize: bytes of an element.
        along: whether a weight's numbers lie along d; turned, wide tiles are slower.
        gpu: where.
        crowded: whether what follows the sums needs as many registers as they do.
    """
    if itemsize == 8:
        return _fit(Tile((64, _side(d, 32), _side(c, 16)), 4, 2), itemsize, gpu)
    if itemsize == 4 or not gpu.wgmma:
        return _fit(Tile((64, _side(d, 64), _side(c, 32)), 4, 3), itemsize, gpu)
    if d > 64 and crowded:
        return _fit(Tile((128, 128, _side(c, 64)), 8, 3), itemsize, gpu)
    if d > 128 and c > 128 and along:
        return _fit(Tile((128, 256, 64), 8, 3), itemsize, gpu)
    if d > 64:
        return _fit(Tile((128, 128, _side(c, 64)), 4, 3), itemsize, gpu)
    if d > 32:
        return _fit(Tile((64, 64, _side(c, 64)), 4, 2), itemsize, gpu)
    return _fit(Tile((64, _side(d, 32), _side(c, 64)), 4, 3), itemsize, gpu)


def fold_tile(d: int, itemsize: int) -> Tile:
    """(BLOCK_M, BLOCK_N, BLOCK_K) of `fold_kernel` to d channels."""
    return Tile((64, _side(d, 64 if itemsize < 8 else 32), 32), 4, 2)


def depthwise_tile(channels: int, itemsize: int) -> Tile:
    """(BLOCK_M, BLOCK_N) of the depthwise kernels: 16 bytes a thread along the channels."""
    return Tile((64, _side(channels, 256 // itemsize)), 4, 2)


def gradient_tile(c: int, d: int, itemsize: int, gpu: Gpu) -> Tile:
    """(BLOCK_C, BLOCK_D) of `weight_gradient_kernel` for c channels to d."""
    if itemsize == 8:
        tile = Tile((_side(c, 32), _side(d, 32)), 4, 2)
    elif itemsize == 4 or not gpu.wgmma or max(c, d) <= 64:
        tile = Tile((_side(c, 64), _side(d, 64)), 4, 3)
    elif c > 64 and 128 < d < 512:
        tile = Tile((128, 256), 8, 3)
    else:
        tile = Tile((_side(c, 128), _side(d, 128)), 4, 3)
    blocks = (*tile.blocks, UNIT)
    return tile._replace(num_stages=_fit(tile._replace(blocks=blocks), itemsize, gpu).num_stages)


def num_shares(rows: int, offsets: int, matrix_tiles: int, tile: Tile) -> int:
    """Shares that the pairs are cut into, so that an H200 has work for some waves; 0: not at all.

    Without shares a program sums all pairs of an offset: enough programs where the matrix is large.
    """
    programs = 264 if tile.num_warps == 8 else 528
    if matrix_tiles * offsets >= 792:
        return 0
    worthwhile = rows * offsets // (LEAST_UNITS * UNIT) + 1
    return max(1, min(programs // matrix_tiles, worthwhile))


def _side(size: int, most: int) -> int:
    """The side of a dot's tile for so many numbers."""
    return max(LEAST_DOT, min(1 << max(size - 1, 0).bit_length(), most))


def _fit(tile: Tile, itemsize: int, gpu: Gpu) -> Tile:
    """The tile with as many stages as shared memory holds."""
    m, n, k = tile.blocks
    stages = gpu.shared // ((m + n) * k * itemsize)
    return tile._replace(num_stages=max(1, min(tile.num_stages, stages)))
