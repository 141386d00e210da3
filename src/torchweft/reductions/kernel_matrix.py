"""The matrix of a formula that is linear in one variable, by its diagonal and its columns.

    (K b)_i = Σ_j f(x_i, y_j, p, b_j)

Row i · E + c belongs to component c of point i.  A formula k(x_i, y_j, p) b_j with k of one
component is the same matrix for each component of b, so that E = 1 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.errors import ShapeError
from torchweft.reductions.engine.reduction import reduce
from torchweft.reductions.engine.whole import Whole, using
from torchweft.reductions.formula.node import Node, node, substitute, swap, var, variables

__all__ = ["Columns", "KernelMatrix", "check_square", "kernel_matrix"]

Columns = dict[int, Tensor]
"""The variables of j at some columns, (R, *batch, 1, D) by number, with the unknown's unit vectors.
"""


class KernelMatrix(NamedTuple):
    """The matrix of a formula, over this process's rows.

    Args:
        formula: f, which is reduced over j.
        unknown: b, a variable of j.
        tensors: the variables by number; that of b gives its shape alone.
        width: E.
    """

    formula: Node
    unknown: Node
    tensors: tuple[Tensor, ...]
    width: int

    @property
    def batch(self) -> tuple[int, ...]:
        """The batch dimensions of b."""
        return tuple(self.tensors[self.unknown.data[0]].shape[:-2])

    @property
    def points(self) -> int:
        """How many points this process has."""
        count: int = self.tensors[self.unknown.data[0]].shape[-2]
        return count

    @property
    def rows(self) -> int:
        """How many rows this process has."""
        return self.points * self.width

    def diagonal(self) -> Tensor:
        """(*batch, rows): K_rr."""
        there = {v: var(v.data[0], v.dim, 0) for v in variables(self.formula) if v.data[2] == 1}
        parts = []
        for component in range(self.width):
            tensors = list(self.tensors)
            tensors[self.unknown.data[0]] = self._unit(component).expand(self.points, -1)
            parts.append(self._reduced(substitute(self.formula, there), tensors)[..., component])
        return torch.stack(parts, -1).flatten(-2)

    def at(self, row: Tensor, ours: Tensor) -> Columns:
        """The variables of j at the rows (R, *batch) of this process, 0 where it is not `ours`."""
        point = torch.where(ours, row // self.width, 0)[..., None, None]
        found = {}
        for v in variables(self.formula):
            if v.data[2] == 1 and v != self.unknown:
                value = self.tensors[v.data[0]]
                value = value if self.points else value.new_zeros(1, v.dim)
                value = value.expand(len(row), *self.batch, *value.shape[-2:])
                value = value.gather(-2, point.expand(*point.shape[:-1], v.dim))
                found[v.data[0]] = torch.where(ours[..., None, None], value, 0)
        unit = torch.stack([self._unit(c) for c in range(self.width)])
        component = torch.where(ours, row % self.width, 0)
        found[self.unknown.data[0]] = unit[component][..., None, :] * ours[..., None, None]
        return found

    def columns(self, at: Columns) -> Tensor:
        """(*batch, rows, R): the columns that have these variables."""
        tensors = [at.get(n, t) for n, t in enumerate(self.tensors)]
        found = self._reduced(self.formula, tensors)[..., : self.width]
        return found.flatten(-2).movedim(0, -1)

    def _unit(self, component: int) -> Tensor:
        """(dimension of b,): 1 at the component, which is the first of each repeated one."""
        like = self.tensors[self.unknown.data[0]]
        return torch.eye(self.unknown.dim, dtype=like.dtype, device=like.device)[component]

    def _reduced(self, f: Node, tensors: Sequence[Tensor]) -> Tensor:
        """Σ_j f of this process alone: (..., *batch, points, dimension)."""
        like = tensors[self.unknown.data[0]]
        if not any(v.data[2] == 0 for v in variables(f)):  # which says how many rows there are
            f = node("add", f, var(len(tensors), 1, 0))
            tensors = [*tensors, like.new_zeros(1).expand(self.points, 1)]
        with using(Whole()):
            found = reduce("Sum", f, tensors, 1)
        assert isinstance(found, Tensor)
        leading = torch.broadcast_shapes(found.shape[:-2], like.shape[:-2])  # type: ignore[no-untyped-call]
        return found.expand(*leading, *found.shape[-2:])


def kernel_matrix(f: Node, number: int, axis: int, tensors: Sequence[Tensor]) -> KernelMatrix:
    """The matrix of a formula.

    Args:
        f: the formula.
        number: of the variable that it is linear in.
        axis: 1 reduces over j, 0 over i.
        tensors: the variables by number, with the right-hand side as b.

    Raises:
        ShapeError: b does not vary with what is reduced over, or K is not square.
    """
    f = f if axis == 1 else swap(f)
    unknown = next((v for v in variables(f) if v.data[0] == number), None)
    if unknown is None or unknown.data[2] != 1:
        raise ShapeError(
            f"variable {number} is to be solved for, but the formula does not reduce over it: a "
            "ridge and a preconditioner follow from a matrix that multiplies it. Declare it as a "
            f"{'Vj' if axis == 1 else 'Vi'}, or pass alpha and no preconditioner."
        )
    known = [(v.data[2], tensors[v.data[0]].shape) for v in variables(f)]
    leading = torch.broadcast_shapes(*[s[:-1] if cat == 2 else s[:-2] for cat, s in known])  # type: ignore[no-untyped-call]
    points = next((s[-2] for cat, s in known if cat == 0), tensors[number].shape[-2])
    check_square((*leading, points, f.dim), tensors[number].shape)
    width = 1 if _is_scaled(f, unknown) else unknown.dim
    return KernelMatrix(f, unknown, tuple(t.detach() for t in tensors), width)


def _is_scaled(f: Node, unknown: Node) -> bool:
    """Whether f is b times a formula of one component without b."""
    if f.op != "mul" or unknown not in f.args:
        return False
    (other,) = [a for a in f.args if a is not unknown][:1] or [unknown]
    return other.dim == 1 and unknown not in variables(other)


def check_square(product: Sequence[int], rhs: Sequence[int]) -> None:
    """Raise ShapeError unless an operator's product has the shape of the right-hand side."""
    if tuple(product) != tuple(rhs):
        raise ShapeError(
            f"the operator gives {tuple(product)} but rhs is {tuple(rhs)}: it "
            "must be square, with as many points i as j. Pass the same points for both."
        )
