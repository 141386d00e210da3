"""Optimal transport at work: a map is levelled, a cloud is laid onto another scan of it.

    cut  a_i ∝ max(h_i − h̄, 0) at p_i        fill  b_j ∝ max(h̄ − h_j, 0) at p_j

Earth above the mean height h̄ of a map goes to where ground is missing.  A cloud is moved by the
rotation and shift that fit best to where transport carries its points, again and again.  Where the
mass of a point goes is told by the gradient of the cost, p_i − (∂cost/∂p_i) / a_i.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.demo.data.surface import Surface
from torchweft.reductions import SamplesLoss
from torchweft.reductions.cluster import cluster_ranges_centroids, grid_cluster

__all__ = [
    "BLUR",
    "Levelling",
    "Motion",
    "Scans",
    "angle",
    "carried",
    "heaps",
    "levelling",
    "registered",
    "scans",
]

BLUR = 0.02  # of the longer side of a map
CELLS = 12  # of the heaps of earth, along the longer side
SCANNED = 2000  # points of a scan at most
ROTATION, SHIFT = 40.0, 0.3  # degrees; in units of the radius of the cloud
STEPS = 15


class Levelling(NamedTuple):
    """Where earth is and where it is missing, in units of the longer side."""

    cut: Tensor  # (M, 2)
    amount: Tensor  # (M,) share of the earth
    fill: Tensor  # (N, 2)
    room: Tensor  # (N,) share of the room
    side: float  # the longer side, in the surface's unit


def levelling(surface: Surface) -> Levelling:
    """The points of a map above its mean height, and those below."""
    places, height = surface.truth[:, :2], surface.truth[:, 2]
    side = float((places.amax(0) - places.amin(0)).max())
    places = (places - places.amin(0)) / side
    above = height - height.mean()
    up, down = above > 0, above < 0
    amount, room = (part / part.sum() for part in (above[up], above[down]))
    return Levelling(places[up], amount, places[down], room, side)


def carried(cut: Tensor, amount: Tensor, fill: Tensor, room: Tensor) -> Tensor:
    """(M, D) where the mass of each point goes, on average."""
    cut = cut.clone().requires_grad_()
    cost = SamplesLoss("sinkhorn", blur=BLUR, debias=False)(amount, cut, room, fill)
    (gradient,) = torch.autograd.grad(cost, cut)
    return cut.detach() - gradient / amount.unsqueeze(1)


def heaps(values: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """(C, D) means of values under the weights `share`, and (C,) sums of these, by cell.

    The first two columns of values are places.
    """
    labels = grid_cluster(values[:, :2], 1 / CELLS)
    _, means, shares = cluster_ranges_centroids(values, labels, weights=share)
    return means, shares


class Motion(NamedTuple):
    """x ↦ turn x + shift."""

    turn: Tensor  # (3, 3)
    shift: Tensor  # (3,)

    def __call__(self, points: Tensor) -> Tensor:
        """(N, 3) points, moved."""
        there: Tensor = points @ self.turn.T + self.shift
        return there


class Scans(NamedTuple):
    """Two scans of a cloud, no point of which is in both, in units of its radius."""

    fixed: Tensor  # (N, 3)
    moving: Tensor  # (M, 3)
    back: Motion  # what lays `moving` onto `fixed`


def scans(surface: Surface, seed: int) -> Scans:
    """Half of the noisy points as they are, the other half rotated and shifted."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(surface.noisy), generator=generator)[: 2 * SCANNED]
    points = surface.noisy[order] - surface.noisy.mean(0)
    points = points / points.square().sum(1).mean().sqrt()
    fixed, moving = points.chunk(2)
    axis = torch.nn.functional.normalize(torch.randn(3, generator=generator), dim=0)
    across = torch.linalg.cross(axis.expand(3, 3), torch.eye(3))
    turn = torch.linalg.matrix_exp(torch.pi / 180 * ROTATION * across.T)
    shift = SHIFT * torch.nn.functional.normalize(torch.randn(3, generator=generator), dim=0)
    return Scans(fixed, Motion(turn, shift)(moving), Motion(turn.T, -shift @ turn))


def registered(moving: Tensor, fixed: Tensor) -> Motion:
    """The rotation and shift that lay one cloud onto another."""
    loss = SamplesLoss("sinkhorn", blur=0.05, debias=False)
    motion = Motion(torch.eye(3).to(moving), torch.zeros(3).to(moving))
    for _ in range(STEPS):
        points = motion(moving).requires_grad_()
        (gradient,) = torch.autograd.grad(loss(points, fixed), points)
        aims = points.detach() - len(points) * gradient  # where transport carries each point
        motion = fitted(moving, aims)
    return motion


def fitted(points: Tensor, aims: Tensor) -> Motion:
    """The rotation and shift of points that come closest to the aims, by least squares."""
    centre, aim = points.mean(0), aims.mean(0)
    u, _, v = torch.linalg.svd((aims - aim).T @ (points - centre))
    signs = torch.ones(3).to(points)
    signs[2] = (u @ v).det()
    turn = u * signs @ v
    return Motion(turn, aim - turn @ centre)


def angle(one: Motion, other: Motion) -> float:
    """Degrees between two rotations."""
    difference = (one.turn.double() - other.turn.double()).norm() / 8**0.5
    return float(2 * difference.clamp(max=1).asin().rad2deg())
