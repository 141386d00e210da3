"""The numba path of the products: CPU tensors, rows in parallel, channels in vector lanes.

Entries of a row are added in order; long segments are cut at fixed places and sums over n in
fixed parts, so the bits do not depend on the number of threads.
"""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweft.core.explain import Launch, record, recording
from torchweft.core.tables.plan import Plan, Table
from torchweft.products.forms import PRODUCTS, accumulator, result_channels
from torchweft.products.torch_path import product_torch

__all__ = ["product_numba"]

SERIAL = 100_000
"""Multiplications below which one thread is faster: a parallel call costs about 50 µs."""

ENOUGH = 64
"""Rows to share among threads: a sum over n is split in parts until there are as many."""

GEMM = 16, 32 * 32
"""Least N and least size of a matrix for BLAS, which reads it once for many n: 2 to 3 times
faster than the loop from 64 x 64 on, on one core."""

Array = np.ndarray[Any, Any]

# numba's simplest threading layer ends the process when two threads enter it
_one_at_a_time = threading.Lock()


class _Forked:
    """OpenMP's threads do not survive a fork; a forked process runs serially."""

    here = False


os.register_at_fork(after_in_child=lambda: setattr(_Forked, "here", True))


def product_numba(
    op: str,
    first: Tensor,
    second: Tensor | None,
    scale: Tensor | None,
    plan: Plan,
    roles: str,
    accumulate: bool,
) -> Tensor:
    """See `torchweft.products.launch.product`: the same arguments, the same result.

    16-bit inputs are widened first and the result is rounded at the end; inputs that are not
    contiguous are copied (a stride of 0 over n is not: that operand is shared).  Where many n meet
    one large matrix, or sum into one, the matrix products of `product_torch` serve.
    """
    if second is not None and _is_gemm(op, first, second, accumulate):
        return product_torch(op, first, second, scale, plan, roles, accumulate)
    dims = PRODUCTS[op].dims
    wide = accumulator(first.dtype)
    batch = _batch(first, dims[0])
    if second is not None and batch is None:
        batch = _batch(second, dims[1])
    channels = result_channels(op, first, second)
    table = plan.table(roles)
    x = _rows(first, dims[0], wide)
    y = x[:1] if second is None else _rows(second, dims[1], wide)
    s = np.empty(0, x.dtype) if scale is None else scale.detach().to(wide).contiguous().numpy()
    indices = plan.derived((roles, "arrays"), lambda: _arrays(table))

    summed = accumulate and batch is not None
    size = 1 if batch is None else batch
    width = math.prod(channels)
    pieces = table.num_rows if table.slices is None else table.slices.num_pieces
    parts = min(size, -(-ENOUGH // max(pieces, 1))) if summed else size
    part = -(-size // parts) if parts else 1
    out = torch.empty(parts, pieces, width, dtype=wide)
    if min(x.shape[0], y.shape[0]) == 0 or 0 in (size, table.num_entries):
        out.zero_()
    else:
        work = size * table.num_entries * max(x.shape[2], y.shape[2])
        _run(work, op, x, y, s, *indices, size, part, out.numpy())
    if recording():
        copies = [a for a, given in ((x, first), (y, second)) if _is_copy(a, given)]
        if summed or table.slices is not None or first.dtype != wide:
            copies.append(out.numpy())
        room = sum(a.nbytes for a in copies)
        record(Launch("numba", op, {"part": part}, parts * pieces, room))
    if table.slices is not None:
        out = _sum_pieces(out, table.slices.owner_indptr, table.num_rows)
    if summed:
        bounds = torch.tensor([0, parts], dtype=torch.int32)
        out = _sum_pieces(out.reshape(1, parts, table.num_rows * width), bounds, 1)
    lead = [] if batch is None or summed else [batch]
    return out.reshape(*lead, table.num_rows, *channels).to(first.dtype)


def _is_gemm(op: str, first: Tensor, second: Tensor, accumulate: bool) -> bool:
    """Whether rows (N, R, C) meet shared matrices, or pairs of rows are summed to matrices."""
    if not (op == "vecmat" or (op == "outer" and accumulate)):
        return False
    if not first.dim() == second.dim() == 3:
        return False
    least_batch, least_size = GEMM
    return first.shape[0] >= least_batch and first.shape[2] * second.shape[2] >= least_size


def _batch(operand: Tensor, dims: int) -> int | None:
    return operand.shape[0] if operand.dim() == dims + 2 else None


def _rows(operand: Tensor, dims: int, wide: torch.dtype) -> Array:
    """(N or 1, rows, numbers of a row), contiguous, in the dtype of sums."""
    operand = operand.detach()
    if operand.dim() == dims + 1:
        operand = operand.unsqueeze(0)
    elif operand.shape[0] > 1 and operand.stride(0) == 0:
        operand = operand[:1]
    width = math.prod(operand.shape[2:])
    rows: Array = operand.reshape(*operand.shape[:2], width).to(wide).contiguous().numpy()
    return rows


def _is_copy(a: Array, given: Tensor | None) -> bool:
    return given is not None and a.ctypes.data != given.data_ptr()


def _arrays(table: Table) -> tuple[Array, Array, Array, Array]:
    """indptr, index1, index2, term; a missing one is the identity."""
    indptr = table.indptr if table.slices is None else table.slices.indptr
    given = (indptr, table.index1, table.index2, table.term)
    dtype = next((i.dtype for i in given if i is not None), torch.int32)
    identity = torch.arange(table.num_entries + 1, dtype=dtype).numpy()
    arrays: list[Array] = [identity if i is None else i.numpy() for i in given]
    return arrays[0], arrays[1], arrays[2], arrays[3]


def _run(work: int, op: str, *arguments: Any) -> None:
    import numba

    from torchweft.products.numba_loops import loop

    threads = torch.get_num_threads()
    if work < SERIAL or _Forked.here or threads == 1:
        loop(op, parallel=False)(*arguments)
        return
    with _one_at_a_time:
        most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        numba.set_num_threads(min(threads, most))
        loop(op, parallel=True)(*arguments)


def _sum_pieces(rows: Tensor, indptr: Tensor, num_rows: int) -> Tensor:
    """(parts, pieces, width) → (parts, num_rows, width), pieces added in order."""
    out = torch.empty(rows.shape[0], num_rows, rows.shape[2], dtype=rows.dtype)
    pieces = torch.arange(rows.shape[1], dtype=indptr.dtype).numpy()
    x = rows.numpy()
    tables = (indptr.numpy(), pieces, pieces, pieces)
    none = np.empty(0, x.dtype)
    _run(rows.numel(), "scale", x, x[:1], none, *tables, len(x), 1, out.numpy())
    return out
