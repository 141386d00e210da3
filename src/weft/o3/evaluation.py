"""A tensor product evaluated: channelwise products, matrices that mix copies, dense sums.

    direct   z = channelwise(x, y, weight)
    mixed    z = t @ weight,  t = channelwise(x, y)
    dense    z = Σ C x y weight by torch's own operations, for each instruction

On a graph, shared weights act on sums over edges; weights of its own act on each edge.  On the CPU
few rows are computed as if all were dense: an operator would take the host longer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from weft.core.backend import choose, interpreted
from weft.core.explain import Launch, record, recording
from weft.core.op import compiling, transformed, unwatched
from weft.o3.channelwise import channelwise_product
from weft.o3.dense import dense_product, exact
from weft.o3.graph import Graph
from weft.o3.instructions import Instruction, Operands
from weft.o3.layout import join, split
from weft.o3.mixing import mix, refuse, serves
from weft.o3.mixing_rows import holds, mixed_rows
from weft.o3.operator import LOOPS_FROM
from weft.o3.structure import Structure
from weft.o3.structures import Columns, Mixed, Parts, structures_of, weight_offsets
from weft.products import SparseScaleInfo, sparse_scale

__all__ = ["Recipe", "recipe_of"]

_INTERPRETED = interpreted()


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
        if graph is None and self.parts.every and self.has_few(x):
            return self._by_instruction(x, y, weight)
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

    def _by_instruction(self, x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        """The same, each instruction by torch's own operations."""
        if recording():
            record(Launch("torch", "by_instruction", {"rows": len(y)}, len(self.parts.every)))
        return self._joined(list(self._dense(self.parts.every, x, y, weight)), y)

    def has_few(self, x: Tensor) -> bool:
        """Whether the time of a call is the host's: rows of few numbers on the CPU.

        Then torch's own operations take less of it than operators, of gradients above all, but
        where channelwise products are all there is.  Where kernels are interpreted, the CPU stands
        for a GPU.
        """
        if self.backend is not None or not x.is_cpu or _INTERPRETED:
            return False
        if compiling() or transformed():
            return False
        parts = self.parts
        if parts.mixed is None and not parts.dense and choose(None, "cpu") == "numba":
            return False
        return x.shape[0] * parts.channels < LOOPS_FROM and unwatched(x) and exact(x)

    def _edgewise(self, x: Tensor, y: Tensor, weight: Tensor | None, graph: Graph | None) -> Tensor:
        """What is computed edge by edge, then summed."""
        if graph is not None:
            x = sparse_scale(x, SparseScaleInfo(index=graph.src), backend=self.backend)
        found = []
        mixed = self.parts.mixed
        if mixed is not None and not self.shared:
            found.append(self._mixed_by_row(mixed, x, y, weight))
        if self.parts.dense:
            found.append(self._joined(list(self._dense(self.parts.dense, x, y, weight)), y))
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

    def _mixed_by_row(self, mixed: Mixed, x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        """Rows of the output, each by weights of its own."""
        structure, mixing = mixed.structure, mixed.mixing
        if weight is not None and holds(mixing, structure, x, self.backend):
            return mixed_rows(structure, mixing, x, y, weight)
        return self._mixed(self._channelwise(structure, x, y), weight)

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

    def _dense(
        self, numbers: Iterable[int], x: Tensor, y: Tensor, weight: Tensor | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Instruction by instruction, by torch's own operations."""
        if self.backend not in (None, "torch"):
            refuse(self.backend, x, "pairs of copies, or sums over many")
        firsts = split(x, self.operands.in1, self.layout)
        seconds = split(y, self.operands.in2, self.layout)
        for n in numbers:
            instruction = self.instructions[n]
            own = self.weight(n, weight) if instruction.has_weight else None
            a, b = firsts[instruction.i_in1], seconds[instruction.i_in2]
            first, second, out = self.operands.of(instruction)
            degrees = (first.ir.l, second.ir.l, out.ir.l)
            yield instruction.i_out, dense_product(instruction, degrees, a, b, own)

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
