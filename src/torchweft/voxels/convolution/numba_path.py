"""The numba path of the sparse convolution: products of rows where they lie, see `numba_loops`.

    y[o] = Σ_k x[sources[k,o]] @ weight[k]

Sums are in float32 (float64 for float64); 16-bit operands are widened first and the result is
rounded once.  Groups of channels, and the gradient of the weight, are products of the torch path.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweft.core.cpu.arrays import as_array
from torchweft.core.cpu.loops import share
from torchweft.voxels.convolution import torch_path
from torchweft.voxels.convolution.epilogue import NO_EPILOGUE, Epilogue
from torchweft.voxels.convolution.torch_path import weight_gradient
from torchweft.voxels.grid import whole

__all__ = ["convolve", "weight_gradient"]

MOST_ROWS, CHUNKS_PER_THREAD = 2048, 4
"""Output rows of a chunk, which reads each matrix once: matrices of 256 x 256 take longer to read
than a few hundred rows to multiply."""

SERIAL = 2**18
"""Multiplications below which one thread is faster."""

Array = np.ndarray[Any, Any]


def convolve(
    x: Tensor,
    weight: Tensor,
    table: Tensor,
    order: Tensor | None,
    *,
    groups: int = 1,
    precision: str = "ieee",
    after: Epilogue = NO_EPILOGUE,
    flip: bool = False,
) -> Tensor:
    """y[o] = Σ_k x[sources[k,o]] @ weight[k], as `launch.convolve`; of every precision, exact."""
    if groups > 1:
        options: dict[str, Any] = {"groups": groups, "after": after, "flip": flip}
        return torch_path.convolve(x, weight, table, order, **options)
    from torchweft.voxels.convolution import numba_loops

    num_offsets, inner, outer = weight.shape
    table = whole(table, order, num_offsets)
    y = x.new_empty(table.shape[1], outer, dtype=torch.promote_types(x.dtype, torch.float32))
    threads = torch.get_num_threads()
    parts = 1 if threads == 1 else CHUNKS_PER_THREAD * threads
    chunk = max(1, min(MOST_ROWS, -(-len(y) // parts)))
    tables, result = (table.numpy(), _numbers(order)), y.numpy()
    given = _wide(x).reshape(-1), inner, _wide(weight), flip

    def run(first: int, last: int) -> None:
        numba_loops.convolve(first, last, chunk, *given, *tables, result)

    tasks = -(-len(y) // chunk)
    if y.numel():
        share(run, tasks, table.numel() * inner * outer, SERIAL)
    if after is not NO_EPILOGUE:
        y = after.to(y.dtype)(y)
    return y.to(x.dtype)


def _wide(a: Tensor) -> Array:
    """Contiguous, in the dtype of sums."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return as_array(a.detach().to(wide).contiguous())


def _numbers(order: Tensor | None) -> Array:
    return np.empty(0, np.int32) if order is None else order.numpy()
