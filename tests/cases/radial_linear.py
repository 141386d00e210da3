"""Contract cases of channelwise products whose weights are h A: inputs x, y, h and A."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import torch
from torch import Tensor

from tests.cases.channelwise import GRAPHS, STRUCTURES, Edges
from tests.cases.suite import Suite
from torchweft.o3 import reference
from torchweft.o3.channelwise.structure import Structure
from torchweft.o3.graph import graph_of
from torchweft.o3.radial_linear.operator import radial_product
from torchweft.testing.contract import Case

__all__ = ["make_case", "suite"]

HIDDEN = 6


def _call(
    x: Tensor,
    y: Tensor,
    radial: Tensor,
    radial_weight: Tensor,
    structure: Structure,
    src: Tensor,
    dst: Tensor,
    num_nodes: int,
    backend: str | None = None,
) -> Tensor:
    graph = graph_of(src, dst, num_nodes, x.shape[0])
    return radial_product(structure, x, y, radial, radial_weight, graph, backend=backend)


def _oracle(
    x: Tensor, y: Tensor, radial: Tensor, radial_weight: Tensor, structure: Structure, **tables: Any
) -> Tensor:
    weight = radial @ radial_weight
    return reference.channelwise_reference(structure, x, y, weight, **tables)


def _magnitude(
    x: Tensor, y: Tensor, radial: Tensor, radial_weight: Tensor, structure: Structure, **tables: Any
) -> Tensor:
    return _oracle(x, y, radial, radial_weight, structure, **tables, sign=torch.abs)


def make_case(name: str, structure: Structure, edges: Edges, hidden: int = HIDDEN) -> Case:
    """A case with random inputs.

    Args:
        name: of the case; it seeds everything.
        structure: blocks and paths, with weights.
        edges: the graph.
        hidden: numbers in a row of h.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    randn = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    wx, wy, _, ww = structure.widths
    count = edges.src.numel()
    inputs = randn(edges.num_sources, wx), randn(count, wy), randn(count, hidden), randn(hidden, ww)
    tables = edges._asdict()
    del tables["num_sources"]
    return Case(
        f"radial_product: {name}",
        _call,
        _oracle,
        inputs,
        {"structure": structure, **tables},
        magnitude=_magnitude,
        together=True,
    )


@functools.cache
def suite() -> Suite:
    """The part of `make check` of weights that are h A."""
    graphs = {name: edges for name, edges in GRAPHS.items() if edges is not None}
    small = graphs["unsorted"]
    weighted = {name: s for name, s in STRUCTURES.items() if s.weighted}
    cases = [make_case(name, structure, small) for name, structure in weighted.items()]
    uvu = STRUCTURES["uvu"]
    cases += [make_case(f"uvu, {name}", uvu, edges) for name, edges in graphs.items()]
    cases.append(make_case("uvu, one hidden", uvu, small, 1))
    full = [make_case("full uvu", uvu, small), make_case("full uuu", STRUCTURES["uuu"], small)]
    few = graphs["one edge"]
    doors = [make_case("door uvu", uvu, small)]
    return Suite(cases, full, [make_case("small uvuv", STRUCTURES["uvuv"], few)], doors, ())
