"""Pictures as PNG bytes, with transparent ground and grey letters: legible on light and on dark."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.colors import LightSource, LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

from torchweft.demo.data.surface import Surface

if TYPE_CHECKING:
    from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

__all__ = [
    "LAND",
    "blocks",
    "curve",
    "forecasts",
    "height_of",
    "panels",
    "parity",
    "plain_axis",
    "png",
    "whole",
]

GREY, ACCENT, INK = "#808890", "#e0662f", "#26221c"
LAND = ("#3f6b4f", "#7f9a5a", "#c9b878", "#b98d5c", "#f2ece0")  # by height
CHARGES = ("#3f7cac", "#b8481a")  # minus, plus
DOTS = 150  # an inch
VIEW = (0.25, 0.70)  # of the columns of a map: the part that is shown enlarged


def panels(surface: Surface, views: Mapping[str, Tensor]) -> bytes:
    """The held-out part, enlarged, in each version of the points."""
    height = 7.9 if surface.grid else height_of(surface.truth[surface.held_out] @ _plane(surface))
    figure = Figure(figsize=(9.6, height), layout="constrained")
    axes: Any = figure.subplots(2, 2)
    for axis, (title, points) in zip(axes.flat, views.items(), strict=True):
        if surface.grid:
            axis.imshow(_relief(surface, points, surface.held_out), interpolation="nearest")
        else:
            _scatter(axis, surface, points)
        axis.set_title(title, color=GREY, fontsize=11, loc="left")
        axis.set_axis_off()
    return png(figure)


def whole(surface: Surface, points: Tensor) -> bytes:
    """The whole map, with the line beyond which nothing was learned from."""
    assert surface.grid
    figure = Figure(figsize=(9.6, 8.2), layout="constrained")
    axis = figure.subplots()
    axis.imshow(_relief(surface, points))
    border = int(surface.held_out.sum()) / surface.grid[1] - 0.5
    axis.axhline(border, color=INK, linewidth=1.4, linestyle=(0, (5, 3)))
    for text, row, side in (
        ("held out", border - 5, "bottom"),
        ("learned from", border + 4, "top"),
    ):
        axis.text(5, row, text, color=INK, fontsize=11, va=side, weight="bold")
    axis.set_axis_off()
    return png(figure)


def curve(losses: Sequence[float], levels: Mapping[str, float], name: str) -> bytes:
    """A root mean square over the steps of learning, beside levels that need no learning."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    axis = figure.subplots()
    window = 21
    kernel = np.ones(window) / window
    squares = np.convolve(np.square(losses), kernel, mode="valid")
    axis.plot(losses, color=ACCENT, alpha=0.25, linewidth=0.8)
    axis.plot(np.arange(len(squares)) + window // 2, np.sqrt(squares), color=ACCENT, linewidth=2)
    for what, level in levels.items():
        axis.axhline(level, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)))
        axis.text(len(losses), level, what, color=GREY, fontsize=9, ha="right", va="bottom")
    axis.set(
        xlabel="step",
        ylabel=name,
        xlim=(0, len(losses)),
        ylim=(0, 1.1 * max(*losses, *levels.values())),
    )
    plain_axis(axis)
    return png(figure)


def plain_axis(axis: Axes) -> None:
    """Two grey lines for the axes, grey letters."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(GREY)
    axis.tick_params(colors=GREY)
    axis.xaxis.label.set_color(GREY)
    axis.yaxis.label.set_color(GREY)


def forecasts(charge: Tensor, path: Tensor, views: Mapping[str, tuple[Tensor, str, str]]) -> bytes:
    """Some systems from their flattest side: the true path of each body, and its predicted place.

    Args:
        charge: (S, n), its sign is the colour.
        path: (T, S, n, 3), from what is known to what is asked.
        views: predicted positions (S, n, 3), marker and colour, by name.
    """
    count = path.shape[1]
    figure = Figure(figsize=(9.6, 9.6 / count + 0.5), layout="constrained")
    axes: Any = figure.subplots(1, count)
    for number, axis in enumerate(axes):
        centre = path[:, number].flatten(0, 1).mean(0)
        plane = torch.linalg.svd(path[:, number].flatten(0, 1) - centre).Vh[:2].T
        flat = (path[:, number] - centre) @ plane
        for body in range(flat.shape[1]):
            colour = CHARGES[int(charge[number, body] > 0)]
            x, y = flat[:, body].T.numpy()
            axis.plot(x, y, color=colour, linewidth=2, solid_capstyle="round")
            axis.plot(x[0], y[0], "o", color=colour, markersize=7)
        for name, (positions, marker, colour) in views.items():
            x, y = ((positions[number] - centre) @ plane).T.numpy()
            axis.plot(x, y, marker, color=colour, label=name, markersize=9, markeredgewidth=1.6)
        axis.set_aspect("equal", "datalim")
        axis.set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=2, frameon=False, labelcolor=GREY
    )
    return png(figure)


def parity(views: Mapping[str, tuple[Tensor, Tensor]]) -> bytes:
    """Numbers that should be equal, (true, found) by what they are; a line where they are."""
    figure = Figure(figsize=(9.6, 9.6 / len(views) + 0.2), layout="constrained")
    axes: Any = figure.subplots(1, len(views), squeeze=False)
    for axis, (name, (truth, found)) in zip(axes.flat, views.items(), strict=True):
        ends = [float(end) for end in torch.cat([truth, found]).aminmax()]
        axis.plot(ends, ends, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)))
        axis.plot(truth.cpu(), found.cpu(), ".", color=ACCENT, alpha=0.3, markersize=3)
        axis.set_title(name, color=GREY, fontsize=11, loc="left")
        axis.set_aspect("equal")
        plain_axis(axis)
    return png(figure)


def _relief(surface: Surface, points: Tensor, rows: Tensor | None = None) -> Any:
    """Hill shading over colours of height; of the held-out rows only their middle, enlarged."""
    assert surface.grid
    heights = points[:, 2].reshape(surface.grid).numpy()
    low, high = surface.truth[:, 2].aminmax()
    light = LightSource(azdeg=315, altdeg=45)
    land = LinearSegmentedColormap.from_list("land", LAND)
    shaded = light.shade(
        heights,
        cmap=land,
        vmin=float(low),
        vmax=float(high),
        blend_mode="soft",
        vert_exag=1.5,
        dx=surface.spacing,
        dy=surface.spacing,
    )
    if rows is None:
        return shaded
    left, right = (int(part * surface.grid[1]) for part in VIEW)
    return shaded[: int(rows.sum()) // surface.grid[1], left:right]


def _scatter(axis: Axes, surface: Surface, points: Tensor) -> None:
    """The held-out points seen along their flattest direction, coloured by their error."""
    rows = surface.held_out
    x, y = (points[rows] @ _plane(surface)).T.numpy()
    error = (points - surface.truth)[rows].norm(dim=1).numpy()
    axis.scatter(x, y, c=error, s=3, linewidths=0, cmap="viridis", vmin=0, vmax=2 * surface.sigma)
    axis.set_aspect("equal")


def _plane(surface: Surface) -> Tensor:
    """(3, 2) the two directions in which the held-out points lie apart most."""
    held_out = surface.truth[surface.held_out]
    centred = held_out - held_out.mean(0)
    directions: Tensor = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, 1:].flip(1)
    return directions


def height_of(places: Tensor, most: float = 9.2) -> float:
    """Inches of a figure 9.6 wide that points (N, 2), at one scale, fill with their title."""
    wide, high = map(float, places.amax(0) - places.amin(0))
    return min(most, 1.2 + 9.6 * high / max(wide, 1e-9))


def png(figure: Figure) -> bytes:
    """The picture as a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS, transparent=True)
    return buffer.getvalue()


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
