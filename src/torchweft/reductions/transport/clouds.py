"""Two weighted clouds of points: checks, and the form in which losses compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchweft.core.operators.operands import check_tensors
from torchweft.errors import DTypeError, ShapeError
from torchweft.reductions.engine.whole import whole

__all__ = ["centred", "check_clouds", "widened"]


def check_clouds(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> None:
    """Raise unless they are weights (*batch, points) and points (*batch, points, D), some of each.

    Raises:
        DTypeError: one is no strided tensor, the points are not floating-point numbers, x and y of
            different ones, or the weights are computed in another dtype than the points.
        ShapeError: a shape does not fit, or a cloud has no points.
    """
    whole().agree("a loss of clouds", lambda: _checked(a, x, b, y))
    for name, points in (("x", x), ("y", y)):
        if not points.shape[-1] * whole().number(points.shape[-2]):
            raise ShapeError(
                f"{name} is {tuple(points.shape)}: a cloud must have at least one point, of one "
                "coordinate or more. Leave empty clouds out."
            )


def _checked(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> dict[str, Any]:
    """What the clouds of all processes share; raises as `check_clouds` does."""
    check_tensors(a=a, x=x, b=b, y=y)
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
        if weights.shape != points.shape[:-1]:
            raise ShapeError(
                f"{name} is {tuple(weights.shape)} but its points are {tuple(points.shape)}: each "
                f"point has one weight. Pass {name} as {tuple(points.shape[:-1])}."
            )
    return {
        "batch": x.shape[:-2],
        "number of coordinates": x.shape[-1],
        "dtype": (a.dtype, x.dtype, b.dtype),
        "device": x.device.type,
        "requires_grad": [t.requires_grad for t in (a, x, b, y)],
    }


def centred(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both clouds around the middle of their box, so that rounding sees no large coordinates.

    Returns:
        x, y and the length of the diagonal of the box, (*batch).
    """
    points = torch.cat([x.detach(), y.detach()], -2)
    if points.shape[-2]:
        low, high = points.amin(-2, keepdim=True), points.amax(-2, keepdim=True)
    else:  # of other processes
        shape = (*points.shape[:-2], 1, points.shape[-1])
        low, high = points.new_full(shape, torch.inf), points.new_full(shape, -torch.inf)
    low, high = -whole().largest(-low), whole().largest(high)
    middle = (low + high) / 2
    return x - middle, y - middle, (high - low).norm(dim=-1).squeeze(-1)


def widened(*tensors: Tensor) -> list[Tensor]:
    """16-bit numbers in float32, so that results on the way are not rounded to 16 bits."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]
