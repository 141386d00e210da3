"""Launches of the kernels of equivariant linear maps between multivectors and scalars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.clifford import kernels
from torchweft.clifford.matrices.launch import launched
from torchweft.core.gpu.launcher import Launcher, Tile, has_tf32
from torchweft.core.printing.modules import written

__all__ = ["PREPARED", "map_weights", "maps", "maps_tile", "weights_tile"]

ROWS_PER_TILE, FEATURES_PER_TILE = 64, 32
LEAST_FEATURES = 16
"""Of a product in Triton; more at a time need more registers where tensor cores do not help."""
PREPARED = Tile((256,), 4, 1)
"""Numbers of the matrices that a program copies."""
PROGRAMS_PER_GPU, LEAST_ROWS = 1024, 128
"""About how many programs fill a GPU, and the rows that are worth one."""


def maps(
    x: Tensor,
    weight: Tensor,
    first: Tensor | None,
    z: Tensor,
    tables: Sequence[Tensor],
    ends: int,
    turned: bool,
) -> None:
    """z = the maps of x by the matrices in weight, by `maps_kernel`; first: (rows, ends · G).

    tables: terms (source, map, sign) by target, where each target's begin, columns of weight.
    """
    (blades, rows, features), out = x.shape, z.shape[-1]
    *terms, columns = tables
    precision = _precision(x)
    parts, count = 1 + (precision == "tf32x3"), weight.numel() // (features * out)
    matrices = weight.new_empty((parts, count, out, features))
    programs = -(-weight.numel() // PREPARED.blocks[0])
    variant: tuple[Any, ...] = ("prepare_maps_kernel", PREPARED, programs, count, turned, parts)
    launched(_launcher, variant, (features, out), [weight, matrices, columns])
    numbers = (rows, features, out, *x.stride(), 0 if first is None else first.stride(0))
    tile = maps_tile(features, out, precision)
    programs = blades * -(-rows // tile.blocks[0]) * -(-out // tile.blocks[2])
    variant = ("maps_kernel", tile, programs, count, blades, ends, precision)
    launched(_launcher, variant, numbers, [x, matrices, first, z, *terms], matrices.nbytes)


def map_weights(
    x: Tensor,
    y: Tensor,
    sums: Tensor | None,
    tables: Sequence[Tensor],
    maps: int,
    total: Tensor,
) -> None:
    """total = the gradients of all maps' matrices, then sums over rows of sums, if it is given.

    tables: terms (source, target, sign) by map, where each map's begin, columns of the matrices.
    """
    (_, rows, features), out = x.shape, y.shape[-1]
    precision = "tf32" if _precision(x) == "tf32" else "ieee"  # tf32x3 takes as long
    tile = weights_tile(features, out)
    columns = 0 if sums is None else sums.shape[1]
    tiles = maps * -(-features // tile.blocks[1]) * -(-out // tile.blocks[2])
    tiles += -(-columns // tile.blocks[2])
    parts = max(1, min(PROGRAMS_PER_GPU // tiles, -(-rows // LEAST_ROWS)))
    wide = torch.promote_types(x.dtype, torch.float32)
    partials = x.new_empty((parts, total.numel()), dtype=wide)
    places = total.numel(), total.numel() - columns
    stride = 0 if sums is None else sums.stride(0)
    numbers = (rows, features, out, *places, *x.stride(), *y.stride(), stride)
    variant = ("map_weights_kernel", tile, tiles * parts, maps, parts, precision)
    launched(_launcher, variant, numbers, [x, y, sums, partials, *tables], partials.nbytes)
    launched(_sum_launcher, (), (parts, total.numel()), [partials, total])


def maps_tile(features: int, out: int, precision: str) -> Tile:
    """Rows, features that are summed at a time, features that come out."""
    summed = LEAST_FEATURES if precision == "ieee" else _block(features)
    return Tile((ROWS_PER_TILE, summed, _block(out)), 4, 2)


def weights_tile(features: int, out: int) -> Tile:
    """Rows that are summed at a time, features of both sides."""
    return Tile((ROWS_PER_TILE, _block(features), _block(out)), 4, 2)


def _block(features: int) -> int:
    return max(LEAST_FEATURES, min(FEATURES_PER_TILE, 1 << (features - 1).bit_length()))


def _precision(x: Tensor) -> str:
    """Of the products of float32 numbers: on tensor cores as exact as float32, or as torch allows.

    "ieee" where there are no such cores, and in 16 bits, where it says nothing.
    """
    if x.dtype != torch.float32 or not has_tf32(x.device):
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def _launcher(variant: tuple[Any, ...], numbers: tuple[int, ...]) -> Launcher:
    name, tile, programs, *constants = variant
    return Launcher(written(kernels.__name__, name), programs, (), numbers, tuple(constants), tile)


def _sum_launcher(variant: tuple[Any, ...], numbers: tuple[int, ...]) -> Launcher:
    tile = Tile((64, 32), 4, 1)
    kernel = written(kernels.__name__, "sum_partials_kernel")
    return Launcher(kernel, -(-numbers[1] // tile.blocks[1]), (), numbers, (), tile)
