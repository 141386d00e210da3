"""A tensor product evaluated: channelwise products, matrices that mix copies, dense sums.

    direct   z = channelwise(x, y, weight)
    mixed    z = t @ weight,  t = channelwise(x, y)
    dense    z = Σ C x y weight by torch's own operations, for each instruction

On a graph, shared weights act on sums over edges; weights of its own act on each edge.  On the CPU
what is not channelwise alone is computed as if all were dense.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.backend import choose, interpreted
from torchweft.core.explain import Launch, record, recording
from torchweft.core.operators.operator import compiling, transformed, unwatched
from torchweft.o3.channelwise.operator import LOOPS_FROM
from torchweft.o3.channelwise.product import channelwise_product
from torchweft.o3.channelwise.structure import Structure
from torchweft.o3.edges.graph import Graph
from torchweft.o3.irreps.instructions import Instruction, Operands
from torchweft.o3.irreps.layout import join, split
from torchweft.o3.mixing.operator import mix, refuse, serves
from torchweft.o3.mixing.rows_operator import holds, mixed_rows
from torchweft.o3.tensor_product.assembly import (
    Columns,
    Mixed,
    Parts,
    structures_of,
    weight_offsets,
)
from torchweft.o3.tensor_product.dense import dense_product, exact
from torchweft.products import SparseScaleInfo, sparse_scale

__all__ = ["Recipe", "recipe_of"]

_INTERPRETED = interpreted()

Weights = Sequence[Tensor | None]
"""Of each instruction."""


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
        if graph is None and self.parts.every and self.by_torch(x):
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

    def by_torch(self, x: Tensor) -> bool:
        """Whether torch's own operations take least time: on the CPU, without large loops.

        Loops serve channelwise products, if there is nothing else or their rows are many.  What
        mixes copies is products of matrices, which each instruction has in its best order.  Where
        kernels are interpreted, the CPU stands for a GPU.
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
        weights = self._weights(weight)
        for columns in mixed.outputs:
            components = self.operands.out[columns.i_out].ir.dim
            block = t.narrow(1, columns.offset, components * columns.width)
            block = block.reshape(-1, components, columns.width)
            times = self._mix_shared if self.shared else self._mix_own
            found.append((columns.i_out, times(block, columns, weights).transpose(1, 2)))
        return self._joined(found, t)

    def _mix_shared(self, block: Tensor, columns: Columns, weights: Weights) -> Tensor:
        return block @ torch.cat([self._matrix(n, block, weights) for n, _ in columns.parts])

    def _mix_own(self, block: Tensor, columns: Columns, weights: Weights) -> Tensor:
        """Path by path: one matrix a row would be a copy of all weights."""
        products = [
            block.narrow(2, first, math.prod(self.instructions[n].path_shape[:-1]))
            @ self._matrix(n, block, weights)
            for n, first in columns.parts
        ]
        return functools.reduce(torch.add, products)

    def _matrix(self, n: int, like: Tensor, weights: Weights) -> Tensor:
        """(…, copies that are mixed, mul): the weight; ones for a sum without weights."""
        shape, weight = self.instructions[n].path_shape, weights[n]
        if weight is None:
            return like.new_ones(math.prod(shape[:-1]), shape[-1])
        return weight.flatten(-len(shape), -2)

    def _weights(self, weight: Tensor | None) -> Weights:
        """(…, *path_shape): views of the flat weights of all instructions, None where it has none.

        Their gradients are one.
        """
        sizes = [end - begin for begin, end in itertools.pairwise(self.offsets)]
        if weight is None or not any(sizes):
            return [None] * len(sizes)
        return [
            flat.reshape(*flat.shape[:-1], *instruction.path_shape) if size else None
            for flat, size, instruction in zip(
                weight.split_with_sizes(sizes, -1), sizes, self.instructions, strict=True
            )
        ]

    def _dense(
        self, numbers: Iterable[int], x: Tensor, y: Tensor, weight: Tensor | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Instruction by instruction, by torch's own operations."""
        if self.backend not in (None, "torch"):
            refuse(self.backend, x, "pairs of copies, or sums over many")
        firsts = split(x, self.operands.in1, self.layout)
        seconds = split(y, self.operands.in2, self.layout)
        weights = self._weights(weight)
        for n in numbers:
            instruction, own = self.instructions[n], weights[n]
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
