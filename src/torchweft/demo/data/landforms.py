"""A surface as voxels of three kinds: on a map valley, slope, ridge; in a cloud flat, bent, edge.

    κ = −½ div(∇h / √(1 + |∇h|²))     of a map: mean curvature of its smoothed heights h
    v = λ₃ / (λ₁ + λ₂ + λ₃)           of a cloud: variances along the axes of 32 neighbours

A cloud has no side that is above, so its curvature has no sign.  A voxel has the mean of its
points.  The lowest fifth of the voxels that may be learned from are of the first kind, the highest
fifth of the third, all others of the second; the same two numbers divide the held-out part.  What a
voxel shows of itself is that it is there, and how high in it the surface lies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torchweft.demo.data.neighbours import nearest, split
from torchweft.demo.data.surface import Surface
from torchweft.voxels import SparseTensor, voxelize

__all__ = ["Part", "bend", "kinds_of", "landforms", "smoothed"]

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
    places = tensor.C.clone()
    for column in columns:
        places[:, column] = tensor.spatial_shape[column - 1] - 1 - places[:, column]
    return part._replace(tensor=SparseTensor(tensor.feats, places, tensor.spatial_shape, 1))
