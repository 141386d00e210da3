"""A tensor product evaluated: channelwise products, matrices that mix copies, dense sums.

    direct   z = channelwise(x, y, weight)
    mixed    z = t @ weight,  t = channelwise(x, y)
    dense    one instruction by torch's own operations, differentiated by autograd:
             t[u,v,m] = Σ_ij f C[i,j,m] x[u,i] y[v,j], u and v one letter for copies side by side;
             z is t times the weight, summed over the letters that z lacks

On a graph, shared weights act on sums over edges, and weights of each edge act on that edge.  On
the CPU a product that is not channelwise alone is computed as if all of it were dense.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.backend import choose, interpreted
from torchweft.core.explain import Launch, record, recording
from torchweft.core.operators.operator import compiling, transformed, unwatched
from torchweft.o3.backends import refuse_backend
from torchweft.o3.channelwise.operator import LOOPS_FROM
from torchweft.o3.channelwise.product import channelwise_product
from torchweft.o3.graph import Graph
from torchweft.o3.irreps.irreps import join, split, split_weight
from torchweft.o3.irreps.wigner import constant_tensor, wigner_3j
from torchweft.o3.mixing.operator import mix, mixed_rows, serves_mix, serves_mixed_rows
from torchweft.o3.tensor_product.instructions import (
    Instruction,
    InstructionParts,
    Operands,
)
from torchweft.products import SparseScaleInfo, sparse_scale

__all__ = ["ProductRecipe"]

_INTERPRETED = interpreted()


class ProductRecipe(NamedTuple):
    """The computation of a tensor product by its instructions.

    Args:
        operands: the irreps of x, y and z.
        instructions: with their factors.
        parts: the instructions by how they are computed.
        layout: of x, y and z.
        shared: whether all rows (or edges) have the same weights.
        backend: of every part, or None.
    """

    operands: Operands
    instructions: tuple[Instruction, ...]
    parts: InstructionParts
    layout: str
    shared: bool
    backend: str | None

    def __call__(
        self, x: Tensor, y: Tensor, weight: Tensor | None, graph: Graph | None = None
    ) -> Tensor:
        """(rows or nodes, D_out) of x (rows, D1), y (rows or edges, D2) and the weights."""
        direct, mixed, dense, every, _ = self.parts
        if graph is None and every and self.by_torch(x):
            if recording():
                record(Launch("torch", "by_instruction", {"rows": len(y)}, len(every)))
            return self._joined(self._dense(every, x, y, weight), y)
        product = functools.partial(channelwise_product, backend=self.backend)
        found = [product(s, x, y, weight if s.weighted else None, graph) for s in direct]
        if mixed is not None and self.shared:
            found.append(self._mixed(product(mixed.structure, x, y, None, graph), weight))
        if dense or (mixed is not None and not self.shared):
            found.append(self._edgewise(x, y, weight, graph))
        if found:
            return functools.reduce(torch.add, found)
        rows = y.shape[0] if graph is None else graph.num_nodes
        return y.new_zeros(rows, self.operands.out.dim)

    def by_torch(self, x: Tensor) -> bool:
        """Whether torch's own operations take the least time: on the CPU, without large loops.

        Numba's loops compute channelwise products where there are no other products, or many rows.
        Instructions that mix copies are products of matrices, in the best order for each.  With
        interpreted kernels the CPU takes the place of a GPU.
        """
        if self.backend is not None or not x.is_cpu or _INTERPRETED:
            return False
        if compiling() or transformed():
            return False
        parts = self.parts
        if parts.mixed is None and not parts.dense and choose(None, "cpu") == "numba":
            return False
        return x.shape[0] * parts.channels < LOOPS_FROM and unwatched(x) and _exact(x)

    def _edgewise(self, x: Tensor, y: Tensor, weight: Tensor | None, graph: Graph | None) -> Tensor:
        """The products that are computed for each edge and then summed."""
        if graph is not None:
            x = sparse_scale(x, SparseScaleInfo(index=graph.src), backend=self.backend)
        found, mixed = [], self.parts.mixed
        if mixed is not None and not self.shared:
            structure, mixing = mixed.structure, mixed.mixing
            if weight is not None and serves_mixed_rows(mixing, structure, x, self.backend):
                found.append(mixed_rows(structure, mixing, x, y, weight))
            else:
                t = channelwise_product(structure, x, y, None, backend=self.backend)
                found.append(self._mixed(t, weight))
        if self.parts.dense:
            found.append(self._joined(self._dense(self.parts.dense, x, y, weight), y))
        rows = functools.reduce(torch.add, found)
        if graph is None:
            return rows
        info = SparseScaleInfo(index_out=graph.dst, out_size=graph.num_nodes)
        return sparse_scale(rows, info, backend=self.backend)

    def _mixed(self, t: Tensor, weight: Tensor | None) -> Tensor:
        """Rows of the output: columns of t times weights."""
        mixed = self.parts.mixed
        assert mixed is not None
        if weight is not None and serves_mix(mixed.mixing, t, self.shared, self.backend):
            return mix(mixed.mixing, t, weight)
        weights = self._weights(weight)
        found = []
        for columns in mixed.outputs:
            components = self.operands.out[columns.i_out].ir.dim
            block = t.narrow(1, columns.offset, components * columns.width)
            block = block.reshape(-1, components, columns.width)
            matrices = [self._matrix(n, block, weights) for n, _ in columns.parts]
            if self.shared:  # one product of all rows: torch folds rows only where a gradient is
                matrix = torch.cat(matrices)
                z = (block.flatten(0, 1) @ matrix).view(*block.shape[:2], matrix.shape[1])
            else:  # path by path: one matrix a row would be a copy of all weights
                firsts = (first for _, first in columns.parts)
                products = [
                    block.narrow(2, first, matrix.shape[-2]) @ matrix
                    for first, matrix in zip(firsts, matrices, strict=True)
                ]
                z = functools.reduce(torch.add, products)
            found.append((columns.i_out, z.transpose(1, 2)))
        return self._joined(found, t)

    def _matrix(self, n: int, like: Tensor, weights: list[Tensor | None]) -> Tensor:
        """(…, mixed copies, mul): the weight; ones for a sum without weights."""
        instruction, weight = self.instructions[n], weights[n]
        if weight is None:
            return like.new_ones(instruction.mixed_copies, instruction.path_shape[-1])
        return weight.flatten(-len(instruction.path_shape), -2)

    def _weights(self, weight: Tensor | None) -> list[Tensor | None]:
        """(…, *path_shape) of each instruction; None for one without a weight."""
        return split_weight(
            weight, [i.path_shape if i.has_weight else None for i in self.instructions]
        )

    def _dense(
        self, numbers: Iterable[int], x: Tensor, y: Tensor, weight: Tensor | None
    ) -> Iterator[tuple[int, Tensor]]:
        """The item of the output and the block of each instruction."""
        if self.backend not in (None, "torch"):
            refuse_backend(self.backend, x.device.type, "pairs of copies, or sums over many")
        firsts = split(x, self.operands.in1, self.layout)
        seconds = split(y, self.operands.in2, self.layout)
        weights = self._weights(weight)
        for n in numbers:
            instruction = self.instructions[n]
            a, b = firsts[instruction.i_in1], seconds[instruction.i_in2]
            first, second, out = self.operands.of(instruction)
            degrees = (first.ir.l, second.ir.l, out.ir.l)
            yield instruction.i_out, _dense_product(instruction, degrees, a, b, weights[n])

    def _joined(self, blocks: Iterable[tuple[int, Tensor]], like: Tensor) -> Tensor:
        """Rows of the output: blocks of one item add, items without a block are zero."""
        items: dict[int, Tensor] = {}
        for i_out, block in blocks:
            items[i_out] = items[i_out] + block if i_out in items else block
        rows = [
            items[k] if k in items else like.new_zeros(like.shape[0], item.mul, item.ir.dim)
            for k, item in enumerate(self.operands.out)
        ]
        return join(rows, self.layout)


Degrees = tuple[int, int, int]


def _dense_product(
    instruction: Instruction, degrees: Degrees, a: Tensor, b: Tensor, weight: Tensor | None
) -> Tensor:
    """(rows, mul, 2l+1) of a (rows, mul1, 2l1+1), b and a weight (…, *path_shape).

    Modes that sum the copies of one factor sum them first: uvu and uvv are uuu of such sums.
    """
    mode, factor = instruction.mode, instruction.path_weight
    if mode.pairs:
        u, v = torch.triu_indices(a.shape[1], a.shape[1], 1, device=a.device).unbind()
        a, b = a[:, u], b[:, v]
    if mode.first == mode.second:
        met = _side_by_side(degrees, factor, a, b)
    elif mode.out in ("u", "v"):
        a, b, weight = _of_one_letter(mode.out, a, b, weight)
        met = _side_by_side(degrees, factor, a, b)
    elif mode.mixes and weight is not None:
        return _mix_both(degrees, factor, a, b, weight)
    else:
        met = _all_pairs(degrees, factor, a, b).flatten(1, 2)
        weight = None if weight is None else weight.flatten(-2)
    if not mode.mixes:
        return met if weight is None else met * weight.unsqueeze(-1)
    return met.sum(1, keepdim=True) if weight is None else (met.mT @ weight).mT


def _exact(x: Tensor) -> bool:
    """Whether torch multiplies matrices in the full precision of x's dtype, float32 or float64."""
    if x.dtype == torch.float64:
        return True
    backends: Any = torch.backends
    return x.dtype == torch.float32 and backends.mkldnn.matmul.fp32_precision in ("none", "ieee")


def _of_one_letter(
    out: str, a: Tensor, b: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both factors with the copies of the output, and the part of weight_uv left to apply."""
    if out == "v":
        weight = None if weight is None else weight.mT
        b, a, weight = _of_one_letter("u", b, a, weight)
        return a, b, weight
    if b.shape[1] == 1:
        return a, b, None if weight is None else weight.squeeze(-1)
    return a, b.sum(1, keepdim=True) if weight is None else weight @ b, None


def _side_by_side(degrees: Degrees, factor: float, a: Tensor, b: Tensor) -> Tensor:
    """(rows, u, 2l3+1) of copies u of a (rows, u, 2l1+1) and b; one copy of either serves all.

    A product with a scalar scales, and a product into a scalar is an inner product.
    """
    l1, l2, l3 = degrees
    if 0 in degrees:
        scale = factor / math.sqrt(2 * max(degrees) + 1)
        found = a * (b if scale == 1 else b * scale)
        return found if l1 == 0 or l2 == 0 else found.sum(-1, keepdim=True)
    matrices = (b @ _table(b, degrees, factor)).view(*b.shape[:2], 2 * l1 + 1, 2 * l3 + 1)
    if b.shape[1] == 1:
        return a @ matrices.squeeze(1)
    return (a.unsqueeze(2) @ matrices).squeeze(2)


def _mix_both(degrees: Degrees, factor: float, a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """(rows, w, 2l3+1) = Σ_uv weight_uvw t_uv: copies of a are mixed, then meet those of b."""
    u, v, w = weight.shape[-3:]
    if u == 1 or v == 1:
        return _mix_either(degrees, factor, a, b, weight.flatten(-3, -2))
    own = weight.dim() > 3
    if degrees[0] == 0 or degrees[2] == 0 or (degrees[1] == 0 and not own):
        return _mix_with_scalars(degrees, factor, a, b, weight)
    (rows, _, i), m = a.shape, 2 * degrees[2] + 1
    turned = a.mT if own else a.mT.flatten(0, 1)  # one matrix, or one a row
    mixed = (turned @ weight.flatten(-2)).view(rows, i * v, w)
    matrices = (b @ _table(b, degrees, factor)).view(rows, v, i, m).transpose(1, 2).flatten(1, 2)
    return (matrices.mT @ mixed).mT


def _mix_either(degrees: Degrees, factor: float, a: Tensor, b: Tensor, matrix: Tensor) -> Tensor:
    """`_mix_both` where one factor has one copy: copies of the other are mixed before or after.

    Fewer components are mixed: scalars take a third of the work of vectors.
    """
    if b.shape[1] == 1 and degrees[0] < degrees[2]:
        return _side_by_side(degrees, factor, _mix_copies(a, matrix), b)
    if a.shape[1] == 1 and degrees[1] < degrees[2]:
        return _side_by_side(degrees, factor, a, _mix_copies(b, matrix))
    return _mix_copies(_side_by_side(degrees, factor, a, b), matrix)


def _mix_copies(a: Tensor, matrix: Tensor) -> Tensor:
    """(rows, w, 2l+1) of a (rows, u, 2l+1) and a matrix (…, u, w)."""
    if matrix.dim() > 2:
        return (a.mT @ matrix).mT
    # one 2-D product: in a batched one torch would copy the matrix for each row
    found = a.mT.flatten(0, 1) @ matrix
    return found.view(a.shape[0], a.shape[2], matrix.shape[1]).mT


def _mix_with_scalars(
    degrees: Degrees, factor: float, a: Tensor, b: Tensor, weight: Tensor
) -> Tensor:
    """`_mix_both` where a, b or z is scalars: the 3j symbol is the unit matrix by 1/√(2l+1)."""
    scale = factor / math.sqrt(2 * max(degrees) + 1)
    if degrees[0] and degrees[1]:
        met = (a @ b.mT).flatten(1) * scale
        return (met.unsqueeze(1) @ weight.flatten(-3, -2)).mT
    if degrees[0]:
        a, b, weight = b, a, weight.transpose(-3, -2)
    mixed = (scale * a).mT @ weight.flatten(-2)
    return (b.mT @ mixed.view(a.shape[0], *weight.shape[-2:])).mT


def _all_pairs(degrees: Degrees, factor: float, a: Tensor, b: Tensor) -> Tensor:
    """(rows, u, v, 2l3+1) of copies u of a and v of b."""
    (rows, u, i), v, m = a.shape, b.shape[1], 2 * degrees[2] + 1
    if u == 1 or v == 1:
        return _side_by_side(degrees, factor, a, b).view(rows, u, v, m)
    matrices = (b @ _table(b, degrees, factor)).view(rows, v, i, m).transpose(1, 2)
    return (a @ matrices.flatten(2)).view(rows, u, v, m)


@constant_tensor
def _table(degrees: Degrees, factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(2l2+1, (2l1+1) (2l3+1)), a factor times the 3j symbol."""
    table = factor * wigner_3j(*degrees, torch.float64, device)
    return table.movedim(1, 0).flatten(1).to(dtype)
