"""Launches of the kernels of linear maps by grade."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from torchweft.clifford.matrices import linear_kernels
from torchweft.core.backend import interpreted
from torchweft.core.explain import Launch, record, recording
from torchweft.core.gpu.launcher import CONTRACTED, Launcher, Tile, current_device, processors

__all__ = ["rows", "rows_tile", "serves_rows", "sum_by_grade", "turned"]

MOST_TILES, MOST_FEATURES = 1024, 1024
"""Beyond so many tiles, or numbers that one result sums, the library's product is ahead."""

SUM_TILE, TURN_TILE = Tile((512,), 4, 1), Tile((64,), 8, 1)
INTERPRETED_PROGRAMS = 3


def serves_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether `rows` takes contiguous x, and is the faster way.

    The copy engine loads tiles: rows of both factors begin at multiples of 16 bytes.
    """
    if not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    matrix = _laid_out(weight)
    return (
        0 < _tiles(x, weight.shape[-1]) <= MOST_TILES
        and 0 < x.shape[-1] <= MOST_FEATURES
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
        names = linear_kernels.rows_kernel.arg_names[-len(constants) - len(tile.blocks) :]
        shown: dict[str, int | str] = dict(zip(names, (*constants, *tile.blocks), strict=True))
        shown |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        record(Launch("triton", "rows_kernel", shown, programs, 0))
    with current_device(x):
        linear_kernels.rows_kernel[(programs,)](
            x_desc, w_desc, bias, z, count, x.shape[-1], z.shape[-1], *constants, *tile.blocks,
            **tile.options, **CONTRACTED,
        )  # fmt: skip


def rows_tile(features: int) -> Tile:
    """BLOCK_M, BLOCK_N, BLOCK_K of a product with so many columns."""
    return Tile((128, 256 if features > 128 else 128, 64), 8, 3)


def sum_by_grade(partials: Tensor, n: int, parts: int, dtype: torch.dtype) -> Tensor:
    """(blades · parts, F_in, F_out) → (n+1, F_in, F_out), the sums of each grade in fixed order."""
    sums = partials.new_empty((n + 1, *partials.shape[1:]), dtype=dtype)
    _launch("sum_kernel", [partials, sums], (sums[0].numel(),), (n, parts), n + 1)
    return sums


def turned(weight: Tensor) -> Tensor:
    """Contiguous matrices, turned, as a view of the shape that they had."""
    grades, f_in, f_out = weight.shape
    out = weight.new_empty(grades, f_out, f_in)
    _launch("turn_kernel", [weight, out], (f_in, f_out), (), grades)
    return out.mT


def _launch(
    name: str,
    operands: Sequence[Tensor],
    numbers: tuple[int, ...],
    constants: tuple[int, ...],
    grades: int,
) -> None:
    with current_device(operands[0]):
        _launcher(name, numbers, constants, grades, *(t.dtype for t in operands))(operands)


@functools.lru_cache(maxsize=256)
def _launcher(
    name: str, numbers: tuple[int, ...], constants: tuple[int, ...], grades: int, *_: torch.dtype
) -> Launcher:
    """A launcher keeps compiled code, so that the dtypes are part of what it is known by."""
    tile = SUM_TILE if name == "sum_kernel" else TURN_TILE
    programs = grades
    for number in numbers:
        programs *= -(-number // tile.blocks[0])
    return Launcher(getattr(linear_kernels, name), programs, (), numbers, constants, tile)


def _laid_out(weight: Tensor) -> Tensor | None:
    """The matrices as they lie in memory, contiguous; None if they do not."""
    return next((m for m in (weight, weight.mT) if m.is_contiguous()), None)


def _tiles(x: Tensor, columns: int) -> int:
    block_m, block_n, _ = rows_tile(columns).blocks
    return x.shape[0] * -(-x.shape[1] // block_m) * -(-columns // block_n)
