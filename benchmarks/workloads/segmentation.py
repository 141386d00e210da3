"""Generated rooms whose voxels are to be labelled: floor, wall, box, ball or cylinder.

A room is points on a floor, two walls that meet, and shapes of random sizes at random places, with
noise, turned about the vertical and voxelised.  A voxel has the class of most of its points; its
features are one, and where the mean of its points lies between its corners.  So only the geometry
around a voxel tells its class: boxes, balls and cylinders float at any height.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torchweft.voxels import voxelize

__all__ = ["CLASSES", "FEATURES", "SHAPE", "Rooms", "join", "rooms"]

CLASSES = ("floor", "wall", "box", "ball", "cylinder")
FEATURES = 4
SHAPE = (64, 64, 32)
"""Voxels along x, y and z: even at each of four levels."""

SIZE = 0.1  # of a voxel, in metres
DENSITY = 400  # points a square metre
NOISE = 0.015
HEIGHT = 2.8
OBJECTS = 4  # of each class

Points = tuple[Tensor, Tensor]


class Rooms(NamedTuple):
    """A batch of rooms.

    indices: (N, 4) int32 voxels (room, x, y, z).
    features: (N, FEATURES) float32.
    labels: (N,) int64 numbers of classes.
    batch_size: number of rooms.
    """

    indices: Tensor
    features: Tensor
    labels: Tensor
    batch_size: int

    def to(self, device: torch.device, dtype: torch.dtype) -> Rooms:
        """On a device, with features of a dtype."""
        features = self.features.to(device, dtype)
        return Rooms(self.indices.to(device), features, self.labels.to(device), self.batch_size)


def rooms(count: int, seed: int, density: float = DENSITY) -> list[Rooms]:
    """Some rooms, each a batch of its own."""
    generator = torch.Generator().manual_seed(seed)
    return [_voxels(*_room(generator, density)) for _ in range(count)]


def join(parts: Sequence[Rooms]) -> Rooms:
    """One batch of several, in their order."""
    begins = torch.tensor([0, *[part.batch_size for part in parts]]).cumsum(0)
    moved = [
        part.indices + part.indices.new_tensor([int(begin), 0, 0, 0])
        for part, begin in zip(parts, begins[:-1], strict=True)
    ]
    features, labels = (
        torch.cat(pieces)
        for pieces in zip(*[(part.features, part.labels) for part in parts], strict=True)
    )
    return Rooms(torch.cat(moved), features, labels, int(begins[-1]))


def _voxels(points: Tensor, labels: Tensor) -> Rooms:
    inside = ((points >= 0) & (points < SIZE * torch.tensor(SHAPE))).all(1)
    points, labels = points[inside], labels[inside]
    votes = functional.one_hot(labels, len(CLASSES)).float()
    mean, _ = voxelize(points, SIZE, torch.cat([points, votes], 1))
    between = mean.feats[:, :3] / SIZE - mean.C[:, 1:]
    features = torch.cat([between, torch.ones_like(between[:, :1])], 1)
    return Rooms(mean.C.int(), features, mean.feats[:, 3:].argmax(1), 1)


def _room(generator: torch.Generator, density: float) -> Points:
    """Points (P, 3) of a room, in metres, and their classes (P,)."""
    middle = SIZE * torch.tensor(SHAPE) / 2
    length, breadth = _uniform(generator, 3.6, 4.8, 2).tolist()
    sides = length * torch.tensor([1.0, 0, 0]), breadth * torch.tensor([0, 1.0, 0])
    up = torch.tensor([0, 0, HEIGHT])
    corner = torch.tensor([-length / 2, -breadth / 2, 0.05])
    surfaces = [(0, _box(generator, sides[0] + sides[1], density) + corner)]
    surfaces += [(1, _box(generator, side + up, density) + corner) for side in sides]
    for kind, draw in ((2, _any_box), (3, _any_ball), (4, _any_cylinder)):
        for _ in range(OBJECTS):
            room = torch.tensor([length / 2, breadth / 2, HEIGHT / 2]) - 0.4
            place = _uniform(generator, -1, 1, 3) * room + torch.tensor([0, 0, HEIGHT / 2])
            surfaces.append((kind, draw(generator, density) + place))
    points = torch.cat([surface for _, surface in surfaces])
    labels = torch.cat([torch.full((len(surface),), kind) for kind, surface in surfaces])
    points = points + NOISE * torch.randn(points.shape, generator=generator)
    turned = points @ _turn(generator).T + middle * torch.tensor([1.0, 1.0, 0.0])
    return turned, labels


def _any_box(generator: torch.Generator, density: float) -> Tensor:
    sides = _uniform(generator, 0.5, 1.2, 3)
    return (_box(generator, sides, density) - sides / 2) @ _turn(generator).T


def _any_ball(generator: torch.Generator, density: float) -> Tensor:
    radius = float(_uniform(generator, 0.25, 0.5, 1))
    count = int(density * 4 * math.pi * radius**2)
    return radius * functional.normalize(torch.randn(count, 3, generator=generator))


def _any_cylinder(generator: torch.Generator, density: float) -> Tensor:
    """Upright and open."""
    radius, height = (float(_uniform(generator, *s, 1)) for s in ((0.2, 0.4), (0.8, 1.4)))
    count = int(density * 2 * math.pi * radius * height)
    angle, up = _uniform(generator, 0, 1, 2, count)
    angle = 2 * math.pi * angle
    return torch.stack([radius * angle.cos(), radius * angle.sin(), height * (up - 0.5)], 1)


def _box(generator: torch.Generator, sides: Tensor, density: float) -> Tensor:
    """Points on the faces of a box from 0 to its sides; one flat box has two faces."""
    areas = sides.roll(1) * sides.roll(2)
    count = int(density * (1 + bool(sides.all())) * areas.sum())
    axis = torch.multinomial(areas, count, replacement=True, generator=generator)[:, None]
    at = torch.rand(count, 3, generator=generator)
    return at.scatter(1, axis, at.gather(1, axis).round()) * sides


def _turn(generator: torch.Generator) -> Tensor:
    """A rotation about the vertical."""
    angle = float(_uniform(generator, 0, 2 * math.pi, 1))
    cos, sin = math.cos(angle), math.sin(angle)
    return torch.tensor([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1.0]])


def _uniform(generator: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=generator)
