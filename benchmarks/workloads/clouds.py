"""Voxel clouds for measurements: (N, 3) integers and the box they lie in.

`TORCHWEFT_LIDAR` may name an .npz file whose key `pc` holds the points (n, 3) of a LiDAR sweep, in
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
    return os.environ.get("TORCHWEFT_LIDAR")


def lidar(size: float) -> Cloud:
    """The sweep's voxels of a size in metres, ascending."""
    points = torch.as_tensor(np.load(lidar_file())["pc"])[:, :3]
    cells = torch.floor((points - points.amin(0)) / size).int()
    voxels = torch.unique(cells, dim=0)
    return voxels, [int(n) + 1 for n in voxels.amax(0)]


@functools.cache
def sphere(resolution: int) -> Cloud:
    """Voxels from r − 1.25 to r = resolution / 2; rows by blocks of 256³, row-major inside."""
    middle = (resolution - 1) / 2
    square = (torch.arange(resolution) - middle).double() ** 2
    left = square[:, None] + square
    columns = (left <= (resolution / 2) ** 2).nonzero()
    left = left[columns[:, 0], columns[:, 1]]
    outer, inner = (((resolution / 2 - d) ** 2 - left).clamp(min=0).sqrt() for d in (0, 1.25))
    # z from −outer to −inner and from inner to outer, as intervals [begin, end)
    low, high = (middle - outer).ceil(), (middle + outer).floor() + 1
    hole = (middle - inner).floor() + 1, (middle + inner).ceil()
    begin = torch.stack([low, torch.maximum(*hole)], 1).long().flatten()
    end = torch.stack([hole[0], high], 1).long().flatten()
    count = (end - begin).clamp(min=0)
    interval = torch.repeat_interleave(count)
    z = torch.arange(len(interval)) - (count.cumsum(0) - count - begin)[interval]
    voxels = torch.cat([columns[interval // 2], z[:, None]], 1)
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
    "lidar10": functools.partial(lidar, 0.1),
    "lidar20": functools.partial(lidar, 0.2),
    "sphere64": functools.partial(sphere, 64),
    "sphere128": functools.partial(sphere, 128),
    "sphere256": functools.partial(sphere, 256),
    "sphere512": functools.partial(sphere, 512),
    "sphere1024": functools.partial(sphere, 1024),
    "rand1m": functools.partial(scattered, 1_000_000, 400),
    "rand50k": functools.partial(scattered, 50_000, 64),
}
