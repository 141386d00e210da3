"""The executor in plain torch: always there, on any device, over chunks of edges.

    result[row(e)] += Σ_terms Σ_paths Σ_abm C[a,b,m] …   with the result's slot left open

All paths of a product go at once where its channels share a factor (`torch_packed`), else path
after path; so they do on the CPU where a number is not finite, which then stays in its paths.
Messages of a chunk are added row by row, in the order of the edges and without atomics: results
repeat bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.explain import Launch, record, recording
from torchweft.o3.channelwise.calls import Call, Result, Term
from torchweft.o3.channelwise.structure import SLOTS, Block, Path, Product, Structure, stores
from torchweft.o3.channelwise.torch_packed import Packed, Plan, plan_of
from torchweft.o3.edges.graph import Tables
from torchweft.o3.irreps.wigner import wigner_3j

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


class _Given(NamedTuple):
    """What a call is of."""

    structure: Structure
    plans: tuple[Plan | None, ...]  # of its products
    tensors: Sequence[Tensor]
    wide: torch.dtype  # of sums
    tables: Tables
    shared: bool


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
    wide = _accumulator(tensors[0])
    plans = _plans(structure, wide, tensors[0].device)
    several = any(len(product.paths) > 1 for product in structure.products)
    if several and not _finite(tensors, wide):  # times 0, it would reach every path of an edge
        plans = (None,) * len(plans)
    given = _Given(structure, plans, tensors, wide, tables, shared)
    step = _step(given)
    # few edges are taken once for all results, which share what they have in common
    every = _Edges(given, None, 0, tables.num_edges) if tables.num_edges <= step else None
    return [_result(given, result, every, step) for result in call.results]


def _result(given: _Given, result: Result, every: _Edges | None, step: int) -> Tensor:
    slot, tables, like = result.slot, given.tables, given.tensors[0]
    rows = {"x": tables.num_x, "z": tables.num_z, "w": 1 if given.shared else tables.num_edges}
    shape = (rows.get(slot, tables.num_edges), given.structure.width(slot))
    if not result.terms or not tables.num_edges or 0 in shape:
        return like.new_zeros(shape)
    order = _order(slot, tables)
    if every is not None:
        out, chunks = _summed(every.messages(result), order), 1
    else:
        out = like.new_zeros(shape, dtype=given.wide)
        chunks = _add_chunks(out, given, result, order, step)
    if recording():
        size = min(step, tables.num_edges)
        room = size * max(given.structure.widths) * out.element_size()
        record(Launch("torch", f"contract_{slot}", {"edges": size}, chunks, room))
    return out.to(like.dtype)


@functools.lru_cache(maxsize=1024)
def _plans(
    structure: Structure, dtype: torch.dtype, device: torch.device
) -> tuple[Plan | None, ...]:
    return tuple(plan_of(product, dtype, device) for product in structure.products)


def _accumulator(like: Tensor) -> torch.dtype:
    """The dtype of sums: float32, or float64 where torch would round the factors of a product."""
    backends: Any = torch.backends
    matmul = backends.cuda.matmul if like.is_cuda else backends.mkldnn.matmul
    rounds = matmul.fp32_precision not in ("none", "ieee")
    return torch.float64 if rounds else torch.promote_types(like.dtype, torch.float32)


def _finite(tensors: Sequence[Tensor], wide: torch.dtype) -> bool:
    """Whether all numbers are; on the CPU, since elsewhere the host would wait for the answer."""
    return all(t.is_cuda or math.isfinite(t.sum(dtype=wide).item()) for t in tensors)


def _order(slot: str, tables: Tables) -> _Order:
    if slot == "x":
        return _Order(tables.x_edges, tables.x_indptr)
    if slot == "z":
        return _Order(tables.z_edges, tables.z_indptr)
    return _Order(None, None)


def _step(given: _Given) -> int:
    """Edges of a chunk."""
    like = given.tensors[0]
    width = max(*given.structure.widths, *(p.table.shape[1] for p in given.plans if p))
    room = _CHUNK.get(like.device.type, _CHUNK["cpu"])
    return max(1, room // (width * given.wide.itemsize))


def _add_chunks(out: Tensor, given: _Given, result: Result, order: _Order, step: int) -> int:
    """Add the messages of all edges to their rows, chunk after chunk; how many there were."""
    chunks = _chunks(order, given.tables.num_edges, step, out)
    for begin, end, first, last in chunks:
        messages = _Edges(given, order.edges, begin, end).messages(result)
        if order.indptr is None:
            out[first:last] += messages
        else:
            bounds = order.indptr[first : last + 1].clamp(begin, end)
            out[first:last] += _segments(messages, bounds)
    return len(chunks)


def _chunks(order: _Order, num_edges: int, step: int, out: Tensor) -> list[_Chunk]:
    """Runs of edges with the rows of the result that each one touches."""
    begins = range(0, num_edges, step)
    ends = [*begins[1:], num_edges]
    if order.indptr is None:  # a row each, or one for all
        whole = out.shape[0] < num_edges
        return [
            _Chunk(b, e, *((0, 1) if whole else (b, e))) for b, e in zip(begins, ends, strict=True)
        ]
    marks = torch.tensor([*begins, num_edges], dtype=order.indptr.dtype, device=out.device)
    firsts = (torch.searchsorted(order.indptr, marks, right=True) - 1).tolist()
    lasts = torch.searchsorted(order.indptr, marks).tolist()
    return [
        _Chunk(b, e, firsts[i], lasts[i + 1])
        for i, (b, e) in enumerate(zip(begins, ends, strict=True))
    ]


def _summed(messages: Tensor, order: _Order) -> Tensor:
    """The rows that messages of all edges, in the order of their numbers, add up to."""
    if order.indptr is None:
        return messages
    if order.edges is not None:
        messages = messages.index_select(0, order.edges)
    return _segments(messages, order.indptr)


def _segments(messages: Tensor, indptr: Tensor) -> Tensor:
    lengths = indptr.diff().long()
    return torch.segment_reduce(messages, "sum", lengths=lengths, axis=0, unsafe=True)


class _Edges:
    """Some edges: the rows that they read, gathered when first asked for, and their messages."""

    def __init__(self, given: _Given, edges: Tensor | None, begin: int, end: int) -> None:
        self._given, self._range = given, (begin, end - begin)
        self._edges = None if edges is None else edges[begin:end]
        self._rows: dict[tuple[str, int], Tensor] = {}
        self._packed = [None if plan is None else Packed(plan, self.rows) for plan in given.plans]

    def messages(self, result: Result) -> Tensor:
        """(edges, width): what each adds to its row; (1, width) of weights that all share."""
        given, slot = self._given, result.slot
        total = slot == "w" and given.shared
        rows, width = 1 if total else self._range[1], given.structure.width(slot)
        once = None not in given.plans and stores(given.structure, slot) == (1, 1)
        like = given.tensors[0]
        make = like.new_empty if once else like.new_zeros
        messages = make(rows, width, dtype=self._given.wide)
        for product, packed in zip(given.structure.products, self._packed, strict=True):
            if packed is not None:
                packed.add(messages, slot, result.terms, total, once)
                continue
            for path in product.paths:
                for term in result.terms:
                    _add_path(messages, product, path, slot, term, self)
        return messages

    def rows(self, slot: str, tensor: int) -> Tensor:
        """(edges, width), or one row that all share."""
        found = self._rows.get((slot, tensor))
        if found is None:
            found = self._gathered(slot, self._given.tensors[tensor]).to(self._given.wide)
            self._rows[slot, tensor] = found
        return found

    def block(self, slot: str, tensor: int, block: Block, channels: int) -> Tensor:
        """(edges, components, channels or 1)."""
        rows = self.rows(slot, tensor)
        return _view(rows, block, channels)

    def _gathered(self, slot: str, tensor: Tensor) -> Tensor:
        given = self._given
        if slot == "w" and given.shared:
            return tensor
        table = {"x": given.tables.src, "z": given.tables.dst}.get(slot)
        index = self._edges
        if table is not None:
            index = table.narrow(0, *self._range) if index is None else table.index_select(0, index)
        if index is not None:
            return tensor.index_select(0, index)
        whole = self._range == (0, tensor.shape[0])
        return tensor if whole else tensor.narrow(0, *self._range)


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
    message = _message(slot, given, degrees, path.factor, target.shape[2] == 1 < channels)
    target += message.sum(0, keepdim=True) if len(target) == 1 else message


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
