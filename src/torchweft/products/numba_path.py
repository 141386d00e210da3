"""The loops of the products: CPU tensors, rows in parallel, channels in vector lanes.

Entries of a row are added in order; long segments are cut at fixed places and sums over n in
fixed parts, so the bits do not depend on the number of threads.  Tensors are contiguous and in the
dtype of sums: x (N or 1, R1, ·), y (N or 1, R2, ·) with matrices as flat rows, z (parts, M, ·).
One loop serves all products: it is compiled once for each, around the lines that add one term.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from torchweft.core.cpu.loops import share
from torchweft.core.cpu.machine_code import machine_code
from torchweft.core.explain import Launch, record, recording
from torchweft.core.expressions.program import accumulator
from torchweft.core.printing.dialect import indented
from torchweft.core.tables import Plan, Table
from torchweft.products.forms import PRODUCTS, batch_of, result_channels
from torchweft.products.torch_path import product_torch

__all__ = ["product_numba"]

SERIAL = 100_000
"""Multiplications below which one thread is faster: a parallel call costs about 50 µs."""

ENOUGH_ROWS = 64
"""Rows for the threads to share: a sum over n is split into parts until there are as many rows."""

GEMM = 16, 32 * 32
"""Least N and least matrix size for BLAS, which reads a matrix once for many n: 2 to 3 times
faster than the loop from 64 x 64 on, on one core."""


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
    s = None if scale is None else scale.detach().to(wide).contiguous()
    indices = plan.derived((roles, "complete"), lambda: _complete(table))

    summed = accumulate and batch is not None
    size = 1 if batch is None else batch
    width = math.prod(channels)
    pieces = table.num_rows if table.slices is None else table.slices.num_pieces
    parts = min(size, -(-ENOUGH_ROWS // max(pieces, 1))) if summed else size
    out = x.new_empty(parts, pieces, width)
    if min(x.shape[0], y.shape[0]) == 0 or 0 in (size, table.num_entries, pieces):
        out.zero_()
    else:
        work = size * table.num_entries * max(x.shape[2], y.shape[2])
        _run(work, op, x, y, s, indices, size, out)
    if recording():
        copies = [t for t, given in ((x, first), (y, second)) if _is_copy(t, given)]
        if summed or table.slices is not None or first.dtype != wide:
            copies.append(out)
        room = sum(t.nbytes for t in copies)
        record(Launch("numba", op, {"parts": parts}, parts * pieces, room))
    if table.slices is not None:
        out = _sum_pieces(out, table.slices.owner_indptr, table.num_rows)
    if summed:
        bounds = torch.tensor([0, parts], dtype=torch.int32, device="cpu")
        out = _sum_pieces(out.reshape(1, parts, table.num_rows * width), bounds, 1)
    lead = [] if batch is None or summed else [batch]
    out = out.reshape(*lead, table.num_rows, *channels).to(first.dtype)
    return out.data  # no view: torch lets no caller write to a view that a Function returns


def _is_gemm(op: str, first: Tensor, second: Tensor, accumulate: bool) -> bool:
    """Whether rows (N, R, C) meet shared matrices, or pairs of rows are summed into matrices."""
    if not (op == "vecmat" or (op == "outer" and accumulate)):
        return False
    if not first.dim() == second.dim() == 3:
        return False
    least_batch, least_size = GEMM
    return first.shape[0] >= least_batch and first.shape[2] * second.shape[2] >= least_size


def _as_rows(operand: Tensor, dims: int, wide: torch.dtype) -> Tensor:
    """(N or 1, rows, numbers of a row), contiguous, in the dtype of sums."""
    operand = operand.detach()
    if operand.dim() == dims + 1:
        operand = operand.unsqueeze(0)
    elif operand.shape[0] > 1 and operand.stride(0) == 0:
        operand = operand[:1]
    width = math.prod(operand.shape[2:])
    return operand.resolve_neg().reshape(*operand.shape[:2], width).to(wide).contiguous()


def _is_copy(t: Tensor, given: Tensor | None) -> bool:
    return given is not None and t.data_ptr() != given.data_ptr()


def _complete(table: Table) -> list[Tensor]:
    """indptr, index1, index2, term; a missing one is the identity."""
    indptr = table.indptr if table.slices is None else table.slices.indptr
    given = (indptr, table.index1, table.index2, table.term)
    dtype = next((i.dtype for i in given if i is not None), torch.int32)
    identity = torch.arange(table.num_entries + 1, dtype=dtype, device="cpu")
    return [identity if i is None else i for i in given]


def _run(
    work: int, op: str, x: Tensor, y: Tensor, s: Tensor | None, indices: list[Tensor], size: int,
    out: Tensor,
) -> None:  # fmt: skip
    """Fill (parts, rows, width) with sums over the entries of a row and n of a part."""
    parts, num_rows, width = out.shape
    part = -(-size // parts)
    bounds = torch.arange(parts + 1, device="cpu").mul_(part).clamp_(max=size)
    dtypes = [t.dtype for t in (x, *indices)]
    kernel = machine_code(
        _source(op, s is not None, width if width <= FEW else 0, *map(str, dtypes))
    )
    # rows of one n stand for every n
    steps = (t.shape[1] if t.shape[0] > 1 else 0 for t in (x, y))
    rows = (t.flatten(0, 1) for t in (x, y, out))
    given = (x if s is None else s).flatten()
    arguments = (num_rows, width, x.shape[2], y.shape[2], *steps, bounds, *rows, given, *indices)

    def run(first: int, last: int) -> None:
        kernel(first, last, *arguments)

    share(run, parts * num_rows, work, SERIAL)


def _sum_pieces(rows: Tensor, indptr: Tensor, num_rows: int) -> Tensor:
    """(parts, pieces, width) → (parts, num_rows, width), pieces added in order."""
    out = rows.new_empty(rows.shape[0], num_rows, rows.shape[2])
    pieces = torch.arange(rows.shape[1], dtype=indptr.dtype, device="cpu")
    if out.numel():
        _run(rows.numel(), "scale", rows, rows[:1], None, [indptr, *[pieces] * 3], len(rows), out)
    return out


CHANNELS = 64
"""Channels whose sums stay in registers while the entries of a row are added: on one core, 2.5
times faster than sums in memory at 64 channels, 1.1 at 100.  Two runs of 32 are slower, as are
other halves of a row."""

FEW = 4
"""Channels up to which each number of them has code of its own: it takes a third to two thirds of
the time at 2 to 4 channels, more at 32."""

_ADD = {
    "outer": (
        "for c in range(0, left):",
        "    factor = s * x[i, c]",
        "    for d in range(0, right):",
        "        z[r, c * right + d] += factor * y[j, d]",
    ),
    "inner": (
        "total = 0.0",
        "for c in range(0, left):",
        "    total += x[i, c] * y[j, c]",
        "z[r, 0] += s * total",
    ),
    "vecmat": (
        "for c in range(0, left):",
        "    factor = s * x[i, c]",
        "    for d in range(0, width):",
        "        z[r, d] += factor * y[j, c * width + d]",
    ),
    "mul": ("{add} s * x[i, {c}] * y[j, {c}]",),
    "vecsca": ("factor = s * y[j, 0]", "{add} factor * x[i, {c}]"),
    "scale": ("{add} s * x[i, {c}]",),
}
"""z += s · x ∘ y for one entry; c and d are channels of x and of y or z.

{add} stands for a loop over channels of a row of z, and {c} for one of them.
"""


_EACH = [
    "for n in range(bounds[b], bounds[b + 1]):",
    "    for k in range(indptr[m], indptr[m + 1]):",
]
"""The entries of a row."""


@functools.cache
def _source(op: str, scaled: bool, few: int, real: str, *indices: str) -> str:
    """z[b,m] = Σ_{n ∈ part b} Σ_{k ∈ segment m} s[t] · x[n,i] ∘ y[n,j]; (b,m) from first to last-1.

    Sums over channels may be reordered into vector lanes, the same way in every run; those
    of a few channels stay in registers.
    """
    sizes = ("first", "last", "num_rows", "width", "left", "right", "x_step", "y_step")
    arguments = [*(f"{name}: int64" for name in sizes), "bounds: int64[:]"]
    arguments += [f"{name}: {real}[:, :]" for name in "xyz"] + [f"scale: {real}[:]"]
    names = ("indptr", "index1", "index2", "term")
    arguments += [f"{name}: {dtype}[:]" for name, dtype in zip(names, indices, strict=True)]
    entry = ["i = index1[k] + n * x_step"]
    if PRODUCTS[op].second is not None:
        entry.append("j = index2[k] + n * y_step")
    if scaled:
        entry.append("s = scale[term[k]]")
    entry += [line if scaled else line.replace("s * ", "") for line in _ADD[op]]
    row = ["m = r - b * num_rows"]
    if few and "{add}" in entry[-1]:
        row += _sums(entry, f"range({few})", "c")
    elif "{add}" in entry[-1]:
        first = f"{CHANNELS} * block + c"
        row.append(f"for block in range(0, width // {CHANNELS}):")
        row += indented(_sums(entry, f"range({CHANNELS})", first), 1)
        row.append(f"for rest in range(0, (width % {CHANNELS} + {CHANNELS - 1}) // {CHANNELS}):")
        rest = f"range(width // {CHANNELS} * {CHANNELS}, width)"
        row += indented(_sums(entry, rest, "c"), 1)
    else:
        row += _sums(entry, "range(0, width)", "c")
    head = f"def rows_of_{op}({', '.join(arguments)}):".replace("torch.", "")
    parts = "for b in range(first // num_rows, (last + num_rows - 1) // num_rows):"
    rows = "for r in range(max(first, b * num_rows), min(last, b * num_rows + num_rows)):"
    return "\n".join([head, *indented([parts], 1), *indented([rows], 2), *indented(row, 3)])


def _sums(entry: list[str], channels: str, c: str) -> list[str]:
    """The lines that add all entries of a row, in some of its channels."""
    loop = f"for c in {channels}:"
    *lines, last = entry
    if "{add}" in last:
        lines += [loop, "    " + last.format(add=f"z[r, {c}] +=", c=c)]
    else:
        lines.append(last)
    return [loop, f"    z[r, {c}] = 0.0", *_EACH, *indented(lines, 2)]
