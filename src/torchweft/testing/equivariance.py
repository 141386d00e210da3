"""Equivariance under versors, boosts and translations included, and under O(3), for any layer.

A versor u, a product of vectors that are not null, acts on a multivector as x ↦ u x̂ u⁻¹, x̂ being
the grade involution of x if u is odd, else x.  The action is a matrix built from the Cayley table
in float64: nothing of what is tested takes part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.o3.irreps.irreps import Irreps, IrrepsLike, join, split

__all__ = [
    "act",
    "assert_equivariant",
    "assert_o3_equivariant",
    "random_versor",
    "turn",
    "versor_action",
]

PROMISED = {torch.float32: 1e-5, torch.float64: 1e-12}
"""The error that torchweft promises at most, as a part of the output's largest value."""


def random_versor(algebra: Algebra, factors: int = 2, seed: int = 0) -> Tensor:
    """The product of `factors` random unit vectors: (B,), float64.

    One vector reflects, two rotate, boost or translate.  Rapidities are moderate, for a boost
    enlarges every rounding error: a vector's square is at least 4/5 of its Euclidean one, hence
    its rapidity at most 0.35, and that of two vectors at most 1.4 (twice the energy at rest).
    """
    generator = torch.Generator().manual_seed(seed)
    table = algebra.cayley(torch.float64)
    versor = torch.zeros(algebra.num_blades, dtype=torch.float64)
    versor[0] = 1
    for _ in range(factors):
        vector = torch.zeros_like(versor)
        blades = algebra.of_grade[1]
        vector[blades.start : blades.stop] = _unit_vector(algebra, generator)
        versor = torch.einsum("ijk,i,k->j", table, versor, vector)
    return versor


def versor_action(versor: Tensor, algebra: Algebra) -> Tensor:
    """The matrix (B, B), float64, of x ↦ u x̂ u⁻¹."""
    table = algebra.cayley(torch.float64)
    grades = torch.tensor(algebra.grades)
    reversion = 1 - 2 * (grades * (grades - 1) // 2 % 2)
    reverse = versor * reversion
    size = torch.einsum("ik,i,k->", table[:, 0], versor, reverse)
    odd = bool(versor[grades % 2 == 1].any())
    involution = 1 - 2 * (grades % 2) if odd else torch.ones_like(grades)
    left = torch.einsum("ijk,i->jk", table, versor)
    right = torch.einsum("ijk,k->ji", table, reverse / size)
    action: Tensor = right @ left * involution
    return action


def act(action: Tensor, x: Tensor, blade_dim: int = 0) -> Tensor:
    """The matrix of a versor on the blades of x, in float64, rounded once to x's dtype."""
    moved: Tensor = torch.tensordot(action, x.movedim(blade_dim, 0).double(), 1)
    return moved.movedim(0, blade_dim).to(x.dtype)


def assert_equivariant(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    algebra: Algebra,
    *,
    blade_dim: int = 0,
    error: float | None = None,
) -> float:
    """f(u[x], u[y], …) = u[f(x, y, …)] for versors of 1 to n factors, or AssertionError.

    Args:
        function: of multivectors, to a multivector.
        inputs: the multivectors, all in one dtype.
        algebra: whose versors act.
        blade_dim: where the blades stand, in the inputs and in the output.
        error: allowed at most, as a part of the largest output; None: what torchweft promises,
            1e-5 in float32 and 1e-12 in float64.

    Returns:
        The largest error over all versors, as a part of the largest output.
    """
    plain = function(*inputs).detach().double()

    def cases() -> Iterator[tuple[str, Tensor, Tensor]]:
        for factors in range(1, algebra.n + 1):
            action = versor_action(random_versor(algebra, factors, seed=factors), algebra)
            found = function(*(act(action, x, blade_dim) for x in inputs))
            yield (
                f"a versor of {factors} vectors of {algebra}",
                found,
                act(action, plain, blade_dim),
            )

    return _worst(cases(), PROMISED[inputs[0].dtype] if error is None else error)


def _unit_vector(algebra: Algebra, generator: torch.Generator) -> Tensor:
    """A random vector that squares to ±1 and is not near a null one."""
    metric = torch.tensor(algebra.metric, dtype=torch.float64)
    if not metric.any():
        raise AssertionError(f"{algebra} has no versors: all its vectors are null")
    while True:
        vector = torch.randn(algebra.n, generator=generator, dtype=torch.float64)
        square = (metric * vector * vector).sum()
        if 5 * square.abs() >= 4 * (metric.abs() * vector * vector).sum():
            return vector / square.abs().sqrt()


def assert_o3_equivariant(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    irreps_in: Sequence[IrrepsLike],
    irreps_out: IrrepsLike,
    *,
    layout: str = "mul_ir",
    error: float | None = None,
) -> float:
    """f(D(R) x, …) = D(R) f(x, …) for random R of O(3), proper and improper, or AssertionError.

    Args:
        function: of rows of irreps, to rows of irreps.
        inputs: (…, D) each, all in one dtype.
        irreps_in: of each input.
        irreps_out: of the output.
        layout: "mul_ir" or "ir_mul", of the inputs and of the output.
        error: allowed at most, as a part of the largest output; None: what torchweft promises,
            1e-5 in float32 and 1e-12 in float64.

    Returns:
        The largest error, as a part of the largest output.
    """
    plain = function(*inputs).detach().double()
    generator = torch.Generator().manual_seed(0)

    def cases() -> Iterator[tuple[str, Tensor, Tensor]]:
        for sign in (1, -1, 1, -1):
            normal = torch.randn(3, 3, generator=generator, dtype=torch.float64)
            rotation = torch.linalg.qr(normal)[0]
            matrix = sign * torch.linalg.det(rotation) * rotation
            moved = (turn(matrix, x, i, layout) for x, i in zip(inputs, irreps_in, strict=True))
            kind = "a rotation" if sign > 0 else "a rotation with inversion"
            yield kind, function(*moved), turn(matrix, plain, irreps_out, layout)

    return _worst(cases(), PROMISED[inputs[0].dtype] if error is None else error)


def _worst(cases: Iterable[tuple[str, Tensor, Tensor]], allowed: float) -> float:
    """The largest error of (transformation, found, expected), as a part of the largest output."""
    worst = 0.0
    for kind, found, expected in cases:
        relative = float((found.detach().double() - expected).abs().max() / expected.abs().max())
        if not relative <= allowed:
            raise AssertionError(
                f"under {kind} the output is off by {relative:.3g} of its largest value: "
                f"{allowed:.3g} is allowed"
            )
        worst = max(worst, relative)
    return worst


def turn(matrix: Tensor, x: Tensor, irreps: IrrepsLike, layout: str = "mul_ir") -> Tensor:
    """D(R) x in float64, rounded once to x's dtype; x (…, D) of irreps, R (3, 3)."""
    given = Irreps(irreps)
    blocks = split(x.double(), given, layout)
    turned = [
        block @ Irreps(item.ir).D_from_matrix(matrix).mT
        for block, item in zip(blocks, given, strict=True)
    ]
    return join(turned, layout).to(x.dtype) if turned else x
