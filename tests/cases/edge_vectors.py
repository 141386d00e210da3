"""Contract cases of vectors of edges, with shifts and without, and of sums over given rows."""

from __future__ import annotations

import functools
import zlib

import torch
from torch import Tensor

from tests.cases.channelwise import GRAPHS, Edges
from tests.cases.suite import Suite
from torchweft.o3.edge_vectors.operator import edge_vectors, rows_of_totals, totals
from torchweft.o3.graph import graph_of
from torchweft.testing.contract import Case

__all__ = ["make_case", "suite"]

GRAPHS_OF_ROWS = 7


def _call(
    x: Tensor,
    shift: Tensor | None,
    src: Tensor,
    dst: Tensor,
    backend: str | None = None,
) -> Tensor:
    return edge_vectors(x, graph_of(src, dst, x.shape[0], x.shape[0]), shift)


def _oracle(x: Tensor, shift: Tensor | None, src: Tensor, dst: Tensor, sign: int = -1) -> Tensor:
    v = x[dst.long()] + sign * x[src.long()]
    return v if shift is None else v + shift


def make_case(name: str, edges: Edges, *, shifted: bool = True, width: int = 3) -> Case:
    """A case with random positions.

    Args:
        name: of the case; it seeds everything.
        edges: the graph; both ends are rows of one set.
        shifted: whether there are shifts.
        width: numbers of a position.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    randn = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    x = randn(max(edges.num_nodes, edges.num_sources), width)
    shift = randn(edges.src.numel(), width) if shifted else None
    return Case(
        f"edge_vectors: {name}",
        _call,
        _oracle,
        (x, shift),
        {"src": edges.src, "dst": edges.dst},
        magnitude=functools.partial(_oracle, sign=1),
    )


def _total(v: Tensor, index: Tensor, backend: str | None = None) -> Tensor:
    return totals(v, rows_of_totals(index, GRAPHS_OF_ROWS))


def _plain_total(v: Tensor, index: Tensor) -> Tensor:
    return v.new_zeros(GRAPHS_OF_ROWS, v.shape[1]).index_add(0, index.long(), v)


def _totals(name: str, index: Tensor, width: int = 1) -> Case:
    """Sums of random rows; two of the results have none."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    v = torch.randn(index.numel(), width, dtype=torch.float64, generator=generator)
    return Case(f"totals: {name}", _total, _plain_total, (v,), {"index": index})


@functools.cache
def suite() -> Suite:
    """The part of `make check` of vectors of edges."""
    graphs = {name: edges for name, edges in GRAPHS.items() if edges is not None}
    cases = [make_case(name, edges) for name, edges in graphs.items()]
    cases += [make_case(f"{name}, plain", edges, shifted=False) for name, edges in graphs.items()]
    small = graphs["unsorted"]
    cases += [make_case(f"width {width}", small, width=width) for width in (1, 8, 31)]
    sizes = torch.tensor([3, 0, 300, 1, 40, 0, 2])
    cases.append(_totals("sorted", torch.arange(GRAPHS_OF_ROWS).repeat_interleave(sizes)))
    cases.append(_totals("in any order", torch.arange(50) * 3 % 5, width=5))
    full = [
        cases[-1],
        make_case("full", small),
        make_case("full sorted", graphs["sorted"], shifted=False),
    ]
    return Suite(cases, full, [make_case("small", graphs["self loops"])], [], ())
