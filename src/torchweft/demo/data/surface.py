"""A surface (an elevation model or the user's cloud), its noisy measurement, its landforms.

    κ = −½ div(∇h / √(1 + |∇h|²))     of a map: mean curvature of its smoothed heights h
    v = λ₃ / (λ₁ + λ₂ + λ₃)           of a cloud: variances along the axes of 32 neighbours

Landforms are voxels of three classes: valley, slope and ridge on a map; flat, bent and edge in a
cloud, which has no side that is above, so that its curvature has no sign.  A voxel has the mean of
its points.  Of the voxels that may be learned from, the lowest fifth are of the first class and the
highest fifth of the third; the same two thresholds divide the held-out part.  The features of a
voxel are a constant and the height of the surface within it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor
from torch.nn import functional

from torchweft.demo.data.readers import read_points
from torchweft.errors import ShapeError
from torchweft.voxels import SparseTensor, voxelize

__all__ = [
    "Part",
    "Surface",
    "bend",
    "kinds_of",
    "landforms",
    "load",
    "measured",
    "nearest",
    "smoothed",
    "split",
]

METRES_OF_NOISE = 10.0  # σ on the elevation model
NOISE = 0.2  # σ of a cloud, in units of its spacing
SPIKES, SPIKE = 0.1, 8.0  # one point in ten is off by eight times as much
AROUND = 16  # neighbours that show a cloud's normal at a point
HELD_OUT = 0.4  # of the points, at one end of the surface: never learned from
FEWEST, SMALL, MOST = 256, 5000, 200_000  # points
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

    @property
    def small(self) -> bool:
        """Whether sums over its points take less time than a call."""
        return len(self.truth) < SMALL

    def rmse(self, points: Tensor, rows: Tensor) -> float:
        """Root mean square distance of some of the points to their true places."""
        error = (points - self.truth)[rows]
        return float(error.square().sum(1).mean().sqrt())


def load(path: Path | None, seed: int, key: str | None = None) -> Surface:
    """The user's cloud, or the elevation model that comes with matplotlib."""
    generator = torch.Generator().manual_seed(seed)
    if path is None:
        return _elevation_model(generator)
    return _cloud(read_points(path, key), path.name, generator)


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
    near = nearest(truth, AROUND)
    distances = (truth[near] - truth.unsqueeze(1)).norm(dim=2)
    truth = truth / distances.amin(1).median()
    sides = truth.amax(0) - truth.amin(0)
    exact = Surface(
        name=name,
        unit="spacings",
        truth=truth,
        noisy=truth,
        frames=_frames(truth, near),
        base=truth,
        held_out=_far_end(truth[:, int(sides.argmax())]),
        spacing=1.0,
        sigma=NOISE,
        grid=None,
    )
    return measured(exact, generator)


def measured(cloud: Surface, generator: torch.Generator) -> Surface:
    """A cloud with new noise along its true normals; frames are those that noisy points show."""
    truth = cloud.truth
    normals = _frames(truth, nearest(truth, AROUND))[:, 2]
    noisy = _measure(truth, normals, cloud.sigma, generator)
    return replace(cloud, noisy=noisy, frames=_frames(noisy, nearest(noisy, AROUND)), base=noisy)


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


def split(points: Tensor, size: int) -> list[Tensor]:
    """Blocks of at most `size` rows that lie together: halved at the median of the longest side."""
    cloud = points.numpy()
    blocks, waiting = [], [np.arange(len(cloud))]
    while waiting:
        rows = waiting.pop()
        if len(rows) <= size:
            blocks.append(torch.from_numpy(rows))
            continue
        side = np.ptp(cloud[rows], axis=0).argmax()
        waiting += np.array_split(rows[cloud[rows, side].argsort(kind="stable")], 2)
    return blocks


def nearest(points: Tensor, k: int) -> Tensor:
    """(N, k) rows of the k nearest other points, nearest first."""
    cloud = points.double().numpy()
    _, found = cKDTree(cloud).query(cloud, k + 1)
    other = found != np.arange(len(cloud))[:, None]
    other[:, k] &= ~other[:, :k].all(1)  # among equal points the point itself may be missing
    return torch.from_numpy(found[other].reshape(-1, k))


SHARE = 0.2  # of the voxels are of the first kind, as many of the third
ACROSS = 2  # points of a voxel along each axis
WIDTH = 2.0  # σ of the smoothing, in voxels' edges
NEIGHBOURS = 32
TILE = 5000  # voxels at most
UNIT = 4  # shapes are multiples, so that each voxel has a coarser one above it


class Part(NamedTuple):
    """Voxels that lie together, with what they are."""

    tensor: SparseTensor  # (N, 2): 1, and the height within the voxel from its middle
    label: Tensor  # (N,) number of its kind


def kinds_of(surface: Surface) -> tuple[str, str, str]:
    """Their names."""
    return ("valley", "slope", "ridge") if surface.grid else ("flat", "bent", "edge")


def landforms(surface: Surface, device: torch.device) -> tuple[list[Part], Part]:
    """Tiles that may be learned from, each also mirrored, and the held-out part."""
    size, curved = _edges(surface), bend(surface)
    known, known_bend = _voxels(surface, ~surface.held_out, size, curved)
    other, other_bend = _voxels(surface, surface.held_out, size, curved)
    limits = known_bend.quantile(torch.tensor([SHARE, 1 - SHARE], dtype=known_bend.dtype))
    labels, other_labels = (
        torch.bucketize(b.contiguous(), limits) for b in (known_bend, other_bend)
    )
    blocks = split(known.C[:, 1:].float(), TILE)
    tiles = [
        tile
        for part in (_part(known, labels, rows, device) for rows in blocks)
        for tile in (part, _mirrored(part, 1), _mirrored(part, 2), _mirrored(part, 1, 2))
    ]
    return tiles, _part(other, other_labels, torch.arange(len(other)), device)


def bend(surface: Surface) -> Tensor:
    """(N,) κ or v of each point, in float64."""
    if surface.grid is None:
        return _variation(surface.truth.double())
    heights = surface.truth[:, 2].double().view(surface.grid)
    down, right = _steps(surface)
    smooth = smoothed(heights, WIDTH * ACROSS)
    slopes = torch.gradient(smooth, spacing=(down, right))
    length = (1 + slopes[0].square() + slopes[1].square()).sqrt()
    parts = [
        torch.gradient(slope / length, spacing=step, dim=axis)[0]
        for axis, (slope, step) in enumerate(zip(slopes, (down, right), strict=True))
    ]
    return -0.5 * (parts[0] + parts[1]).flatten()


def smoothed(heights: Tensor, width: float) -> Tensor:
    """A map under Gaussian weights of so many cells; beyond its edge it goes on as it ends."""
    reach = int(4 * width) + 1
    distance = torch.arange(-reach, reach + 1, dtype=heights.dtype)
    weight = (-0.5 * (distance / width).square()).softmax(0)
    for _ in range(2):
        wide = functional.pad(heights.unsqueeze(1), (reach, reach), mode="replicate")
        heights = functional.conv1d(wide, weight.view(1, 1, -1))[:, 0].T
    return heights


def _variation(points: Tensor) -> Tensor:
    around = points[nearest(points, NEIGHBOURS)]
    centred = around - around.mean(1, keepdim=True)
    axes: Tensor = torch.linalg.eigvalsh(centred.mT @ centred)  # ascending
    return axes[:, 0] / axes.sum(1).clamp(min=torch.finfo(axes.dtype).tiny)


def _steps(surface: Surface) -> tuple[float, float]:
    """From a row of a map to the next, and from a column to the next."""
    assert surface.grid
    places = surface.truth[:, :2].view(*surface.grid, 2)
    return float((places[1, 0] - places[0, 0]).norm()), float((places[0, 1] - places[0, 0]).norm())


def _edges(surface: Surface) -> Tensor:
    """(3,) a voxel's; on a map as high as half of the voxels rise within their width."""
    if surface.grid is None:
        return torch.full((3,), ACROSS * surface.spacing, dtype=torch.float64)
    down, right = _steps(surface)
    heights = surface.truth[:, 2].view(surface.grid)
    slopes = torch.stack(torch.gradient(heights, spacing=(down, right))).norm(dim=0)
    rise = float(slopes.median()) * (down + right) / 2
    return ACROSS * torch.tensor([right, down, rise], dtype=torch.float64)


def _voxels(
    surface: Surface, which: Tensor, size: Tensor, curved: Tensor
) -> tuple[SparseTensor, Tensor]:
    """The voxels of some points with their features, and their κ or v."""
    points = surface.truth[which].double()
    # half a cell below the first point: as many points of a map in each column of voxels
    origin = points.amin(0) - size / (2 * ACROSS)
    height = (points[:, 2] - origin[2]) / size[2]
    inside = height - height.floor() - 0.5
    values = torch.stack([torch.ones_like(inside), inside, curved[which]], 1)
    found, _ = voxelize(points, size, values, origin=origin)
    return found.replace(found.feats[:, :2].float()), found.feats[:, 2]


def _part(voxels: SparseTensor, labels: Tensor, rows: Tensor, device: torch.device) -> Part:
    places = voxels.C[rows]
    low, high = places.amin(0), places.amax(0)
    shape = [-(-int(n) // UNIT) * UNIT for n in (high - low + 1)[1:]]
    tensor = SparseTensor(voxels.feats[rows], places - low, shape, 1)
    return Part(tensor.to(device), labels[rows].to(device))


def _mirrored(part: Part, *columns: int) -> Part:
    """The same with some of the horizontal axes turned round: a ridge is still a ridge."""
    tensor = part.tensor
    places = tensor.C
    for column in columns:
        places[:, column] = tensor.spatial_shape[column - 1] - 1 - places[:, column]
    return part._replace(tensor=SparseTensor(tensor.feats, places, tensor.spatial_shape, 1))
