"""Contract cases of vectors of edges: differences of positions, with shifts and without."""

from __future__ import annotations

import functools
import zlib

import torch
from torch import Tensor

from tests.cases.channelwise import GRAPHS, Edges
from tests.cases.suite import Suite
from torchweft.o3.edge_vectors.operator import edge_vectors
from torchweft.o3.graph import graph_of
from torchweft.testing.contract import Case

__all__ = ["make_case", "suite"]


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


@functools.cache
def suite() -> Suite:
    """The part of `make check` of vectors of edges."""
    graphs = {name: edges for name, edges in GRAPHS.items() if edges is not None}
    cases = [make_case(name, edges) for name, edges in graphs.items()]
    cases += [make_case(f"{name}, plain", edges, shifted=False) for name, edges in graphs.items()]
    small = graphs["unsorted"]
    cases += [make_case(f"width {width}", small, width=width) for width in (1, 8, 31)]
    full = [make_case("full", small), make_case("full sorted", graphs["sorted"], shifted=False)]
    return Suite(cases, full, [make_case("small", graphs["self loops"])], [], ())
