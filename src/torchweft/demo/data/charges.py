"""Charged bodies that attract and repel each other, simulated on the spot.

    ẍ_i = Σ_{j≠i} q_i q_j (x_i − x_j) / |x_i − x_j|³,   q_i = ±1

The field's n-body comparison (Satorras, Hoogeboom and Welling 2021): five bodies start at
x ~ N(0, 1) with |v| = 1/2.  A step of 0.001 first changes the velocity, then moves the body; no
component of a force exceeds 100, so that a close encounter is no catapult; every hundredth step is
a frame.  Given frame 30, predict the positions of frame 40.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Starts", "Trajectories", "forces", "simulate", "starts"]

BODIES = 5
STEP = 1e-3
STEPS_A_FRAME = 100
SPEED = 0.5
STRONGEST = 100.0

NOISE = 2 * 49 * 3 * BODIES


class Starts(NamedTuple):
    """S systems of n bodies at time 0.  Systems come last: every step works on long rows."""

    charge: Tensor  # (n, S), ±1
    position: Tensor  # (n, 3, S)
    velocity: Tensor  # (n, 3, S)


class Trajectories(NamedTuple):
    """S systems of n bodies in T frames."""

    charge: Tensor  # (S, n)
    position: Tensor  # (T, S, n, 3)
    velocity: Tensor  # (T, S, n, 3), that of half a step before the position


def starts(systems: int, seed: int) -> Starts:
    """Random systems, one after the other as the comparison draws them: seed 43 gives its own."""
    random = np.random.RandomState(seed)
    charges, positions, directions = [], [], []
    for _ in range(systems):
        charges.append(np.where(random.random_sample(BODIES) < 0.5, -1.0, 1.0))
        positions.append(random.standard_normal((3, BODIES)))
        directions.append(random.standard_normal((3, BODIES)))
        random.standard_normal(NOISE)  # of size zero in the comparison, but drawn
    x, v = (torch.from_numpy(np.stack(a, axis=-1)).transpose(0, 1) for a in (positions, directions))
    velocity = SPEED * v / v.norm(dim=1, keepdim=True)
    return Starts(torch.from_numpy(np.stack(charges, axis=-1)), x.contiguous(), velocity)


def forces(position: Tensor, charge: Tensor) -> Tensor:
    """F_i = Σ_{j≠i} q_i q_j (x_i − x_j) / |x_i − x_j|³, no component beyond 100: (n, 3, S)."""
    across = position.unsqueeze(1) - position  # (n, n, 3, S), 0 from a body to itself
    itself = torch.eye(len(position), device=position.device)[:, :, None]
    inverse = (across.square().sum(2) + itself).rsqrt()
    size = charge.unsqueeze(1) * charge * inverse.pow(3)
    return (across * size.unsqueeze(2)).sum(1).clamp(-STRONGEST, STRONGEST)


def simulate(start: Starts, frames: int) -> Trajectories:
    """The first frames, on the device of `start` and in its precision."""
    charge, x, v = start
    positions, velocities = [], []
    for _ in range(frames):
        for _ in range(STEPS_A_FRAME):
            v = v + STEP * forces(x, charge)
            x = x + STEP * v
        positions.append(x)
        velocities.append(v)
    found = (torch.stack(t).permute(0, 3, 1, 2).contiguous() for t in (positions, velocities))
    return Trajectories(charge.T.contiguous(), *found)
