"""Launches of the kernels that split h and A into parts, and of products of such parts.

The weights of a block of edges, h A, are `formed`; the gradient of A, h^T g, is `summed`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.explain import record_cost, recording
from torchweft.core.gpu.launcher import (
    Call,
    Kernel,
    Tile,
    compile_together,
    current_device,
    processors,
)
from torchweft.core.printing.modules import written
from torchweft.products.tiles import power_of_two

__all__ = [
    "MOST_HIDDEN",
    "SplitLaunch",
    "formed_weights",
    "launch",
    "of_columns",
    "of_rows",
    "summed_products",
]

KERNELS = "torchweft.o3.radial_linear.kernels"

MOST_HIDDEN = 128
"""Numbers in a row of h that a program takes at once."""

FORMED_TILE = Tile((128, 128), 4, 1)
"""Rows and columns of weights."""

SUMMED_TILE = Tile((64, 2), 4, 1)
"""Rows that are summed at a time, and of how many such steps loads are under way."""

SUMS_PER_PROGRAM = 2**13
"""Numbers of h times columns of g in a program."""

SUMMING_PROGRAMS = 2
"""Programs of each processor that share a sum over rows: as many as run at once."""

NUMBERS_PER_PROGRAM = 2048
"""Numbers of a program that splits rows or columns."""


class SplitLaunch(NamedTuple):
    """A call of a kernel by a number of programs."""

    call: Call
    programs: int


def launch(launches: Sequence[SplitLaunch], workspace: int) -> None:
    """One after the other; those that take longest to compile stand last."""
    compile_together([each.call for each in reversed(launches)])
    for (kernel, tensors, free), programs in launches:
        kernel(programs, tensors, free, workspace)


def _depth(hidden: int) -> int:
    """Numbers of a part: a power of 2 that tensor cores take."""
    return max(16, power_of_two(hidden))


def _block(hidden: int) -> int:
    return max(1, NUMBERS_PER_PROGRAM // _depth(hidden))


# parts

SplitPair = tuple[Tensor, Tensor]
"""Parts (count, parts, depth) and a power of two for each, or rows of y multiplied by these."""


@functools.lru_cache(maxsize=1024)
def _row_kernel(
    hidden: int, y_width: int, parts: int, index: torch.dtype | None, device: torch.device
) -> Kernel:
    """Splits rows of h and scales rows of y (y_width 0: none), in an order of a dtype or None.

    The kernel keeps code of one device.
    """
    side = power_of_two(max(1, y_width))
    tile = Tile((_depth(hidden), _block(hidden)), 4, 1)
    return Kernel(written(KERNELS, "row_parts"), (), (hidden, y_width, side, parts), tile)


@functools.lru_cache(maxsize=1024)
def _column_kernel(
    hidden: int, width: int, beside: int, parts: int, device: torch.device
) -> Kernel:
    """Splits columns of A, which are gathered where `beside` is not 0."""
    tile = Tile((_depth(hidden), _block(hidden)), 4, 1)
    numbers = hidden, width, max(1, beside), parts
    return Kernel(written(KERNELS, "column_parts"), (), numbers, tile)


def of_rows(
    h: Tensor, parts: int, y: Tensor | None = None, order: Tensor | None = None
) -> tuple[SplitLaunch, SplitPair]:
    """Parts of h (E, H), and rows of y multiplied by powers of two, or these powers."""
    rows, hidden = h.shape
    of_h = h.new_empty((rows, parts, _depth(hidden)), dtype=torch.float16)
    beside = h.new_empty(rows) if y is None else torch.empty_like(y)
    index = None if order is None else order.dtype
    kernel = _row_kernel(hidden, 0 if y is None else y.shape[1], parts, index, h.device)
    outs = (None, beside) if y is None else (beside, None)
    call = Call(kernel, [h, y, order, of_h, *outs], (rows,))
    return SplitLaunch(call, -(-rows // _block(hidden))), (of_h, beside)


def of_columns(
    a: Tensor, parts: int, columns: Tensor | None = None, factors: Tensor | None = None
) -> tuple[SplitLaunch, SplitPair]:
    """Parts of the columns of A (H, W), all or gathered ones, and their powers of two."""
    hidden, width = a.shape
    count, beside = (width, 0) if columns is None else (columns.shape[1], columns.shape[0])
    of_a = a.new_empty((count, parts, _depth(hidden)), dtype=torch.float16)
    powers = a.new_empty(count)
    kernel = _column_kernel(hidden, width, beside, parts, a.device)
    call = Call(kernel, [a, columns, factors, of_a, powers], (count,))
    return SplitLaunch(call, -(-count // _block(hidden))), (of_a, powers)


# products


def formed_weights(h: Tensor, a: Tensor) -> Tensor:
    """h A (E, W), of contiguous float32; h has at most MOST columns."""
    (rows, hidden), width = h.shape, a.shape[1]
    w = h.new_empty(rows, width)
    if not w.numel():
        return w
    apart, of_h = of_rows(h, 2)
    beside, of_a = of_columns(a, 2)
    call = Call(_formed_kernel(hidden, width, h.device), [*of_h, *of_a, w], (rows,))
    tall, wide = FORMED_TILE.blocks
    product = SplitLaunch(call, -(-rows // tall) * -(-width // wide))
    with current_device(h):
        launch([apart, beside, product], of_h[0].nbytes + of_a[0].nbytes)
    if recording():
        record_cost(h.nbytes + a.nbytes + w.nbytes, 2 * rows * hidden * width)
    return w


@functools.lru_cache(maxsize=1024)
def _formed_kernel(hidden: int, width: int, device: torch.device) -> Kernel:
    return Kernel(written(KERNELS, "formed_weights"), (), (width, _depth(hidden)), FORMED_TILE)


def summed_products(h: Tensor, g: Tensor) -> Tensor:
    """h^T g (H, W), of contiguous float32; h has at most MOST columns."""
    (rows, hidden), width = h.shape, g.shape[1]
    if not rows or not width:
        return h.new_zeros(hidden, width)
    tall, across = SUMMED_TILE.blocks[0], -(-width // _wide(hidden))
    pieces = max(1, SUMMING_PROGRAMS * processors(h.device) // across)
    piece = -(-rows // (pieces * tall)) * tall
    pieces = -(-rows // piece)
    sums = h.new_empty(pieces, hidden, width)
    apart, of_h = of_rows(h, 2)
    call = Call(_summed_kernel(hidden, width, h.device), [*of_h, g, sums], (rows, piece))
    with current_device(h):
        launch([apart, SplitLaunch(call, pieces * across)], of_h[0].nbytes + sums.nbytes)
    if recording():
        record_cost(h.nbytes + g.nbytes, 2 * rows * hidden * width)
    return sums.sum(0)


def _wide(hidden: int) -> int:
    """Columns of g of a program."""
    return SUMS_PER_PROGRAM // max(64, _depth(hidden))


@functools.lru_cache(maxsize=1024)
def _summed_kernel(hidden: int, width: int, device: torch.device) -> Kernel:
    constants = width, hidden, _depth(hidden), _wide(hidden)
    return Kernel(written(KERNELS, "summed_products"), (), constants, SUMMED_TILE)
