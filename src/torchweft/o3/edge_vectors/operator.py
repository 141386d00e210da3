"""The operator of differences along edges, closed under differentiation.

    torchweft::o3_edges(Tensor[] tensors, str call, str present, SymInt nodes, SymInt edges)
        -> Tensor[]

    "vectors"  v[e] = x[dst[e]] − x[src[e]]                  of x (nodes, C)
    "shifted"  v[e] = x[dst[e]] − x[src[e]] + shift[e]       of x and shift (edges, C)
    "sums"     x[n] = Σ_{dst[e] = n} v[e] − Σ_{src[e] = n} v[e]    of v (edges, C)
    "totals"   x[n] = Σ_{dst[e] = n} v[e]                    of v (edges, C)
    "spread"   v[e] = x[dst[e]]                              of x (nodes, C)

All are linear but "shifted"; "vectors" and "sums", "spread" and "totals" are each other's transpose
and so gradient.  Tables of the graph stand behind the tensors; its edges are sorted by either end
already, so that sums need no atomics.  One kernel each on a GPU, torch's own operations on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchweft.core.backend import interpreted
from torchweft.core.explain import record_cost, recording
from torchweft.core.expressions.program import accumulator
from torchweft.core.gpu.launcher import Kernel, Tile, current_device
from torchweft.core.operators.call_cache import CallCache, signature
from torchweft.core.operators.tensor_list import (
    CachedCall,
    Call,
    ListOperator,
    MaybeTensors,
    Rest,
    Results,
    Tensors,
)
from torchweft.core.printing.modules import written
from torchweft.o3.channelwise.operator import one_by_one
from torchweft.o3.graph import Graph, Tables, pack, unpack
from torchweft.o3.mixing.operator import Numbered, rows_of_elements
from torchweft.o3.pointwise import cached_rows, first_rows, serves_rows
from torchweft.products.tiles import power_of_two

__all__ = ["edge_lengths", "edge_vectors", "rows_of_edges", "rows_of_totals", "totals"]

KERNELS = "torchweft.o3.edge_vectors.kernels"

NUMBERS_PER_PROGRAM = 512
"""Numbers of edges' vectors that a program writes."""

EDGES_PER_STEP = 32
"""Edges of a node that a program adds at a time."""

ROWS_PER_STEP = 256
"""Rows of a total that a program adds at a time: fewer, longer sums."""

COUNT = {"vectors": 1, "shifted": 2, "sums": 1, "totals": 1, "spread": 1}
"""Number of tensors before the tables."""

GRAPHS = Numbered("batch", "{} graphs", "pass the ptr of all graphs")
"""What sums over the nodes of graphs say of a number out of range."""

TRANSPOSES = {"vectors": "sums", "shifted": "sums", "sums": "vectors"}
TRANSPOSES |= {"totals": "spread", "spread": "totals"}
"""The call that gives the gradient of the first tensor."""


def edge_vectors(x: Tensor, graph: Graph, shift: Tensor | None = None) -> Tensor:
    """v[e] = x[dst[e]] − x[src[e]] + shift[e].

    Args:
        x: (N, C), positions of the graph's rows; it reads and adds to the same rows.
        graph: of E edges.
        shift: (E, C) in x's dtype, of the periodic image that an edge reaches; None: 0.

    Returns:
        (E, C) in x's dtype.  Differentiable to any order; gradients of x are sums in a fixed
        order, without atomics.
    """
    tensors = (x,) if shift is None else (x, shift)
    call = "vectors" if shift is None else "shifted"
    rest: Rest = (call, graph.present, graph.num_nodes, graph.num_edges)
    known = None if graph.kind is None else signature(tensors)
    if known is not None:
        key = (call, graph.kind, known)
        if (kept := _calls.get(key)) is None:
            _calls.keep(key, kept := CachedCall(rest, len(tensors), _prepared))
        rest = kept
    (v,) = _edges((*tensors, *graph.packed), rest)
    return v


_calls: CallCache[CachedCall] = CallCache()


def rows_of_totals(index: Tensor, count: int) -> Tables:
    """The tables of sums over rows e with index[e] = n, for n below count.

    Args:
        index: (E,) the graph of each node, integers below count, in any order.
        count: number of graphs.

    Raises:
        IndexRangeError: a graph is not in 0..count - 1; checked as `rows_of_elements` does.
    """
    order, starts = rows_of_elements(index, count, GRAPHS)
    rows = index.shape[0]
    return Tables(rows, count, rows, dst=index, z_indptr=starts, z_edges=order)


def rows_of_edges(graph: Graph) -> Tables:
    """The tables of sums over the edges that a graph adds to each of its nodes."""
    tables, edges = graph.tables, graph.num_edges
    return Tables(
        edges, graph.num_nodes, edges,
        dst=tables.dst, z_indptr=tables.z_indptr, z_edges=tables.z_edges,
    )  # fmt: skip


def totals(v: Tensor, tables: Tables) -> Tensor:
    """x[n] = Σ_{index[e] = n} v[e], in a fixed order, without atomics.

    Args:
        v: (E, C).
        tables: of `rows_of_totals` or `rows_of_edges`.

    Returns:
        (count, C) in v's dtype.  Differentiable to any order.
    """
    packed, present = pack(tables)
    (found,) = _edges((v, *packed), ("totals", present, tables.num_z, tables.num_edges))
    return found


def edge_lengths(v: Tensor) -> Tensor:
    """|v| of each row, (E, 1) of v (E, 3); 0 has the gradient 0."""
    y = cached_rows("length", v)
    if y is not None:
        return y[0]
    if serves_rows(v, None, 1):
        return first_rows("length", "length", v, None)[0]
    lengths: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return lengths


class _EdgeRule:
    """Differences, their transpose, and derivatives, each of which is one of both."""

    predictable = True

    def body(self, tensors: Tensors, *rest: object) -> list[Tensor]:
        results = _prepared(tensors, rest)(tensors)
        if recording():
            moved = sum(t.nbytes for t in (*tensors, *results))
            record_cost(moved, 2 * results[0].numel())
        return list(results)

    def fake(self, tensors: Tensors, *rest: object) -> list[Tensor]:
        call, _, nodes, edges = rest
        rows = nodes if call in ("sums", "totals") else edges
        return [tensors[0].new_empty(rows, tensors[0].shape[1])]  # type: ignore[call-overload]

    def saved(self, results: Tensors) -> Tensors:
        return ()

    def gradients(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        grads: MaybeTensors,
        needed: Sequence[bool],
    ) -> MaybeTensors:
        (grad,) = grads
        found: list[Tensor | None] = [None] * len(tensors)
        if grad is not None and needed[0]:
            turned = _other(rest, TRANSPOSES[rest[0]])
            (found[0],) = call((grad, *tensors[COUNT[rest[0]] :]), turned)
        if rest[0] == "shifted" and needed[1]:
            found[1] = grad
        return found

    def tangents(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        directions: MaybeTensors,
    ) -> Sequence[Tensor]:
        of_x, of_shift = directions[0], directions[1] if rest[0] == "shifted" else None
        tables = tensors[COUNT[rest[0]] :]
        if of_x is None:
            assert of_shift is not None
            return [of_shift]
        if of_shift is None:
            plain = "vectors" if rest[0] == "shifted" else rest[0]
            return call((of_x, *tables), _other(rest, plain))
        return call((of_x, of_shift, *tables), rest)

    def batch(
        self, call: Call, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        return one_by_one(call, size, dims, tensors, rest)


def _other(rest: Rest, call: str) -> Rest:
    """The arguments of another call on the graph, cached with those of a cached call."""
    other = (call, *rest[1:])
    if type(rest) is not CachedCall:
        return other
    if call not in rest.derived:
        rest.derived[call] = CachedCall(other, COUNT[call], rest.prepare)
    known: CachedCall = rest.derived[call]
    return known


_edges = ListOperator("o3_edges", "str call, str present, SymInt nodes, SymInt edges", _EdgeRule())


def _prepared(tensors: Tensors, rest: Rest) -> Callable[[Tensors], Results]:
    """The body for tensors of one signature."""
    call, present, nodes, edges = rest
    count, like = COUNT[call], tensors[0]
    run: Callable[[str, Sequence[Tensor], Tables], Tensor] = _by_torch
    if call != "spread" and (like.is_cuda or interpreted()):
        dtypes = tuple([t.dtype for t in tensors])
        run = functools.partial(
            _by_kernel, _kernel(call, like.shape[1], present, dtypes, like.device)
        )

    def body(given: Tensors) -> Results:
        tables = unpack(given[count:], present, nodes, nodes, edges)
        return (run(call, [t.contiguous() for t in given[:count]], tables),)

    return body


def _by_torch(call: str, floats: Sequence[Tensor], tables: Tables) -> Tensor:
    dtype, src, dst = floats[0].dtype, tables.src, tables.dst
    if call == "spread":
        assert dst is not None
        return floats[0].index_select(0, dst)
    x, *shift = (t.to(accumulator(dtype)) for t in floats)
    if call in ("sums", "totals"):
        found = _segment_sums(x, tables.z_indptr, tables.z_edges)
        if call == "sums":
            found -= _segment_sums(x, tables.x_indptr, tables.x_edges)
        return found.to(dtype)
    assert src is not None
    assert dst is not None
    v = x.index_select(0, dst) - x.index_select(0, src)
    return (v + shift[0] if shift else v).to(dtype)


def _segment_sums(v: Tensor, indptr: Tensor | None, order: Tensor | None) -> Tensor:
    v = v if order is None else v.index_select(0, order)
    return torch.segment_reduce(v, "sum", offsets=indptr, axis=0, unsafe=True, initial=0)


@functools.lru_cache(maxsize=1024)
def _kernel(
    call: str, width: int, present: str, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Kernel:
    """The kernel of a call; it holds machine code, which depends on all arguments."""
    name, tile = "edge_differences", Tile((NUMBERS_PER_PROGRAM,), 4, 1)
    if call in ("sums", "totals"):
        step = EDGES_PER_STEP if call == "sums" else ROWS_PER_STEP
        name, tile = "node_sums", Tile((step, power_of_two(width)), 1, 1)
    return Kernel(written(KERNELS, name), (), (width,), tile)


def _by_kernel(kernel: Kernel, call: str, floats: Sequence[Tensor], tables: Tables) -> Tensor:
    x, *shift = floats
    sums = call in ("sums", "totals")
    out = x.new_empty(tables.num_z if sums else tables.num_edges, x.shape[1])
    with current_device(x):
        if sums:
            ends = (tables.z_indptr, tables.z_edges, tables.x_indptr, tables.x_edges)
            kernel(out.shape[0], (x, *ends, out))
        else:
            programs = -(-out.numel() // NUMBERS_PER_PROGRAM)
            tensors = (x, shift[0] if shift else None, tables.src, tables.dst, out)
            kernel(programs, tensors, (out.shape[0],))
    return out
