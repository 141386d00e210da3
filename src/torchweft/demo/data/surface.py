"""A surface and its noisy measurement: matplotlib's elevation model, or the user's cloud."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchweft.demo.data.neighbours import nearest
from torchweft.demo.data.readers import read_points
from torchweft.errors import ShapeError

__all__ = ["Surface", "load"]

METRES_OF_NOISE = 10.0  # σ on the elevation model
NOISE = 0.2  # σ of a cloud, in units of its spacing
SPIKES, SPIKE = 0.1, 8.0  # one point in ten is off by eight times as much
HELD_OUT = 0.4  # of the points, at one end of the surface: never learned from
FEWEST, MOST = 1024, 200_000  # points
METRES_PER_DEGREE = 111_320.0


@dataclass(frozen=True)
class Surface:
    """N points of a surface, and the same points as a noisy instrument sees them.

    Noise acts along the normals: σ·N(0, 1), and at one point in ten 8σ·N(0, 1).
    """

    name: str
    unit: str
    truth: Tensor  # (N, 3)
    noisy: Tensor  # (N, 3)
    frames: Tensor  # (N, 3, 3): rows are two tangents and the normal, as the noisy points show them
    base: Tensor  # (N, 2 or 3): where neighbours are looked for
    held_out: Tensor  # (N,) bool
    spacing: float  # median distance of a point to its nearest
    sigma: float
    grid: tuple[int, int] | None  # rows and columns of a map; None for a cloud

    def rmse(self, points: Tensor, rows: Tensor) -> float:
        """Root mean square distance of some of the points to their true places."""
        error = (points - self.truth)[rows]
        return float(error.square().sum(1).mean().sqrt())


def load(path: Path | None, seed: int) -> Surface:
    """The user's cloud, or the elevation model that comes with matplotlib."""
    generator = torch.Generator().manual_seed(seed)
    if path is None:
        return _elevation_model(generator)
    return _cloud(read_points(path), path.name, generator)


def _elevation_model(generator: torch.Generator) -> Surface:
    """The Jacksboro fault, Tennessee: 344 × 403 heights every 3 arc seconds (USGS, public)."""
    from matplotlib import cbook

    path = cbook.get_sample_data("jacksboro_fault_dem.npz", asfileobj=False)
    with np.load(path) as data:
        heights = torch.from_numpy(data["elevation"].astype(np.float32))
        degrees = float(data["dx"])
        latitude = float(data["ymin"] + data["ymax"]) / 2
    num_rows, num_columns = heights.shape
    north = METRES_PER_DEGREE * degrees
    east = north * np.cos(np.radians(latitude))
    y, x = torch.meshgrid(
        -north * torch.arange(num_rows), east * torch.arange(num_columns), indexing="ij"
    )
    truth = torch.stack([x, y, heights], dim=-1).reshape(-1, 3).float()
    frames = torch.eye(3).expand(len(truth), 3, 3)
    return Surface(
        name="Jacksboro fault, Tennessee",
        unit="m",
        truth=truth,
        noisy=_measure(truth, frames[:, 2], METRES_OF_NOISE, generator),
        frames=frames,
        base=truth[:, :2],
        held_out=_far_end(truth[:, 1]),
        spacing=float(east),
        sigma=METRES_OF_NOISE,
        grid=(num_rows, num_columns),
    )


def _cloud(truth: Tensor, name: str, generator: torch.Generator) -> Surface:
    if len(truth) < FEWEST:
        raise ShapeError(
            f"{name} holds {len(truth)} points: the demo needs {FEWEST} or more, to learn from "
            "some and to test on others. Pass a larger cloud."
        )
    if len(truth) > MOST:
        truth = truth[torch.randperm(len(truth), generator=generator)[:MOST].sort().values]
    truth = (truth - truth.mean(0, keepdim=True)).float()
    near = nearest(truth, 16)
    distances = (truth[near] - truth.unsqueeze(1)).norm(dim=2)
    truth = truth / distances.amin(1).median()
    noisy = _measure(truth, _frames(truth, near)[:, 2], NOISE, generator)
    sides = truth.amax(0) - truth.amin(0)
    return Surface(
        name=name,
        unit="spacings",
        truth=truth,
        noisy=noisy,
        frames=_frames(noisy, nearest(noisy, 16)),
        base=noisy,
        held_out=_far_end(truth[:, int(sides.argmax())]),
        spacing=1.0,
        sigma=NOISE,
        grid=None,
    )


def _measure(truth: Tensor, normals: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    """truth + σ·(1, or 8 at one point in ten)·N(0, 1)·normal"""
    size = (len(truth), 1)
    spike = torch.rand(size, generator=generator) < SPIKES
    amount = sigma * torch.randn(size, generator=generator)
    return truth + torch.where(spike, SPIKE * amount, amount) * normals


def _frames(points: Tensor, near: Tensor) -> Tensor:
    """(N, 3, 3) principal axes of each neighbourhood, widest first: tangents, then the normal."""
    offsets = points[near] - points[near].mean(1, keepdim=True)
    axes: Tensor = torch.linalg.eigh(offsets.mT @ offsets).eigenvectors
    return axes.mT.flip(1)


def _far_end(position: Tensor) -> Tensor:
    return position > position.quantile(1 - HELD_OUT)
