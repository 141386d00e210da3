"""Geometry in multivectors and back: points, planes, motions, vectors, numbers.

Components stand last, (batch…, F, k), in multivectors (B, batch…, F), or (batch…, F, B) with
`blade_dim=-1`.  Points, planes, rotations and translations are GATr's, in its projective algebra
`PGA` of space: a plane is a vector, a point a trivector, a motion an even versor r, and `sandwich`
moves what it is applied to.  Vectors and numbers are those of any algebra; of L-GATr's `SPACETIME`,
(t, x, y, z).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.clifford.algebra import PGA, Algebra
from torchweft.clifford.calls import blades_first
from torchweft.core.operators.operands import check_tensors
from torchweft.errors import ShapeError

__all__ = [
    "embed_plane",
    "embed_point",
    "embed_pseudoscalar",
    "embed_reflection",
    "embed_rotation",
    "embed_scalar",
    "embed_translation",
    "embed_vector",
    "extract_plane",
    "extract_point",
    "extract_pseudoscalar",
    "extract_reflection",
    "extract_rotation",
    "extract_scalar",
    "extract_translation",
    "extract_vector",
]

LEAST_WEIGHT = 1e-3
"""Points of a smaller weight are divided by this one, as in GATr, so that they stay finite."""


def embed_point(coordinates: Tensor, *, blade_dim: int = 0) -> Tensor:
    """The trivector e123 − x e023 + … of a point, as in GATr.

    Args:
        coordinates: (batch…, F, 3): x, y, z.
        blade_dim: 0 for (16, batch…, F), −1 for (batch…, F, 16).

    >>> import torch
    >>> from torchweft import clifford
    >>> point = clifford.embed_point(torch.tensor([[1.0, 2.0, 3.0]]))
    >>> shift = clifford.embed_translation(torch.tensor([[10.0, 0.0, 0.0]]))
    >>> clifford.extract_point(clifford.sandwich(shift, point, clifford.PGA)).tolist()
    [[11.0, 2.0, 3.0]]
    """
    x, y, z = _components("coordinates", coordinates, 3)
    return _multivector([11, -z, y, -x, torch.ones_like(x), 1], blade_dim)


def extract_point(multivectors: Tensor, *, blade_dim: int = 0) -> Tensor:
    """Coordinates (batch…, F, 3) of points, over their weight, or over 10⁻³ if that is smaller."""
    z, y, x, weight = _blades(multivectors, PGA, blade_dim)[11:15]
    weight = torch.where(weight.abs() > LEAST_WEIGHT, weight, LEAST_WEIGHT)
    return torch.stack([-x, y, -z], -1) / weight.unsqueeze(-1)


def embed_plane(normal: Tensor, position: Tensor, *, blade_dim: int = 0) -> Tensor:
    """The vector n − (n · p) e0 of the plane through p with the normal n.

    Args:
        normal: (batch…, F, 3).
        position: (batch…, F, 3), of any of its points.
        blade_dim: 0 for (16, batch…, F), −1 for (batch…, F, 16).
    """
    n, p = _components("normal", normal, 3), _components("position", position, 3)
    distance = sum((a * b for a, b in zip(n, p, strict=True)), torch.zeros_like(n[0]))
    return _multivector([1, -distance, *n, 11], blade_dim)


def extract_plane(multivectors: Tensor, *, blade_dim: int = 0) -> Tensor:
    """Normals (batch…, F, 3) of planes."""
    return torch.stack(_blades(multivectors, PGA, blade_dim)[2:5], -1)


def embed_reflection(normal: Tensor, position: Tensor, *, blade_dim: int = 0) -> Tensor:
    """The reflection in a plane is that plane; see `embed_plane`."""
    return embed_plane(normal, position, blade_dim=blade_dim)


def extract_reflection(multivectors: Tensor, *, blade_dim: int = 0) -> Tensor:
    """Normals (batch…, F, 3) of the planes of reflections."""
    return extract_plane(multivectors, blade_dim=blade_dim)


def embed_rotation(quaternion: Tensor, *, blade_dim: int = 0) -> Tensor:
    """The rotor w − z e12 + y e13 − x e23 of a unit quaternion.

    Args:
        quaternion: (batch…, F, 4): x, y, z, w, the real part last.
        blade_dim: 0 for (16, batch…, F), −1 for (batch…, F, 16).
    """
    x, y, z, w = _components("quaternion", quaternion, 4)
    return _multivector([w, 7, -z, y, -x, 5], blade_dim)


def extract_rotation(multivectors: Tensor, *, blade_dim: int = 0) -> Tensor:
    """Quaternions (batch…, F, 4) of rotors: x, y, z, w."""
    blades = _blades(multivectors, PGA, blade_dim)
    return torch.stack([-blades[10], blades[9], -blades[8], blades[0]], -1)


def embed_translation(vector: Tensor, *, blade_dim: int = 0) -> Tensor:
    """The translator 1 − ½ (t_1 e01 + t_2 e02 + t_3 e03).

    Args:
        vector: (batch…, F, 3).
        blade_dim: 0 for (16, batch…, F), −1 for (batch…, F, 16).
    """
    t = _components("vector", vector, 3)
    return _multivector([torch.ones_like(t[0]), 4, *(-a / 2 for a in t), 8], blade_dim)


def extract_translation(multivectors: Tensor, *, blade_dim: int = 0) -> Tensor:
    """Vectors (batch…, F, 3) of translators, whose scalar is 1."""
    return -2 * torch.stack(_blades(multivectors, PGA, blade_dim)[5:8], -1)


def embed_vector(vectors: Tensor, algebra: Algebra, *, blade_dim: int = 0) -> Tensor:
    """Vectors (batch…, F, n) as the vectors of an algebra, (B, batch…, F)."""
    parts = _components("vectors", vectors, algebra.n)
    return _multivector([1, *parts, algebra.num_blades - algebra.n - 1], blade_dim)


def extract_vector(multivectors: Tensor, algebra: Algebra, *, blade_dim: int = 0) -> Tensor:
    """The vectors (batch…, F, n) of multivectors (B, batch…, F)."""
    return torch.stack(_blades(multivectors, algebra, blade_dim)[1 : algebra.n + 1], -1)


def embed_scalar(scalars: Tensor, algebra: Algebra, *, blade_dim: int = 0) -> Tensor:
    """Numbers (batch…, F, 1) as the scalars of multivectors (B, batch…, F)."""
    return _multivector([*_components("scalars", scalars, 1), algebra.num_blades - 1], blade_dim)


def extract_scalar(multivectors: Tensor, algebra: Algebra, *, blade_dim: int = 0) -> Tensor:
    """The scalars (batch…, F, 1) of multivectors (B, batch…, F)."""
    return _blades(multivectors, algebra, blade_dim)[0].unsqueeze(-1)


def embed_pseudoscalar(pseudoscalars: Tensor, algebra: Algebra, *, blade_dim: int = 0) -> Tensor:
    """Numbers (batch…, F, 1) as the last blades of multivectors (B, batch…, F)."""
    parts = _components("pseudoscalars", pseudoscalars, 1)
    return _multivector([algebra.num_blades - 1, *parts], blade_dim)


def extract_pseudoscalar(multivectors: Tensor, algebra: Algebra, *, blade_dim: int = 0) -> Tensor:
    """The last blades (batch…, F, 1) of multivectors (B, batch…, F)."""
    return _blades(multivectors, algebra, blade_dim)[-1].unsqueeze(-1)


def _components(name: str, given: Tensor, count: int) -> tuple[Tensor, ...]:
    check_tensors(**{name: given})
    if given.dim() < 2 or given.shape[-1] != count:
        raise ShapeError(
            f"{name} is {tuple(given.shape)}: it must be (batch…, F, {count}), with {count} "
            "components last. Add a dimension of features, given.unsqueeze(-2), if it lacks one."
        )
    return given.unbind(-1)


def _multivector(parts: list[Tensor | int], blade_dim: int) -> Tensor:
    """Blades in order, given as tensors (batch…, F), and as numbers of zeros."""
    (first, *_) = (part for part in parts if isinstance(part, Tensor))
    blades = [
        torch.zeros_like(first).expand(part, *first.shape)
        if isinstance(part, int)
        else part.expand_as(first)[None]
        for part in parts
    ]
    return torch.cat(blades).movedim(0, blade_dim)


def _blades(multivectors: Tensor, algebra: Algebra, blade_dim: int) -> tuple[Tensor, ...]:
    check_tensors(multivectors=multivectors)
    return blades_first(algebra, blade_dim, multivectors=multivectors)[0].unbind(0)
