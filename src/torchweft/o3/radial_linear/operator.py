"""Channelwise products whose weights are a radial network's last matrix: never stored.

z[d] = Σ_{e: dst[e] = d} Q(x[src[e]], y[e], h[e] A)

    torchweft::o3_radial(Tensor[] tensors, str structure, str call, …) -> Tensor[]

The form is linear in x, y, h and A, so its derivatives of every order are calls of the same
operator.  In a call h stands in slot w, and A in slot a.  The forward pass of float32 on a GPU has
a fused kernel; all other calls go by blocks of edges:

    for each block of the edges, sorted by their row of z:
        w = h A;  the call with formed weights, by its own kernels;  gh = gw A^T;  gA += h^T gw

A block is a graph of its own, whose rows are those that it touches, so that what a block costs
follows its edges.  Blocks are added in their order: bits repeat.  A call of several terms is taken
apart into matrix products and a call of x, y, z and w:

    w_k  = Σ_(h, A) h A                      terms with the same x, y and z share one sum
    gw_k = Σ_terms ∂Q/∂w
    h:   Σ gw A^T          A:   Σ_e h^T gw
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.backend import choose
from torchweft.core.operators.operands import same_kind
from torchweft.core.operators.tensor_list import CachedCall, ListOperator, Rest, Results, Tensors
from torchweft.core.operators.tensor_list import Call as Door
from torchweft.core.tables.tensor_cache import TensorCache
from torchweft.o3.backends import executor
from torchweft.o3.channelwise.calls import ROLES, Call, Result, Term, read_call
from torchweft.o3.channelwise.operator import ContractionRule as Contraction
from torchweft.o3.channelwise.operator import cached_call as kept
from torchweft.o3.channelwise.operator import contraction, one_by_one
from torchweft.o3.channelwise.structure import Structure, read
from torchweft.o3.edges.graph import Graph, Tables, pack, unpack
from torchweft.o3.mixing.blocks import Block as Copies
from torchweft.o3.mixing.blocks import Mixing
from torchweft.o3.mixing.blocks import Path as Matrix
from torchweft.o3.radial_linear.source import SHORT

__all__ = ["RADIAL_PRECISIONS", "radial_product"]


RADIAL_PRECISIONS = ("tf32x3", "tf32")
"""Precisions of products with A in float32 on tensor cores: as float32, or mantissas of 10 bits.

They come in parts of 16 bits, which take half the time of TF32's and have as many digits.
"""

_FORWARD = str(Call("xywa", (Result("z", ((0, 1, 2, 3),)),)))


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

    Memory beside the results: forward by kernels a copy of h and y.  Else, and in derivatives,
    h A of a block of edges (see BLOCK_BYTES), and gradients of it as large.
    """
    x, y, radial, radial_weight = same_kind(x=x, y=y, radial=radial, radial_weight=radial_weight)
    tensors = [x, y, radial, radial_weight, *graph.packed]
    sizes = (*graph.tables[:3], radial.shape[1])
    rest = (structure.text, _FORWARD, graph.present, *sizes, backend or "", precision)
    return _radial(tensors, rest)[0]


class _Radial(Contraction):
    """Derivatives of Q(x, y, h A, z)."""

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
                ((_, (term,)),) = what.results  # of x, y, h and A
                found = fused.run(of, [values[t] for t in term], tables, hidden, precision)
            else:
                found = run_by_blocks(of, what, values, tables, hidden, backend or None)
        return [result.to(dtype) for result in found]

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        structure, call, _, num_x, num_z, num_edges, hidden, *_ = rest
        width = read(structure).width
        shapes = {
            "x": (num_x, width("x")),
            "y": (num_edges, width("y")),
            "z": (num_z, width("z")),
            "w": (num_edges, hidden),
            "a": (hidden, width("w")),
        }
        return [tensors[0].new_empty(shapes[slot]) for slot, _ in read_call(call).results]

    def batch(
        self, call: Door, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        self.refuse_mapped_graph(dims, rest)
        return one_by_one(call, size, dims, tensors, rest)


@functools.cache
def _fused(backend: str | None, device: str) -> Any:
    """The module of the fused kernel, where it may serve."""
    if choose(backend, device) != "triton":
        return None
    return executor("radial_linear", "triton")


_radial = ListOperator(
    "o3_radial",
    "str structure, str call, str present, SymInt num_x, SymInt num_z, SymInt num_edges, "
    "SymInt hidden, str backend, str precision",
    _Radial(),
)


BLOCK_BYTES = {"cpu": 2**25, "cuda": 5 * 2**26}
"""Bytes of a block's weights; each gradient of them takes as many.

A GPU needs many rows at once to be busy: gradients of W1 take a seventh longer than by blocks of
2^30, in two fifths of the memory (H200).
"""

ROWS_PER_BLOCK = 512
"""Rows of z in a block whose gradients are sums, each by one program: as many as run at once."""

MOST_BLOCK_TIMES = 4
"""Times BLOCK_BYTES that these rows may take."""


class _Block(NamedTuple):
    """Edges of a graph as a graph of their own.

    Args:
        begin: the first edge, where their numbers follow each other.
        edges: their numbers; None: they do.
        sources: the rows of x that they read; None: all.
        first: the row of z that is the block's first.
        packed: its tables.
        present: which of them there are.
        sizes: its rows of x, of z, and edges.
        settled: cached calls on this block.
    """

    begin: int
    edges: Tensor | None
    sources: Tensor | None
    first: int
    packed: Sequence[Tensor]
    present: str
    sizes: tuple[int, int, int]
    settled: dict[Any, CachedCall]


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
        tensors: one for each of its slots, contiguous, float32 or float64.
        tables: the edges.
        hidden: numbers in a row of h.
        backend: of the kernels of formed weights.
    """
    width, like = structure.width("w"), tensors[0]
    rows = {"x": tables.num_x, "y": tables.num_edges, "z": tables.num_z}
    rows |= {"w": tables.num_edges, "a": hidden}
    widths = {s: structure.width(s) for s in "xyz"} | {"w": hidden, "a": width}
    step = max(1, BLOCK_BYTES[like.device.type] // max(1, width * like.element_size()))
    if like.is_cuda and any(slot == "z" for slot, _ in call.results):
        many = ROWS_PER_BLOCK * tables.num_edges // max(1, tables.num_z)
        step = min(max(step, many), MOST_BLOCK_TIMES * step)
    blocks = _blocks(tables, step) if tables.num_edges else ()
    shapes = [(rows[slot], widths[slot]) for slot, _ in call.results]
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
    structure: Structure, call: Call, values: Sequence[Tensor], block: _Block, backend: str | None
) -> list[Tensor | None]:
    """The results of the edges of a block; None: no terms."""
    plan, kernels = radial_plan_of(call), _kernels(values[0], backend)

    def total(result: str, pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor | None:
        products = [_product(result, a, b, kernels) for a, b in pairs]
        return functools.reduce(torch.Tensor.add_, products) if products else None

    formed = [_formed([(values[h], values[a]) for h, a in pairs], kernels) for pairs in plan.formed]
    given = [values[t] for t in plan.given]
    rest = structure.text, str(plan.inner), block.present, block.sizes, False, backend
    key = rest, values[0].dtype
    settled = block.settled.get(key) or block.settled.setdefault(key, kept(*rest))
    found = contraction([*given, *formed, *block.packed], settled)
    results: list[Tensor | None] = []
    for (slot, _), what in zip(call.results, plan.results, strict=True):
        if isinstance(what, int):
            results.append(found[what])
        elif slot == "w":
            results.append(total("t", ((found[gw], values[a]) for gw, a in what)))
        else:
            results.append(total("w", ((values[h], found[gw]) for h, gw in what)))
    return results


def _formed(pairs: Sequence[tuple[Tensor, Tensor]], kernels: bool) -> Tensor:
    """Σ h A by one product: a sum of several would be read and written again."""
    if len(pairs) == 1:
        return _product("z", *pairs[0], kernels)
    rows, matrices = zip(*pairs, strict=True)
    return _product("z", torch.cat(rows, 1), torch.cat(matrices), kernels)


def _product(result: str, a: Tensor, b: Tensor, kernels: bool) -> Tensor:
    """z = t w, t = z w^T or w = t^T z of the two others; by kernels in parts."""
    if not kernels or a.shape[result != "w"] < SHORT:
        left = a.t() if result == "w" else a
        return left @ (b.t() if result == "t" else b)
    from torchweft.o3.radial_linear import split_products

    if result != "t" and a.shape[1] <= split_products.MOST_HIDDEN:
        made = split_products.formed_weights if result == "z" else split_products.summed_products
        return made(a, b)
    launch = executor("mixing", "triton")
    if result == "w":
        shape = a.shape[1], b.shape[1]
        found: Tensor = launch.run_mix(_matrix(*shape), result, a, b, True).view(shape)
    else:
        found = launch.run_mix(_matrix(*b.shape), result, a, b.flatten(), True)
    return found


@functools.lru_cache(maxsize=256)
def _matrix(hidden: int, width: int) -> Mixing:
    """The mixing that is one matrix (hidden, width)."""
    t, z = Copies(0, 1, 1, 1, hidden), Copies(0, 1, 1, 1, width)
    return Mixing((hidden, width, hidden * width), (t,), (z,), (Matrix(0, 0, 0, 1.0),))


def _kernels(like: Tensor, backend: str | None) -> bool:
    return like.dtype == torch.float32 and choose(backend, like.device.type) == "triton"


# blocks

_block_cache: TensorCache[tuple[_Block, ...]] = TensorCache()


def _blocks(tables: Tables, step: int) -> tuple[_Block, ...]:
    """Blocks of at most `step` edges, all of one size, kept as long as the tables."""
    sizes = tables[:3]
    if tables.num_edges <= step:
        packed, present = pack(tables)
        return (_Block(0, None, None, 0, packed, present, sizes, {}),)
    step = -(-tables.num_edges // -(-tables.num_edges // step))
    return _block_cache.get((tables.src, tables.dst), (sizes, step), lambda: _cut(tables, step))


def _cut(tables: Tables, step: int) -> tuple[_Block, ...]:
    src, dst, order = tables.src, tables.dst, tables.z_edges
    assert src is not None
    assert dst is not None
    found = []
    for begin in range(0, tables.num_edges, step):
        ends = slice(begin, begin + step)
        edges = None if order is None else order[ends]
        to, places = (t[ends] if edges is None else t.index_select(0, edges) for t in (dst, src))
        first, last = (int(row) for row in to[[0, -1]])
        sources, places = torch.unique(places, return_inverse=True)
        graph = Graph(places, to - first, last - first + 1, sources.shape[0])
        read = None if sources.shape[0] == tables.num_x else sources
        sizes = graph.tables[:3]
        found.append(_Block(begin, edges, read, first, graph.packed, graph.present, sizes, {}))
    return tuple(found)


def _rows(tensor: Tensor, slot: str, block: _Block) -> Tensor:
    """The rows of a tensor that a block reads."""
    if slot == "a":
        return tensor
    place = _place(slot, block)
    return tensor.narrow(0, *place) if isinstance(place, tuple) else tensor.index_select(0, place)


def _add(result: Tensor, part: Tensor, slot: str, block: _Block) -> None:
    """The result of a block's rows, each of which is there once: no order to choose.

    Edges are in no other block.
    """
    place = (0, part.shape[0]) if slot == "a" else _place(slot, block)
    if isinstance(place, tuple):
        own = result.narrow(0, *place)
        own.copy_(part) if slot in "yw" else own.add_(part)
    elif slot in "yw":
        result.index_copy_(0, place.long(), part)
    else:
        result.index_add_(0, place, part)


def _place(slot: str, block: _Block) -> tuple[int, int] | Tensor:
    """A block's rows of a slot: the first and how many, or their numbers."""
    num_x, num_z, num_edges = block.sizes
    if slot == "z":
        return block.first, num_z
    if slot == "x":
        return (0, num_x) if block.sources is None else block.sources
    return (block.begin, num_edges) if block.edges is None else block.edges


Sum = tuple[tuple[int, int], ...]
"""Pairs of numbers whose products are added."""


class RadialPlan(NamedTuple):
    """How to compute a call on edges whose weights are formed.

    Args:
        inner: its tensors are those of `given`, then the formed weights.
        given: the numbers of the call's tensors in slots x, y and z that it reads.
        formed: for each formed weight the pairs (h, A) of tensors.
        results: for each result of the call: a number of a result of `inner`, or pairs.  For h,
            pairs (result of `inner`, A); for A, pairs (h, result of `inner`).
    """

    inner: Call
    given: tuple[int, ...]
    formed: tuple[Sum, ...]
    results: tuple[int | Sum, ...]


@functools.lru_cache(maxsize=4096)
def radial_plan_of(call: Call) -> RadialPlan:
    """How to compute a call."""
    given = tuple(t for t, slot in enumerate(call.slots) if slot in "xyz")
    place = {t: i for i, t in enumerate(given)}
    formed: dict[Sum, int] = {}
    inner: dict[Result, int] = {}
    results: list[int | Sum] = []

    def number(result: Result) -> int:
        return inner.setdefault(result, len(inner))

    for slot, terms in call.results:
        if slot in "wa":
            pairs = []
            for factor, rest in _by_factor(slot, terms):
                summed = tuple(tuple(place[t] for t in term) for term in rest)
                gw = number(Result("w", summed))
                pairs.append((gw, factor) if slot == "w" else (factor, gw))
            results.append(tuple(pairs))
            continue
        found = []
        for (first, second), sums in _by_others(terms):
            k = formed.setdefault(sums, len(formed))
            found.append((place[first], place[second], len(given) + k))
        results.append(number(Result(slot, tuple(found))))
    slots = "".join(call.slots[t] for t in given) + "w" * len(formed)
    return RadialPlan(Call(slots, tuple(inner)), given, tuple(formed), tuple(results))


def _by_factor(slot: str, terms: Iterable[Term]) -> list[tuple[int, list[Term]]]:
    """Terms of a result h or A by the other of these, which stands last."""
    assert ROLES[-2:] == "wa"
    assert slot in "wa"
    groups: dict[int, list[Term]] = {}
    for *others, factor in terms:
        groups.setdefault(factor, []).append(tuple(others))
    return list(groups.items())


def _by_others(terms: Iterable[Term]) -> list[tuple[tuple[int, int], Sum]]:
    """Terms of a result x, y or z by their other two; h and A stand last."""
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for first, second, h, a in terms:
        groups.setdefault((first, second), []).append((h, a))
    return [(others, tuple(pairs)) for others, pairs in groups.items()]
