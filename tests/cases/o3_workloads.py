"""The named workloads of channelwise products: structures, graphs and random tensors.

    mace_L2_carbon   17 paths on 1000 nodes of degree 158      mace_L2_sparse   23000 of degree 6
    l3_uniform64     23 paths on 5000 nodes of degree 32       sevennet_l3i5    34, of 2560 and 64
    uuu_seed         23 paths of 20000 rows, one row of weights

Rows are ir_mul: the channels of a component stand side by side.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.o3.channelwise.calls import Call, forward, gradient
from torchweft.o3.channelwise.structure import Block, Path, Product, Structure
from torchweft.o3.graph import Graph, Tables

__all__ = [
    "WORKLOADS",
    "Workload",
    "calls",
    "conv",
    "elementwise",
    "ring_graph",
    "row_by_row",
    "rows",
]

Multiplicities = tuple[tuple[int, int], ...]
"""(channels, degree) of each block."""


class Workload(NamedTuple):
    """A product and its size; degree 0: every edge is a row of its own, the weights are shared."""

    structure: Structure
    nodes: int
    degree: int

    @property
    def shared(self) -> bool:
        """Whether w has one row."""
        return not self.degree

    def tables(self, device: str = "cpu") -> Tables:
        """Of a ring with random labels."""
        if not self.degree:
            return row_by_row(self.nodes)
        src, dst = ring_graph(self.nodes, self.degree)
        return Graph(src.to(device), dst.to(device), self.nodes).tables


def conv(x: Multiplicities, degrees: tuple[int, ...], natural: bool = True) -> Structure:
    """uvu: every product of x with one spherical harmonic of each degree is an output of its own.

    Outputs have the degrees of y; with natural parity l1 + l2 + l3 is even.
    """
    meets = [
        (c, i, j)
        for i, (_, a) in enumerate(x)
        for j, b in enumerate(degrees)
        for c in range(abs(a - b), a + b + 1)
        if c in degrees and not (natural and (a + b + c) % 2)
    ]
    found = sorted(meets, key=lambda path: path[0])
    x_blocks, x_width = _blocks(x)
    z_blocks, z_width = _blocks(tuple((x[i][0], c) for c, i, _ in found))
    w_blocks, w_width = _blocks(tuple((x[i][0], 0) for _, i, _ in found))
    y_blocks, y_width = _blocks(tuple((1, b) for b in degrees))
    y_blocks = [block._replace(channel_step=0) for block in y_blocks]
    products = []
    for channels in dict.fromkeys(mul for mul, _ in x):
        mine = [k for k, (_, i, _) in enumerate(found) if x[i][0] == channels]
        own = [i for i, (mul, _) in enumerate(x) if mul == channels]
        paths = tuple(
            Path(own.index(found[k][1]), found[k][2], n, n, math.sqrt(2 * found[k][0] + 1))
            for n, k in enumerate(mine)
        )
        z, w = (tuple(blocks[k] for k in mine) for blocks in (z_blocks, w_blocks))
        products.append(
            Product(channels, tuple(x_blocks[i] for i in own), tuple(y_blocks), z, w, paths)
        )
    return Structure((x_width, y_width, z_width, w_width), tuple(products))


def elementwise(channels: int, degrees: tuple[int, ...]) -> Structure:
    """uuu: every product of natural parity of blocks of x and y, summed into blocks of z."""
    blocks, width = _blocks(tuple((channels, a) for a in degrees))
    found = [
        (i, j, k) for i, a in enumerate(degrees) for j, b in enumerate(degrees)
        for k, c in enumerate(degrees) if abs(a - b) <= c <= a + b and (a + b + c) % 2 == 0
    ]  # fmt: skip
    into = [sum(path[2] == k for path in found) for k in range(len(degrees))]
    paths = tuple(
        Path(i, j, k, n, math.sqrt((2 * degrees[k] + 1) / into[k]))
        for n, (i, j, k) in enumerate(found)
    )
    weights, w_width = _blocks(((channels, 0),) * len(found))
    same = tuple(blocks)
    product = Product(channels, same, same, same, tuple(weights), paths)
    return Structure((width, width, width, w_width), (product,))


def ring_graph(nodes: int, degree: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(src, dst): symmetric, of exact degree, random labels, edges sorted by (dst, src)."""
    perm = torch.randperm(nodes, generator=torch.Generator().manual_seed(seed))
    near = torch.arange(1, degree // 2 + 1)
    dst = perm.repeat_interleave(degree)
    src = perm[(torch.arange(nodes)[:, None] + torch.cat([near, -near])).remainder(nodes).flatten()]
    order = torch.argsort(dst * nodes + src)
    return src[order], dst[order]


def row_by_row(rows: int) -> Tables:
    """Edge e reads row e and is row e."""
    return Tables(rows, rows, rows)


def calls(weighted: bool = True) -> dict[str, Call]:
    """The forward pass, all gradients of it, and all gradients of those."""
    first = forward(weighted)
    second = gradient(first, (True,) * len(first.slots), (True,))
    third = gradient(second, (True,) * len(second.slots), (True,) * len(second.results))
    return {"forward": first, "backward": second, "second order": third}


def rows(
    structure: Structure,
    call: Call,
    tables: Tables,
    shared: bool,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> list[Tensor]:
    """Random tensors for a call."""
    counts = {"x": tables.num_x, "y": tables.num_edges, "z": tables.num_z}
    counts["w"] = 1 if shared else tables.num_edges
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [(counts[slot], structure.width(slot)) for slot in call.slots]
    return [torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes]


def _blocks(items: Multiplicities) -> tuple[list[Block], int]:
    """ir_mul blocks side by side, and their width."""
    blocks, offset = [], 0
    for channels, degree in items:
        blocks.append(Block(offset, degree, channels, 1))
        offset += channels * (2 * degree + 1)
    return blocks, offset


MACE = conv(((128, 0), (128, 1), (128, 2)), (0, 1, 2, 3))

WORKLOADS = {
    "mace_L2_carbon": Workload(MACE, 1000, 158),
    "mace_L2_sparse": Workload(MACE, 23000, 6),
    "l3_uniform64": Workload(conv(tuple((64, a) for a in range(4)), (0, 1, 2, 3)), 5000, 32),
    "sevennet_l3i5": Workload(
        conv(((128, 0), (64, 1), (32, 2), (32, 3)), (0, 1, 2, 3), natural=False), 2560, 64
    ),
    "uuu_seed": Workload(elementwise(128, (0, 1, 2, 3)), 20000, 0),
}
