"""Launches of the kernels of the fully connected product; each fills tensors that it is given."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.clifford import fc_kernels, fc_rows
from weft.clifford.algebra import Algebra
from weft.clifford.fc_rows import Norm
from weft.core.backend import interpreted
from weft.core.launcher import Launcher

__all__ = ["denormalise", "normalise", "pairs", "row_scale", "turn"]


def pairs(
    x: Tensor, y: Tensor, scale: Tensor | None, t: Tensor, algebra: Algebra, gated: bool
) -> None:
    """t = the pairs of x and y, times a factor for each row."""
    _launch_pairs(algebra, gated, "", [x, y, t, scale])


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
    _launch_pairs(algebra, gated, wanted, [x, y, dt, factor, *gradients])


def _launch_pairs(
    algebra: Algebra, gated: bool, gradients: str, tensors: Sequence[Tensor | None]
) -> None:
    x, y, t = operands = [t for t in tensors[:3] if t is not None]
    outputs = [t for t in tensors[4:] if t is not None]
    operands += [t for t in tensors[3:] if t is not None]
    numbers = (*x.shape[1:], *x.stride(), *y.stride(), *(g.stride(0) for g in outputs[:1]))
    variant = (algebra, gated, tensors[3] is not None, _dialect(), gradients)
    with _current(x):
        _pairs_launcher(variant, numbers, x.dtype, t.dtype)(operands, t.nbytes)


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
    """For each row of (D, B, F) a power of two that brings what is computed of it below 2¹⁵.

    That is the numbers of x or, with y, sums of so many products of x and y.
    """
    scale = x.new_empty(x.shape[1], dtype=torch.float32)
    operands = [x] if y is None else [x, y]
    strides = tuple(stride for operand in operands for stride in operand.stride())
    names = "xy"[: len(operands)]
    variant = ("scale_kernel", x.shape[0], names, terms, _dialect())
    with _current(x):
        _row_launcher(variant, (*x.shape[1:], *strides), x.dtype)([*operands, scale])
    return scale


def normalise(
    o: Tensor, undo: Tensor | None, z: Tensor, r: Tensor, norm: Norm, algebra: Algebra
) -> None:
    """z = o, times a factor for each row, over its size by grade; r (grades, B) = 1 / size."""
    operands = [t for t in (o, undo, z, r) if t is not None]
    variant = ("norm_kernel", algebra, norm, undo is not None, _dialect())
    with _current(o):
        _row_launcher(variant, tuple(o.shape[1:]), o.dtype, z.dtype)(operands)


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
    operands = [t for t in (go, z, r, do, scale) if t is not None]
    numbers = (*go.shape[1:], *go.stride(), z.stride(0), r.stride(0))
    variant = ("denorm_kernel", algebra, norm, scale is not None, _dialect())
    with _current(go):
        _row_launcher(variant, numbers, go.dtype, z.dtype, do.dtype)(operands)


@functools.lru_cache(maxsize=1024)
def _row_launcher(variant: tuple[Any, ...], numbers: tuple[int, ...], *_: torch.dtype) -> Launcher:
    name, *rest = variant
    make = fc_rows.scale_kernels if name == "scale_kernel" else fc_rows.norm_kernels
    rows, features = numbers[:2]
    return Launcher(getattr(make(*rest), name), rows, (), numbers, (), fc_rows.row_tile(features))


def _dialect() -> str:
    return "triton" if interpreted() or torch.version.hip else "gluon"


def _current(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's device current, as a launcher needs it."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
