"""Launches of the kernels of the fully connected product; each fills tensors that it is given."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.matrices import fc_kernels, fc_rows
from torchweft.clifford.matrices.fc_rows import Norm
from torchweft.core.backend import interpreted
from torchweft.core.gpu.launcher import Launcher, current_device

__all__ = [
    "arrange",
    "denormalise",
    "normalise",
    "pairs",
    "row_scale",
    "turn",
]


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

    finds: the factors, if there are any, are found: powers of two that bring the pairs below 2¹⁵.
    A program that owns a row finds its factor on the way; longer rows are read twice.
    """
    finds = finds and scale is not None
    if finds and scale is not None and fc_kernels.row_tile(algebra, x.shape[2]) is None:
        row_scale(x, y, fc_kernels.layout(algebra).most_terms, scale)
        finds = False
    variant = (algebra, gated, scale is not None, _dialect(), "", finds)
    _launch_pairs(variant, [x, y, t, scale], [])


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
    variant = (algebra, gated, factor is not None, _dialect(), wanted, False)
    _launch_pairs(variant, [x, y, dt, factor], outputs)


def _launch_pairs(
    variant: tuple[Any, ...], tensors: Sequence[Tensor | None], outputs: Sequence[Tensor]
) -> None:
    x, y, t, *_ = operands = [t for t in tensors if t is not None]
    numbers = (*x.shape[1:], *x.stride(), *y.stride(), *(g.stride(0) for g in outputs[:1]))
    with current_device(x):
        launch = _pairs_launcher(variant, numbers, x.dtype, t.dtype)
        launch([*operands, *outputs], t.nbytes)


@functools.lru_cache(maxsize=1024)
def _pairs_launcher(
    variant: tuple[Any, ...], numbers: tuple[int, ...], *dtypes: torch.dtype
) -> Launcher:
    """A launcher keeps compiled code, so that the dtypes are part of what it is known by."""
    algebra, *_, gradients, finds = variant
    module = fc_kernels.pair_kernels(*variant)
    kernel = module.turn_kernel if gradients else module.pairs_kernel
    rows, features = numbers[:2]
    whole = fc_kernels.row_tile(algebra, features) if finds else None
    tile = whole or fc_kernels.pair_tile(algebra, features, gradients)
    block, block_f = tile.blocks
    programs = -(-rows // (block // block_f)) * -(-features // block_f)
    return Launcher(kernel, programs, (), numbers, (), tile)


def row_scale(x: Tensor, y: Tensor | None, terms: int, scale: Tensor) -> None:
    """For each row of (D, B, F) a power of two that brings what is computed of it below 2¹⁵.

    That is the numbers of x or, with y, sums of so many products of x and y.
    """
    operands = [x] if y is None else [x, y]
    strides = tuple(stride for operand in operands for stride in operand.stride())
    names = "xy"[: len(operands)]
    variant = ("scale_kernel", x.shape[0], names, terms, _dialect())
    with current_device(x):
        _row_launcher(variant, (*x.shape[1:], *strides), x.dtype)([*operands, scale])


def arrange(w: Tensor, order: Tensor, scale: Tensor | None, z: Tensor) -> None:
    """z[p] = w[order[p]], times the scale if there is one; w: (P, N, F), z: contiguous."""
    operands = [t for t in (w, order, scale, z) if t is not None]
    paths, rows, features = w.shape
    variant = ("arrange_kernel", scale is not None, _dialect())
    numbers = (paths * rows, features, rows, *w.stride())
    with current_device(w):
        _row_launcher(variant, numbers, w.dtype, z.dtype)(operands)


def normalise(
    o: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    z: Tensor,
    r: Tensor,
    norm: Norm,
    algebra: Algebra,
) -> None:
    """z = o, without the scales of its rows and of all, over its size by grade; r = 1 / size."""
    operands = [o, *(scales or ()), z, r]
    variant = ("norm_kernel", algebra, norm, scales is not None, _dialect())
    numbers = (*o.shape[1:], z.stride(0), r.stride(0))
    with current_device(o):
        _row_launcher(variant, numbers, o.dtype, z.dtype)(operands)


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
    with current_device(go):
        _row_launcher(variant, numbers, go.dtype, z.dtype, do.dtype)(operands)


MAKERS = {"scale_kernel": fc_rows.scale_kernels, "arrange_kernel": fc_rows.arrange_kernels}


@functools.lru_cache(maxsize=1024)
def _row_launcher(variant: tuple[Any, ...], numbers: tuple[int, ...], *_: torch.dtype) -> Launcher:
    name, *rest = variant
    make = MAKERS.get(name, fc_rows.norm_kernels)
    rows, features = numbers[:2]
    return Launcher(getattr(make(*rest), name), rows, (), numbers, (), fc_rows.row_tile(features))


def _dialect() -> str:
    return "triton" if interpreted() or torch.version.hip else "gluon"
