"""Contract cases of channelwise products: modes, layouts, multiplicities, graphs.

A structure is written as the blocks of x and of y, (multiplicity, degree) each, and how they meet:

    uvu   z[u] = x[u] y[v] w[u,v]    summed over v
    uvv   z[v] = x[u] y[v] w[u,v]    summed over u
    uuu   z[u] = x[u] y[u] w[u]
    uvuv  z[u,v] = x[u] y[v] w[u,v]
    11w   z[w] = x[0] y[0] w[w]      three copies
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.cases.o3_workloads import ring_graph
from tests.cases.suite import Suite
from torchweft.o3 import reference
from torchweft.o3.channelwise.product import channelwise_product
from torchweft.o3.channelwise.structure import Block, Path, Product, Structure
from torchweft.o3.graph import Graph, graph_of
from torchweft.testing.bounds import assert_within_bound
from torchweft.testing.contract import Case

__all__ = ["GRAPHS", "STRUCTURES", "Edges", "make_case", "make_structure", "suite"]

Blocks = Sequence[tuple[int, int]]
"""(multiplicity, degree) of the irreps of a row."""


class _Place(NamedTuple):
    """An irrep in a row: component m of copy u is at offset + m · step + u · copy_step."""

    mul: int
    degree: int
    offset: int
    step: int
    copy_step: int

    def channels(self, first: int = 0, every: int = 1) -> Block:
        """Copies first, first + every, … as channels."""
        start = self.offset + first * self.copy_step
        return Block(start, self.degree, self.step, every * self.copy_step)

    def copy(self, u: int) -> Block:
        """One copy, shared by all channels."""
        return Block(self.offset + u * self.copy_step, self.degree, self.step, 0)


def _places(blocks: Blocks, layout: str) -> list[_Place]:
    places, offset = [], 0
    for mul, degree in blocks:
        size = 2 * degree + 1
        steps = (1, size) if layout == "mul_ir" else (mul, 1)
        places.append(_Place(mul, degree, offset, *steps))
        offset += mul * size
    return places


def _width(places: Sequence[_Place]) -> int:
    return sum(p.mul * (2 * p.degree + 1) for p in places)


_Meeting = tuple[int, Block, Block, Block, Block]
"""Channels, and the blocks of x, y, z and w."""


def _meetings(mode: str, x: _Place, y: _Place, z: _Place, w: int) -> list[_Meeting]:
    """The paths of one instruction whose weights begin at w."""
    if mode == "uuu":
        return [(x.mul, x.channels(), y.channels(), z.channels(), Block(w, 0, 1, 1))]
    if mode == "uvv":
        return [
            (y.mul, x.copy(u), y.channels(), z.channels(), Block(w + u * y.mul, 0, 1, 1))
            for u in range(x.mul)
        ]
    if mode == "11w":
        return [(z.mul, x.copy(0), y.copy(0), z.channels(), Block(w, 0, 1, 1))]
    own = mode == "uvuv"
    return [
        (
            x.mul,
            x.channels(),
            y.copy(v),
            z.channels(v, y.mul) if own else z.channels(),
            Block(w + v, 0, 1, y.mul),
        )
        for v in range(y.mul)
    ]


def make_structure(
    x: Blocks,
    y: Blocks,
    mode: str = "uvu",
    layout: str = "mul_ir",
    weighted: bool = True,
    lmax: int = 2,
    joined: bool = False,
) -> Structure:
    """Every path up to lmax; each has an output of its own, or, `joined`, one with its equals."""
    rows, edges = _places(x, layout), _places(y, layout)
    found: list[tuple[str, _Place, _Place, tuple[int, int]]] = []
    for a in rows:
        for b in edges:
            muls = {"uvu": a.mul, "uuu": a.mul, "uvv": b.mul, "uvuv": a.mul * b.mul, "11w": 3}
            if mode == "uuu" and a.mul != b.mul:
                continue
            low, high = abs(a.degree - b.degree), min(a.degree + b.degree, lmax)
            found += [(mode, a, b, (muls[mode], degree)) for degree in range(low, high + 1)]
    kinds = sorted({out for *_, out in found})
    outs = kinds if joined else [out for *_, out in found]
    results = _places([*outs, (2, 1)], layout)  # the last has no path
    meetings: list[tuple[_Meeting, float]] = []
    w = 0
    for i, (_, a, b, out) in enumerate(found):
        z = results[kinds.index(out) if joined else i]
        paths = _meetings(mode, a, b, z, w)
        meetings += [(path, math.sqrt((2 * z.degree + 1) / (1 + i % 3))) for path in paths]
        w += sum(path[0] for path in paths)
    widths = (_width(rows), _width(edges), _width(results), w if weighted else 0)
    counts = sorted({meeting[0] for meeting, _ in meetings})
    products = tuple(
        _product(n, [m for m in meetings if m[0][0] == n], weighted=weighted) for n in counts
    )
    return Structure(widths, products)


def _product(
    channels: int, meetings: Sequence[tuple[_Meeting, float]], *, weighted: bool
) -> Product:
    blocks: tuple[list[Block], ...] = ([], [], [], [])
    paths = []
    for (_, *met), factor in meetings:
        for kept, block in zip(blocks, met, strict=True):
            if block not in kept:
                kept.append(block)
        x, y, z, w = (kept.index(block) for kept, block in zip(blocks, met, strict=True))
        paths.append(Path(x, y, z, w if weighted else -1, factor))
    of_x, of_y, of_z, of_w = (tuple(kept) for kept in blocks)
    return Product(channels, of_x, of_y, of_z, of_w if weighted else (), tuple(paths))


STRUCTURES: dict[str, Structure] = {
    "uvu": make_structure([(5, 0), (5, 1)], [(1, 0), (1, 1)], lmax=1),
    "uvu ir_mul": make_structure([(8, 0), (8, 1)], [(1, 0), (1, 1), (1, 2)], layout="ir_mul"),
    "uvu ragged": make_structure([(3, 0), (1, 1)], [(1, 0), (2, 1)], lmax=1, joined=True),
    "uvv": make_structure([(2, 1), (1, 0)], [(4, 1)], "uvv"),
    "uuu": make_structure([(6, 1), (6, 0)], [(6, 1)], "uuu", "ir_mul"),
    "uvuv": make_structure([(3, 1)], [(2, 1)], "uvuv", lmax=1),
    "11w": make_structure([(1, 1)], [(1, 1), (1, 0)], "11w", "ir_mul"),
    "unweighted": make_structure([(4, 1), (2, 0)], [(1, 1)], weighted=False, joined=True),
    "scalars": make_structure([(1, 0)], [(1, 0)], lmax=0),
}
"""Modes, layouts, equal and ragged multiplicities; outputs of one path, of several, of none."""


class Edges(NamedTuple):
    """Edges of a case; num_sources rows are read, num_nodes added to."""

    src: Tensor
    dst: Tensor
    num_nodes: int
    num_sources: int


def _edges(name: str, count: int, nodes: int, sources: int) -> Edges:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    draw = functools.partial(torch.randint, size=(count,), generator=generator)
    return Edges(draw(max(sources, 1)), draw(max(nodes, 1)), nodes, sources)


def _sorted(edges: Edges) -> Edges:
    order = torch.argsort(edges.dst * edges.num_sources + edges.src)
    return edges._replace(src=edges.src[order], dst=edges.dst[order])


def _looped(edges: Edges) -> Edges:
    return edges._replace(src=edges.dst.clone())


def _with_hub(edges: Edges) -> Edges:
    """Most edges meet in row 1, which is read by as many."""
    hub = torch.arange(edges.dst.numel()) % 8 > 0
    return edges._replace(src=edges.src.where(~hub, 1), dst=edges.dst.where(~hub, 1))


GRAPHS: dict[str, Edges | None] = {
    "rows": None,
    "unsorted": _edges("unsorted", 40, 11, 11),
    "sorted": _sorted(_edges("sorted", 40, 11, 11)),
    "self loops": _looped(_edges("self loops", 20, 9, 9)),
    "empty rows": _edges("empty rows", 12, 30, 50),
    "two sets": _edges("two sets", 33, 4, 17),
    "one edge": _edges("one edge", 1, 3, 2),
    "no edges": _edges("no edges", 0, 4, 3),
    "nobody": _edges("nobody", 0, 0, 0),
    "hub": _with_hub(_edges("hub", 5000, 6, 7)),
}
"""Orders, loops, rows without edges, one row with nearly all of them, nothing at all."""


def _call(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    structure: Structure,
    src: Tensor | None = None,
    dst: Tensor | None = None,
    num_nodes: int = 0,
    backend: str | None = None,
) -> Tensor:
    graph = None if src is None or dst is None else graph_of(src, dst, num_nodes, x.shape[0])
    return channelwise_product(structure, x, y, weight, graph, backend=backend)


def _oracle(
    x: Tensor, y: Tensor, weight: Tensor | None, structure: Structure, **tables: Any
) -> Tensor:
    return reference.channelwise_reference(structure, x, y, weight, **tables)


def _magnitude(
    x: Tensor, y: Tensor, weight: Tensor | None, structure: Structure, **tables: Any
) -> Tensor:
    return reference.channelwise_reference(structure, x, y, weight, **tables, sign=torch.abs)


def make_case(
    name: str, structure: Structure, edges: Edges | None, *, shared: bool = False
) -> Case:
    """A case with random inputs.

    Args:
        name: of the case; it seeds everything.
        structure: blocks and paths.
        edges: None is row by row.
        shared: whether all edges have the same weights.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    randn = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    rows = 7 if edges is None else edges.num_sources
    count = 7 if edges is None else edges.src.numel()
    wx, wy, _, ww = structure.widths
    weight = (randn(ww) if shared else randn(count, ww)) if structure.weighted else None
    tables: dict[str, Any] = {"structure": structure}
    if edges is not None:
        tables |= {"src": edges.src, "dst": edges.dst, "num_nodes": edges.num_nodes}
    inputs = randn(rows, wx), randn(count, wy), weight
    return Case(
        f"channelwise_product: {name}",
        _call,
        _oracle,
        inputs,
        tables,
        magnitude=_magnitude,
        together=True,
    )


def check_large_offsets(device: str) -> None:
    """Offsets past 2^31: the last edges of many, alone in their row, are right."""
    structure = make_structure([(128, 0)] * 16, [(1, 0)], lmax=0)
    last, (wx, wy, wz, ww) = 9, structure.widths
    generator = torch.Generator(device).manual_seed(0)
    randn = functools.partial(torch.randn, dtype=torch.float16, device=device, generator=generator)
    inputs = randn(2, wx), randn(last, wy), randn(last, ww), randn(2, wz)

    def run(count: int, x: Tensor, tail_y: Tensor, tail_w: Tensor, g: Tensor) -> list[Tensor]:
        nodes = (torch.arange(count, device=device) >= count - last).long()
        y, w = (tail.new_zeros(count, tail.shape[1]) for tail in (tail_y, tail_w))
        y[-last:], w[-last:] = tail_y, tail_w
        leaves = [t.requires_grad_() for t in (x.clone(), y, w)]
        graph = graph_of(nodes, nodes, 2, 2)
        z = channelwise_product(structure, leaves[0], leaves[1], leaves[2], graph)
        gx, gy, gw = torch.autograd.grad(z, leaves, g)
        return [z[1].detach(), gx[1], gy[-last:].clone(), gw[-last:].clone()]

    found = run(2**31 // ww + 64, *inputs)
    exact, magnitude = (
        run(last, *(of(t.double()) for t in inputs)) for of in (torch.clone, torch.abs)
    )
    for result, value, size, terms in zip(
        found, exact, magnitude, (last, last, ww, 1), strict=True
    ):
        assert_within_bound(result, value, size, terms)


def check_runs(device: str) -> None:
    """Gradients of so many edges that kernels take those of near rows together are right."""
    structure = make_structure([(64, 0), (64, 1)], [(1, 0), (1, 1)], layout="ir_mul", lmax=1)
    src, dst = (t.to(device) for t in ring_graph(2048, 16))
    graph = Graph(src, dst, 2048, reused=True)
    assert (graph.tables.runs is None) == (src.device.type == "cpu")
    wx, wy, wz, ww = structure.widths
    generator = torch.Generator(device).manual_seed(0)
    randn = functools.partial(torch.randn, device=device, generator=generator)
    *given, g = (randn(n, w) for n, w in ((2048, wx), (len(src), wy), (len(src), ww), (2048, wz)))

    def gradients(z: Callable[..., Tensor], leaves: list[Tensor], g: Tensor) -> Sequence[Tensor]:
        leaves = [t.requires_grad_() for t in leaves]
        return torch.autograd.grad(z(*leaves), leaves, g)

    def exact(sign: Callable[[Tensor], Tensor]) -> Sequence[Tensor]:
        z = functools.partial(
            reference.channelwise_reference, structure, src=src, dst=dst, num_nodes=2048, sign=sign
        )
        return gradients(z, [sign(t.double()) for t in given], sign(g.double()))

    z = functools.partial(channelwise_product, structure, graph=graph)
    found = gradients(z, [t.clone() for t in given], g)
    values, sizes = exact(torch.positive), exact(torch.abs)
    for result, value, size, terms in zip(found, values, sizes, (16 * 8, 64 * 8, 8), strict=True):
        assert_within_bound(result, value, size, terms)


@functools.cache
def suite() -> Suite:
    """The channelwise products' part of `make check`."""
    small = GRAPHS["unsorted"]
    cases = [make_case(name, structure, small) for name, structure in STRUCTURES.items()]
    uvu = STRUCTURES["uvu"]
    cases += [make_case(f"uvu, {name}", uvu, edges) for name, edges in GRAPHS.items()]
    ragged = STRUCTURES["uvu ragged"]
    for name in ("rows", "sorted", "two sets", "no edges"):
        cases.append(make_case(f"ragged, {name}, shared", ragged, GRAPHS[name], shared=True))
    full = [
        make_case("full uvu", uvu, small),
        make_case("full ragged, shared", ragged, GRAPHS["two sets"], shared=True),
        make_case("full uuu, rows", STRUCTURES["uuu"], None),
    ]
    few = _edges("few", 5, 3, 4)
    doors = [
        make_case("door uvu", uvu, few),
        make_case("door shared", STRUCTURES["uvv"], few, shared=True),
        make_case("door unweighted, rows", STRUCTURES["unweighted"], None),
    ]
    return Suite(
        cases,
        full,
        [make_case("small uvuv", STRUCTURES["uvuv"], few)],
        doors,
        (check_large_offsets, check_runs),
    )
