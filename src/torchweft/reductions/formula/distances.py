"""Squared distances of all pairs |a_i − b_j|² that keep their digits wherever the points lie."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sqdist"]

DIRECT = 8
"""So many components are subtracted one by one."""

CHAIN = 8
"""So many squares are added one after the other, such sums by halves."""

SMALL = 2.0**-24
"""Below this share of the largest |a|² + |b|², an expanded distance has not all digits of float32:
float64 gives it an error of about 16 · 2⁻⁵³ of that sum."""


def sqdist(a: Tensor, b: Tensor) -> Tensor:
    """Σ_k (a_k − b_k)² over the last dimension, which stays with length 1.

    Of (..., I, 1, D) and (..., 1, J, D) in float32 on a CPU it is one product of matrices in
    float64.  It is centred, and what is small beside |a|² + |b|² is computed from differences.
    """
    if a.dim() > 2 and b.dim() > 2 and b.shape[-2] == a.shape[-3] == 1:
        a, b = b, a  # in either order the same numbers: gradients repeat what a sum rounded
    pairs = a.dim() > 2 and b.dim() > 2 and a.shape[-2] == b.shape[-3] == 1
    plain = a.dtype == torch.float32 and a.device.type == "cpu"
    taped = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if pairs and plain and not taped and a.shape[-1] > DIRECT and a.numel() and b.numel():
        return _expanded(a[..., 0, :], b[..., 0, :, :])[..., None]
    return _direct(a, b, taped)


def _direct(a: Tensor, b: Tensor, taped: bool = False) -> Tensor:
    """By differences, a component at a time: no tensor of all pairs and components."""
    a, b = (t.movedim(-1, 0).contiguous() for t in (a, b))
    return _squares(a, b, taped)[..., None]


def _squares(a: Tensor, b: Tensor, taped: bool) -> Tensor:
    """Σ (a − b)² over the first dimension."""
    if len(a) > CHAIN:
        half = len(a) // 2
        first, second = (_squares(a[k], b[k], taped) for k in (slice(half), slice(half, None)))
        return first + second if taped else first.add_(second)
    if taped:
        steps = zip(a, b, strict=True)
        return sum(((x - y).square() for x, y in steps), start=a.new_zeros(()))
    difference = a[0] - b[0]
    out = difference.square()
    for x, y in zip(a[1:], b[1:], strict=True):
        torch.sub(x, y, out=difference)
        out.addcmul_(difference, difference)
    return out


def _expanded(a: Tensor, b: Tensor) -> Tensor:
    """|a|² + |b|² − 2⟨a, b⟩ of centred points, (..., I, J)."""
    wide_b = b.double()
    centre = wide_b.mean(-2, keepdim=True)
    wide_a, wide_b = a.double() - centre, wide_b - centre
    square_a, square_b = (t.square().sum(-1, keepdim=True) for t in (wide_a, wide_b))
    out = torch.matmul(wide_a, wide_b.transpose(-1, -2))
    out.mul_(-2).add_(square_a).add_(square_b.transpose(-1, -2))
    smallest = SMALL * float(square_a.max() + square_b.max())
    if not float(out.min()) >= smallest:  # not a number in any point, too
        near = out < smallest
        if not smallest < torch.inf or int(near.sum()) * DIRECT > near.numel():
            wide = _direct(a[..., None, :].double(), b[..., None, :, :].double())
            return wide[..., 0].to(a.dtype)
        *batch, i, j = near.nonzero(as_tuple=True)
        a, b = (t.expand(*out.shape[:-2], *t.shape[-2:]) for t in (a, b))
        found = (a[(*batch, i)].double() - b[(*batch, j)]).square().sum(-1)
        out[(*batch, i, j)] = found
    return out.to(a.dtype)
