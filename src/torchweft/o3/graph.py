"""Graphs: the row that each edge reads, the row that it adds to, and the edges sorted by either.

    edge e:  out[dst[e]] += f(x[src[e]], e)

Edges are sorted once by dst and once by src, so that sums and their gradients need no atomics: the
edges of a row are adjacent, in the order of their numbers.

Runs are edges of neighbouring rows of z that share a row of x:

    part[r] = Σ_{e in run r} what edge e adds to its row of x      x[m] = Σ_{r of m} part[r]

A row of x for each edge, written and read again, is a third of the memory traffic of the gradients
of a convolution.  Rows of z that are near each other in the graph read mostly the same rows of x.
So RUN_TILE rows of z form a tile, the edges of a tile that read one row of x form a run, and only
the sum of a run is stored.  Each warp of a program takes one run, all of one tile, and the warps
share the rows of z in L1.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torchweft.core import recorded
from torchweft.core.operators.operands import check_tensors
from torchweft.core.operators.operator import below_transforms, compiling, unwatched, watched
from torchweft.core.table_copies import (
    copies_of,
    mark_constant,
    place_of,
    unreadable,
    with_views,
)
from torchweft.core.tables import SLICE, Slices, TensorCache, cut, narrow
from torchweft.errors import DeviceError, DTypeError, IndexRangeError, ShapeError
from torchweft.o3.sorting.rows import sorted_by_row

__all__ = [
    "FLAT",
    "RUNS_PER_PROGRAM",
    "Graph",
    "Runs",
    "Tables",
    "check_ranges",
    "flat",
    "graph_of",
    "listed",
    "pack",
    "repeated",
    "runs_of",
    "unpack",
]

RUN_TILE = 16
"""Rows of z in a tile of runs."""

RUN_LEVELS = 3
"""Edges along which rows search for the least number, which near rows have in common."""

ROW_BITS = 21
"""Bits of the number of a row, so that the numbers of all levels form one key."""

RUNS_PER_PROGRAM = 4
"""The number of runs is a multiple of it; the last ones may be empty."""

MIN_RUN_EDGES = 2**15
"""Edges from which on kernels, not launches, determine the time."""

MAX_RUNS_PER_EDGE = 1 / 4
"""Runs per edge up to which they are faster: each has a start and a store."""


class Runs(NamedTuple):
    """Run r has the edges edges[indptr[r]] .. edges[indptr[r+1] − 1].

    In a tile long runs come first, and among equal lengths those that share their rows of z.
    """

    indptr: Tensor  # (R + 1,)
    owner: Tensor  # (R,) row of x
    edges: Tensor  # (E,)
    rows: Tensor  # (E,) their rows of z
    bounds: Tensor  # (num_x + 1,) row m of x sums order[bounds[m]] .. order[bounds[m+1] − 1]
    order: Tensor  # (R,) runs sorted by owner


class Tables(NamedTuple):
    """The index tables of a graph.

    Tensors are contiguous, on one device, int32 where all numbers are below 2^31, else int64.
    Row m of slot z sums the edges z_edges[z_indptr[m]] .. z_edges[z_indptr[m+1] − 1], in this
    order; likewise slot x.
    """

    num_x: int  # rows of slot x
    num_z: int  # rows of slot z
    num_edges: int  # E
    src: Tensor | None = None  # (E,) row of x; None: edge e reads row e
    dst: Tensor | None = None  # (E,) row of z; None: edge e is row e
    z_indptr: Tensor | None = None  # (num_z + 1,); None where dst is None
    z_edges: Tensor | None = None  # (E,) edges sorted by dst; None: 0 .. E − 1
    x_indptr: Tensor | None = None
    x_edges: Tensor | None = None
    z_slices: Slices | None = None  # pieces of rows, None where no row is longer than SLICE
    x_slices: Slices | None = None
    runs: Runs | None = None  # None where they are not faster


class Graph:
    """The edges of a graph, from row src[e] to row dst[e], checked and sorted once for all layers.

    Any directed multigraph: edges in any order, repeated edges, self loops, nodes without edges.
    Passed to `TensorProductConv` and other layers in place of src and dst.

    Args:
        src: (E,) int64 or int32, the row that each edge reads.
        dst: (E,) int64 or int32, the row that each edge adds to.
        num_nodes: number of rows of the result; None: one more than the largest number in src and
            dst.
        num_sources: number of rows that edges read from; None: num_nodes.
        reused: whether gradients on the graph are computed dozens of times: on a GPU, gradients of
            many edges then take less time and memory, and creating the graph costs what about a
            dozen of them gain.

    Raises:
        ShapeError, DTypeError, DeviceError: src and dst do not fit each other.
        IndexRangeError: an edge is out of range; on a GPU checked only under TORCHWEFT_CHECK=1.

    The graph holds copies of src and dst, int32 where all numbers are below 2^31: later changes of
    these have no effect on it.  torch.save and, by its defaults, torch.load take it.

    Cost: two sorts of E numbers, and one read by the host (none inside torch.compile, nor in a
    function of `torchweft.capture`, where rows of many thousand edges are then not cut into
    pieces).  Inside torch.compile, create the graph once and pass it to all layers: a layer that
    is given src and dst sorts them itself.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> src, dst = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 0, 0, 1])
        >>> graph = o3.Graph(src, dst, num_nodes=3)
        >>> graph
        Graph(4 edges, 3 to 3 rows)
        >>> conv = o3.TensorProductConv("4x0e", "1x0e", "4x0e", [(0, 0, 0, "uvu", True)])
        >>> x, y, weight = torch.randn(3, 4), torch.randn(4, 1), torch.randn(4, conv.weight_numel)
        >>> conv(x, y, weight, graph).shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        src: Tensor,
        dst: Tensor,
        num_nodes: int | None = None,
        num_sources: int | None = None,
        reused: bool = False,
    ) -> None:
        if not compiling():
            _check_edges(src, dst)
            _check_sizes(num_nodes=num_nodes, num_sources=num_sources)
        if num_nodes is None:
            num_nodes = _largest(src, dst) + 1
        sources = num_nodes if num_sources is None else num_sources
        self.reused = reused
        tables = _tables(src, dst, sources, num_nodes)
        read = reused and not (compiling() or watched() or unreadable(src, dst))
        self._take(_with_runs(tables) if read else tables)

    def _take(self, tables: Tables) -> None:
        traced = compiling() or watched()  # sizes may be symbols, which are not hashable
        self.tables = tables
        self.packed, self.present = pack(tables)
        facts = None if traced else (self.present, *tables[:3], *map(_of, self.packed))
        self.kind = facts and _kind(*facts)

    def __getstate__(self) -> dict[str, Any]:
        return {"tables": self.tables, "reused": self.reused}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.reused = state["reused"]
        self._take(state["tables"])

    def __repr__(self) -> str:
        return f"Graph({self.num_edges} edges, {self.num_sources} to {self.num_nodes} rows)"

    @property
    def src(self) -> Tensor:
        """(E,) the row that each edge reads."""
        return self.packed[0]

    @property
    def dst(self) -> Tensor:
        """(E,) the row that each edge adds to."""
        return self.packed[1]

    @property
    def num_nodes(self) -> int:
        """Rows that are added to."""
        return self.tables.num_z

    @property
    def num_sources(self) -> int:
        """Rows that are read."""
        return self.tables.num_x

    @property
    def num_edges(self) -> int:
        """E."""
        return self.tables.num_edges

    def to(self, device: torch.device | str) -> Graph:
        """The same graph on a device."""
        edges = self.src.to(device), self.dst.to(device)
        return Graph(*edges, self.num_nodes, self.num_sources, self.reused)


torch.serialization.add_safe_globals([Graph, Tables, Runs, Slices])  # of torch.load, by default

_graphs: TensorCache[Graph] = TensorCache()


def graph_of(src: Tensor, dst: Tensor, num_nodes: int, num_sources: int) -> Graph:
    """The graph of these tensors, cached as long as their content stays."""
    if compiling():
        return Graph(src, dst, num_nodes, num_sources)
    return _graph_of(src, dst, num_nodes, num_sources)


@below_transforms
def _graph_of(src: Tensor, dst: Tensor, num_nodes: int, num_sources: int) -> Graph:
    if not isinstance(src, Tensor) or not isinstance(dst, Tensor) or not unwatched(src):
        return Graph(src, dst, num_nodes, num_sources)
    _check_edges(src, dst)
    _check_sizes(num_nodes=num_nodes, num_sources=num_sources)
    sizes = (num_nodes, num_sources)
    if (run := recorded.Current.run) is not None:
        src, dst = with_views(run, src, dst)
        if unreadable(src, dst):
            owners, places = zip(*(place_of(table) for table in (src, dst)), strict=True)
            return run.value(owners, (places, sizes), lambda: Graph(src, dst, *sizes))
    src, dst = cast("tuple[Tensor, Tensor]", copies_of((src, dst)))
    return _graphs.get((src, dst), sizes, lambda: Graph(src, dst, *sizes))


def pack(tables: Tables) -> tuple[list[Tensor], str]:
    """The tensors that are not None, and a "0" or "1" for each of FLAT."""
    every = flat(tables)
    return [t for t in every if t is not None], "".join("01"[t is not None] for t in every)


def unpack(tensors: Sequence[Tensor], present: str, num_x: int, num_z: int, edges: int) -> Tables:
    """The tables that `pack` flattened."""
    if not tensors:
        return Tables(num_x, num_z, edges)
    src, dst, z_indptr, z_edges, x_indptr, x_edges, *rest = listed(present)((*tensors, None))
    found = Tables(num_x, num_z, edges, src, dst, z_indptr, z_edges, x_indptr, x_edges)
    if "1" not in present[6:]:
        return found
    found = found._replace(z_slices=_slices(rest[:3]), x_slices=_slices(rest[3:6]))
    runs = [part for part in rest[6:] if part is not None]
    return found._replace(runs=Runs(*runs)) if runs else found


@functools.lru_cache(maxsize=4096)
def listed(present: str) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]:
    """A function that puts the tensors of `pack`, followed by a None, in the order of FLAT."""
    count, places = 0, []
    for flag in present or "0" * len(FLAT):
        places.append(count if flag == "1" else -1)
        count += flag == "1"
    return operator.itemgetter(*places)


def _of(table: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return table.shape, table.dtype, table.device


@functools.lru_cache(maxsize=4096)
def _kind(*facts: Any) -> object:
    """One object for all graphs of one signature."""
    return object()


def repeated(tables: Tables, times: int) -> Tables:
    """Disjoint copies of a graph as one graph."""
    rows, more, edges = tables.num_x, tables.num_z, tables.num_edges
    limit = times * max(rows, more, edges) + 1

    def shifted(index: Tensor | None, step: int) -> Tensor | None:
        if index is None:
            return None
        copies = torch.arange(times, device=index.device)[:, None] * step
        return narrow((index + copies).flatten(), limit)

    def bounds(indptr: Tensor | None, step: int) -> Tensor | None:
        if indptr is None:
            return None
        starts = shifted(indptr[:-1], step)
        assert starts is not None
        return torch.cat([starts, starts.new_full((1,), times * step)])

    def pieces(slices: Slices | None, rows: int) -> Slices | None:
        if slices is None:
            return None
        count = slices.num_pieces
        owners = bounds(slices.owner_indptr, count)
        return _slices([bounds(slices.indptr, edges), shifted(slices.owner, rows), owners])

    return Tables(
        times * rows,
        times * more,
        times * edges,
        shifted(tables.src, rows),
        shifted(tables.dst, more),
        bounds(tables.z_indptr, edges),
        shifted(tables.z_edges, edges),
        bounds(tables.x_indptr, edges),
        shifted(tables.x_edges, edges),
        pieces(tables.z_slices, more),
        pieces(tables.x_slices, rows),
    )


def flat(tables: Tables) -> tuple[Tensor | None, ...]:
    """The tensors of tables in the order of FLAT."""
    z, x, runs = tables[9:]
    slices = (*(_WHOLE if z is None else z[:3]), *(_WHOLE if x is None else x[:3]))
    return (*tables[3:9], *slices, *(_NO_RUNS if runs is None else runs))


FLAT = (
    *("src", "dst", "z_indptr", "z_edges", "x_indptr", "x_edges"),
    *(f"{slot}_{name}" for slot in "zx" for name in ("pieces", "owner", "owners")),
    *(f"runs_{name}" for name in Runs._fields),
)
"""Names of the tensors of tables; `pieces owner owners` are the tensors of slices."""

_WHOLE = (None, None, None)

_NO_RUNS = (None,) * len(Runs._fields)


def _slices(parts: Sequence[Tensor | None]) -> Slices | None:
    indptr, owner, owner_indptr = parts
    if indptr is None or owner is None or owner_indptr is None:
        return None
    return Slices(indptr, owner, owner_indptr, owner.shape[0])


def _tables(src: Tensor, dst: Tensor, num_x: int, num_z: int) -> Tables:
    return (_traced if compiling() else _built)(src, dst, num_x, num_z)


@below_transforms
def _built(src: Tensor, dst: Tensor, num_x: int, num_z: int) -> Tables:
    """Tables of edges whose values can be read."""
    if not unwatched(src):
        return _traced(src, dst, num_x, num_z)
    if src.device.type == "cpu" or os.environ.get("TORCHWEFT_CHECK") == "1":
        check_ranges(src, dst, num_x, num_z)
    limit = max(num_x, num_z, src.shape[0]) + 1
    with torch.inference_mode(False):  # autograd saves tables, also those created in inference mode
        tables = _sorted_both(src, dst, num_x, num_z, limit)
        if unreadable(src, dst):
            return tables
        mark_constant(tables.src, tables.dst)
        return _with_facts(tables) if src.shape[0] else tables


def _traced(src: Tensor, dst: Tensor, num_x: int, num_z: int) -> Tables:
    """Tables without reads of values or sizes: in int64, unknown order, no row cut."""
    return _sorted_both(src, dst, num_x, num_z, 2**63)


def _sorted_both(src: Tensor, dst: Tensor, num_x: int, num_z: int, limit: int) -> Tables:
    x, z = sorted_by_row((src, dst), (num_x, num_z), limit)
    return Tables(num_x, num_z, src.shape[0], x.rows, z.rows, *z[1:], *x[1:])


def _with_facts(tables: Tables) -> Tables:
    """Tables without orders that are the identity, and with long rows cut; read by the host."""
    z_indptr, x_indptr = tables.z_indptr, tables.x_indptr
    src, dst = tables.src, tables.dst
    assert src is not None
    assert dst is not None
    assert z_indptr is not None
    assert x_indptr is not None
    facts = [(dst.diff() >= 0).all(), z_indptr.diff().max()]
    facts += [(src.diff() >= 0).all(), x_indptr.diff().max()]
    z_sorted, z_longest, x_sorted, x_longest = torch.stack([f.long() for f in facts]).tolist()
    return tables._replace(
        z_edges=None if z_sorted else tables.z_edges,
        x_edges=None if x_sorted else tables.x_edges,
        z_slices=cut(z_indptr, SLICE) if z_longest > SLICE else None,
        x_slices=cut(x_indptr, SLICE) if x_longest > SLICE else None,
    )


@below_transforms
def _with_runs(tables: Tables) -> Tables:
    """Tables with runs, on a GPU where no row of x is cut."""
    num_x, num_z, _, src, dst = tables[:5]
    if src is None or dst is None or not src.is_cuda or tables.x_slices is not None:
        return tables
    with torch.inference_mode(False):
        return tables._replace(runs=runs_of(src, dst, num_x, num_z))


def _largest(src: Tensor, dst: Tensor) -> int:
    if compiling() or unreadable(src, dst):
        raise ShapeError(
            "num_nodes was left out inside torch.compile, export or a function of "
            "torchweft.capture: the number of rows must not depend on values there. Pass "
            "num_nodes."
        )
    return max((int(index.max()) for index in (src, dst) if index.numel()), default=-1)


def _check_edges(src: Tensor, dst: Tensor) -> None:
    check_tensors(src=src, dst=dst)
    for name, index in (("src", src), ("dst", dst)):
        if index.dtype not in (torch.int64, torch.int32):
            raise DTypeError(
                f"{name} is {index.dtype}: edges are numbers of rows, int64 or int32. "
                f"Convert it, e.g. {name}.long()."
            )
        if index.dim() != 1:
            raise ShapeError(
                f"{name} is {tuple(index.shape)}: it must be (E,), one number an edge. "
                f"Pass {name}.flatten(), or a row of edge_index."
            )
    if src.shape != dst.shape:
        raise ShapeError(
            f"src has {src.shape[0]} edges and dst has {dst.shape[0]}: they must have the same "
            "number, one of each an edge. Pass the two rows of one edge_index."
        )
    if src.device != dst.device:
        raise DeviceError(
            f"src is on {src.device} and dst on {dst.device}: they must be on one device. "
            f"Pass dst.to({str(src.device)!r})."
        )


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and (not hasattr(size, "__index__") or size < 0):
            raise ShapeError(
                f"{name} is {size!r}: it must be an integer, 0 or more, or None. "
                "Pass the number of rows."
            )


def check_ranges(src: Tensor, dst: Tensor, num_x: int, num_z: int) -> None:
    """Raises IndexRangeError where an edge is out of range."""
    for name, index, rows, what in (
        ("src", src, num_x, "rows of x (num_sources)"),
        ("dst", dst, num_z, "rows to add to (num_nodes)"),
    ):
        if not index.numel():
            return
        low, high = (int(v) for v in index.aminmax())
        if low >= 0 and high < rows:
            continue
        value = low if low < 0 else high
        where = int((index == value).nonzero()[0, 0])
        raise IndexRangeError(
            f"{name}[{where}] is {value} but there are {rows} {what}: every value must lie in "
            f"0..{rows - 1}. Correct {name}, or pass more rows."
        )


# runs


def runs_of(src: Tensor, dst: Tensor, num_x: int, num_z: int) -> Runs | None:
    """The runs of a graph; None where there are few edges, or nearly as many runs.

    Cost: five sorts, of edges, rows and runs, and one number read by the host.
    """
    count = src.shape[0]
    if count < MIN_RUN_EDGES:
        return None
    rows = _near(src.long(), dst.long(), num_x, num_z)
    place = torch.empty_like(rows)
    place[rows] = torch.arange(num_z, device=rows.device)
    at = place[dst]
    key, edges = torch.sort((at // RUN_TILE * num_x + src) * RUN_TILE + at % RUN_TILE, stable=True)
    key = key // RUN_TILE
    starts = torch.cat([key.new_zeros(1), 1 + key.diff().nonzero().flatten()])
    if starts.shape[0] > MAX_RUNS_PER_EDGE * count:
        return None
    lengths = torch.cat([starts, starts.new_full((1,), count)]).diff()
    by = _alike(key[starts] // num_x * (count + 1) - lengths, lengths, place[dst[edges]] % RUN_TILE)
    starts, lengths = starts[by], lengths[by]
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    moved = torch.repeat_interleave(starts - indptr[:-1], lengths, output_size=count)
    edges = edges[moved + torch.arange(count, device=moved.device)]
    owner = key[starts] % num_x
    sources, order = torch.sort(owner, stable=True)
    bounds = torch.searchsorted(sources, torch.arange(num_x + 1, device=owner.device))
    missing = -owner.shape[0] % RUNS_PER_PROGRAM
    indptr = torch.cat([indptr, indptr[-1:].expand(missing)])
    owner = torch.cat([owner, owner[-1:].expand(missing)])
    limit = max(num_x, num_z, count) + 1
    found = (indptr, owner, edges, dst[edges], bounds, order)
    return Runs(*(narrow(t, limit) for t in found))


def _alike(key: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
    """The order of runs by a key, then by a bit mask of the rows of their edges."""
    runs = torch.arange(key.shape[0], device=key.device)
    run = torch.repeat_interleave(runs, lengths, output_size=rows.shape[0])
    bits = torch.zeros_like(runs).index_add_(0, run, 2 ** (RUN_TILE - 1 - rows))
    order = torch.argsort(bits, stable=True)
    return order[torch.argsort(key[order], stable=True)]


def _near(src: Tensor, dst: Tensor, num_x: int, num_z: int) -> Tensor:
    """Rows of z in an order in which neighbours read common rows of x.

    Every row gets a random number and replaces it by the least of those it reads, RUN_LEVELS times
    where x and z have the same rows.  Rows are sorted by the last numbers, then by those before.
    """
    numbers = _hashed(torch.arange(num_x, device=src.device))
    total = torch.zeros(num_z, dtype=torch.int64, device=src.device)
    for level in range(RUN_LEVELS if num_x == num_z else 1):
        start = numbers if num_x == num_z else total.new_full((num_z,), 2**ROW_BITS - 1)
        numbers = start.scatter_reduce(0, dst, numbers[src], "amin")
        total += numbers << (ROW_BITS * level)
    return torch.argsort(total, stable=True)


def _hashed(rows: Tensor) -> Tensor:
    """Pseudo-random numbers of ROW_BITS bits."""
    mixed = rows
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 15)) * 0x45D9F3B & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)) >> (32 - ROW_BITS)
