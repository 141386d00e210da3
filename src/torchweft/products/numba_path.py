"""The numba path of the products: CPU tensors, rows in parallel, channels in vector lanes.

Entries of a row are added in order; long segments are cut at fixed places and sums over n in
fixed parts, so the bits do not depend on the number of threads.  Arrays are C-contiguous and in the
dtype of sums: x (N or 1, R1, ·), y (N or 1, R2, ·) with matrices as flat rows, z (parts, M, ·).
One loop serves all products: it is compiled once for each, around the lines that add one term.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import types
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from torchweft.core.cpu.arrays import as_array
from torchweft.core.explain import Launch, record, recording
from torchweft.core.expressions.program import accumulator
from torchweft.core.tables import Plan, Table
from torchweft.products.forms import PRODUCTS, batch_of, result_channels
from torchweft.products.torch_path import product_torch

__all__ = ["loop", "product_numba"]

WORK_OF_A_RUN = 2**28
"""Multiplications of a run of rows: a tenth of a second or two."""

SERIAL = 100_000
"""Multiplications below which one thread is faster: a parallel call costs about 50 µs."""

ENOUGH_ROWS = 64
"""Rows for the threads to share: a sum over n is split into parts until there are as many rows."""

GEMM = 16, 32 * 32
"""Least N and least matrix size for BLAS, which reads a matrix once for many n: 2 to 3 times
faster than the loop from 64 x 64 on, on one core."""

Array = np.ndarray[Any, Any]

# numba's simplest threading layer ends the process when two threads enter it
_one_at_a_time = threading.Lock()


class _Forked:
    """Whether this process is a fork: OpenMP's threads do not survive it, so loops run serially."""

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
    contiguous are copied, except operands with stride 0 over n, which are shared.  Where many n use
    one large matrix, or are summed into one, `product_torch` computes matrix products.
    """
    if second is not None and _is_gemm(op, first, second, accumulate):
        return product_torch(op, first, second, scale, plan, roles, accumulate)
    dims = PRODUCTS[op].dims
    wide = accumulator(first.dtype)
    sizes = batch_of(op, first), batch_of(op, second, 1)
    batch = sizes[1] if sizes[0] is None else sizes[0]
    channels = result_channels(op, first, second)
    table = plan.table(roles)
    x = _as_rows(first, dims[0], wide)
    y = x[:1] if second is None else _as_rows(second, dims[1], wide)
    s = np.empty(0, x.dtype) if scale is None else as_array(scale.detach().to(wide).contiguous())
    indices = plan.derived((roles, "arrays"), lambda: _arrays(table))

    summed = accumulate and batch is not None
    size = 1 if batch is None else batch
    width = math.prod(channels)
    pieces = table.num_rows if table.slices is None else table.slices.num_pieces
    parts = min(size, -(-ENOUGH_ROWS // max(pieces, 1))) if summed else size
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
    """Whether rows (N, R, C) meet shared matrices, or pairs of rows are summed into matrices."""
    if not (op == "vecmat" or (op == "outer" and accumulate)):
        return False
    if not first.dim() == second.dim() == 3:
        return False
    least_batch, least_size = GEMM
    return first.shape[0] >= least_batch and first.shape[2] * second.shape[2] >= least_size


def _as_rows(operand: Tensor, dims: int, wide: torch.dtype) -> Array:
    """(N or 1, rows, numbers of a row), contiguous, in the dtype of sums."""
    operand = operand.detach()
    if operand.dim() == dims + 1:
        operand = operand.unsqueeze(0)
    elif operand.shape[0] > 1 and operand.stride(0) == 0:
        operand = operand[:1]
    width = math.prod(operand.shape[2:])
    return as_array(operand.reshape(*operand.shape[:2], width).to(wide).contiguous())


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
    """Fill the last argument in; Python looks for signals, as Ctrl-C, between runs of its rows."""
    rows = math.prod(arguments[-1].shape[:2])
    runs = max(1, min(rows, work // WORK_OF_A_RUN))
    threads = torch.get_num_threads()
    if work < SERIAL or _Forked.here or threads == 1:
        rows_of_op = loop(op, parallel=False)
        for i in range(runs):
            rows_of_op(rows * i // runs, rows * (i + 1) // runs, *arguments)
        return
    with _one_at_a_time:
        most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        numba.set_num_threads(min(threads, most))
        rows_of_op = loop(op, parallel=True)
        for i in range(runs):
            rows_of_op(rows * i // runs, rows * (i + 1) // runs, *arguments)


def _sum_pieces(rows: Tensor, indptr: Tensor, num_rows: int) -> Tensor:
    """(parts, pieces, width) → (parts, num_rows, width), pieces added in order."""
    out = torch.empty(rows.shape[0], num_rows, rows.shape[2], dtype=rows.dtype)
    pieces = torch.arange(rows.shape[1], dtype=indptr.dtype).numpy()
    x = rows.numpy()
    tables = (indptr.numpy(), pieces, pieces, pieces)
    none = np.empty(0, x.dtype)
    _run(rows.numel(), "scale", x, x[:1], none, *tables, len(x), 1, out.numpy())
    return out


def _mul(s, x, y, z):  # type: ignore[no-untyped-def]
    for c in range(z.shape[0]):
        z[c] += s * x[c] * y[c]


def _outer(s, x, y, z):  # type: ignore[no-untyped-def]
    for c in range(x.shape[0]):
        factor = s * x[c]
        row = z[c * y.shape[0] : (c + 1) * y.shape[0]]
        for d in range(y.shape[0]):
            row[d] += factor * y[d]


def _inner(s, x, y, z):  # type: ignore[no-untyped-def]
    total = z.dtype.type(0)
    for c in range(x.shape[0]):
        total += x[c] * y[c]
    z[0] += s * total


def _vecmat(s, x, y, z):  # type: ignore[no-untyped-def]
    for c in range(x.shape[0]):
        factor = s * x[c]
        row = y[c * z.shape[0] : (c + 1) * z.shape[0]]
        for d in range(z.shape[0]):
            z[d] += factor * row[d]


def _vecsca(s, x, y, z):  # type: ignore[no-untyped-def]
    factor = s * y[0]
    for c in range(z.shape[0]):
        z[c] += factor * x[c]


def _scale(s, x, y, z):  # type: ignore[no-untyped-def]
    for c in range(z.shape[0]):
        z[c] += s * x[c]


_ADD = {
    "mul": _mul,
    "outer": _outer,
    "inner": _inner,
    "vecmat": _vecmat,
    "vecsca": _vecsca,
    "scale": _scale,
}
"""z += s · x ∘ y for one entry."""


def _rows(first, last, x, y, s, indptr, index1, index2, term, batch, part, z):  # type: ignore[no-untyped-def]
    """z[b,m] = Σ_{n ∈ part b} Σ_{k ∈ segment m} s[t] · x[n,i] ∘ y[n,j]; s of length 0 is 1.

    Of the rows of all parts, those numbered first .. last-1.
    """
    num_rows = z.shape[1]
    one = z.dtype.type(1)
    for r in numba.prange(first, last):
        b, m = r // num_rows, r % num_rows
        z_row = z[b, m]
        z_row[:] = 0
        for n in range(b * part, min(batch, (b + 1) * part)):
            x_n, y_n = x[min(n, x.shape[0] - 1)], y[min(n, y.shape[0] - 1)]
            for k in range(indptr[m], indptr[m + 1]):
                weight = s[term[k]] if s.shape[0] else one
                add_term(weight, x_n[index1[k]], y_n[index2[k]], z_row)  # type: ignore[name-defined]  # noqa: F821


@functools.cache
def loop(op: str, parallel: bool) -> Any:
    """`_rows` around the term of one product: without the GIL, kept on disk where there is room.

    The term is a global of the function, inlined: with a branch over products, or a call, its
    channels are not vectorized (three times slower).  Sums over channels may be reordered into
    vector lanes, the same way in every run.
    """
    jit: Any = numba.njit
    add_term = jit(_ADD[op], inline="always")
    name = f"rows_{op}_{'parallel' if parallel else 'serial'}"
    function = types.FunctionType(_rows.__code__, {**globals(), "add_term": add_term}, name)
    function.__qualname__ = name  # the only name by which numba distinguishes its files on disk
    options = {"nogil": True, "parallel": parallel, "fastmath": {"reassoc", "contract", "nsz"}}
    try:
        return jit(function, cache=True, **options)
    except RuntimeError:  # numba finds no folder for its cache
        return jit(function, **options)
