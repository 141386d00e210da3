"""Voxels drawn as blocks, seen from above and aside: PNG bytes, as `pictures` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from torchweft.demo.page.pictures import GREY, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["blocks"]

Array = np.ndarray[Any, Any]

TURN, TILT = np.radians(14), np.radians(38)  # of the eye: about the vertical, above the ground
FACES = {  # corners of the three faces that the eye sees, and how much light falls on them
    "top": (((0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)), 1.0),
    "front": (((0, 0, 0), (1, 0, 0), (1, 0, 1), (0, 0, 1)), 0.82),
    "side": (((1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 0, 1)), 0.64),
}


def blocks(
    places: Tensor,
    views: Mapping[str, Tensor],
    names: Sequence[str],
    colours: Sequence[str],
) -> bytes:
    """The voxels (N, 3), once for each view, below each other.

    Args:
        places: whole numbers.
        views: (N,) which of the colours each voxel has, by title.
        names: what the colours mean; none where the views say it.
        colours: by number.
    """
    voxels = places.cpu().numpy()
    voxels = voxels - voxels.min(0)
    if np.ptp(voxels[:, 1]) > np.ptp(voxels[:, 0]):  # the longer side along the picture
        voxels = np.stack([voxels[:, 1], voxels[:, 0].max() - voxels[:, 0], voxels[:, 2]], 1)
    order = np.argsort(voxels @ _axes()[2], kind="stable")  # far ones first
    low, high = (f(_flat(voxels), axis=0) for f in (np.min, np.max))
    width, height = high - low + 2
    tall = min(9.6 * height / width, 5.5)
    figure = Figure(figsize=(9.6, len(views) * (tall + 0.3) + 0.3), layout="constrained")
    axes: Any = figure.subplots(len(views), 1, squeeze=False)
    shades = np.array([to_rgb(colour) for colour in colours])
    for axis, (title, which) in zip(axes.flat, views.items(), strict=True):
        _draw(axis, voxels[order], shades[which.cpu().numpy()[order]])
        axis.set_title(title, color=GREY, fontsize=11, loc="left")
    if names:
        patches = [Patch(color=c, label=n) for n, c in zip(names, colours, strict=True)]
        figure.legend(
            handles=patches,
            loc="outside lower center",
            ncols=len(names),
            frameon=False,
            labelcolor=GREY,
        )
    return png(figure)


def _draw(axis: Axes, voxels: Array, colours: Array) -> None:
    """All faces of a voxel before those of the next, which is nearer."""
    faces = np.array([corners for corners, _ in FACES.values()])  # (3, 4, 3)
    light = np.array([amount for _, amount in FACES.values()])
    polygons: Any = _flat(voxels[:, None, None] + faces).reshape(-1, 4, 2)
    shades = (colours[:, None] * light[:, None]).reshape(-1, 3)
    axis.add_collection(
        PolyCollection(polygons, facecolors=shades, edgecolors=shades, linewidths=0.1)
    )
    axis.set_aspect("equal")
    axis.set_axis_off()
    axis.autoscale_view()


def _axes() -> Array:
    """Right, up and towards the eye."""
    right = np.array([np.cos(TURN), np.sin(TURN), 0])
    towards = np.array([np.sin(TURN), -np.cos(TURN), 0]) * np.cos(TILT) + [0, 0, np.sin(TILT)]
    return np.stack([right, np.cross(towards, right), towards])


def _flat(points: Array) -> Array:
    """(…, 3) → (…, 2) as the eye sees them."""
    flat: Array = points @ _axes()[:2].T
    return flat
