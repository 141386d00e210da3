"""Launches of the kernels that mix features; each fills tensors that it is given.

First those of the fully connected product, then those of linear maps by grade.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from torchweft.clifford import kernels
from torchweft.clifford.algebra import Algebra
from torchweft.clifford.matrices.source import (
    Norm,
    arrange_kernels,
    layout,
    norm_kernels,
    pair_kernels,
    pair_row_tile,
    pair_tile,
    row_tile,
    scale_kernels,
)
from torchweft.core.backend import interpreted
from torchweft.core.explain import Launch, record, recording
from torchweft.core.gpu.launcher import CONTRACTED, Launcher, Tile, current_device, processors
from torchweft.core.printing.modules import written

__all__ = [
    "arrange",
    "denormalise",
    "launched",
    "meet",
    "normalise",
    "pairs",
    "row_scale",
    "rows",
    "rows_tile",
    "serves_rows",
    "sum_by_grade",
    "turn",
    "turned",
]

Build = Callable[[tuple[Any, ...], tuple[int, ...]], Launcher]


def launched(
    build: Build,
    variant: tuple[Any, ...],
    numbers: tuple[int, ...],
    operands: Sequence[Tensor | None],
    workspace: int = 0,
) -> None:
    """Launch the kernel of a variant with its counts and strides; the first operand is a tensor."""
    with current_device(operands[0]):  # type: ignore[arg-type]
        dtypes = [None if t is None else t.dtype for t in operands]
        device = operands[0].device  # type: ignore[union-attr]
        _cached(build, variant, numbers, device, *dtypes)(operands, workspace)


@functools.lru_cache(maxsize=2048)
def _cached(
    build: Build, variant: tuple[Any, ...], numbers: tuple[int, ...], *_: Hashable
) -> Launcher:
    """A launcher keeps compiled code, so device and dtypes are part of its key."""
    return build(variant, numbers)


@functools.cache
def _gluon() -> bool:
    return not (interpreted() or torch.version.hip)


def pairs(
    x: Tensor,
    y: Tensor,
    scale: Tensor | None,
    t: Tensor,
    algebra: Algebra,
    gated: bool,
    finds: bool = False,
) -> None:
    """t = the pairs of x and y, times a factor for each row.

    finds: the factors, if there are any, are computed: powers of two that bring pairs below 2¹⁵.
    A program that owns a row computes its factor on the way; longer rows are read twice.
    """
    finds = finds and scale is not None
    if finds and scale is not None and pair_row_tile(algebra, x.shape[2]) is None:
        row_scale(x, y, layout(algebra).most_terms, scale)
        finds = False
    variant = (algebra, gated, scale is not None, _gluon(), "", finds)
    numbers = (*x.shape[1:], *x.stride(), *y.stride())
    operands = [x, y, t] if scale is None else [x, y, t, scale]
    launched(_pairs_launcher, variant, numbers, operands, t.nbytes)


def turn(
    x: Tensor,
    y: Tensor,
    factor: Tensor | None,
    dt: Tensor,
    gradients: Sequence[Tensor | None],
    algebra: Algebra,
    gated: bool,
) -> None:
    """The gradients of x and y that are not None, from those of the pairs, times a row's factor."""
    wanted = "".join(v for v, g in zip("xy", gradients, strict=True) if g is not None)
    outputs = [g for g in gradients if g is not None]
    variant = (algebra, gated, factor is not None, _gluon(), wanted, False)
    numbers = (*x.shape[1:], *x.stride(), *y.stride(), outputs[0].stride(0))
    operands = [x, y, dt, *outputs] if factor is None else [x, y, dt, factor, *outputs]
    launched(_pairs_launcher, variant, numbers, operands, dt.nbytes)


def _pairs_launcher(variant: tuple[Any, ...], numbers: tuple[int, ...]) -> Launcher:
    algebra, *_, gradients, finds = variant
    module = pair_kernels(*variant)
    kernel = module.turn_kernel if gradients else module.pairs_kernel
    rows, features = numbers[:2]
    whole = pair_row_tile(algebra, features) if finds else None
    tile = whole or pair_tile(algebra, features, gradients)
    block, block_f = tile.blocks
    programs = -(-rows // (block // block_f)) * -(-features // block_f)
    return Launcher(kernel, programs, (), numbers, (), tile)


def row_scale(x: Tensor, y: Tensor | None, terms: int, scale: Tensor) -> None:
    """For each row of (D, B, F) a power of two that brings what is computed of it below 2¹⁵.

    That is the numbers of x or, with y, sums of so many products of x and y.
    """
    variant = ("scale_kernel", x.shape[0], "x" if y is None else "xy", terms, _gluon())
    if y is None:
        launched(_row_launcher, variant, (*x.shape[1:], *x.stride()), [x, scale])
    else:
        numbers = (*x.shape[1:], *x.stride(), *y.stride())
        launched(_row_launcher, variant, numbers, [x, y, scale])


def arrange(
    w: Tensor, order: Tensor, scales: Tensor | None, z: Tensor, least: Tensor | None = None
) -> None:
    """z[p] = w[order[p]], times the least of the scales; w: (P, N, F), z: contiguous.

    The least is written, too, where there is a place for it.
    """
    paths, rows, features = w.shape
    numbers = (paths * rows, features, rows, *w.stride(), 0 if scales is None else scales.numel())
    operands = [t for t in (w, order, scales, z, least) if t is not None]
    variant = ("arrange_kernel", scales is not None, least is not None, _gluon())
    launched(_row_launcher, variant, numbers, operands)


def meet(bits: int, scale: Tensor, *others: Tensor) -> None:
    """See `meet_kernel`: all its tensors in order."""
    launched(_meet_launcher, (bits,), (len(scale),), [scale, *others])


def _meet_launcher(variant: tuple[Any, ...], numbers: tuple[int, ...]) -> Launcher:
    kernel = written(kernels.__name__, "meet_kernel")
    return Launcher(kernel, 1, (), numbers, variant, MEET_TILE)


def normalise(
    o: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    z: Tensor,
    r: Tensor,
    norm: Norm,
    algebra: Algebra,
) -> None:
    """z = o, without the scales of its rows and of all, over its size by grade; r = 1 / size."""
    variant = ("norm_kernel", algebra, norm, scales is not None, _gluon())
    numbers = (*o.shape[1:], z.stride(0), r.stride(0))
    launched(_row_launcher, variant, numbers, [o, *(scales or ()), z, r])


def denormalise(
    go: Tensor,
    z: Tensor,
    r: Tensor,
    do: Tensor,
    scale: Tensor | None,
    norm: Norm,
    algebra: Algebra,
) -> None:
    """do = the gradient of what was normalised, times a factor for each row that goes to scale."""
    variant = ("denorm_kernel", algebra, norm, scale is not None, _gluon())
    numbers = (*go.shape[1:], *go.stride(), z.stride(0), r.stride(0))
    operands = [go, z, r, do] if scale is None else [go, z, r, do, scale]
    launched(_row_launcher, variant, numbers, operands)


ROW_KERNELS = {"scale_kernel": scale_kernels, "arrange_kernel": arrange_kernels}


def _row_launcher(variant: tuple[Any, ...], numbers: tuple[int, ...]) -> Launcher:
    name, *options = variant
    module = ROW_KERNELS.get(name, norm_kernels)(*options)
    rows, features = numbers[:2]
    return Launcher(getattr(module, name), rows, (), numbers, (), row_tile(features))


MOST_LINEAR_TILES, MOST_LINEAR_FEATURES = 1024, 1024
"""Beyond so many tiles, or numbers that one result sums, the library's product is ahead."""

SUM_TILE, TURN_TILE, MEET_TILE = Tile((512,), 4, 1), Tile((64,), 8, 1), Tile((2048,), 8, 1)
INTERPRETED_PROGRAMS = 3


def serves_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether `rows` takes contiguous x, and is the faster way.

    The copy engine loads tiles: rows of both factors begin at multiples of 16 bytes.
    """
    if not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    matrix = _laid_out(weight)
    return (
        0 < _tiles(x, weight.shape[-1]) <= MOST_LINEAR_TILES
        and 0 < x.shape[-1] <= MOST_LINEAR_FEATURES
        and not (x.shape[-1] % 8 or weight.shape[-1] % 8)
        and matrix is not None
        and not (x.data_ptr() | matrix.data_ptr()) & 15
        and torch.version.hip is None
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
    )


def rows(x: Tensor, weight: Tensor, bias: Tensor | None, n: int, z: Tensor) -> None:
    """z_j = x_j @ weight[grade of j], and the bias on the scalar.

    x, z: contiguous (B, rows, F); weight: contiguous (n+1, F_in, F_out), or its matrices turned.
    """
    matrix, turned_in = _laid_out(weight), not weight.is_contiguous()
    tile = rows_tile(z.shape[-1])
    block_m, block_n, block_k = tile.blocks
    block_w = [block_n, block_k] if turned_in else [block_k, block_n]
    x_desc = TensorDescriptor.from_tensor(x, [1, block_m, block_k])
    w_desc = TensorDescriptor.from_tensor(matrix, [1, *block_w])
    blades, count, _ = x.shape
    most = INTERPRETED_PROGRAMS if interpreted() else processors(x.device)
    programs = min(_tiles(x, z.shape[-1]), most)
    constants = (blades, n, turned_in)
    if recording():
        names = kernels.rows_kernel.arg_names[-len(constants) - len(tile.blocks) :]
        shown: dict[str, int | str] = dict(zip(names, (*constants, *tile.blocks), strict=True))
        shown |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        record(Launch("triton", "rows_kernel", shown, programs, 0))
    with current_device(x):
        kernels.rows_kernel[(programs,)](
            x_desc, w_desc, bias, z, count, x.shape[-1], z.shape[-1], *constants, *tile.blocks,
            **tile.options, **CONTRACTED,
        )  # fmt: skip


def rows_tile(features: int) -> Tile:
    """BLOCK_M, BLOCK_N, BLOCK_K of a product with so many columns."""
    return Tile((128, 256 if features > 128 else 128, 64), 8, 3)


def sum_by_grade(partials: Tensor, n: int, parts: int, dtype: torch.dtype) -> Tensor:
    """(blades · parts, F_in, F_out) → (n+1, F_in, F_out), the sums of each grade in fixed order."""
    sums = partials.new_empty((n + 1, *partials.shape[1:]), dtype=dtype)
    variant = ("sum_kernel", SUM_TILE, n + 1, n, parts)
    launched(_grade_launcher, variant, (sums[0].numel(),), [partials, sums])
    return sums


def turned(weight: Tensor) -> Tensor:
    """The matrices, transposed in memory, as a view of the shape that they had."""
    grades, f_in, f_out = weight.shape
    out = weight.new_empty(grades, f_out, f_in)
    launched(_grade_launcher, ("turn_kernel", TURN_TILE, grades), (f_in, f_out), [weight, out])
    return out.mT


def _grade_launcher(variant: tuple[Any, ...], numbers: tuple[int, ...]) -> Launcher:
    name, tile, programs, *constants = variant
    for number in numbers:
        programs *= -(-number // tile.blocks[0])
    kernel = written(kernels.__name__, name)
    return Launcher(kernel, programs, (), numbers, tuple(constants), tile)


def _laid_out(weight: Tensor) -> Tensor | None:
    """The matrices as they lie in memory, contiguous; None if they do not."""
    return next((m for m in (weight, weight.mT) if m.is_contiguous()), None)


def _tiles(x: Tensor, columns: int) -> int:
    block_m, block_n, _ = rows_tile(columns).blocks
    return x.shape[0] * -(-x.shape[1] // block_m) * -(-columns // block_n)
