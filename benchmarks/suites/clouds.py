"""Voxel clouds for measurements: (N, 3) integers and the box they lie in.

`WEFT_LIDAR` may name an .npz file whose key `pc` holds the points (n, 3) of a LiDAR sweep, in
metres; without it the cases that need one are left out.
"""

from __future__ import annotations

import functools
import os

import numpy as np
import torch
from torch import Tensor

__all__ = ["CLOUDS", "lidar_file"]

Cloud = tuple[Tensor, list[int]]


def lidar_file() -> str | None:
    """The file of the LiDAR cases."""
    return os.environ.get("WEFT_LIDAR")


def lidar(size: float) -> Cloud:
    """The sweep's voxels of a size in metres, ascending."""
    points = torch.as_tensor(np.load(lidar_file())["pc"])[:, :3]
    cells = torch.floor((points - points.amin(0)) / size).int()
    voxels = torch.unique(cells, dim=0)
    return voxels, [int(n) + 1 for n in voxels.amax(0)]


@functools.cache
def sphere(resolution: int) -> Cloud:
    """A shell; rows by blocks of 256³, row-major inside."""
    square = (torch.arange(resolution).float() - (resolution - 1) / 2) ** 2
    slabs = []
    for x in range(0, resolution, 16):
        radius = (square[x : x + 16, None, None] + square[:, None] + square).sqrt()
        shell = (radius <= resolution / 2) & (radius >= resolution / 2 - 1.25)
        slabs.append(shell.nonzero() + torch.tensor([x, 0, 0]))
    voxels = torch.cat(slabs)
    block = ((voxels >> 8) * torch.tensor([1 << 12, 1 << 6, 1])).sum(1)
    return voxels[torch.argsort(block, stable=True)].int(), [resolution] * 3


def scattered(count: int, side: int) -> Cloud:
    """Distinct voxels drawn from a cube, in random order."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, side, (int(count * 1.1), 3), generator=generator, dtype=torch.int32)
    voxels = torch.unique(drawn, dim=0)
    kept = torch.randperm(len(voxels), generator=generator)[:count]
    return voxels[kept].contiguous(), [side] * 3


CLOUDS = {
    "lidar05": functools.partial(lidar, 0.05),
    "sphere64": functools.partial(sphere, 64),
    "sphere128": functools.partial(sphere, 128),
    "sphere256": functools.partial(sphere, 256),
    "sphere512": functools.partial(sphere, 512),
    "sphere1024": functools.partial(sphere, 1024),
    "rand1m": functools.partial(scattered, 1_000_000, 400),
    "rand50k": functools.partial(scattered, 50_000, 64),
}
