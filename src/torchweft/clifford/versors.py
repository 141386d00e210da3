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
from torchweft.clifford.calls import LARGEST_DIMENSION, blades_first, check_algebra
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
    """r x r̃, unnormalised: how a versor r (a rotation, reflection, translation or boost) acts on x.

    Args:
        r: a versor, (B, batch…, F); batch and features broadcast with x's.
        x: multivectors, the same layout and dtype.
        algebra: the algebra of the multivectors.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F) in x's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Error: that of two geometric products; in half precision the one between is rounded.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> turn = clifford.embed_rotation(torch.tensor([[0.0, 0.0, 0.5, 0.5]]) * 2**0.5)
        >>> point = clifford.embed_point(torch.tensor([[1.0, 0.0, 0.0]]))
        >>> moved = clifford.sandwich(turn, point, clifford.PGA)  # 90° about z
        >>> clifford.extract_point(moved).round(decimals=4) + 0.0
        tensor([[0., 1., 0.]])
    """
    left = geometric_product(r, x, algebra, blade_dim=blade_dim, backend=backend)
    turned = reverse(r, algebra, blade_dim=blade_dim, backend=backend)
    return geometric_product(left, turned, algebra, blade_dim=blade_dim, backend=backend)


def commutator(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """½ (x y − y x): of bivectors their Lie bracket, with any x the rotation that they generate.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        y: the right factors, the same layout and dtype; batch and features broadcast.
        algebra: the algebra that defines the product.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F) in x's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Cost: two geometric products; in half precision they are rounded.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> e1, e2 = torch.eye(4)[1:3, :, None]
        >>> clifford.commutator(e1, e2, clifford.Algebra((1, 1))).flatten()  # e12
        tensor([0., 0., 0., 1.])
    """
    product, turned = _both_orders(x, y, algebra, blade_dim, backend)
    return (product - turned) / 2


def anticommutator(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """½ (x y + y x): x y without its commutator.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        y: the right factors, the same layout and dtype; batch and features broadcast.
        algebra: the algebra that defines the product.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F) in x's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Cost: two geometric products; in half precision they are rounded.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> e1 = torch.eye(4)[1, :, None]
        >>> clifford.anticommutator(e1, e1, clifford.Algebra((1, 1))).flatten()  # 1
        tensor([1., 0., 0., 0.])
    """
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
    """(x ⌋ b) b⁻¹: the part of x inside the subspace of a blade b, with x's grades.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        blade: products of vectors, the same layout; where it has no inverse, the result is infinite
            or NaN.
        algebra: the algebra of the multivectors, n ≤ 5.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F) in x's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Cost: 8 geometric products, most of them for the inverse.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x, e1 = torch.tensor([0.0, 3.0, 4.0, 0.0])[:, None], torch.eye(4)[1, :, None]
        >>> clifford.project(x, e1, clifford.Algebra((1, 1))).flatten()
        tensor([0., 3., 0., 0.])
    """
    options: Any = {"blade_dim": blade_dim, "backend": backend}
    contracted = left_contraction(x, blade, algebra, **options)
    return geometric_product(contracted, inverse(blade, algebra, **options), algebra, **options)


def reject(
    x: Tensor, blade: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x less its projection into the subspace of a blade, see `project`.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        blade: products of vectors, the same layout; where it has no inverse, the result is infinite
            or NaN.
        algebra: the algebra of the multivectors, n ≤ 5.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F) in x's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Cost: 8 geometric products, most of them for the inverse.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x, e1 = torch.tensor([0.0, 3.0, 4.0, 0.0])[:, None], torch.eye(4)[1, :, None]
        >>> clifford.reject(x, e1, clifford.Algebra((1, 1))).flatten()
        tensor([0., 0., 4., 0.])
    """
    return x - project(x, blade, algebra, blade_dim=blade_dim, backend=backend)


def meet(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x ∨ y, `regressive`: the intersection of the subspaces of two blades that span the space.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        y: the right factors, the same layout and dtype; batch and features broadcast.
        algebra: the algebra that defines the product.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F) in x's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Error and cost: see `geometric_product`.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> e12, e23 = torch.eye(8)[[4, 6], :, None]
        >>> clifford.meet(e12, e23, clifford.Algebra((1, 1, 1))).flatten()[2]  # the line of e2
        tensor(1.)
    """
    return regressive(x, y, algebra, blade_dim=blade_dim, backend=backend)


def inverse(
    x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """y with x y = y x = 1, of any multivector that has an inverse; else infinite or NaN.

        y = a / ⟨x a⟩₀,  a = x̃ s̄ t̄,  s = x x̃ of grades 0, 1, 4, 5,  t = s s̄ of grades 0, 5

    A bar changes the sign of all grades but the scalar, in s of grades 1 and 4 only.  A step
    y (2 − x y) of Newton's method follows.  Computed in float32 or wider.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        algebra: the algebra of the multivectors, n ≤ 5.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors of x's shape and dtype.

    Raises:
        ShapeError: n > 5, or multivectors of another layout.
        DTypeError: x is not floating-point.
        BackendError: a backend was requested and cannot serve.

    Error: about that of the solution of x y = 1 by the matrix of x.

    Cost: 5 geometric products, 7 for n = 5.

    Source: Hitzer and Sangwine: Multivector and multivector matrix inverses in real Clifford
    algebras, 2017.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> vector = torch.tensor([0.0, 2.0, 0.0, 0.0])[:, None]
        >>> clifford.inverse(vector, clifford.Algebra((1, 1))).flatten()[1]
        tensor(0.5000)
    """
    check_algebra(algebra)
    if algebra.n > LARGEST_DIMENSION:
        raise ShapeError(
            f"inverse was called in {algebra}, n = {algebra.n}: it needs n ≤ "
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
    """Σ_k bᵏ / k!: the rotor (or boost, or translator) that a bivector generates.

    By scaling and squaring: exp(b) = exp(b/2ˢ)^(2ˢ), with s by the size of each element, without
    branches.

    Args:
        bivector: multivectors whose other grades are ignored, (B, batch…, F), float16 to float64.
        algebra: the algebra of the multivectors.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors of that shape, in the bivector's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Error: about the size of b times the round-off, as a change of b by one round-off causes.

    Cost: 24 geometric products.

    Example:
        >>> import math, torch
        >>> from torchweft import clifford
        >>> turn = torch.tensor([0.0, 0.0, 0.0, math.pi / 2])[:, None]  # π/2 e12
        >>> clifford.exp(turn, clifford.Algebra((1, 1))).flatten().round(decimals=4) + 0.0  # e12
        tensor([0., 0., 0., 1.])
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
        algebra: the algebra of the multivectors.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors of that shape, in the rotor's dtype.

    Raises:
        ShapeError: n > 5, or multivectors of another layout.
        DTypeError: the rotor is not floating-point.
        BackendError: a backend was requested and cannot serve.

    Cost: 34 geometric products.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> plane, bivector = clifford.Algebra((1, 1)), torch.tensor([0.0, 0.0, 0.0, 0.5])[:, None]
        >>> clifford.log(clifford.exp(bivector, plane), plane).flatten().round(decimals=4) + 0.0
        tensor([0.0000, 0.0000, 0.0000, 0.5000])
    """
    check_algebra(algebra)
    if algebra.n > LARGEST_DIMENSION:
        raise ShapeError(
            f"log was called in {algebra}, n = {algebra.n}: it needs n ≤ {LARGEST_DIMENSION}, "
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
