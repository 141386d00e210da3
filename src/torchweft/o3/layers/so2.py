"""Linear maps along edges: of irreps turned so that the edge is the polar axis (eSCN).

    z = D(R)ᵀ M D(R) x,    R edge/|edge| = e_y
    (Mx)_{±m} = W_r x_{±m} ∓ W_i x_{∓m}

M commutes with turns about y, so z does not depend on which R is taken.  Where the edge is not 0,
it is a tensor product with its spherical harmonics: Y_l(e_y) has one component, so of
3j(l1, l2, l3) remain

    W_r[m] = √(2l2+1) C[l1+m, l2, l3+m]  if l1+l2+l3 is even,
    W_i[m] = √(2l2+1) C[l1+m, l2, l3-m]  if it is odd            ("component" harmonics)

and a pair of irreps has as many W as there are l2: every tensor product with harmonics is such a
map, and with all orders m every map is one.  It costs O(l³) an edge and channel, not O(l⁶).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.operators.operands import check_tensors, same_kind, without_autocast
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.irreps.irreps import (
    Irrep,
    Irreps,
    IrrepsLike,
    broadcast_leads,
    check_rows,
    join,
    parts_of,
    split,
)
from torchweft.o3.irreps.rotation import check_last, check_matrix, unit
from torchweft.o3.irreps.wigner import check_degrees, wigner_D_matrices, working_dtype
from torchweft.o3.tensor_product.instructions import weight_sizes
from torchweft.o3.tensor_product.module import WeightedModule

__all__ = ["SO2Instruction", "SO2Linear", "edge_rotation"]


class SO2Instruction(NamedTuple):
    """A matrix between components ±order of two items: W_i if `turned`, else W_r."""

    i_in: int
    i_out: int
    order: int
    turned: bool
    path_shape: tuple[int, int]
    path_weight: float

    @property
    def has_weight(self) -> bool:
        """True: every instruction has a weight."""
        return True


class SO2Linear(WeightedModule):
    """z = D(R)ᵀ M D(R) x, M a linear map between components of equal |m|, and R edge/|edge| = e_y.

    Equivariant under O(3).  A linear map of x that depends on the direction of an edge, as a tensor
    product with the edge's spherical harmonics is, at O(l³) operations in place of O(l⁶).  Each
    component of M x is a sum over the items and copies that reach it, divided by √(their number).

    Args:
        irreps_in: irreps of x (…, D).
        irreps_out: irreps of z (…, D_out); items without an instruction are zero.
        mmax: the highest order |m| that is mixed, higher orders are dropped; None: all orders.
        irreps_edge: "1o": edges are vectors, and the layer is equivariant under reflections too;
            "1e": edges do not change under inversion, as in layers that are equivariant under
            rotations only, and items of equal parities are mixed.
        internal_weights: whether the module owns its weight; None: if it is shared.
        shared_weights: whether all rows have one weight (True, and None) or each row its own
            (False).
        layout: see `torchweft.o3`.
        backend: see `torchweft.o3`.

    Attributes:
        instructions: sorted by order m, then items of z, then of x.

    Raises:
        WeftError: an invalid mmax or irreps_edge; another backend.

    Source: Passaro, Zitnick: Reducing SO(3) convolutions to SO(2) for efficient equivariant GNNs,
    ICML 2023 (eSCN).

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> layer = o3.SO2Linear("8x0e+8x1o", "8x0e+8x1o")
        >>> layer(torch.randn(10, 32), edge=torch.randn(10, 3)).shape
        torch.Size([10, 32])
    """

    instructions: Sequence[SO2Instruction]

    def __init__(
        self,
        irreps_in: IrrepsLike,
        irreps_out: IrrepsLike,
        mmax: int | None = None,
        *,
        irreps_edge: str | Irrep = "1o",
        internal_weights: bool | None = None,
        shared_weights: bool | None = None,
        layout: str = "mul_ir",
        backend: str | None = None,
    ) -> None:
        if mmax is not None:
            check_degrees(mmax=mmax)
        edge = Irrep(irreps_edge)
        if edge.l != 1:
            raise ShapeError(
                f"irreps_edge is {edge}: an edge is a vector, '1o', or '1e' where parity does not "
                "count. Pass one of these."
            )
        irreps, out = Irreps(irreps_in), Irreps(irreps_out)
        self._groups = list(_groups(irreps, out, mmax, edge.p))
        found = [*chain(*self._groups)]
        super().__init__(found, out, internal_weights, shared_weights, layout, backend)
        self.irreps_in, self.mmax, self.irreps_edge = irreps, mmax, edge
        self._sizes = [sum(weight_sizes(group)) for group in self._groups]
        self.lmax = max([0, *(item.ir.l for item in (*irreps, *out))])

    def forward(
        self,
        x: Tensor,
        edge: Tensor | None = None,
        weight: Tensor | Sequence[Tensor] | None = None,
        *,
        rotation: Tensor | None = None,
    ) -> Tensor:
        """The map of every row, `so2(x[src], edge)`.

        Args:
            x: (…, D); its leading dimensions, the edges' and those of own weights broadcast.
            edge: (…, 3), of any length.  Zero passes scalars to scalars alone, and its gradient
                is zero.
            weight: (weight_numel,), or (…, weight_numel) without shared_weights; None: the
                module's.
            rotation: (…, 3, 3) in place of edge, such as `edge_rotation(edge)`: its second row
                is the direction of the edge.

        Returns:
            (…, D_out) in the inputs' dtype; half precision computes in float32.
        """
        check_rows("x", x, self.irreps_in, self)
        flat = self.checked_weight(weight)
        x, *given = same_kind(x=x, weight=flat)
        flat, work = given[0] if given else None, working_dtype(x.dtype)
        with without_autocast(x):
            matrix = self._rotation(edge, rotation, work)
            own = [] if flat is None or self.shared_weights else [flat.shape[:-1]]
            batch = broadcast_leads([x.shape[:-1], matrix.shape[:-2], *own])
            rows = x.to(work).expand(*batch, x.shape[-1])
            turns = wigner_D_matrices(self.lmax, matrix)
            z = self._mapped(rows, turns, None if flat is None else flat.to(work))
        return z.to(x.dtype)

    def _rotation(self, edge: Tensor | None, rotation: Tensor | None, dtype: torch.dtype) -> Tensor:
        if edge is not None and rotation is None:
            check_tensors(edge=edge)
            return edge_rotation(edge.to(dtype))
        if rotation is not None and edge is None:
            check_matrix("rotation", rotation)
            return rotation.to(dtype)
        words = "neither was" if edge is None else "both were"
        raise DTypeError(
            f"{words} given of edge and rotation: exactly one gives the direction. Pass edge "
            "(…, 3), or rotation= (…, 3, 3)."
        )

    def _mapped(self, x: Tensor, turns: list[Tensor], weight: Tensor | None) -> Tensor:
        blocks = [
            self._rows(turns, item.ir.l) @ block.mT
            for item, block in zip(
                self.irreps_in, split(x, self.irreps_in, self.layout), strict=True
            )
        ]  # (…, orders, mul)
        matrices = [] if weight is None else parts_of(weight, self._sizes)
        found: dict[tuple[int, int], Tensor] = {}
        for members, flat in zip(self._groups, matrices, strict=True):
            _, i_out, order, _, (_, mul), factor = members[0]
            columns = torch.cat([_pair(blocks[i.i_in], i) for i in members], -1)
            matrix = flat.reshape(*flat.shape[:-1], columns.shape[-1], mul)
            found[i_out, order] = columns @ (matrix * factor)
        items = [self._turned_back(k, found, x, turns).mT for k in range(len(self.irreps_out))]
        return join(items, self.layout) if items else x.new_zeros(*x.shape[:-1], 0)

    def _rows(self, turns: list[Tensor], degree: int) -> Tensor:
        """The rows of D for the orders up to mmax."""
        cut = 0 if self.mmax is None else max(0, degree - self.mmax)
        return turns[degree].narrow(-2, cut, 2 * (degree - cut) + 1)

    def _turned_back(
        self, k: int, found: dict[tuple[int, int], Tensor], like: Tensor, turns: list[Tensor]
    ) -> Tensor:
        """(…, 2l+1, mul): an item of z from its components by order."""
        mul, ir = self.irreps_out[k]
        rows = self._rows(turns, ir.l)
        none = like.new_zeros(*like.shape[:-1], 2, mul)
        orders = range(rows.shape[-2] // 2 + 1)
        middle, *pairs = (found.get((k, m), none if m else none[..., :1, :]) for m in orders)
        low, high = ([pair.narrow(-2, n, 1) for pair in pairs] for n in (0, 1))
        return rows.mT @ torch.cat([*reversed(low), middle, *high], -2)


def edge_rotation(edge: Tensor) -> Tensor:
    """R with R edge/|edge| = e_y: rotations that turn edges to the polar axis.

    The shortest turn to e_y; where edge_y < 0, half a turn about x comes before it.  Both are
    smooth in their half, so gradients of results that do not depend on the choice of R are right
    everywhere.

    Args:
        edge: (…, 3), real, of any length.

    Returns:
        (…, 3, 3) in the dtype of edge; 0 for edges of length 0.

    Raises:
        ShapeError: edge is not (…, 3).
        DTypeError: edge is not a floating-point tensor.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> edge = torch.tensor([0.0, 0.0, 2.0])
        >>> o3.edge_rotation(edge) @ edge
        tensor([0., 2., 0.])
    """
    check_last("edge", edge, 3)
    half = torch.where(edge[..., 1:2] < 0, -1.0, 1.0).to(edge.dtype)
    flip = torch.cat([torch.ones_like(half), half, half], -1)
    direction = unit(edge) * flip
    x, y, z = direction.unbind(-1)
    k = 1 / (1 + y)
    rows = [1 - k * x * x, -x, -k * x * z, x, y, z, -k * x * z, -z, 1 - k * z * z]
    matrix: Tensor = torch.stack(rows, -1).reshape(*x.shape, 3, 3) * flip.unsqueeze(-2)
    nowhere = (direction == 0).all(-1)[..., None, None]
    return matrix.masked_fill(nowhere, 0)


def _groups(
    irreps: Irreps, out: Irreps, mmax: int | None, parity: int
) -> Iterator[list[SO2Instruction]]:
    """The matrices that a mirror allows, in groups by order and item of z, then by items of x."""
    last = max([-1, *(item.ir.l for item in out)])
    for order in range((last if mmax is None else min(last, mmax)) + 1):
        for k, (mul, ir) in enumerate(out):
            group = [
                (i, turned, item.mul)
                for i, item in enumerate(irreps)
                if item.mul and mul and order <= min(item.ir.l, ir.l)
                for turned in (False, True)[: 1 + (order > 0)]
                if _allowed(item.ir, ir, turned, parity)
            ]
            if group:
                factor = 1 / math.sqrt(sum(count for *_, count in group))
                yield [
                    SO2Instruction(i, k, order, turned, (count, mul), factor)
                    for i, turned, count in group
                ]


def _allowed(first: Irrep, out: Irrep, turned: bool, parity: int) -> bool:
    """Whether there is a degree l2 of harmonics, of parity^l2, with l1+l2+l3 odd (turned)."""
    odd = (first.l + out.l + turned) % 2
    return first.p * out.p == (parity if odd else 1)


def _pair(block: Tensor, instruction: SO2Instruction) -> Tensor:
    """(…, 2, mul): components -m and m, or what W_i makes of them: m and minus -m; (…, 1, mul)."""
    order, middle = instruction.order, block.shape[-2] // 2
    if not order:
        return block.narrow(-2, middle, 1)
    low, high = block.narrow(-2, middle - order, 1), block.narrow(-2, middle + order, 1)
    return torch.cat([high, -low] if instruction.turned else [low, high], -2)
