"""What all modules on multivectors share: an algebra, a layout, and checks that name the module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchweft.clifford.algebra import Algebra
from torchweft.errors import DTypeError, ShapeError

__all__ = ["PGA", "MultivectorModule", "grade_squares"]

PGA = Algebra.cl(3, 0, 1)
"""GATr's projective algebra: planes are vectors, points are trivectors, e0 is null and first."""


class MultivectorModule(nn.Module):
    """A module that takes multivectors of one algebra in one layout.

    Args:
        algebra: of the multivectors.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
    """

    def __init__(self, algebra: Algebra, blade_dim: int = 0) -> None:
        super().__init__()
        if not isinstance(algebra, Algebra):
            raise DTypeError(
                f"algebra is a {type(algebra).__name__}: it must be an Algebra. "
                "Pass Algebra.cl(p, q, r) or Algebra(metric)."
            )
        if blade_dim not in (0, -1):
            raise ShapeError(
                f"blade_dim is {blade_dim}: it must be 0, for (B, batch…, F), or -1, for "
                "(batch…, F, B). Move the blades first or last."
            )
        self.algebra = algebra
        self.blade_dim = blade_dim
        # for a definite metric both norms are the same, and this one takes fewer steps
        self.norm = "euclidean" if algebra.is_definite else "metric"

    def check(self, x: Tensor, features: int | None = None, name: str = "x") -> None:
        """Raise ShapeError unless x has the algebra's blades and, if given, the features."""
        blades = self.algebra.num_blades
        feature_dim = -1 if self.blade_dim == 0 else -2
        fits = x.dim() >= 2 and x.shape[self.blade_dim] == blades
        if fits and features in (None, x.shape[feature_dim]):
            return
        count = "F" if features is None else features
        order = f"({blades}, batch…, {count})" if self.blade_dim == 0 else f"(…, {count}, {blades})"
        raise ShapeError(
            f"{name} is {tuple(x.shape)}: {type(self).__name__} of {self.algebra} needs {order}. "
            "Give it these blades and features, or set blade_dim (0: blades first, -1: last)."
        )

    def blades_first(self, x: Tensor) -> Tensor:
        """X as (B, batch…, F), a view."""
        return x.movedim(self.blade_dim, 0)

    def blades_back(self, x: Tensor) -> Tensor:
        """(B, batch…, F) in this module's layout, a view."""
        return x.movedim(0, self.blade_dim)

    def extra_repr(self) -> str:
        """The algebra and the shapes of the parameters."""
        shapes = [f"{name}={tuple(p.shape)}" for name, p in self.named_parameters(recurse=False)]
        layout = ["blade_dim=-1"] if self.blade_dim else []
        return ", ".join([str(self.algebra), *shapes, *layout])


def grade_squares(x: Tensor, algebra: Algebra) -> Tensor:
    """t_g = Σ_(j∈g) q_j x_j², (n+1, batch…, F) for x (B, batch…, F); float32 for half precision.

    q_j is the product of the blade's metric entries: every t_g is invariant under versors.
    """
    squares = x.to(torch.promote_types(x.dtype, torch.float32)).square()
    grades = []
    for blades in algebra.of_grade:
        parts = [
            squares[j] if algebra.squares[j] > 0 else -squares[j]
            for j in blades
            if algebra.squares[j]
        ]
        grades.append(sum(parts, torch.zeros_like(squares[0])))
    return torch.stack(grades)
