"""Graphs: which row each edge reads, which it adds to, and the edges sorted by either.

    edge e:  out[dst[e]] += f(x[src[e]], e)

Sorted once by dst and once by src, so that sums and their gradients need no atomics: the edges of a
row follow each other, in the order of their numbers.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.operators.operands import check_tensors
from torchweft.core.operators.operator import below_transforms, compiling, unwatched, watched
from torchweft.core.tables.segments import SLICE, Slices, cut, indptr_of, narrow, sort_rows
from torchweft.core.tables.tensor_cache import TensorCache
from torchweft.errors import DeviceError, DTypeError, IndexRangeError, ShapeError
from torchweft.o3.edges.shared_source_runs import Runs, runs_of

__all__ = [
    "FLAT",
    "Graph",
    "Tables",
    "check_ranges",
    "flat",
    "graph_of",
    "listed",
    "pack",
    "repeated",
    "row_by_row",
    "unpack",
]


class Tables(NamedTuple):
    """What an executor reads of a graph.

    Tensors are contiguous, on one device, int32 where all numbers are below 2^31, else int64.
    Row m of slot z sums the edges z_edges[z_indptr[m]] .. z_edges[z_indptr[m+1] − 1], in this
    order; likewise slot x.
    """

    num_x: int  # rows of slot x
    num_z: int  # rows of slot z
    num_edges: int  # E
    src: Tensor | None = None  # (E,) row of x; None: edge e reads row e
    dst: Tensor | None = None  # (E,) row of z; None: edge e is row e
    z_indptr: Tensor | None = None  # (num_z + 1,); None: dst is
    z_edges: Tensor | None = None  # (E,) edges sorted by dst; None: they are
    x_indptr: Tensor | None = None
    x_edges: Tensor | None = None
    z_slices: Slices | None = None  # pieces of rows, None where no row is longer than SLICE
    x_slices: Slices | None = None
    runs: Runs | None = None  # of many edges, if they are few


class Graph:
    """Edges from src to dst, checked and sorted once; any multigraph.

    Args:
        src: (E,) int64 or int32, the row that each edge reads.
        dst: (E,) the row that it adds to.
        num_nodes: rows that are added to; None: one more than the largest number in src and dst.
        num_sources: rows that are read; None: num_nodes.
        reused: whether gradients on it are taken dozens of times: on a GPU those of many edges then
            take less time and memory, and the graph costs what some dozen of them gain.

    Raises:
        ShapeError, DTypeError, DeviceError: src and dst do not fit each other.
        IndexRangeError: an edge is out of range; on a GPU that is looked at under
            TORCHWEFT_CHECK=1.

    It holds copies.  Cost: two sorts of E numbers and one read by the host (none inside
    torch.compile, where rows of many thousand edges are then not cut into pieces).  There, make it
    once and give it to all layers: a layer that is given src and dst sorts them itself.
    """

    def __init__(
        self,
        src: Tensor,
        dst: Tensor,
        num_nodes: int | None = None,
        num_sources: int | None = None,
        reused: bool = False,
    ) -> None:
        traced = compiling() or watched()  # sizes may be symbols, which are no key
        if not compiling():
            _check_edges(src, dst)
            _check_sizes(num_nodes=num_nodes, num_sources=num_sources)
        if num_nodes is None:
            num_nodes = _largest(src, dst) + 1
        sources = num_nodes if num_sources is None else num_sources
        self.reused = reused
        tables = _tables(src, dst, sources, num_nodes)
        self.tables = _with_runs(tables) if reused and not traced else tables
        self.packed, self.present = pack(self.tables)
        facts = None if traced else (self.present, *self.tables[:3], *map(_of, self.packed))
        self.kind = facts and _kind(*facts)

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


_graphs: TensorCache[Graph] = TensorCache()


def graph_of(src: Tensor, dst: Tensor, num_nodes: int, num_sources: int) -> Graph:
    """The graph of these very tensors in their present state, sorted once."""
    if compiling():
        return Graph(src, dst, num_nodes, num_sources)
    return _graph_of(src, dst, num_nodes, num_sources)


@below_transforms
def _graph_of(src: Tensor, dst: Tensor, num_nodes: int, num_sources: int) -> Graph:
    if not isinstance(src, Tensor) or not isinstance(dst, Tensor) or not unwatched(src):
        return Graph(src, dst, num_nodes, num_sources)
    sizes = (num_nodes, num_sources)
    return _graphs.get((src, dst), sizes, lambda: Graph(src, dst, *sizes))


def row_by_row(rows: int) -> Tables:
    """Edge e reads row e and is row e."""
    return Tables(rows, rows, rows)


def pack(tables: Tables) -> tuple[list[Tensor], str]:
    """The tensors that there are, and a text that says which."""
    every = flat(tables)
    return [t for t in every if t is not None], "".join("01"[t is not None] for t in every)


def unpack(tensors: Sequence[Tensor], present: str, num_x: int, num_z: int, edges: int) -> Tables:
    """The tables that `pack` took apart."""
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
    """Takes the tensors of `pack` and a None behind them to their places in FLAT."""
    count, places = 0, []
    for flag in present or "0" * len(FLAT):
        places.append(count if flag == "1" else -1)
        count += flag == "1"
    return operator.itemgetter(*places)


def _of(table: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return table.shape, table.dtype, table.device


@functools.lru_cache(maxsize=4096)
def _kind(*facts: Any) -> object:
    """One object for graphs of which an executor would say the same."""
    return object()


def repeated(tables: Tables, times: int) -> Tables:
    """Copies of a graph side by side, none connected with another."""
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
    """The tensors of tables by the names of FLAT."""
    z, x, runs = tables[9:]
    slices = (*(_WHOLE if z is None else z[:3]), *(_WHOLE if x is None else x[:3]))
    return (*tables[3:9], *slices, *(_NO_RUNS if runs is None else runs))


FLAT = (
    *("src", "dst", "z_indptr", "z_edges", "x_indptr", "x_edges"),
    *(f"{slot}_{name}" for slot in "zx" for name in ("pieces", "owner", "owners")),
    *(f"runs_{name}" for name in Runs._fields),
)
"""Those of a graph, then of slices: indptr, owner and owner_indptr; then of runs."""

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
    """With the values at hand."""
    if not unwatched(src):
        return _traced(src, dst, num_x, num_z)
    if src.device.type == "cpu" or os.environ.get("TORCHWEFT_CHECK") == "1":
        check_ranges(src, dst, num_x, num_z)
    limit = max(num_x, num_z, src.shape[0]) + 1
    with torch.inference_mode(False):  # autograd keeps tables, which may be made in evaluation
        tables = _sorted_both(src, dst, num_x, num_z, limit)
        return _with_facts(tables) if src.shape[0] else tables


def _traced(src: Tensor, dst: Tensor, num_x: int, num_z: int) -> Tables:
    """Without a look at values or sizes: in int64, no order known, no row cut."""
    return _sorted_both(src, dst, num_x, num_z, 2**63)


def _sorted_both(src: Tensor, dst: Tensor, num_x: int, num_z: int, limit: int) -> Tables:
    src, dst = (narrow(index, limit).clone() for index in (src, dst))
    (z_indptr, z_edges), (x_indptr, x_edges) = (
        _sorted(index, rows, limit) for index, rows in ((dst, num_z), (src, num_x))
    )
    edges = src.shape[0]
    return Tables(num_x, num_z, edges, src, dst, z_indptr, z_edges, x_indptr, x_edges)


def _sorted(rows: Tensor, size: int, limit: int) -> tuple[Tensor, Tensor]:
    order = sort_rows(rows)
    indptr = indptr_of(rows.index_select(0, order), size)
    return narrow(indptr, limit), narrow(order, limit)


def _with_facts(tables: Tables) -> Tables:
    """Orders that are the identity left out, and long rows cut: what the host must read."""
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
    """With runs, if there is a GPU and no row of x is cut."""
    num_x, num_z, _, src, dst = tables[:5]
    if src is None or dst is None or not src.is_cuda or tables.x_slices is not None:
        return tables
    with torch.inference_mode(False):
        return tables._replace(runs=runs_of(src, dst, num_x, num_z))


def _largest(src: Tensor, dst: Tensor) -> int:
    if compiling():
        raise ShapeError(
            "num_nodes was left out inside torch.compile or export: the number of rows must not "
            "depend on values there. Pass num_nodes."
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
                "Pass how many rows there are."
            )


def check_ranges(src: Tensor, dst: Tensor, num_x: int, num_z: int) -> None:
    """Raises IndexRangeError where an edge names a row that there is not."""
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
