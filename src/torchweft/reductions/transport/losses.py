"""Distances between weighted clouds of points, whose densities are a_i at x_i and b_j at y_j.

    loss(a, x, b, y) = ½ Σ a_i a_j k(x_i, x_j) + ½ Σ b_i b_j k(y_i, y_j) − Σ a_i b_j k(x_i, y_j)

with the kernel k of a name: energy −|x − y|, gaussian exp(−|x − y|² / 2 blur²), laplacian
exp(−|x − y| / blur).  Differentiable to any order in weights and points.  Weights may be of any
sign and mass; the energy is a distance where the masses of a and b agree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchweft.errors import DTypeError, ShapeError
from torchweft.reductions.engine.reduction import reduce
from torchweft.reductions.formula.node import Node, node, var

__all__ = ["KERNELS", "centred", "check_clouds", "kernel_loss", "widened"]


def _distance(x: Node, y: Node) -> Node:
    return node("sqrt", node("sqdist", x, y))


# points are in units of the blur
KERNELS: dict[str, Callable[[Node, Node], Node]] = {
    "energy": lambda x, y: -_distance(x, y),
    "gaussian": lambda x, y: node("exp", -0.5 * node("sqdist", x, y)),
    "laplacian": lambda x, y: node("exp", -_distance(x, y)),
}


def kernel_loss(
    name: str,
    a: Tensor,
    x: Tensor,
    b: Tensor,
    y: Tensor,
    *,
    blur: float = 0.05,
    backend: str | None = None,
) -> Tensor:
    """½ ⟨a, K(x, x) a⟩ + ½ ⟨b, K(y, y) b⟩ − ⟨a, K(x, y) b⟩, (*batch)

    Args:
        name: of KERNELS.
        a: (*batch, M) weights.
        x: (*batch, M, D) points.
        b: (*batch, N) weights.
        y: (*batch, N, D) points.
        blur: width of the kernel; the energy distance has none.
        backend: as `reduce` takes it.
    """
    check_clouds(a, x, b, y)
    dtype, dim = x.dtype, x.shape[-1]
    a, x, b, y = widened(a, x, b, y)
    x, y, _ = centred(x, y)
    formula = KERNELS[name](var(0, dim, 0), var(1, dim, 1)) * var(2, 1, 1)
    scale = 1.0 if name == "energy" else 1 / blur

    def mean(at: Tensor, points: Tensor, weights: Tensor) -> Tensor:
        columns = (scale * at, scale * points, weights.unsqueeze(-1))
        result = reduce("Sum", formula, columns, 1, backend=backend)
        assert isinstance(result, Tensor)
        return result.squeeze(-1)

    own = 0.5 * (a * mean(x, x, a)).sum(-1) + 0.5 * (b * mean(y, y, b)).sum(-1)
    return (own - (a * mean(x, y, b)).sum(-1)).to(dtype)


def check_clouds(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> None:
    """Raise unless they are weights (*batch, points) and points (*batch, points, D), some of each.

    Raises:
        DTypeError: the points are not floating-point numbers, x and y of different ones, or the
            weights are computed in another dtype than the points.
        ShapeError: a shape does not fit, or a cloud has no points.
    """
    if x.dtype != y.dtype or not x.is_floating_point():
        raise DTypeError(
            f"x is {x.dtype} and y {y.dtype}: points must be of one floating dtype. Convert them "
            "with .to(torch.float32)."
        )
    if min(x.ndim, y.ndim) < 2 or x.shape[:-2] != y.shape[:-2] or x.shape[-1] != y.shape[-1]:
        raise ShapeError(
            f"x is {tuple(x.shape)} but y is {tuple(y.shape)}: both must be (*batch, points, D) "
            "with the same batch and D. Reshape one of them."
        )
    for name, weights, other, points in (("a", a, "x", x), ("b", b, "y", y)):
        own, common = (torch.promote_types(t.dtype, torch.float32) for t in (weights, points))
        if own != common:
            raise DTypeError(
                f"a loss of clouds is given weights {name} of {weights.dtype} at points {other} of "
                f"{points.dtype}: it computes in one dtype. Convert the weights with "
                f"{name}.to({points.dtype})."
            )
        if 0 in points.shape[-2:]:
            raise ShapeError(
                f"{other} is {tuple(points.shape)}: a cloud must have at least one point, of one "
                "coordinate or more. Leave empty clouds out."
            )
        if weights.shape != points.shape[:-1]:
            raise ShapeError(
                f"{name} is {tuple(weights.shape)} but its points are {tuple(points.shape)}: each "
                f"point has one weight. Pass {name} as {tuple(points.shape[:-1])}."
            )


def centred(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both clouds around the middle of their box, so that rounding sees no large coordinates.

    Returns:
        x, y and the length of the diagonal of the box, (*batch).
    """
    points = torch.cat([x.detach(), y.detach()], -2)
    low, high = points.amin(-2, keepdim=True), points.amax(-2, keepdim=True)
    middle = (low + high) / 2
    return x - middle, y - middle, (high - low).norm(dim=-1).squeeze(-1)


def widened(*tensors: Tensor) -> list[Tensor]:
    """16-bit numbers in float32, so that results on the way are not rounded to 16 bits."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]
