"""The Triton path of the sparse convolution: launches of its kernels, and their tiles.

Sizes follow from K, N and C alone: counts of pairs stay on the GPU, and the host never waits.
Tiles follow from channels, dtype and the properties of the GPU.  They determine the order of the
sums too, so results depend on shapes, never on the load of the machine.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import (
    Call,
    Kernel,
    Tile,
    compile_together,
    current_device,
    has_tf32,
)
from torchweft.core.operators.call_cache import CallCache
from torchweft.core.operators.operator import compiling, recording, transformed, unwatched
from torchweft.voxels.convolution.epilogue import NO_EPILOGUE, Epilogue
from torchweft.voxels.maps.gpu.tiles import (
    MOST_SORTED,
    PANEL,
    call_for_pairs,
    calls_for_tiles,
    kernel_for,
    padded,
    pair_dtype,
    pairs_of,
    tiles_of,
    tiles_of_parts,
)
from torchweft.voxels.maps.kernel_map import KernelMap

__all__ = [
    "Gpu",
    "compile_ahead",
    "convolve",
    "convolve_tile",
    "depthwise_tile",
    "fold_tile",
    "gradient_tile",
    "prepare",
    "reduced_tile",
    "turned",
    "weight_gradient",
]

LEAST_DOT_SIDE = 16
"""The least size of each side of `tl.dot`."""

FOLDED_CHANNELS = 8
"""Most channels for which several offsets share a dot."""

PAIRS_PER_UNIT = 64
"""Pairs that the weight gradient sums at once."""

LEAST_UNITS = 8
"""Fewest units of pairs that are worth partial sums of their own, if every pair exists."""

MOST_ADDED = 16
"""Most shares that a program adds up at once."""

THIRDS = range(17, 32)
"""Numbers of offsets that may be summed in three parts."""

LEAST_IN_THIRDS = 1024
"""Fewest channels read for which tiles of a third of the offsets outweigh passing on the sums."""

_CONV_KERNELS = "convolution.kernels."


def prepare(found: KernelMap, gradient: bool) -> None:
    """Build now what a convolution and, with gradient, its weight's gradient cache for a map."""
    table, order, offsets = found.kept, found.outputs.order, found.geometry.num_offsets
    with current_device(table):
        if gradient:
            pairs_of(table, order, offsets, mirrored=found.back is None)
        else:
            tiles_of(table, order, offsets)


def turned(weight: Tensor, groups: int) -> Tensor:
    """(K, C_in/groups, C_out) → (K, C_out/groups, C_in), each group's matrix transposed."""
    if groups == 1:
        return weight.transpose(1, 2)
    offsets, inner, outer = weight.shape
    matrices = weight.reshape(offsets, inner, groups, outer // groups)
    return matrices.permute(0, 3, 2, 1).flatten(2)


def convolve(
    x: Tensor,
    weight: Tensor,
    table: Tensor,
    order: Tensor | None,
    *,
    groups: int,
    precision: str,
    after: Epilogue = NO_EPILOGUE,
    flip: bool = False,
) -> Tensor:
    """y[o] = Σ_k x[sources[k,o]] @ weight[k], summed over k in one order for all rows.

    Args:
        x: (N_in, C_in), any strides.
        weight: (K, C_in / groups, C_out), any strides.
        table: (K, N_out) int32, −1 for none: sources[k, order[i]] in column i; or half of it, see
            `whole`.
        order: (N_out,) the output rows in canonical order; None: in row order.
        groups: of channels.
        precision: of float32, "ieee", "tf32" or "tf32x3".
        after: is applied to the sums before they are rounded.
        flip: weight[K − 1 − k] instead of weight[k].  The input gradient of a submanifold
            convolution with an odd kernel needs no table of its own.

    Returns:
        (N_out, C_out) in x's dtype, rounded once.
    """
    y = x.new_empty(table.shape[1], weight.shape[2])
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    weight, passes = _laid_out_for_dots(weight, precision), _passes(weight, y, after)
    with current_device(x):
        for number, (out, step) in enumerate(passes):
            operands = x, weight, out
            kernel, programs, halves = _convolver_of(operands, groups, precision, step, flip)
            steps = [None if t is None else t.contiguous() for t in step[:5]]
            if not kernel.compiled:
                read = table.contiguous()
                calls = _convolver_calls(x, weight, y, read, groups, precision, after, flip)
                compile_together([*calls, *calls_for_tiles(read, order, len(weight))])
            if len(passes) == 1:
                tiles = tiles_of(table, order, len(weight))
            else:
                tiles = tiles_of_parts(table, order, len(weight), len(passes))[number]
            tables = (tiles.lists, tiles.halves, tiles.rows, tiles.turns[halves - 1])
            kernel(programs, (*operands, *steps, *tables))
    return y


def _laid_out_for_dots(weight: Tensor, precision: str) -> Tensor:
    """The weight; of float32 one that is contiguous along the axis along which dots read it.

    Warp groups that multiply in TF32 read it along the channels summed, other dots along the
    channels written.  Where the other axis is contiguous, Triton copies 4 bytes at a time to shared
    memory: with 64 channels in TF32 a convolution takes 3.6 times as long on an H200.
    """
    if weight.dtype != torch.float32:
        return weight
    in_groups = precision != "ieee" and _gpu_of(weight.device).wgmma
    if in_groups and weight.shape[1] > FOLDED_CHANNELS:
        return weight.transpose(1, 2).contiguous().transpose(1, 2)
    return weight.contiguous()


def _passes(weight: Tensor, y: Tensor, after: Epilogue) -> tuple[tuple[Tensor, Epilogue], ...]:
    """What a convolution writes and applies in one launch, or in one for each third of the offsets.

    A third adds what it finds to the sums so far, its residual, which are in float32 at least.
    """
    if weight.shape[1] < LEAST_IN_THIRDS or len(weight) not in THIRDS:
        return ((y, after),)
    if any(step is not None for step in (after.scale, after.residual, after.var)):
        return ((y, after),)
    sums = torch.empty_like(y, dtype=torch.promote_types(y.dtype, torch.float32))
    last = after._replace(residual=sums)
    return (sums, NO_EPILOGUE), (sums, Epilogue(residual=sums)), (y, last)


_convolvers: CallCache[tuple[Kernel, int, int]] = CallCache()


def _convolver_of(
    operands: tuple[Tensor, Tensor, Tensor],
    groups: int,
    precision: str,
    after: Epilogue,
    flip: bool,
) -> tuple[Kernel, int, int]:
    """(kernel, programs, halves of a panel per tile); kernels are cached by signature."""
    x, weight, y = operands
    (k, c, channels), strides = weight.shape, (x.stride(0), *weight.stride())
    slots = -(-len(y) // PANEL) * PANEL
    wide = max(_extent(x), y.numel(), weight.numel(), slots * k) >= 2**31
    dtypes = [None if t is None else t.dtype for t in after[:5]]
    kinds = (x.dtype, y.dtype, *dtypes, slots > MOST_SORTED)
    flags = (flip, wide, after.activation, after.eps)
    gpu = _gpu_of(x.device)
    few = slots // PANEL * -(-channels // PANEL) < 2 * gpu.processors
    key = (x.device, *kinds, k, c, channels, *strides, groups, precision, few, *flags)
    found = _convolvers.get(key)
    if found is None:
        d, size = channels // groups, x.dtype.itemsize
        constants: tuple[Any, ...] = (k, *flags)
        if groups > 1 and c == 1:
            function, tile = "depthwise_kernel", depthwise_tile(channels, size)
            numbers: tuple[int, ...] = (d, channels, strides[0], strides[1], strides[3])
            columns = -(-channels // tile.blocks[1])
        else:
            numbers = (c, d, groups, *strides)
            precision = _precision(precision, x.dtype, gpu)
            constants += (precision,)
            if c <= FOLDED_CHANNELS:
                function, tile = "fold_kernel", fold_tile(d, size)
                constants += (1 << (c - 1).bit_length(),)
            else:
                function = "convolve_kernel"
                along = strides[3] == 1 and after.activation != "gelu"
                tile = convolve_tile(c, d, size, along, gpu, few, precision == "tf32")
                constants += (c % tile.blocks[2] == 0, d % tile.blocks[1] == 0)
            columns = groups * -(-d // tile.blocks[1])
        kernel = kernel_for(_CONV_KERNELS + function, numbers, constants, tile, x.device, kinds)
        found = kernel, columns, 2 * tile.blocks[0] // PANEL
        _convolvers.keep(key, found)
    kernel, columns, parts = found
    return kernel, slots // (PANEL // 2) // parts * columns, parts


def _convolver_calls(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    table: Tensor,
    groups: int,
    precision: str,
    after: Epilogue,
    flip: bool,
) -> list[Call]:
    """The calls of `convolve`; any int32 tensor stands for tables that may not exist yet."""
    turns, calls = table if len(y) <= MOST_SORTED else None, list[Call]()
    weight = _laid_out_for_dots(weight.detach(), precision)
    for out, step in _passes(weight, y, after):
        operands = x, weight, out
        kernel, *_ = _convolver_of(operands, groups, precision, step, flip)
        calls.append(Call(kernel, (*operands, *step[:5], table, table, table, turns)))
    return calls


_compiled_layers: set[tuple[Any, ...]] = set()
"""Signatures of convolutions that `compile_ahead` has seen."""


def compile_ahead(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    maps: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    groups: int,
    precision: str,
    tiled: bool = False,
) -> None:
    """Compile in threads all kernels of a layer and of its recorded gradients, if it is new.

    Otherwise a training step would compile them one after the other.

    Args:
        x: see `convolve`.
        weight: see `convolve`.
        bias: (C_out,).
        maps: table, back (None where the gradient of x reads the table flipped), and the orders
            of inputs and outputs.
        groups: see `convolve`.
        precision: see `convolve`.
        tiled: whether the map compiles the kernels of its tiles.
    """
    if compiling() or transformed() or not (unwatched(x) and unwatched(weight)):
        return
    table, back, in_order, out_order = maps
    of_x, of_weight = recording() and x.requires_grad, recording() and weight.requires_grad
    absent = bias is None, back is None, in_order is None, out_order is None
    kind = (x.device, x.dtype, weight.shape, groups, precision, absent, of_x, of_weight)
    if kind in _compiled_layers or 0 in (x.numel(), weight.numel(), table.shape[1]):
        return
    _compiled_layers.add(kind)
    x = x.detach().contiguous()
    y, mirrored = x.new_empty(table.shape[1], weight.shape[2]), back is None
    with current_device(x):
        after = NO_EPILOGUE if bias is None else Epilogue(shift=bias)
        calls = _convolver_calls(x, weight, y, table, groups, precision, after, flip=False)
        reads = [(table, out_order)]
        if of_x:
            operands = y, turned(weight.detach(), groups), x, table
            calls += _convolver_calls(*operands, groups, precision, NO_EPILOGUE, flip=mirrored)
            reads += [] if back is None else [(back, in_order)]
        if of_weight:
            dw = x.new_empty(weight.shape)
            made = _differentiator_of(x, y, dw, groups, precision, mirrored)
            calls += _differentiator_calls(made, (x, y, dw), table, out_order, mirrored)
        for read in [] if tiled else reads:
            calls += calls_for_tiles(*read, len(weight))
        compile_together(calls)


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
        order: (N_out,) the output rows in canonical order; None: in row order.
        groups: of channels.
        precision: of float32, "ieee", "tf32" or "tf32x3".
        offsets: K; None: the number of rows of a whole table.
        mirrored: whether the pairs of offset K − 1 − k are those of k swapped, see `pairs_of`.

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
        kernel, shares = made.kernel, made.shares
        z = _partial_sums(dw, shares, shares + k)
        if not kernel.compiled:
            read = table.contiguous()
            compile_together(_differentiator_calls(made, (x, g, dw), read, order, mirrored))
        pairs = pairs_of(table, order, k, mirrored)
        tensors = (x, g, z, pairs.inputs, pairs.outputs, pairs.totals)
        kernel((shares or k) * made.matrix_tiles, tensors, (shares,))
        if shares:
            made.reduction(made.reduction_programs, (z, dw, pairs.totals), (shares,))
    return dw


def _partial_sums(dw: Tensor, shares: int, count: int) -> Tensor:
    """Room for `count` sums where pairs are divided into shares, else dw itself."""
    dtype = torch.promote_types(dw.dtype, torch.float32)
    return dw.new_empty((count, *dw.shape[1:]), dtype=dtype) if shares else dw


class _Differentiator(NamedTuple):
    """The kernels of a weight's gradient.

    Args:
        kernel: sums a tile of a matrix over a share of the pairs.
        matrix_tiles: tiles of one offset's matrices, of all groups.
        reduction: adds up the sums of shares.
        reduction_programs: how many programs that takes.
        shares: of the pairs; 0: a program sums all pairs of an offset.
    """

    kernel: Kernel
    matrix_tiles: int
    reduction: Kernel
    reduction_programs: int
    shares: int


def _differentiator_calls(
    made: _Differentiator,
    tensors: tuple[Tensor, Tensor, Tensor],
    table: Tensor,
    order: Tensor | None,
    mirrored: bool,
) -> list[Call]:
    """The calls of `weight_gradient`; any int32 tensor stands for one that does not exist yet."""
    (x, g, dw), shares = tensors, made.shares
    z = _partial_sums(dw, shares, 0)
    pairs = table.new_empty(0, dtype=pair_dtype(table.shape[1], mirrored))
    calls = [
        Call(made.kernel, (x, g, z, pairs, pairs, table), (shares,)),
        call_for_pairs(table, order, len(dw), mirrored),
    ]
    if shares:
        calls.append(Call(made.reduction, (z, dw, table), (shares,)))
    return calls


_differentiators: CallCache[_Differentiator] = CallCache()
"""For any number of rows, with the most shares."""


def _differentiator_of(
    x: Tensor, g: Tensor, dw: Tensor, groups: int, precision: str, mirrored: bool
) -> _Differentiator:
    """The kernels for tensors, cached by signature."""
    (k, c, channels), rows, strides = dw.shape, len(g), (x.stride(0), g.stride(0))
    wide, kinds = max(_extent(x), _extent(g)) >= 2**31, (x.dtype, pair_dtype(rows, mirrored))
    key = (x.device, *kinds, k, c, channels, *strides, groups, precision, wide, mirrored)
    found = _differentiators.get(key)
    if found is None:
        d, size, gpu = channels // groups, x.dtype.itemsize, _gpu_of(x.device)
        more: tuple[Any, ...] = ()
        if groups > 1 and c == 1:
            tile = depthwise_tile(channels, size)
            tile = tile._replace(blocks=tile.blocks[1:])
            matrix_tiles = -(-channels // tile.blocks[0])
            function = "depthwise_gradient_kernel"
            numbers: tuple[int, ...] = (d, channels, *strides)
        else:
            tf32 = _precision(precision, x.dtype, gpu) == "tf32"
            tile = gradient_tile(c, d, size, gpu, tf32)
            matrix_tiles = groups * -(-c // tile.blocks[0]) * -(-d // tile.blocks[1])
            function, numbers = "weight_gradient_kernel", (c, d, groups, *strides)
            even = c % tile.blocks[0] == 0, d % tile.blocks[1] == 0
            # one product in float32 is faster than three in TF32
            more = ("tf32" if tf32 else "ieee", *even)
        most = _most_shares(k, matrix_tiles, tile)
        constants, where = (k, padded(k), most == 0, wide, mirrored, *more), (x.device, *kinds)
        kernel = kernel_for(_CONV_KERNELS + function, numbers, constants, tile, *where)
        reduced, name = reduced_tile(k, most), _CONV_KERNELS + "reduce_kernel"
        reduction = kernel_for(name, (c * channels,), constants[:2], reduced, x.device, x.dtype)
        programs = k * -(-c * channels // reduced.blocks[1])
        found = _Differentiator(kernel, matrix_tiles, reduction, programs, most)
        _differentiators.keep(key, found)
    worthwhile = rows * k // (LEAST_UNITS * PAIRS_PER_UNIT) + 1
    return found._replace(shares=min(found.shares, worthwhile))


def _precision(precision: str, dtype: torch.dtype, gpu: Gpu) -> str:
    return precision if dtype == torch.float32 and gpu.tf32 else "ieee"


def _extent(rows: Tensor) -> int:
    """Elements from the first row to the end of the last, gaps included."""
    count, width = rows.shape
    return count * max(rows.stride(0), width)


class Gpu(NamedTuple):
    """The properties of a GPU that tiles depend on.

    Args:
        wgmma: whether dots run by warp groups, which take larger tiles without spilling registers.
        tf32: whether it has TF32.
        shared: bytes of shared memory that one block may use.
        processors: how many.
    """

    wgmma: bool
    tf32: bool
    shared: int
    processors: int


@functools.cache
def _gpu_of(device: torch.device) -> Gpu:
    """The GPU of a tensor; for the interpreter, an H200."""
    if device.type != "cuda":
        return Gpu(True, True, 232_448, 132)
    properties = torch.cuda.get_device_properties(device)
    processors = properties.multi_processor_count
    if torch.version.hip is not None:
        return Gpu(False, False, 65_536, processors)
    shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Gpu(properties.major == 9, has_tf32(device), shared, processors)


def convolve_tile(
    c: int, d: int, itemsize: int, along: bool, gpu: Gpu, few: bool, tf32: bool
) -> Tile:
    """(BLOCK_M, BLOCK_N, BLOCK_K) of `convolve_kernel` for c channels to d.

    Args:
        c: channels read.
        d: channels written.
        itemsize: bytes of an element.
        along: whether 256 columns a tile are no slower: the weight is contiguous along d, and no
            GELU needs the registers.
        gpu: the GPU.
        few: whether tiles of 128 rows leave processors without work.
        tf32: whether factors are cut off to TF32.
    """
    m, n, k, warps, stages = 64, _side(d, 64), _side(c, 64), 4, 3
    if itemsize == 8:
        n, k = _side(d, 32), _side(c, 16)
    elif tf32 and gpu.wgmma:
        m, n, k = 64 if few else 128, _side(d, 128), _side(c, 32)
    elif itemsize == 4 or not gpu.wgmma:
        k = _side(c, 32)
    elif d > 64:
        m, n, stages = (64, 128, 4) if few else (128, 128, 3)
        if d > 128 and c > 128 and along and not few:
            n, warps = 256, 8
        elif c > 64 and 0 < c % 64 <= 32:
            k, stages = 32, 4  # of 64 channels the last would be half empty
    elif d > 32:
        stages = 2
    return _fit(Tile((m, n, k), warps, stages), itemsize, gpu)


def fold_tile(d: int, itemsize: int) -> Tile:
    """(BLOCK_M, BLOCK_N, BLOCK_K) of `fold_kernel` to d channels."""
    return Tile((64, _side(d, 64 if itemsize < 8 else 32), 32), 4, 2)


def depthwise_tile(channels: int, itemsize: int) -> Tile:
    """(BLOCK_M, BLOCK_N) of the depthwise kernels: 16 bytes per thread along the channels."""
    return Tile((64, _side(channels, 256 // itemsize)), 4, 2)


def gradient_tile(c: int, d: int, itemsize: int, gpu: Gpu, tf32: bool) -> Tile:
    """(BLOCK_C, BLOCK_D) of `weight_gradient_kernel` for c channels to d.

    Warp groups read factors in TF32 along the pairs, but rows are contiguous along the channels:
    the tile has two warps, which multiply without a warp group.
    """
    if itemsize == 8:
        tile = Tile((_side(c, 32), _side(d, 64)), 4, 2)
    elif tf32 and gpu.wgmma:
        tile = Tile((_side(c, 64), _side(d, 128)), 2, 2)
    elif itemsize == 4 and gpu.wgmma and d > 64:
        tile = Tile((_side(c, 64), 128), 8, 2)
    elif itemsize == 4 and gpu.wgmma:
        tile = Tile((_side(c, 32), _side(d, 64)), 4, 3)
    elif itemsize == 4 or not gpu.wgmma or max(c, d) <= 64:
        tile = Tile((_side(c, 64), _side(d, 64)), 4, 3)
    elif c > 64 and 128 < d <= 512:
        tile = Tile((128, 256), 8, 3)
    else:
        tile = Tile((_side(c, 128), _side(d, 128)), 4, 3)
    blocks = (*tile.blocks, PAIRS_PER_UNIT)
    return tile._replace(num_stages=_fit(tile._replace(blocks=blocks), itemsize, gpu).num_stages)


def reduced_tile(offsets: int, shares: int) -> Tile:
    """(BLOCK_S, BLOCK) of `reduce_kernel`: an offset's shares at once, if not many."""
    of_offset = shares // offsets + 2  # with those that begin or end in other offsets
    added = min(1 << (of_offset - 1).bit_length(), MOST_ADDED)
    return Tile((added, 2048 // added))


def _most_shares(offsets: int, matrix_tiles: int, tile: Tile) -> int:
    """Most shares of the pairs, so that an H200 has work for some waves; 0: none.

    Without shares a program sums all pairs of an offset, which suffices for large matrices.
    """
    programs = 264 if tile.num_warps == 8 else 528
    return 0 if matrix_tiles * offsets >= 792 else max(1, programs // matrix_tiles)


def _side(size: int, most: int) -> int:
    """The side of a dot's tile for `size` channels."""
    return max(LEAST_DOT_SIDE, min(1 << max(size - 1, 0).bit_length(), most))


def _fit(tile: Tile, itemsize: int, gpu: Gpu) -> Tile:
    """The tile with as many stages as shared memory holds."""
    m, n, k = tile.blocks
    stages = gpu.shared // ((m + n) * k * itemsize)
    return tile._replace(num_stages=max(1, min(tile.num_stages, stages)))
