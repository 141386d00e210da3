"""The irreps of a product of several factors with symmetries under exchange of its indices.

z_k = Σ_{i,j,…} Q_{k,i,j,…} x_i y_j …,  Q_k orthonormal tensors with the symmetries, by irreps

Couplings of x, y, … one after the other give tensors R_u of each irrep, orthonormal over the paths
u.  S averages a tensor over the permutations of its indices, with their signs; it commutes with
rotations, so A_uv = <R_u, S R_v> is the same for each component of the irrep, and its eigenvectors
of eigenvalue 1 are the combinations with the symmetries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.core.operators.operands import same_kind
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.irreps.irreps import Irrep, Irreps, IrrepsLike, MulIr, check_rows, parts_of
from torchweft.o3.irreps.wigner import wigner_3j
from torchweft.o3.layers.tables import TableLayer
from torchweft.o3.tensor_product.products import kept_irreps

__all__ = ["ReducedTensorProducts"]

Symmetries = frozenset[tuple[int, tuple[int, ...]]]
"""A group of permutations of indices, each with the sign that it gives a tensor."""

Kept = frozenset[Irrep] | None
"""Irreps to keep; None: all."""


class ReducedTensorProducts(TableLayer):
    """z_k = Σ Q_{k,i,j,…} x_i y_j …: a product with symmetries of its indices, by irreps.

    Args:
        formula: indices and the symmetries under their exchange: "ij=ji" is symmetric, "ij=-ji"
            antisymmetric, "ijk=jki" cyclic, "ij" has none.
        filter_ir_out: keep only these irreps of z; None: all.
        filter_ir_mid: couple only through these irreps; None: all.
        eps: eigenvalues within eps of 1 count as 1, and numbers within eps of 0 as 0.
        backend: see `torchweft.o3`.
        **irreps: irreps of each index, such as i="1o"; one is enough for indices that are
            exchanged.

    Attributes:
        irreps_in: a list, of each factor.
        irreps_out: of z.
        change_of_basis: Q, (irreps_out.dim, D1, D2, …), e3nn 0.6's basis; |Q_k| = 1.  e3nn 0.4 has
            another where an irrep occurs several times: its states are refused.

    Raises:
        ShapeError: the formula does not read, or an index has no irreps, or two.

    Rows have the layout "mul_ir".

    Cost: Q is dense, D1 · D2 · … · irreps_out.dim numbers; a call multiplies the outer product of
    each row by it.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> product = o3.ReducedTensorProducts("ij=-ji", i="1o")
        >>> product
        ReducedTensorProducts(1x1o x 1x1o -> 1x1e)
        >>> x, y = torch.eye(3)[:2]
        >>> product(x, y)  # the cross product by 1/√2
        tensor([0.0000, 0.0000, 0.7071])
        >>> o3.ReducedTensorProducts("ijkl=jikl=ikjl=ijlk", i="1e").irreps_out
        1x0e+1x2e+1x4e
    """

    _e3nn_parts = ("main.",)

    change_of_basis: Tensor

    def __init__(
        self,
        formula: str,
        filter_ir_out: IrrepsLike | None = None,
        filter_ir_mid: IrrepsLike | None = None,
        eps: float = 1e-9,
        *,
        backend: str | None = None,
        **irreps: IrrepsLike,
    ) -> None:
        super().__init__(backend=backend)
        letters, symmetries = _read(formula)
        self.irreps_in = _irreps_of(letters, symmetries, irreps)
        kept = kept_irreps(filter_ir_out), kept_irreps(filter_ir_mid)
        self._given = symmetries, tuple(self.irreps_in), *kept, eps
        self.irreps_out, _ = _reduced(*self._given)
        self.register_tables()

    def tables(self) -> Mapping[str, Tensor]:
        """The change of basis."""
        return {"change_of_basis": _reduced(*self._given)[1]}

    def __repr__(self) -> str:
        factors = " x ".join(map(str, self.irreps_in))
        return f"{type(self).__name__}({factors} -> {self.irreps_out})"

    def forward(self, *xs: Tensor) -> Tensor:
        """The product, by its irreps.

        Args:
            *xs: a tensor (…, D) for each index; leading dimensions broadcast.

        Returns:
            (…, irreps_out.dim).
        """
        if len(xs) != len(self.irreps_in):
            raise DTypeError(
                f"{len(xs)} tensors were given to {self!r}: it takes one for each index, "
                f"{len(self.irreps_in)}. Pass as many."
            )
        for n, (x, irreps) in enumerate(zip(xs, self.irreps_in, strict=True)):
            check_rows(f"x{n}", x, irreps, self)
        first, *others = (
            self.as_tables(x) for x in same_kind(**{f"x{n}": x for n, x in enumerate(xs)})
        )
        outer = first
        for x in others:
            outer = (outer.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
        return self.as_input(outer @ self.change_of_basis.flatten(1).mT, xs[0])


def _read(formula: str) -> tuple[str, Symmetries]:
    """The indices, and the group of their symmetries."""
    terms = [term.strip() for term in formula.split("=")]
    letters = terms[0]
    found = set()
    for term in terms:
        indices = term.removeprefix("-")
        if sorted(indices) != sorted(set(letters)) or not letters.isalpha():
            raise ShapeError(
                f"formula {formula!r} does not read at {term!r}: terms are the same letters in any "
                "order, each once, all but the first with a sign or without. Write, for example, "
                "'ij=-ji'."
            )
        found.add((-1 if term != indices else 1, tuple(map(indices.index, letters))))
    while True:
        products = {(s * t, tuple(p[i] for i in q)) for s, p in found for t, q in found}
        if products <= found:
            return letters, frozenset(found)
        found |= products


def _irreps_of(
    letters: str, symmetries: Symmetries, given: Mapping[str, IrrepsLike]
) -> list[Irreps]:
    """The irreps of each index: its own, or those of an index that it is exchanged with."""
    if unknown := [name for name in given if len(name) != 1 or name not in letters]:
        raise ShapeError(
            f"irreps of {', '.join(unknown)} are given, but the formula has the indices {letters}. "
            f"Pass irreps of these, such as {letters[0]}='1o'."
        )
    known = {name: Irreps(irreps) for name, irreps in given.items()}
    found: list[Irreps] = []
    for n, letter in enumerate(letters):
        exchanged = sorted({letters[p[n]] for _, p in symmetries})
        choices = {known[name] for name in exchanged if name in known}
        if len(choices) != 1:
            has = " and ".join(sorted(map(str, choices))) or "none"
            raise ShapeError(
                f"index {letter} has the irreps {has}: indices that are exchanged must have the "
                f"same. Pass irreps of {' or '.join(exchanged)}, such as {letter}='1o'."
            )
        found += choices
    return found


@functools.lru_cache(maxsize=64)
def _reduced(
    symmetries: Symmetries, factors: tuple[Irreps, ...], out: Kept, mid: Kept, eps: float
) -> tuple[Irreps, Tensor]:
    """The irreps of the result, and the change of basis in float64."""
    irreps: list[Irrep] = []
    found = [torch.zeros(0, *(f.dim for f in factors), dtype=torch.float64, device="cpu")]
    with torch.inference_mode(False), torch.no_grad():
        groups: dict[Irrep, list[Tensor]] = {}
        for ir, tensor in _couplings(factors, mid):
            groups.setdefault(ir, []).append(tensor)
        for ir, group in groups.items():
            if out is None or ir in out:
                tensors = torch.stack(group)
                chosen = _symmetric(tensors[:, 0], symmetries, eps)
                found.append(torch.tensordot(chosen, tensors, 1).flatten(0, 1))
                irreps += [ir] * len(chosen)
    return Irreps(irreps).simplify(), torch.cat(found)


def _couplings(factors: tuple[Irreps, ...], mid: Kept) -> list[tuple[Irrep, Tensor]]:
    """Each irrep of the product, sorted, with its tensor (2l+1, D1, D2, …)."""
    first, *others = factors
    irreps = [ir for mul, ir in first for _ in range(mul)]
    unit = torch.eye(first.dim, dtype=torch.float64, device="cpu")
    found = list(zip(irreps, parts_of(unit, [ir.dim for ir in irreps], 0), strict=True))
    for factor in others:
        coupled = [
            each
            for left, tensor in found
            for item, place in zip(factor, factor.slices(), strict=True)
            for out in left * item.ir
            if mid is None or out in mid
            for each in _coupled(left, tensor, item, out, place.start, factor.dim)
        ]
        found = sorted(coupled, key=lambda coupling: coupling[0])
    return found


def _coupled(
    left: Irrep, tensor: Tensor, item: MulIr, out: Irrep, start: int, dim: int
) -> Iterator[tuple[Irrep, Tensor]]:
    """A tensor of irrep `left` coupled to `out` with each copy of an item at `start` of `dim`."""
    mul, ir = item
    symbol = wigner_3j(out.l, left.l, ir.l, torch.float64, "cpu") * math.sqrt(out.dim)
    part = torch.einsum("j...,ijl->i...l", tensor, symbol)
    for u in range(mul):
        before = start + u * ir.dim
        yield out, pad(part, (before, dim - before - ir.dim))


def _symmetric(tensors: Tensor, symmetries: Symmetries, eps: float) -> Tensor:
    """(solutions, U): combinations with the symmetries of orthonormal tensors (U, D1, D2, …)."""
    average = torch.zeros_like(tensors)
    for sign, order in symmetries:
        average += sign * tensors.permute(0, *(1 + k for k in order))
    matrix = tensors.flatten(1) @ (average / len(symmetries)).flatten(1).mT
    values, vectors = torch.linalg.eigh(matrix)
    solutions = vectors[:, values > 1 - eps]
    return _orthonormal(solutions @ solutions.mT, solutions.shape[1], eps)


def _orthonormal(rows: Tensor, rank: int, eps: float) -> Tensor:
    """(rank, U): the first rows that are independent, orthonormal, their first numbers positive.

    e3nn's choice among all bases, so that tables and checkpoints agree.
    """
    found: list[Tensor] = []
    for row in rows:
        if len(found) == rank:
            break
        for other in found:
            row = row - row.dot(other) * other
        if row.norm() > 2 * eps:
            row = row / row.norm()
            row = torch.where(row.abs() < eps, 0, row)
            found.append(row * row[row != 0][0].sign())
    return torch.stack(found) if found else rows[:0]
