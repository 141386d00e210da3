"""The torch path of the products: on any device, in chunks that stay in cache.

    z[n,m] = Σ_{k ∈ segment m} s[t] · x[n,i] ∘ y[n,j]

A chunk is a run of entries for a run of n.  Its rows are gathered, multiplied in the dtype of
sums, and added segment by segment in order, without atomics: results repeat bit for bit.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.explain import Launch, record, recording
from torchweft.core.expressions.program import accumulator
from torchweft.core.tables import Plan, Table
from torchweft.products.forms import PRODUCTS, batch_of, result_channels

__all__ = ["product_torch"]

_EINSUM = {
    "mul": ("kc", "kc", "kc"),
    "outer": ("kc", "kd", "kcd"),
    "inner": ("kc", "kc", "k"),
    "vecmat": ("kc", "kcd", "kd"),
    "vecsca": ("kc", "k", "kc"),
    "scale": ("kc", "", "kc"),
}

_CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Numbers gathered at a time: 1 MB stays in a core's cache, 64 MB fill a GPU."""


class _Chunk(NamedTuple):
    """Entries begin .. end-1, which belong to the rows first .. last-1."""

    begin: int
    end: int
    first: int
    last: int
    # CPU: row - first of each entry; GPU: number of entries of each row; None: one entry a row
    places: Tensor | None


def product_torch(
    op: str,
    first: Tensor,
    second: Tensor | None,
    scale: Tensor | None,
    plan: Plan,
    roles: str,
    accumulate: bool,
) -> Tensor:
    """See `torchweft.products.launch.product`: the same arguments, the same result."""
    table = plan.table(roles)
    operands = [first] if second is None else [first, second]
    sizes = [batch_of(op, a, slot) for slot, a in enumerate(operands)]
    batched = [size is not None for size in sizes]
    batch = next((size for size in sizes if size is not None), None)
    equation, channels = _equation(op, batched, accumulate), result_channels(op, first, second)
    lead = [] if batch is None or accumulate else [batch]
    wide = accumulator(first.dtype)
    out = torch.zeros(*lead, table.num_rows, *channels, dtype=wide, device=first.device)
    shared, own = _widths(op, [*operands, out], [*batched, bool(lead)])
    room = _CHUNK.get(first.device.type, _CHUNK["cpu"])
    entries = max(1, min(room // max(shared, own), table.num_entries))
    step = max(1, min(room // (entries * own), batch or 1))
    chunks = plan.derived((roles, "chunks", entries), lambda: _chunks(table, entries))
    for n in range(0, 1 if batch is None else batch, step):
        part = [a[n : n + step] if has_n else a for a, has_n in zip(operands, batched, strict=True)]
        target = out[n : n + step] if lead else out
        for chunk in chunks:
            terms = _terms(part, batched, scale, table, chunk, equation, wide)
            _add(target, terms, chunk, len(lead))
    if recording():
        tile: dict[str, int | str] = {"entries": entries, "batch": step}
        room_bytes = entries * (shared + step * own) * out.element_size()
        record(Launch("torch", op, tile, len(chunks), room_bytes))
    return out.to(first.dtype)


def _widths(op: str, tensors: list[Tensor], batched: list[bool]) -> tuple[int, int]:
    """Elements of the widest row among tensors shared over N, and among tensors with N."""
    widths = [1, 1]
    dims = (*PRODUCTS[op].dims[: len(tensors) - 1], PRODUCTS[op].dims[2])
    for a, d, has_n in zip(tensors, dims, batched, strict=True):
        widths[has_n] = max(widths[has_n], math.prod(a.shape[a.dim() - d :]))
    return widths[0], widths[1]


def _equation(op: str, batched: list[bool], accumulate: bool) -> str:
    """The einsum of a chunk."""
    *words, result = _EINSUM[op]
    inputs = ["n" * has_n + word for has_n, word in zip(batched, words, strict=False)]
    keep = "n" if any(batched) and not accumulate else ""
    return f"{','.join(inputs)}->{keep}{result}"


def _chunks(table: Table, entries: int) -> list[_Chunk]:
    """Runs of at most `entries` entries, each with the rows that it adds to."""
    indptr, stop = table.indptr, table.num_entries
    if indptr is None:
        bounds = [*range(0, stop, entries), stop]
        return [_Chunk(b, e, b, e, None) for b, e in itertools.pairwise(bounds)]
    begin, stop = (int(v) for v in indptr[[0, -1]])
    bounds = [*range(begin, stop, entries), stop]
    marks = torch.tensor(bounds, dtype=indptr.dtype, device=indptr.device)
    firsts = (torch.searchsorted(indptr, marks, right=True) - 1).tolist()
    lasts = torch.searchsorted(indptr, marks).tolist()
    chunks = []
    for (b, e), first, last in zip(itertools.pairwise(bounds), firsts, lasts[1:], strict=False):
        # int64: index_add_ is several times slower with int32
        places = indptr[first : last + 1].clamp(b, e).diff().long()
        if indptr.device.type == "cpu":
            places = torch.repeat_interleave(places, output_size=e - b)
        chunks.append(_Chunk(b, e, first, last, places))
    return chunks


def _terms(
    operands: list[Tensor],
    batched: list[bool],
    scale: Tensor | None,
    table: Table,
    chunk: _Chunk,
    equation: str,
    wide: torch.dtype,
) -> Tensor:
    """s · x ∘ y of the entries of a chunk, ([n], entries, *channels), in the dtype of sums."""
    rows = [
        _gather(a, index, chunk, int(has_n)).to(wide)
        for a, index, has_n in zip(operands, (table.index1, table.index2), batched, strict=False)
    ]
    if scale is not None:
        weights = _gather(scale, table.term, chunk, 0).to(wide)
        lead = rows[0].dim() - int(batched[0]) - 1
        rows[0] = rows[0] * weights.reshape(-1, *(1,) * lead)
    fresh = scale is not None or table.index1 is not None
    return _combine(equation, rows, fresh)


def _combine(equation: str, rows: list[Tensor], fresh: bool) -> Tensor:
    """torch.einsum, or elementwise operations for products without matrices, which einsum copies.

    `fresh` rows of the first operand were gathered for this chunk and may be overwritten.
    """
    inputs, _, result = equation.partition("->")
    if "d" in inputs or ("n" in inputs and "n" not in result):
        return torch.einsum(equation, *rows)
    if len(rows) == 1:
        return rows[0]
    x, y = rows
    if result.endswith("k"):  # inner
        terms: Tensor = torch.linalg.vecdot(x, y)
        return terms
    if not inputs.endswith("c"):  # vecsca
        y = y.unsqueeze(-1)
    return x.mul_(y) if fresh and x.dim() >= y.dim() else x * y


def _gather(a: Tensor, index: Tensor | None, chunk: _Chunk, dim: int) -> Tensor:
    if index is None:
        return a.narrow(dim, chunk.begin, chunk.end - chunk.begin)
    return a.index_select(dim, index[chunk.begin : chunk.end])


def _add(out: Tensor, terms: Tensor, chunk: _Chunk, dim: int) -> None:
    """Add terms to their rows, in order."""
    here = out.narrow(dim, chunk.first, chunk.last - chunk.first)
    if chunk.places is None:
        here += terms
    elif out.device.type == "cpu":
        here.index_add_(dim, chunk.places, terms)
    else:  # index_add_ is not repeatable on a GPU
        lengths = chunk.places.expand(*terms.shape[:dim], -1)
        sums = torch.segment_reduce(
            terms.contiguous(), "sum", lengths=lengths, axis=dim, unsafe=True
        )
        here += sums
