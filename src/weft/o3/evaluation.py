"""A tensor product evaluated: channelwise products, matrices that mix copies, dense sums.

    direct   z = channelwise(x, y, weight)
    mixed    z = t @ weight,  t = channelwise(x, y)
    dense    z = einsum(C, x, y, weight) for each instruction

On a graph, shared weights act on sums over edges; weights of its own act on each edge.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from weft.o3.channelwise import channelwise_product
from weft.o3.graph import Graph
from weft.o3.instructions import Instruction, Operands
from weft.o3.layout import join, split
from weft.o3.mixing import mix, refuse, serves
from weft.o3.structure import Structure
from weft.o3.structures import Columns, Parts, structures_of, weight_offsets
from weft.o3.wigner import wigner_3j
from weft.products import SparseScaleInfo, sparse_scale

__all__ = ["Recipe", "recipe_of"]


class Recipe(NamedTuple):
    """How to compute the instructions.

    Args:
        operands: the irreps of x, y and z.
        instructions: with their factors.
        offsets: where each instruction's weight begins; then the number of weights.
        parts: the instructions by kind.
        layout: of x, y and z.
        shared: whether all rows (or edges) have the same weights.
        backend: of every part, or None.
    """

    operands: Operands
    instructions: tuple[Instruction, ...]
    offsets: tuple[int, ...]
    parts: Parts
    layout: str
    shared: bool
    backend: str | None

    def __call__(
        self, x: Tensor, y: Tensor, weight: Tensor | None, graph: Graph | None = None
    ) -> Tensor:
        """(rows or nodes, D_out) of x (rows, D1), y (rows or edges, D2) and the weights."""
        found = [
            self._channelwise(s, x, y, weight if s.weighted else None, graph)
            for s in self.parts.direct
        ]
        mixed = self.parts.mixed
        if mixed is not None and self.shared:
            t = self._channelwise(mixed.structure, x, y, None, graph)
            found.append(self._mixed(t, weight))
        if self.parts.dense or (mixed is not None and not self.shared):
            found.append(self._edgewise(x, y, weight, graph))
        if found:
            return functools.reduce(torch.add, found)
        rows = y.shape[0] if graph is None else graph.num_nodes
        return y.new_zeros(rows, self.operands.out.dim)

    def _edgewise(self, x: Tensor, y: Tensor, weight: Tensor | None, graph: Graph | None) -> Tensor:
        """What is computed edge by edge, then summed."""
        if graph is not None:
            x = sparse_scale(x, SparseScaleInfo(index=graph.src), backend=self.backend)
        found = []
        mixed = self.parts.mixed
        if mixed is not None and not self.shared:
            found.append(self._mixed(self._channelwise(mixed.structure, x, y), weight))
        if self.parts.dense:
            found.append(self._joined(list(self._dense(x, y, weight)), y))
        rows = functools.reduce(torch.add, found)
        if graph is None:
            return rows
        info = SparseScaleInfo(index_out=graph.dst, out_size=graph.num_nodes)
        return sparse_scale(rows, info, backend=self.backend)

    def _channelwise(
        self,
        structure: Structure,
        x: Tensor,
        y: Tensor,
        weight: Tensor | None = None,
        graph: Graph | None = None,
    ) -> Tensor:
        return channelwise_product(structure, x, y, weight, graph, backend=self.backend)

    def _mixed(self, t: Tensor, weight: Tensor | None) -> Tensor:
        """Rows of the output: the columns of t times weights."""
        mixed = self.parts.mixed
        assert mixed is not None
        if weight is not None and serves(mixed.mixing, t, self.shared, self.backend):
            return mix(mixed.mixing, t, weight)
        found = []
        for columns in mixed.outputs:
            components = self.operands.out[columns.i_out].ir.dim
            block = t.narrow(1, columns.offset, components * columns.width)
            block = block.reshape(-1, components, columns.width)
            times = self._mix_shared if self.shared else self._mix_own
            found.append((columns.i_out, times(block, columns, weight).transpose(1, 2)))
        return self._joined(found, t)

    def _mix_shared(self, block: Tensor, columns: Columns, weight: Tensor | None) -> Tensor:
        return block @ torch.cat([self._matrix(n, block, weight) for n, _ in columns.parts])

    def _mix_own(self, block: Tensor, columns: Columns, weight: Tensor | None) -> Tensor:
        """Path by path: one matrix a row would be a copy of all weights."""
        products = [
            block.narrow(2, first, math.prod(self.instructions[n].path_shape[:-1]))
            @ self._matrix(n, block, weight)
            for n, first in columns.parts
        ]
        return functools.reduce(torch.add, products)

    def _matrix(self, n: int, like: Tensor, weight: Tensor | None) -> Tensor:
        """(…, copies that are mixed, mul): the weight; ones for a sum without weights."""
        shape = self.instructions[n].path_shape
        count = math.prod(shape[:-1])
        if not self.instructions[n].has_weight:
            return like.new_ones(count, shape[-1])
        return self.weight(n, weight).flatten(-len(shape), -2)

    def weight(self, n: int, weight: Tensor | None) -> Tensor:
        """(…, *path_shape): a view of the flat weights of an instruction."""
        assert weight is not None
        instruction = self.instructions[n]
        flat = weight.narrow(-1, self.offsets[n], instruction.num_weights)
        return flat.reshape(*flat.shape[:-1], *instruction.path_shape)

    def _dense(self, x: Tensor, y: Tensor, weight: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        if self.backend not in (None, "torch"):
            refuse(self.backend, x, "pairs of copies, or sums over many")
        firsts = split(x, self.operands.in1, self.layout)
        seconds = split(y, self.operands.in2, self.layout)
        for n in self.parts.dense:
            instruction = self.instructions[n]
            l1, l2, l3 = (item.ir.l for item in self.operands.of(instruction))
            table = wigner_3j(l1, l2, l3, torch.float64, x.device) * instruction.path_weight
            own = self.weight(n, weight) if instruction.has_weight else None
            a, b = firsts[instruction.i_in1], seconds[instruction.i_in2]
            value = dense_product(instruction, table.to(x.dtype), a, b, own)
            yield instruction.i_out, value

    def _joined(self, blocks: list[tuple[int, Tensor]], like: Tensor) -> Tensor:
        """Rows of the output: blocks into one item add, items without any are zero."""
        items: list[Tensor | None] = [None] * len(self.operands.out)
        for i_out, block in blocks:
            before = items[i_out]
            items[i_out] = block if before is None else before + block
        rows = [
            like.new_zeros(like.shape[0], item.mul, item.ir.dim) if block is None else block
            for block, item in zip(items, self.operands.out, strict=True)
        ]
        return join(rows, self.layout)


def recipe_of(
    operands: Operands,
    instructions: tuple[Instruction, ...],
    layout: str,
    shared: bool,
    backend: str | None = None,
) -> Recipe:
    """The recipe for instructions."""
    offsets = tuple(weight_offsets(instructions))
    parts = structures_of(instructions, operands, layout)
    return Recipe(operands, instructions, offsets, parts, layout, shared, backend)


def dense_product(
    instruction: Instruction, table: Tensor, a: Tensor, b: Tensor, weight: Tensor | None
) -> Tensor:
    """(rows, mul, 2l+1) of a (rows, mul1, 2l1+1), b and a weight, by the 3j symbol in `table`.

    What sums the copies of one factor sums them first: uvu and uvv are uuu of such sums.
    """
    mode = instruction.mode
    if mode.pairs:
        u, v = torch.triu_indices(a.shape[1], a.shape[1], 1, device=a.device).unbind()
        a, b = a[:, u], b[:, v]
    letters = mode.weight
    per_row = "" if weight is None or weight.dim() == len(letters) else "z"
    if mode.first != mode.second and len(mode.out) == 1 and not mode.mixes:
        a, b = _sum_first(mode.out, a, b, weight, per_row)
        return torch.einsum("zui,zuj,ijm->zum", a, b, table)
    met = f"zu{'v' if 'v' in letters else ''}m"
    turned = torch.einsum("ijm,zui->zujm", table, a)
    value = torch.einsum(f"zujm,z{mode.second}j->{met}", turned, b)
    if weight is None:
        return value.sum(1, keepdim=True) if mode.mixes else value.flatten(1, -2)
    value = torch.einsum(f"{met},{per_row}{letters}->z{mode.out}m", value, weight)
    return value.flatten(1, -2)


def _sum_first(
    out: str, a: Tensor, b: Tensor, weight: Tensor | None, per_row: str
) -> tuple[Tensor, Tensor]:
    """Both factors with the copies of the output, which are those of `a` (u) or of `b` (v)."""
    if weight is None:
        return (
            (a, b.sum(1, keepdim=True).expand(-1, a.shape[1], -1))
            if out == "u"
            else (a.sum(1, keepdim=True).expand(-1, b.shape[1], -1), b)
        )
    if out == "u":
        return a, torch.einsum(f"{per_row}uv,zvj->zuj", weight, b)
    return torch.einsum(f"{per_row}uv,zui->zvi", weight, a), b
