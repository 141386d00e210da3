"""Maps of one multivector that move or flip its blades.

    z_j = sign_j · x_(place of j)

All keep the shape, and take (B, batch…, F), or (batch…, F, B) with `blade_dim=-1`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.functions.checks import backend_for, blades_first
from torchweft.clifford.functions.rows import Validated, run_rows
from torchweft.clifford.programs.programs import key
from torchweft.core.operators.operands import same_kind
from torchweft.errors import DTypeError, ShapeError

__all__ = ["conjugate", "dual", "grade_involution", "grade_project", "reverse"]


def reverse(
    x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x̃: every blade's vectors in the opposite order, (−1)^(g(g−1)/2) on grade g."""
    signs = [(-1) ** (g * (g - 1) // 2) for g in algebra.grades]
    return _flipped(x, algebra, signs, blade_dim, backend)


def grade_involution(
    x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x̂: every vector turned round, (−1)^g on grade g."""
    return _flipped(x, algebra, [(-1) ** g for g in algebra.grades], blade_dim, backend)


def conjugate(
    x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """Clifford conjugation, reverse and grade involution: (−1)^(g(g+1)/2) on grade g."""
    signs = [(-1) ** (g * (g + 1) // 2) for g in algebra.grades]
    return _flipped(x, algebra, signs, blade_dim, backend)


def grade_project(
    x: Tensor,
    grades: int | Iterable[int],
    algebra: Algebra,
    *,
    blade_dim: int = 0,
    backend: str | None = None,
) -> Tensor:
    """⟨x⟩_grades: the part of one grade or of several, zero elsewhere."""
    if not isinstance(grades, Iterable | int):
        raise DTypeError(
            f"grades is a {type(grades).__name__}: it must be a grade or several. "
            "Use grade_project(x, grades, algebra), say with grades=(0, 2)."
        )
    kept = {grades} if isinstance(grades, int) else set(grades)
    if not kept <= set(range(algebra.n + 1)):
        raise ShapeError(
            f"grades are {sorted(kept)}: {algebra} has grades 0 to {algebra.n}. "
            "Leave out the others."
        )
    return _flipped(x, algebra, [int(g in kept) for g in algebra.grades], blade_dim, backend)


def dual(x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None) -> Tensor:
    """Signed complements: e_A goes to that ±e_B with e_A ∧ (±e_B) = e_1…n, in any metric."""
    back = {place: (i, sign) for i, (place, sign) in enumerate(algebra.duals)}
    return _turned(x, algebra, [back[j] for j in range(algebra.num_blades)], blade_dim, backend)


def _flipped(
    x: Tensor, algebra: Algebra, signs: list[int], blade_dim: int, backend: str | None
) -> Tensor:
    return _turned(x, algebra, list(enumerate(signs)), blade_dim, backend)


def _turned(
    x: Tensor,
    algebra: Algebra,
    read: list[tuple[int, int]],
    blade_dim: int,
    backend: str | None,
) -> Tensor:
    words = [f"{place}:{sign}" for place, sign in read]
    name = key("turned", algebra, *words)

    def validate() -> Validated:
        (a,) = blades_first(algebra, blade_dim, x=same_kind(x=x)[0])
        return Validated(name, backend_for(backend, algebra, [a]), (a,))

    return run_rows((name,), algebra, blade_dim, backend, (x,), (), validate)
