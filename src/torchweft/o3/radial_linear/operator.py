"""Channelwise products whose weights are h A, the last layer of a radial network.

z[d] = Σ_{e: dst[e] = d} Q(x[src[e]], y[e], h[e] A)

    torchweft::o3_radial(Tensor[] tensors, str structure, str call, …) -> Tensor[]

The form is linear in x, y, h and A, so its derivatives of every order are calls of the same
operator.  In a call h stands in slot w, and A in slot a.  The forward pass of float32 on a GPU has
a fused kernel, which stores no weights; all other calls go by blocks of edges:

    for each block of the edges, sorted by their row of z:
        w = h A;  the call with formed weights, by its own kernels;  gh = gw A^T;  gA += h^T gw

A block is a graph of its own over the rows that it touches, so that its cost follows its edges.
Blocks are added in order, which makes bits repeat.  A call of several terms becomes matrix products
and a call of x, y, z and w:

    w_k  = Σ_(h, A) h A                      terms with the same x, y and z share one sum
    gw_k = Σ_terms ∂Q/∂w
    h:   Σ gw A^T          A:   Σ_e h^T gw
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchweft.core import recorded
from torchweft.core.backend import choose
from torchweft.core.operators.operands import same_kind
from torchweft.core.operators.tensor_list import CachedCall, ListOperator, Rest, Results, Tensors
from torchweft.core.operators.tensor_list import Call as Door
from torchweft.core.table_copies import unreadable
from torchweft.core.tables import TensorCache
from torchweft.o3.backends import executor
from torchweft.o3.channelwise.calls import Call, Result, Term, read_call
from torchweft.o3.channelwise.operator import (
    ContractionRule,
    cached_call,
    contraction,
    one_by_one,
)
from torchweft.o3.channelwise.structure import Structure, read
from torchweft.o3.graph import Graph, Tables, pack, unpack
from torchweft.o3.mixing.blocks import CopyBlock, MatrixPath, Mixing
from torchweft.o3.radial_linear.source import TWO_PARTS_FROM
from torchweft.o3.sorting.rows import sorted_by_row

__all__ = ["RADIAL_PRECISIONS", "radial_product"]

K = TypeVar("K")

RADIAL_PRECISIONS = ("tf32x3", "tf32")
"""Precisions of float32 products with A on tensor cores: as float32, or mantissas of 10 bits.

They are computed in parts of 16 bits, in half the time of TF32's and with as many digits.
"""

BLOCK_BYTES = {"cpu": 2**25, "cuda": 5 * 2**26}
"""Bytes of a block's weights; each gradient of them takes as many.

A GPU needs many rows at once to be busy: gradients of W1 take a seventh longer than by blocks of
2^30, in two fifths of the memory (H200).
"""

ROWS_PER_BLOCK = 512
"""Rows of z in a block whose gradients are sums, each by one program: as many as run at once."""

MOST_BLOCK_TIMES = 4
"""Times BLOCK_BYTES that these rows may take.

Blocks in a run of `torchweft.capture` take as much: a replay sorts the edges of each.
"""

_RADIAL_FORWARD = str(Call("xywa", (Result("z", ((0, 1, 2, 3),)),)))


def radial_product(
    structure: Structure,
    x: Tensor,
    y: Tensor,
    radial: Tensor,
    radial_weight: Tensor,
    graph: Graph,
    *,
    precision: str = "tf32x3",
    backend: str | None = None,
) -> Tensor:
    """z[d] = Σ_{e: dst[e] = d} Q(x[src[e]], y[e], radial[e] @ radial_weight).

    Args:
        structure: blocks and paths, with weights.
        x: (N, Wx), rows of the graph's sources.
        y: (E, Wy), a row for each edge.
        radial: (E, H).
        radial_weight: (H, Ww).
        graph: the edges.
        precision: of products with radial_weight in float32, where tensor cores compute them.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.

    Returns:
        (num_nodes, Wz) in the inputs' dtype.

    Error: |z − z*| ≤ u|z*| + 4√K·u_acc·Σ|c x y h A|, K terms a row; with "tf32" besides 2^-10 of
    this sum.  By tensor cores h counts as no smaller than 2^-16 of its edge's largest, A as no
    smaller than that part of its column's, or of those that add to the same channel of z.
    Differentiable to any order; bitwise repeatable.

    Memory beside the results: a copy of h and y in a forward pass by kernels; otherwise h A of a
    block of edges (see BLOCK_BYTES), and gradients of it as large.
    """
    x, y, radial, radial_weight = same_kind(x=x, y=y, radial=radial, radial_weight=radial_weight)
    tensors = [x, y, radial, radial_weight, *graph.packed]
    sizes = (*graph.tables[:3], radial.shape[1])
    rest = (structure.text, _RADIAL_FORWARD, graph.present, *sizes, backend or "", precision)
    return _radial(tensors, rest)[0]


class _RadialRule(ContractionRule):
    """Results of derivatives of Q(x, y, h A, z)."""

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        structure, call, present, num_x, num_z, num_edges, hidden, backend, precision = rest
        of, what, dtype = read(structure), read_call(call), tensors[0].dtype
        count = len(what.slots)
        wide = torch.promote_types(dtype, torch.float32)
        values = [t.to(wide).contiguous() for t in tensors[:count]]
        tables = unpack(tensors[count:], present, num_x, num_z, num_edges)
        like = values[0]
        fused = _fused(backend or None, like.device.type)
        with torch.autocast(like.device.type, enabled=False):
            if fused and fused.serves(of, what, like, tables, hidden, precision):
                ((_, (term,)),) = what.results  # the tensors x, y, h and A
                found = fused.run(of, [values[t] for t in term], tables, hidden, precision)
            else:
                found = run_by_blocks(of, what, values, tables, hidden, backend or None)
        return [result.to(dtype) for result in found]

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        structure, call, _, num_x, num_z, num_edges, hidden, *_ = rest
        shapes = _shapes(read(structure), num_x, num_z, num_edges, hidden)
        return [tensors[0].new_empty(shapes[slot]) for slot, _ in read_call(call).results]

    def batch(
        self, call: Door, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        self.refuse_mapped_graph(dims, rest)
        return one_by_one(call, size, dims, tensors, rest)


def _shapes(
    structure: Structure, num_x: int, num_z: int, num_edges: int, hidden: int
) -> dict[str, tuple[int, int]]:
    """Shapes of the tensors in each slot."""
    rows = {"x": num_x, "y": num_edges, "z": num_z}
    shapes = {slot: (count, structure.width(slot)) for slot, count in rows.items()}
    return shapes | {"w": (num_edges, hidden), "a": (hidden, structure.width("w"))}


@functools.cache
def _fused(backend: str | None, device: str) -> Any:
    """The module of the fused kernel, if kernels serve."""
    return executor("radial_linear", "triton") if choose(backend, device) == "triton" else None


_radial = ListOperator(
    "o3_radial",
    "str structure, str call, str present, SymInt num_x, SymInt num_z, SymInt num_edges, "
    "SymInt hidden, str backend, str precision",
    _RadialRule(),
)


class _EdgeBlock(NamedTuple):
    """Some edges of a graph as a graph of their own.

    Args:
        rows: first row and number of rows, or row numbers, that it touches in each slot of the
            whole graph; all rows of slots that are missing.
        packed: tables of the block, see `pack`.
        present: which tables there are.
        sizes: rows of x and of z, edges.
        calls: cached calls on this block.
    """

    rows: Mapping[str, tuple[int, int] | Tensor]
    packed: Sequence[Tensor]
    present: str
    sizes: tuple[int, int, int]
    calls: dict[Any, CachedCall]


def run_by_blocks(
    structure: Structure,
    call: Call,
    tensors: Sequence[Tensor],
    tables: Tables,
    hidden: int,
    backend: str | None,
) -> list[Tensor]:
    """The results of a call.

    Args:
        structure: blocks and paths.
        call: what is computed; h is in slot w, A in slot a.
        tensors: one for each slot of the call, contiguous, float32 or float64.
        tables: the edges.
        hidden: numbers in a row of h.
        backend: of the kernels that read formed weights.
    """
    width, like = structure.width("w"), tensors[0]
    of_slots = _shapes(structure, *tables[:3], hidden)
    step = max(1, BLOCK_BYTES[like.device.type] // max(1, width * like.element_size()))
    most = MOST_BLOCK_TIMES * step
    if unreadable(tables.src, tables.dst):
        step = most
    elif like.is_cuda and any(slot == "z" for slot, _ in call.results):
        many = ROWS_PER_BLOCK * tables.num_edges // max(1, tables.num_z)
        step = min(max(step, many), most)
    blocks = _blocks(tables, step) if tables.num_edges else ()
    shapes = [of_slots[slot] for slot, _ in call.results]
    if len(blocks) == 1:
        parts = _on_block(structure, call, tensors, blocks[0], backend)
        found = zip(shapes, parts, strict=True)
        return [like.new_zeros(shape) if part is None else part for shape, part in found]
    results = []
    for (slot, terms), shape in zip(call.results, shapes, strict=True):
        whole = blocks and slot in "yw" and terms  # each edge is in one block
        results.append((like.new_empty if whole else like.new_zeros)(shape))
    for block in blocks:
        values = [_rows(t, s, block) for t, s in zip(tensors, call.slots, strict=True)]
        parts = _on_block(structure, call, values, block, backend)
        for (slot, _), result, part in zip(call.results, results, parts, strict=True):
            if part is not None:
                _add(result, part, slot, block)
    return results


def _on_block(
    structure: Structure,
    call: Call,
    values: Sequence[Tensor],
    block: _EdgeBlock,
    backend: str | None,
) -> list[Tensor | None]:
    """The results of the edges of a block; None: no terms."""
    plan, like = radial_plan_of(call), values[0]
    kernels = like.dtype == torch.float32 and choose(backend, like.device.type) == "triton"

    def total(result: str, pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor | None:
        products = [_product(result, a, b, kernels) for a, b in pairs]
        return functools.reduce(torch.Tensor.add_, products) if products else None

    formed = []
    for pairs in plan.formed:
        h, a = ([values[pair[i]] for pair in pairs] for i in range(2))
        if len(pairs) > 1:  # one product: a sum of several would be read and written again
            h, a = [torch.cat(h, 1)], [torch.cat(a)]
        formed.append(_product("z", h[0], a[0], kernels))
    given = [values[t] for t in plan.given]
    rest = structure.text, plan.inner, block.present, block.sizes, False, backend
    key = rest, like.dtype
    cached = block.calls.get(key) or block.calls.setdefault(key, cached_call(*rest))
    found = contraction([*given, *formed, *block.packed], cached)
    results: list[Tensor | None] = []
    for (slot, _), what in zip(call.results, plan.results, strict=True):
        if isinstance(what, int):
            results.append(found[what])
        elif slot == "w":
            results.append(total("t", ((found[gw], values[a]) for gw, a in what)))
        else:
            results.append(total("w", ((values[h], found[gw]) for h, gw in what)))
    return results


def _product(result: str, a: Tensor, b: Tensor, kernels: bool) -> Tensor:
    """z = t w, t = z w^T or w = t^T z of the two others; by kernels in parts."""
    if not kernels or a.shape[result != "w"] < TWO_PARTS_FROM:
        left = a.t() if result == "w" else a
        return left @ (b.t() if result == "t" else b)
    launch = executor("radial_linear", "triton")
    found: Tensor
    if result != "t" and a.shape[1] <= launch.MOST_HIDDEN:
        found = (launch.formed_weights if result == "z" else launch.summed_products)(a, b)
        return found
    shape = (a.shape[1], b.shape[1]) if result == "w" else b.shape
    other = b if result == "w" else b.flatten()
    found = executor("mixing", "triton").run_mix(_matrix(*shape), result, a, other, True)
    return found.view(shape) if result == "w" else found


@functools.lru_cache(maxsize=256)
def _matrix(hidden: int, width: int) -> Mixing:
    """The mixing that is one matrix (hidden, width)."""
    t, z = CopyBlock(0, 1, 1, 1, hidden), CopyBlock(0, 1, 1, 1, width)
    return Mixing((hidden, width, hidden * width), (t,), (z,), (MatrixPath(0, 0, 0, 1.0),))


_block_cache: TensorCache[tuple[_EdgeBlock, ...]] = TensorCache()


def _blocks(tables: Tables, step: int) -> tuple[_EdgeBlock, ...]:
    """Blocks of at most `step` edges, all of one size, cached as long as the tables live."""
    sizes = tables[:3]
    if tables.num_edges <= step:
        return (_EdgeBlock({}, *pack(tables), sizes, {}),)
    step = -(-tables.num_edges // -(-tables.num_edges // step))
    ends = tables.src, tables.dst
    if (run := recorded.Current.run) is not None and unreadable(*ends):
        return run.value(ends, (sizes, step), lambda: _cut(tables, step))
    return _block_cache.get(ends, (sizes, step), lambda: _cut(tables, step))


def _cut(tables: Tables, step: int) -> tuple[_EdgeBlock, ...]:
    src, dst, order = tables.src, tables.dst, tables.z_edges
    assert src is not None
    assert dst is not None
    found = []
    for begin in range(0, tables.num_edges, step):
        ends = slice(begin, begin + step)
        edges = None if order is None else order[ends]
        to, places = (t[ends] if edges is None else t.index_select(0, edges) for t in (dst, src))
        own = (begin, to.shape[0]) if edges is None else edges
        rows: dict[str, Any] = {"y": own, "w": own}
        if unreadable(src, dst):
            block = _with_all_rows(tables, begin, places, to)
        else:
            first, last = (int(row) for row in to[[0, -1]])
            sources, places = torch.unique(places, return_inverse=True)
            block = Graph(places, to - first, last - first + 1, sources.shape[0]).tables
            rows["z"] = first, block.num_z
            if sources.shape[0] != tables.num_x:
                rows["x"] = sources
        found.append(_EdgeBlock(rows, *pack(block), block[:3], {}))
    return tuple(found)


def _with_all_rows(tables: Tables, begin: int, src: Tensor, dst: Tensor) -> Tables:
    """The tables of edges that follow each other in the order of dst, with all rows of a graph.

    They are sorted by src alone.
    """
    assert tables.z_indptr is not None
    num_x, num_z, count = tables.num_x, tables.num_z, dst.shape[0]
    indptr = (tables.z_indptr - begin).clamp_(0, count)
    (x,) = sorted_by_row((src,), (num_x,), max(num_x, num_z, count) + 1)
    return Tables(num_x, num_z, count, x.rows, dst, indptr, None, x.indptr, x.order)


def _rows(tensor: Tensor, slot: str, block: _EdgeBlock) -> Tensor:
    """The rows of a tensor that a block reads."""
    rows = block.rows.get(slot)
    if rows is None:
        return tensor
    return tensor.narrow(0, *rows) if isinstance(rows, tuple) else tensor.index_select(0, rows)


def _add(result: Tensor, part: Tensor, slot: str, block: _EdgeBlock) -> None:
    """Add a block's rows to a result; those of edges, which are in no other block, are copied.

    Row numbers are distinct, so that the order of additions is fixed.
    """
    rows = block.rows.get(slot)
    if isinstance(rows, Tensor):
        if slot in "yw":
            result.index_copy_(0, rows.long(), part)
        else:
            result.index_add_(0, rows, part)
    else:
        own = result if rows is None else result.narrow(0, *rows)
        own.copy_(part) if slot in "yw" else own.add_(part)


TensorPairs = tuple[Term, ...]
"""Pairs of numbers of tensors whose products are added."""


class RadialPlan(NamedTuple):
    """Steps of a call on edges whose weights are formed.

    Args:
        inner: text of a call; its tensors are those of `given`, then the formed weights.
        given: numbers of the call's tensors in slots x, y and z.
        formed: for each formed weight the pairs (h, A) of tensors.
        results: for each result of the call: a number of a result of `inner`, or pairs.  For h,
            pairs (result of `inner`, A); for A, pairs (h, result of `inner`).
    """

    inner: str
    given: tuple[int, ...]
    formed: tuple[TensorPairs, ...]
    results: tuple[int | TensorPairs, ...]


@functools.lru_cache(maxsize=4096)
def radial_plan_of(call: Call) -> RadialPlan:
    """The plan of a call; h and A stand last in terms, in this order."""
    given = tuple(t for t, slot in enumerate(call.slots) if slot in "xyz")
    place = {t: i for i, t in enumerate(given)}
    formed: dict[TensorPairs, int] = {}
    inner: dict[Result, int] = {}
    results: list[int | TensorPairs] = []
    for slot, terms in call.results:
        if slot in "wa":
            pairs = []
            for factor, others in _grouped((term[-1], term[:-1]) for term in terms):
                summed = tuple(tuple(place[t] for t in term) for term in others)
                gw = inner.setdefault(Result("w", summed), len(inner))
                pairs.append((gw, factor) if slot == "w" else (factor, gw))
            results.append(tuple(pairs))
        else:
            found = []
            for (first, second), sums in _grouped((term[:2], term[2:]) for term in terms):
                k = formed.setdefault(tuple(sums), len(formed))
                found.append((place[first], place[second], len(given) + k))
            results.append(inner.setdefault(Result(slot, tuple(found)), len(inner)))
    slots = "".join(call.slots[t] for t in given) + "w" * len(formed)
    text = str(Call(slots, tuple(inner)))
    return RadialPlan(text, given, tuple(formed), tuple(results))


def _grouped(terms: Iterable[tuple[K, Term]]) -> list[tuple[K, list[Term]]]:
    groups: dict[K, list[Term]] = {}
    for key, term in terms:
        groups.setdefault(key, []).append(term)
    return list(groups.items())
