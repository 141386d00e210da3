"""Launches of the kernels of the fully connected product: each fills tensors that it is given."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from weft.clifford import fc_kernels
from weft.clifford.algebra import Algebra
from weft.clifford.fc_kernels import Norm
from weft.core.backend import interpreted
from weft.core.launcher import Launcher, Tile

__all__ = ["denormalise", "normalise", "pairs", "row_scale", "turn"]


def pairs(
    x: Tensor, y: Tensor, scale: Tensor | None, t: Tensor, algebra: Algebra, gated: bool
) -> None:
    """t = the pairs of x and y, times a factor for each row."""
    _launch_pairs(algebra, gated, scale, "", [x, y, t])


def turn(
    x: Tensor,
    y: Tensor,
    scale: Tensor | None,
    dt: Tensor,
    gradients: list[Tensor | None],
    algebra: Algebra,
    gated: bool,
) -> None:
    """The gradients of x and y, those that are not None, from the pairs' times a row's factor."""
    wanted = "".join(v for v, g in zip("xy", gradients, strict=True) if g is not None)
    _launch_pairs(
        algebra, gated, scale, wanted, [x, y, dt, *(g for g in gradients if g is not None)]
    )


def _launch_pairs(
    algebra: Algebra, gated: bool, scale: Tensor | None, gradients: str, tensors: list[Tensor]
) -> None:
    x, y, t, *outputs = tensors
    numbers = (*x.shape[1:], *x.stride(), *y.stride(), *(g.stride(0) for g in outputs[:1]))
    scales = [] if scale is None else [scale]
    variant = (algebra, gated, bool(scales), _dialect(), gradients)
    with _device(x):
        _pairs_launcher(variant, numbers, x.dtype, t.dtype)([x, y, t, *scales, *outputs], t.nbytes)


@functools.lru_cache(maxsize=1024)
def _pairs_launcher(
    variant: tuple[Algebra, bool, bool, str, str], numbers: tuple[int, ...], *_: torch.dtype
) -> Launcher:
    """A launcher keeps compiled code, so that the dtypes are part of what it is known by."""
    algebra, gradients = variant[0], variant[-1]
    module = fc_kernels.pair_kernels(*variant)
    kernel = module.turn_kernel if gradients else module.pairs_kernel
    rows, features = numbers[:2]
    tile = fc_kernels.pair_tile(algebra, features, gradients)
    block, block_f = tile.blocks
    programs = -(-rows // (block // block_f)) * -(-features // block_f)
    return Launcher(kernel, programs, (), numbers, (), tile)


def row_scale(x: Tensor, y: Tensor | None, terms: int) -> Tensor:
    """For each row of (D, B, F) a power of two that brings sums of products just below 2¹⁵.

    terms: how many products are summed; y may be None.
    """
    scale = x.new_empty(x.shape[1], dtype=torch.float32)
    strides = (*x.stride(), *((None,) * 3 if y is None else y.stride()))
    with _device(x):
        _scale_launcher(x.shape, strides, terms, x.dtype)([x, y, scale])
    return scale


@functools.lru_cache(maxsize=1024)
def _scale_launcher(
    shape: tuple[int, int, int], strides: tuple[int | None, ...], terms: int, dtype: torch.dtype
) -> Launcher:
    blades, rows, features = shape
    block_f = max(16, min(4096 // blades, 1 << (features - 1).bit_length()))
    numbers, constants = (rows, features, *strides), (terms, blades)
    return Launcher(fc_kernels.scale_kernel, rows, (), numbers, constants, Tile((block_f,)))


def normalise(
    o: Tensor, undo: Tensor | None, z: Tensor, r: Tensor, norm: Norm, algebra: Algebra
) -> None:
    """z = o, times a factor for each row, over its size grade by grade; r (grades, B) 1 / size."""
    _launch_norm("norm_kernel", algebra, norm, undo is not None, [o, undo, z, r], ())


def denormalise(
    go: Tensor,
    z: Tensor,
    r: Tensor,
    do: Tensor,
    scale: Tensor | None,
    norm: Norm,
    algebra: Algebra,
) -> None:
    """do = the gradient of o, times a factor for each row, which goes to `scale`."""
    scaled, strides = scale is not None, (*go.stride(), z.stride(0), r.stride(0))
    _launch_norm("denorm_kernel", algebra, norm, scaled, [go, z, r, do, scale], strides)


def _launch_norm(
    name: str,
    algebra: Algebra,
    norm: Norm,
    scaled: bool,
    tensors: list[Tensor | None],
    strides: tuple[int, ...],
) -> None:
    operands = [t for t in tensors if t is not None]
    numbers = (*operands[0].shape[1:], *strides)
    variant = (algebra, norm, scaled, _dialect())
    with _device(operands[0]):
        _norm_launcher(name, variant, numbers, *(t.dtype for t in operands))(operands)


@functools.lru_cache(maxsize=1024)
def _norm_launcher(
    name: str,
    variant: tuple[Algebra, Norm, bool, str],
    numbers: tuple[int, ...],
    *_: torch.dtype,
) -> Launcher:
    kernel = getattr(fc_kernels.norm_kernels(*variant), name)
    rows, features = numbers[:2]
    return Launcher(kernel, rows, (), numbers, (), fc_kernels.norm_tile(features))


def _dialect() -> str:
    return "triton" if interpreted() or torch.version.hip else "gluon"


def _device(tensor: Tensor) -> Any:
    """The device of a tensor made current, as a launcher needs it."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)
