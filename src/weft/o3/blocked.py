"""The executor in plain torch: always there, on any device, over chunks of edges.

    result[row(e)] += Σ_terms Σ_paths Σ_abm C[a,b,m] …   with the result's slot left open

Of the two blocks that meet, one that all channels share becomes a matrix for each edge, so that the
channels go through a batched product of matrices.  Messages of a chunk are added row by row, in the
order of the edges and without atomics: results repeat bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.explain import Launch, record, recording
from weft.o3.contraction import Call, Result, Term
from weft.o3.graph import Tables
from weft.o3.structure import SLOTS, Block, Path, Product, Structure
from weft.o3.wigner import wigner_3j

__all__ = ["run"]

_CHUNK = {"cpu": 2**23, "cuda": 2**26}
"""Bytes of the widest rows of a chunk."""


class _Chunk(NamedTuple):
    """Edges begin .. end−1 of an order, which add to the rows first .. last−1."""

    begin: int
    end: int
    first: int
    last: int


class _Order(NamedTuple):
    """Edges as one result takes them; None stands for the identity."""

    edges: Tensor | None
    indptr: Tensor | None  # None: every edge is a row of the result


def run(
    structure: Structure, call: Call, tensors: Sequence[Tensor], tables: Tables, shared: bool
) -> list[Tensor]:
    """The results of a call.

    Args:
        structure: blocks and paths.
        call: what is computed.
        tensors: (rows, width) for each of its slots, contiguous, of one dtype.
        tables: the graph.
        shared: whether rows of w have one row for all edges.
    """
    return [_run(structure, result, tensors, tables, shared) for result in call.results]


def _run(
    structure: Structure, result: Result, tensors: Sequence[Tensor], tables: Tables, shared: bool
) -> Tensor:
    slot, like = result.slot, tensors[0]
    rows = {"x": tables.num_x, "z": tables.num_z, "w": 1 if shared else tables.num_edges}
    shape = (rows.get(slot, tables.num_edges), structure.width(slot))
    out = like.new_zeros(shape, dtype=_accumulator(like))
    if not result.terms or not out.numel():
        return out.to(like.dtype)
    order = _order(slot, tables)
    chunks = _chunks(structure, order, tables.num_edges, out)
    for chunk in chunks:
        edges = _Edges(result, tensors, tables, order, chunk, shared)
        messages = out.new_zeros(chunk.end - chunk.begin, out.shape[1])
        for product in structure.products:
            for path in product.paths:
                for term in result.terms:
                    _add_path(messages, product, path, slot, term, edges)
        _add(out, messages, order, chunk, total=slot == "w" and shared)
    if recording():
        size = chunks[0].end - chunks[0].begin if chunks else 0
        room = size * max(structure.widths) * out.element_size()
        record(Launch("torch", f"contract_{slot}", {"edges": size}, len(chunks), room))
    return out.to(like.dtype)


def _accumulator(like: Tensor) -> torch.dtype:
    """The dtype of sums: float32, or float64 where torch would round the factors of a product."""
    backends: Any = torch.backends
    matmul = backends.cuda.matmul if like.is_cuda else backends.mkldnn.matmul
    rounds = matmul.fp32_precision not in ("none", "ieee")
    return torch.float64 if rounds else torch.promote_types(like.dtype, torch.float32)


def _order(slot: str, tables: Tables) -> _Order:
    if slot == "x":
        return _Order(tables.x_edges, tables.x_indptr)
    if slot == "z":
        return _Order(tables.z_edges, tables.z_indptr)
    return _Order(None, None)


def _chunks(structure: Structure, order: _Order, num_edges: int, out: Tensor) -> list[_Chunk]:
    """Runs of edges whose rows fit, with the rows of the result that each one touches."""
    room = _CHUNK.get(out.device.type, _CHUNK["cpu"])
    step = max(1, room // (max(structure.widths) * out.element_size()))
    begins = range(0, num_edges, step)
    if order.indptr is None or len(begins) == 1:
        whole = order.indptr is not None
        return [
            _Chunk(b, e, 0 if whole else b, out.shape[0] if whole else e)
            for b in begins
            for e in [min(b + step, num_edges)]
        ]
    marks = torch.tensor([*begins, num_edges], dtype=order.indptr.dtype, device=out.device)
    firsts = (torch.searchsorted(order.indptr, marks, right=True) - 1).tolist()
    lasts = torch.searchsorted(order.indptr, marks).tolist()
    return [
        _Chunk(b, min(b + step, num_edges), firsts[i], lasts[i + 1]) for i, b in enumerate(begins)
    ]


class _Edges:
    """The rows that the edges of a chunk read, gathered when first asked for."""

    def __init__(
        self,
        result: Result,
        tensors: Sequence[Tensor],
        tables: Tables,
        order: _Order,
        chunk: _Chunk,
        shared: bool,
    ) -> None:
        self.count = chunk.end - chunk.begin
        self._tensors, self._tables, self._shared = tensors, tables, shared
        self._wide = _accumulator(tensors[0])
        self._edges = None if order.edges is None else order.edges[chunk.begin : chunk.end]
        self._range = chunk.begin, self.count
        self._rows: dict[tuple[str, int], Tensor] = {}

    def block(self, slot: str, tensor: int, block: Block, channels: int) -> Tensor:
        """(edges, components, channels or 1)."""
        rows = self._rows.get((slot, tensor))
        if rows is None:
            rows = self._gathered(slot, self._tensors[tensor]).to(self._wide)
            self._rows[slot, tensor] = rows
        return _view(rows, block, channels)

    def _gathered(self, slot: str, tensor: Tensor) -> Tensor:
        if slot == "w" and self._shared:
            return tensor
        table = {"x": self._tables.src, "z": self._tables.dst}.get(slot)
        index = self._edges
        if table is not None:
            index = table.narrow(0, *self._range) if index is None else table.index_select(0, index)
        return tensor.narrow(0, *self._range) if index is None else tensor.index_select(0, index)


def _view(rows: Tensor, block: Block, channels: int) -> Tensor:
    """(rows, components, channels or 1): a block of every row."""
    width = channels if block.channel_step else 1
    return rows.as_strided(
        (rows.shape[0], block.components, width),
        (rows.stride(0), block.step, block.channel_step),
        rows.storage_offset() + block.offset,
    )


def _add_path(
    messages: Tensor, product: Product, path: Path, slot: str, term: Term, edges: _Edges
) -> None:
    """messages += one path of one term."""
    places = dict(zip(SLOTS, (path.x, path.y, path.z, path.w), strict=True))
    of = dict(zip((s for s in SLOTS if s != slot), term, strict=False))
    if path.w < 0:
        of.pop("w", None)
    channels = product.channels
    given = {
        s: edges.block(s, tensor, product.blocks(s)[places[s]], channels)
        for s, tensor in of.items()
    }
    degrees = product.degrees(path)
    target = _view(messages, product.blocks(slot)[places[slot]], channels)
    target += _message(slot, given, degrees, path.factor, target.shape[2] == 1 < channels)


def _message(
    slot: str, given: dict[str, Tensor], degrees: tuple[int, int, int], factor: float, summed: bool
) -> Tensor:
    """Σ c[a,b,m] of the given blocks, open in one slot; (edges, components, channels or 1)."""
    if slot == "w":
        c = _coefficients(degrees, factor, "xyz", given["x"].dtype, given["x"].device)
        terms = _pair(given["x"], given["y"], c) * given["z"]
        return terms.sum(1, keepdim=True)
    first, second = (s for s in "xyz" if s != slot)
    a, b, w = given[first], given[second], given.get("w")
    c = _coefficients(degrees, factor, first + second + slot, a.dtype, a.device)
    if summed:
        return _summed_pair(a, b if w is None else b * w, c)
    if w is None:
        return _pair(a, b, c)
    if a.shape[2] > 1:
        return _pair(a * w, b, c)
    if b.shape[2] > 1:
        return _pair(a, b * w, c)
    return _pair(a, b, c) * w


def _pair(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Σ_ij c[i,j,k] a[e,i,u] b[e,j,u], (e, k, u)."""
    if a.shape[2] == 1 < b.shape[2]:
        return _pair(b, a, c.transpose(0, 1))
    i, j, k = c.shape
    if b.shape[2] == 1:
        matrices = b.squeeze(2) @ c.permute(1, 2, 0).reshape(j, k * i)
        return matrices.view(-1, k, i) @ a
    pairs = (a[:, :, None] * b[:, None]).flatten(1, 2)
    return c.reshape(i * j, k).mT @ pairs


def _summed_pair(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Σ_u Σ_ij c[i,j,k] a[e,i,u] b[e,j,u], (e, k, 1)."""
    if a.shape[2] != b.shape[2]:
        a, b = (t if t.shape[2] == 1 else t.sum(2, keepdim=True) for t in (a, b))
    pairs = (a @ b.mT).flatten(1)
    return (pairs @ c.reshape(-1, c.shape[2])).unsqueeze(2)


@functools.lru_cache(maxsize=4096)
def _coefficients(
    degrees: tuple[int, int, int],
    factor: float,
    order: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """factor · C with its axes in the order of three slots."""
    c = factor * wigner_3j(*degrees, torch.float64, "cpu")
    return c.permute(*("xyz".index(s) for s in order)).contiguous().to(device, dtype)


def _add(out: Tensor, messages: Tensor, order: _Order, chunk: _Chunk, total: bool) -> None:
    """Add the messages of a chunk to their rows, in order."""
    if total:
        out += messages.sum(0)
    elif order.indptr is None:
        out[chunk.begin : chunk.end] = messages
    else:
        bounds = order.indptr[chunk.first : chunk.last + 1].clamp(chunk.begin, chunk.end)
        out[chunk.first : chunk.last] += torch.segment_reduce(
            messages, "sum", lengths=bounds.diff().long(), axis=0, unsafe=True
        )
