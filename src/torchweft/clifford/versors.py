"""Versors: how they act, inverses, projections, and exponential and logarithm of bivectors.

Built of geometric products alone, so gradients of any order exist, also at 0 and at blades.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.calls import LARGEST_DIMENSION, blades_first
from torchweft.clifford.functions import (
    geometric_product,
    grade_project,
    left_contraction,
    regressive,
    reverse,
)
from torchweft.core.operators.operands import same_kind, widened, without_autocast
from torchweft.errors import ShapeError

__all__ = [
    "anticommutator",
    "commutator",
    "exp",
    "inverse",
    "log",
    "meet",
    "project",
    "reject",
    "sandwich",
]

TAYLOR_TERMS = 14
"""Terms of exp on [−½, ½]: the next is ½¹⁵/15!, below float64's round-off."""

MOST_SQUARINGS = 10
"""Most halvings of the argument of exp: up to a size of 2⁹ it is exact to rounding."""

ROOTS = 5
"""Square roots before the series of log: a rotor's angle is below π/2⁵ then."""

SERIES_TERMS = 8
"""Terms of artanh: tan(π/2⁶)¹⁷ is below float64's round-off."""


def sandwich(
    r: Tensor, x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """r x r̃, unnormalised.

    Args:
        r: a versor, (B, batch…, F); batch and features broadcast with x's.
        x: multivectors, the same layout.
        algebra: of the multivectors.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.

    Two geometric products; in half precision the one between is rounded.
    """
    left = geometric_product(r, x, algebra, blade_dim=blade_dim, backend=backend)
    turned = reverse(r, algebra, blade_dim=blade_dim, backend=backend)
    return geometric_product(left, turned, algebra, blade_dim=blade_dim, backend=backend)


def commutator(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """½ (x y − y x): of bivectors their Lie bracket, with any x the rotation that they generate.

    Args:
        x: multivectors, (B, batch…, F).
        y: the same layout; batch and features broadcast.
        algebra: of the multivectors.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.

    Two geometric products; in half precision they are rounded.
    """
    product, turned = _both_orders(x, y, algebra, blade_dim, backend)
    return (product - turned) / 2


def anticommutator(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """½ (x y + y x): what is left of x y without the commutator, whose arguments it has."""
    product, turned = _both_orders(x, y, algebra, blade_dim, backend)
    return (product + turned) / 2


def _both_orders(
    x: Tensor, y: Tensor, algebra: Algebra, blade_dim: int, backend: str | None
) -> tuple[Tensor, Tensor]:
    """x y and y x."""
    options: Any = {"blade_dim": blade_dim, "backend": backend}
    return geometric_product(x, y, algebra, **options), geometric_product(y, x, algebra, **options)


def project(
    x: Tensor, blade: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """(x ⌋ b) b⁻¹: the part of x inside the subspace of a blade b, of x's grades.

    Args:
        x: multivectors, (B, batch…, F).
        blade: products of vectors, the same layout; where it has no inverse, infinite or NaN.
        algebra: of the multivectors, n ≤ 5.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.

    Cost: 8 geometric products, most of them for the inverse.
    """
    options: Any = {"blade_dim": blade_dim, "backend": backend}
    contracted = left_contraction(x, blade, algebra, **options)
    return geometric_product(contracted, inverse(blade, algebra, **options), algebra, **options)


def reject(
    x: Tensor, blade: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x less its projection into a blade's subspace; see `project`."""
    return x - project(x, blade, algebra, blade_dim=blade_dim, backend=backend)


def meet(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x ∨ y: what the subspaces of two blades share if both span the space; `regressive`."""
    return regressive(x, y, algebra, blade_dim=blade_dim, backend=backend)


def inverse(
    x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """y with x y = y x = 1, of any multivector that has one; else infinite or NaN.

    Args:
        x: multivectors, (B, batch…, F).
        algebra: of the multivectors, n ≤ 5.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.

    y = a / ⟨x a⟩₀, with a = x̃ s̄ t̄, s = x x̃ of grades 0, 1, 4, 5 and t = s s̄ of grades 0, 5; a bar
    changes the sign of all but the scalar, in s of grades 1 and 4 alone.  A step y (2 − x y) of
    Newton's follows.  (After Hitzer and Sangwine, "Multivector and multivector matrix inverses in
    real Clifford algebras", 2017.)  In float32 or wider.

    Error: about that of the solution of x y = 1 by the matrix of x.
    Cost: 5 geometric products, 7 for n = 5.
    """
    if algebra.n > LARGEST_DIMENSION:
        raise ShapeError(
            f"inverse was asked for in {algebra}, n = {algebra.n}: it needs n ≤ "
            f"{LARGEST_DIMENSION}. Use a smaller algebra; the inverse of a versor v is reverse(v) "
            "over the scalar of geometric_product(v, reverse(v))."
        )
    (first,) = blades_first(algebra, blade_dim, x=same_kind(widened, x=x)[0])
    product = functools.partial(geometric_product, algebra=algebra, backend=backend)
    with without_autocast(first):
        wide = first.to(torch.promote_types(first.dtype, torch.float32))
        largest = wide.detach().abs().amax(0, keepdim=True)
        size = torch.where(largest > 0, largest, 1)  # so that products stay in range
        wide = wide / size
        adjugate = reverse(wide, algebra, backend=backend)
        for negative in [{1, 4}, {5}][: 1 + (algebra.n == 5)]:
            signs = [-1.0 if grade in negative else 1.0 for grade in algebra.grades]
            square = product(wide, adjugate)
            turned = square * square.new_tensor(signs).view(-1, *[1] * (square.dim() - 1))
            adjugate = product(adjugate, turned)
        y = adjugate / product(wide, adjugate)[:1]
        y = 2 * y - product(y, product(wide, y))
        return (y / size).to(first.dtype).movedim(0, blade_dim)


def exp(
    bivector: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """Σ_k bᵏ / k!, the rotor (or boost, or translator) that a bivector generates.

    By scaling and squaring: exp(b) = exp(b/2ˢ)^(2ˢ), s by the size of each element, no branches.

    Args:
        bivector: multivectors whose other grades are ignored, (B, batch…, F).
        algebra: of the multivectors.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.

    Error: about the size of b times the round-off, as a change of b by one round-off does.
    Cost: 24 geometric products.
    """
    (b,) = blades_first(algebra, blade_dim, bivector=same_kind(widened, bivector=bivector)[0])
    with without_autocast(b):
        return _series(b, algebra, backend).movedim(0, blade_dim)


def _series(b: Tensor, algebra: Algebra, backend: str | None) -> Tensor:
    """Exp of bivectors, blades first."""
    b = grade_project(b, 2, algebra, backend=backend) if algebra.n >= 2 else torch.zeros_like(b)
    size = b.detach().abs().sum(0, keepdim=True)
    halvings = size.clamp(min=0.5).log2().ceil().add(1).clamp(0, MOST_SQUARINGS)
    b = b * torch.exp2(-halvings)
    result = _one_like(b)
    for k in range(TAYLOR_TERMS, 0, -1):  # Horner
        result = _one_like(b) + geometric_product(b, result, algebra, backend=backend) / k
    for step in range(MOST_SQUARINGS):
        squared = geometric_product(result, result, algebra, backend=backend)
        result = torch.where(halvings > step, squared, result)
    return result


def log(
    rotor: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """The bivector b with exp(b) = r, for r r̃ = 1: the inverse of `exp` up to an angle of π.

    By roots: log r = 2⁵ log r^(1/2⁵), then 2 artanh((r − 1)/(r + 1)).

    Args:
        rotor: (B, batch…, F), n ≤ 5; not −1, where the plane of rotation is undefined.
        algebra: of the multivectors.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.

    Cost: 34 geometric products.
    """
    if algebra.n > LARGEST_DIMENSION:
        raise ShapeError(
            f"log was asked for in {algebra}, n = {algebra.n}: it needs n ≤ {LARGEST_DIMENSION}, "
            "where a bivector's square has a scalar and one commuting part. Use a smaller algebra."
        )
    (r,) = blades_first(algebra, blade_dim, rotor=same_kind(widened, rotor=rotor)[0])
    with without_autocast(r):
        return _roots_and_series(r, algebra, backend).movedim(0, blade_dim)


def _roots_and_series(r: Tensor, algebra: Algebra, backend: str | None) -> Tensor:
    """Log of rotors, blades first."""
    one = _one_like(r)
    for _ in range(ROOTS):  # √r = (1 + r) / |1 + r|
        size = _study_square(one + r, algebra, backend)
        r = geometric_product(one + r, size.inverse_root(), algebra, backend=backend)
    turned = reverse(one + r, algebra, backend=backend)
    ratio = geometric_product(r - one, turned, algebra, backend=backend)
    ratio = geometric_product(
        ratio, _study_square(one + r, algebra, backend).inverse(), algebra, backend=backend
    )
    square = geometric_product(ratio, ratio, algebra, backend=backend)
    series = one / (2 * SERIES_TERMS - 1)
    for m in range(SERIES_TERMS - 1, 0, -1):
        product = geometric_product(square, series, algebra, backend=backend)
        series = one / (2 * m - 1) + product
    result = geometric_product(ratio, series, algebra, backend=backend)
    bivector = math.ldexp(2.0, ROOTS) * result
    return grade_project(bivector, 2, algebra, backend=backend)


class _StudyNumber(NamedTuple):
    """s + w with a scalar w² = q; it commutes with the rotor that it is computed from."""

    scalar: Tensor
    rest: Tensor
    square: Tensor

    def _combined(self, scalar: Tensor, factor: Tensor) -> Tensor:
        return torch.cat([scalar, (factor * self.rest)[1:]])

    def inverse(self) -> Tensor:
        """1 / (s + w) = (s − w) / (s² − q)."""
        size = self.scalar**2 - self.square
        return self._combined(self.scalar / size, -1 / size)

    def inverse_root(self) -> Tensor:
        """1 / (a + w/2a), a² = (s + √(s² − q))/2, whose square is s + w."""
        a = ((self.scalar + (self.scalar**2 - self.square).sqrt()) / 2).sqrt()
        size = a**2 - self.square / (4 * a**2)
        return self._combined(a / size, -1 / (2 * a * size))


def _study_square(x: Tensor, algebra: Algebra, backend: str | None) -> _StudyNumber:
    """X x̃ of an even element up to n = 5: its grades are 0 and 4."""
    found = geometric_product(x, reverse(x, algebra, backend=backend), algebra, backend=backend)
    kept = [4] if algebra.n >= 4 else []
    rest = grade_project(found, kept, algebra, backend=backend)
    square = geometric_product(rest, rest, algebra, backend=backend)[:1]
    return _StudyNumber(found[:1], rest, square)


def _one_like(x: Tensor) -> Tensor:
    one = torch.zeros_like(x)
    one[0] = 1
    return one
