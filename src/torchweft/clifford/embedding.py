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
from torchweft.clifford.calls import blades_first, check_algebra
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
    """The trivector e123 − x e023 + y e013 − z e012 of a point in PGA, as in GATr.

    Args:
        coordinates: (batch…, F, 3): x, y, z.
        blade_dim: 0 for (16, batch…, F), −1 for (batch…, F, 16).

    Returns:
        Multivectors (16, batch…, F) of `PGA`, in the dtype of the coordinates.

    Raises:
        ShapeError: the coordinates are not (batch…, F, 3).

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
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
    """The coordinates of points in PGA, divided by their weight, the e123 component.

    Args:
        multivectors: (16, batch…, F) of `PGA`.
        blade_dim: −1 for (batch…, F, 16).

    Returns:
        (batch…, F, 3), x, y and z.  A weight below 10⁻³ is replaced by 10⁻³, as in GATr.

    Raises:
        ShapeError: multivectors of another layout.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.extract_point(clifford.embed_point(torch.tensor([[1.0, 2.0, 3.0]])))
        tensor([[1., 2., 3.]])
    """
    z, y, x, weight = _blades(multivectors, PGA, blade_dim)[11:15]
    weight = torch.where(weight.abs() > LEAST_WEIGHT, weight, LEAST_WEIGHT)
    return torch.stack([-x, y, -z], -1) / weight.unsqueeze(-1)


def embed_plane(normal: Tensor, position: Tensor, *, blade_dim: int = 0) -> Tensor:
    """The vector n − (n · p) e0 of the plane through p with the normal n, as in GATr.

    Args:
        normal: (batch…, F, 3).
        position: (batch…, F, 3), any point of the plane.
        blade_dim: 0 for (16, batch…, F), −1 for (batch…, F, 16).

    Returns:
        Multivectors (16, batch…, F) of `PGA`.

    Raises:
        ShapeError: normal or position is not (batch…, F, 3).

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> up, position = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[5.0, 5.0, 2.0]])
        >>> clifford.embed_plane(up, position).flatten()[1:5]  # e0, e1, e2, e3
        tensor([-2.,  0.,  0.,  1.])
    """
    n, p = _components("normal", normal, 3), _components("position", position, 3)
    distance = sum((a * b for a, b in zip(n, p, strict=True)), torch.zeros_like(n[0]))
    return _multivector([1, -distance, *n, 11], blade_dim)


def extract_plane(multivectors: Tensor, *, blade_dim: int = 0) -> Tensor:
    """The normals of planes in PGA.

    Args:
        multivectors: (16, batch…, F) of `PGA`.
        blade_dim: −1 for (batch…, F, 16).

    Returns:
        (batch…, F, 3), the e1, e2 and e3 components.

    Raises:
        ShapeError: multivectors of another layout.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> up, position = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[5.0, 5.0, 2.0]])
        >>> clifford.extract_plane(clifford.embed_plane(up, position))
        tensor([[0., 0., 1.]])
    """
    return torch.stack(_blades(multivectors, PGA, blade_dim)[2:5], -1)


def embed_reflection(normal: Tensor, position: Tensor, *, blade_dim: int = 0) -> Tensor:
    """The reflection in a plane, which is the vector of the plane, see `embed_plane`.

    Args:
        normal: (batch…, F, 3).
        position: (batch…, F, 3), any point of the plane.
        blade_dim: 0 for (16, batch…, F), −1 for (batch…, F, 16).

    Returns:
        Multivectors (16, batch…, F) of `PGA`.

    Raises:
        ShapeError: normal or position is not (batch…, F, 3).

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> up = torch.tensor([[0.0, 0.0, 1.0]])
        >>> mirror, point = clifford.embed_reflection(up, 0 * up), clifford.embed_point(5 * up)
        >>> clifford.extract_point(clifford.sandwich(mirror, point, clifford.PGA))[0, 2]
        tensor(-5.)
    """
    return embed_plane(normal, position, blade_dim=blade_dim)


def extract_reflection(multivectors: Tensor, *, blade_dim: int = 0) -> Tensor:
    """The normals of the planes of reflections in PGA.

    Args:
        multivectors: (16, batch…, F) of `PGA`.
        blade_dim: −1 for (batch…, F, 16).

    Returns:
        (batch…, F, 3), the e1, e2 and e3 components.

    Raises:
        ShapeError: multivectors of another layout.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> up = torch.tensor([[0.0, 0.0, 1.0]])
        >>> clifford.extract_reflection(clifford.embed_reflection(up, up))
        tensor([[0., 0., 1.]])
    """
    return extract_plane(multivectors, blade_dim=blade_dim)


def embed_rotation(quaternion: Tensor, *, blade_dim: int = 0) -> Tensor:
    """The rotor w − z e12 + y e13 − x e23 of a unit quaternion, in PGA, as in GATr.

    Args:
        quaternion: (batch…, F, 4): x, y, z, w, the real part last, of length 1.
        blade_dim: 0 for (16, batch…, F), −1 for (batch…, F, 16).

    Returns:
        Multivectors (16, batch…, F) of `PGA`.

    Raises:
        ShapeError: the quaternion is not (batch…, F, 4).

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> turn = clifford.embed_rotation(torch.tensor([[0.0, 0.0, 1.0, 0.0]]))  # 180° about z
        >>> point = clifford.embed_point(torch.tensor([[1.0, 2.0, 3.0]]))
        >>> clifford.extract_point(clifford.sandwich(turn, point, clifford.PGA))
        tensor([[-1., -2.,  3.]])
    """
    x, y, z, w = _components("quaternion", quaternion, 4)
    return _multivector([w, 7, -z, y, -x, 5], blade_dim)


def extract_rotation(multivectors: Tensor, *, blade_dim: int = 0) -> Tensor:
    """The quaternions of rotors in PGA.

    Args:
        multivectors: (16, batch…, F) of `PGA`.
        blade_dim: −1 for (batch…, F, 16).

    Returns:
        (batch…, F, 4), x, y, z and w.

    Raises:
        ShapeError: multivectors of another layout.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> turn = torch.tensor([[0.0, 0.6, 0.0, 0.8]])
        >>> clifford.extract_rotation(clifford.embed_rotation(turn))[0, 1]
        tensor(0.6000)
    """
    blades = _blades(multivectors, PGA, blade_dim)
    return torch.stack([-blades[10], blades[9], -blades[8], blades[0]], -1)


def embed_translation(vector: Tensor, *, blade_dim: int = 0) -> Tensor:
    """The translator 1 − ½ (t_1 e01 + t_2 e02 + t_3 e03) of a vector t, in PGA, as in GATr.

    Args:
        vector: (batch…, F, 3).
        blade_dim: 0 for (16, batch…, F), −1 for (batch…, F, 16).

    Returns:
        Multivectors (16, batch…, F) of `PGA`.

    Raises:
        ShapeError: the vector is not (batch…, F, 3).

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> shift = clifford.embed_translation(torch.tensor([[10.0, 0.0, 0.0]]))
        >>> point = clifford.embed_point(torch.tensor([[1.0, 2.0, 3.0]]))
        >>> clifford.extract_point(clifford.sandwich(shift, point, clifford.PGA))
        tensor([[11.,  2.,  3.]])
    """
    t = _components("vector", vector, 3)
    return _multivector([torch.ones_like(t[0]), 4, *(-a / 2 for a in t), 8], blade_dim)


def extract_translation(multivectors: Tensor, *, blade_dim: int = 0) -> Tensor:
    """The vectors of translators in PGA, whose scalar is 1.

    Args:
        multivectors: (16, batch…, F) of `PGA`.
        blade_dim: −1 for (batch…, F, 16).

    Returns:
        (batch…, F, 3).

    Raises:
        ShapeError: multivectors of another layout.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> shift = clifford.embed_translation(torch.tensor([[1.0, 2.0, 3.0]]))
        >>> clifford.extract_translation(shift)
        tensor([[1., 2., 3.]])
    """
    return -2 * torch.stack(_blades(multivectors, PGA, blade_dim)[5:8], -1)


def embed_vector(vectors: Tensor, algebra: Algebra, *, blade_dim: int = 0) -> Tensor:
    """Vectors as the grade-1 part of multivectors.

    Args:
        vectors: (batch…, F, n); (t, x, y, z) of `SPACETIME`.
        algebra: the algebra of the multivectors.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).

    Returns:
        Multivectors (B, batch…, F).

    Raises:
        ShapeError: the vectors are not (batch…, F, n).

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> vectors = torch.tensor([[1.0, 2.0]])
        >>> clifford.embed_vector(vectors, clifford.Algebra((1, 1))).flatten()
        tensor([0., 1., 2., 0.])
    """
    check_algebra(algebra)
    parts = _components("vectors", vectors, algebra.n)
    return _multivector([1, *parts, algebra.num_blades - algebra.n - 1], blade_dim)


def extract_vector(multivectors: Tensor, algebra: Algebra, *, blade_dim: int = 0) -> Tensor:
    """The grade-1 part of multivectors.

    Args:
        multivectors: (B, batch…, F).
        algebra: the algebra of the multivectors.
        blade_dim: −1 for (batch…, F, B).

    Returns:
        (batch…, F, n).

    Raises:
        ShapeError: multivectors of another layout.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.extract_vector(torch.arange(4.0)[:, None], clifford.Algebra((1, 1)))
        tensor([[1., 2.]])
    """
    return torch.stack(_blades(multivectors, algebra, blade_dim)[1 : algebra.n + 1], -1)


def embed_scalar(scalars: Tensor, algebra: Algebra, *, blade_dim: int = 0) -> Tensor:
    """Numbers as the scalars of multivectors.

    Args:
        scalars: (batch…, F, 1).
        algebra: the algebra of the multivectors.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).

    Returns:
        Multivectors (B, batch…, F).

    Raises:
        ShapeError: the scalars are not (batch…, F, 1).

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.embed_scalar(torch.tensor([[5.0]]), clifford.Algebra((1, 1))).flatten()
        tensor([5., 0., 0., 0.])
    """
    check_algebra(algebra)
    return _multivector([*_components("scalars", scalars, 1), algebra.num_blades - 1], blade_dim)


def extract_scalar(multivectors: Tensor, algebra: Algebra, *, blade_dim: int = 0) -> Tensor:
    """The scalars of multivectors.

    Args:
        multivectors: (B, batch…, F).
        algebra: the algebra of the multivectors.
        blade_dim: −1 for (batch…, F, B).

    Returns:
        (batch…, F, 1).

    Raises:
        ShapeError: multivectors of another layout.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.extract_scalar(torch.arange(4.0)[:, None], clifford.Algebra((1, 1)))
        tensor([[0.]])
    """
    return _blades(multivectors, algebra, blade_dim)[0].unsqueeze(-1)


def embed_pseudoscalar(pseudoscalars: Tensor, algebra: Algebra, *, blade_dim: int = 0) -> Tensor:
    """Numbers as the last blade, e_1…n, of multivectors.

    Args:
        pseudoscalars: (batch…, F, 1).
        algebra: the algebra of the multivectors.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).

    Returns:
        Multivectors (B, batch…, F).

    Raises:
        ShapeError: the pseudoscalars are not (batch…, F, 1).

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.embed_pseudoscalar(torch.tensor([[5.0]]), clifford.Algebra((1, 1))).flatten()
        tensor([0., 0., 0., 5.])
    """
    check_algebra(algebra)
    parts = _components("pseudoscalars", pseudoscalars, 1)
    return _multivector([algebra.num_blades - 1, *parts], blade_dim)


def extract_pseudoscalar(multivectors: Tensor, algebra: Algebra, *, blade_dim: int = 0) -> Tensor:
    """The last blade, e_1…n, of multivectors.

    Args:
        multivectors: (B, batch…, F).
        algebra: the algebra of the multivectors.
        blade_dim: −1 for (batch…, F, B).

    Returns:
        (batch…, F, 1).

    Raises:
        ShapeError: multivectors of another layout.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.extract_pseudoscalar(torch.arange(4.0)[:, None], clifford.Algebra((1, 1)))
        tensor([[3.]])
    """
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
