"""Pictures as PNG bytes, so many inches wide, legible on light and on dark.

Grounds are transparent, letters of a grey that has the same contrast with both.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.colors import LightSource, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from torch import Tensor

from torchweft.demo.data.surface import Surface

if TYPE_CHECKING:
    from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

__all__ = [
    "GREY",
    "LAND",
    "WINDOW",
    "blocks",
    "curve",
    "dot_size",
    "earthworks",
    "forecasts",
    "height_of",
    "overlaid",
    "panels",
    "parity",
    "plain_axis",
    "png",
    "whole",
]

GREY, ACCENT, INK = "#757d86", "#d05a24", "#26221c"
LAND = ("#3f6b4f", "#7f9a5a", "#c9b878", "#b98d5c", "#f2ece0")  # by height
EARTH = ("#2f6690", "#9cc0da", "#f4f1ea", "#d9a066", "#8a4b12")  # below the mean, above it
CHARGES = ("#3f7cac", "#b8481a")  # minus, plus
DOTS = 150  # an inch
SMALLEST, TITLE = 10, 11  # sizes of letters, in points
PHONE = 5.0  # inches: narrower pictures have their parts below each other
VIEW = (0.25, 0.70)  # of the columns of a map: the part that is shown enlarged
WINDOW = 21  # steps of a running median


def panels(surface: Surface, views: Mapping[str, Tensor], width: float) -> bytes:
    """The held-out part, enlarged, in each version of the points."""
    columns = 1 if width < PHONE else 2
    each = width / columns
    plane = _plane(surface)
    high = 0.78 * each if surface.grid else height_of(surface.truth[surface.held_out] @ plane, each)
    figure = Figure(figsize=(width, high * -(-len(views) // columns)), layout="constrained")
    axes: Any = figure.subplots(-(-len(views) // columns), columns)
    for axis, (title, points) in zip(axes.flat, views.items(), strict=True):
        if surface.grid:
            axis.imshow(_relief(surface, points, surface.held_out), interpolation="nearest")
        else:
            _scatter(axis, surface, points, each)
        axis.set_title(title, color=GREY, fontsize=TITLE, loc="left")
        axis.set_axis_off()
    return png(figure)


def whole(surface: Surface, points: Tensor, width: float) -> bytes:
    """The whole map, with the line beyond which nothing was learned from."""
    assert surface.grid
    figure = Figure(figsize=(width, 0.86 * width), layout="constrained")
    axis = figure.subplots()
    axis.imshow(_relief(surface, points))
    border = int(surface.held_out.sum()) / surface.grid[1] - 0.5
    axis.axhline(border, color=INK, linewidth=1.4, linestyle=(0, (5, 3)))
    for text, row, side in (
        ("held out", border - 5, "bottom"),
        ("used for training", border + 4, "top"),
    ):
        axis.text(5, row, text, color=INK, fontsize=TITLE, va=side, weight="bold")
    axis.set_axis_off()
    return png(figure)


def curve(losses: Sequence[float], levels: Mapping[str, float], name: str, width: float) -> bytes:
    """A loss over the steps of training and its running median, beside levels; logarithmic."""
    figure = Figure(figsize=(width, max(0.36 * width, 3.3)), layout="constrained")
    axis = figure.subplots()
    medians = np.median(np.lib.stride_tricks.sliding_window_view(losses, WINDOW), axis=1)
    middle = np.arange(len(medians)) + WINDOW // 2
    axis.plot(losses, color=ACCENT, alpha=0.45, linewidth=0.8, label="each step")
    axis.plot(middle, medians, color=ACCENT, linewidth=2.2, label=f"median of {WINDOW} steps")
    for (what, level), style in zip(levels.items(), ((0, (5, 3)), (0, (1, 2))), strict=False):
        axis.axhline(level, color=GREY, linewidth=1.4, linestyle=style, label=what)
    axis.set(xlabel="step of training", ylabel=name, xlim=(0, len(losses)), yscale="log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    plain_axis(axis)
    _legend(figure, *axis.get_legend_handles_labels(), width)
    return png(figure)


def _legend(figure: Figure, handles: Sequence[Any], names: Sequence[str], width: float) -> None:
    """Below the picture, in as many columns as there is room for."""
    columns = max(1, int(width / (0.55 + 0.085 * max(map(len, names)))))
    figure.legend(
        handles,
        names,
        loc="outside lower center",
        ncols=min(columns, len(names)),
        frameon=False,
        labelcolor=GREY,
        fontsize=SMALLEST,
    )


def plain_axis(axis: Axes) -> None:
    """Two grey lines for the axes, grey letters."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(GREY)
    axis.tick_params(which="both", colors=GREY, labelsize=SMALLEST)
    for label in (axis.xaxis.label, axis.yaxis.label):
        label.set(color=GREY, fontsize=SMALLEST)


def forecasts(
    charge: Tensor, path: Tensor, views: Mapping[str, tuple[Tensor, str, str]], width: float
) -> bytes:
    """A system from its flattest side, and each body from near: its true path, predicted ends.

    Args:
        charge: (n,), its sign is the colour.
        path: (T, n, 3), from what is known to what is asked.
        views: predicted positions (n, 3), marker and colour, by name.
        width: inches.
    """
    columns = 2 if width < PHONE else 3
    rows = -(-(1 + len(charge)) // columns)
    figure = Figure(figsize=(width, rows * width / columns + 1.0), layout="constrained")
    axes: Any = figure.subplots(rows, columns).flatten()
    middle = path.flatten(0, 1).mean(0)
    plane = torch.linalg.svd(path.flatten(0, 1) - middle).Vh[:2].T
    flat = (path - middle) @ plane
    ends = [((p - middle) @ plane, marker, colour) for p, marker, colour in views.values()]
    every = (*flat, *(places for places, _, _ in ends))
    reach = max(float((places - flat[0]).abs().max()) for places in every)
    _frame(axes[0], "all particles", flat.flatten(0, 1))
    for body, axis in enumerate(axes[1 : 1 + len(charge)]):
        colour = CHARGES[int(charge[body] > 0)]
        for picture in (axes[0], axis):
            _path(picture, flat[:, body], colour)
        place = {"xytext": (6, 6), "textcoords": "offset points"}
        axes[0].annotate(f"{body + 1}", flat[0, body], color=GREY, fontsize=TITLE, **place)
        for places, marker, shade in ends:
            axis.plot(*places[body].numpy(), marker, color=shade, markersize=8, markeredgewidth=2)
        x, y = flat[-1, body].numpy()
        axis.plot(x, y, "o", color=colour, markersize=13, fillstyle="none", markeredgewidth=1.8)
        box = flat[0, body] + reach * torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
        _frame(axis, f"particle {body + 1}", box)
    _legend(figure, *_marks(views), width)
    return png(figure)


def _path(axis: Axes, places: Tensor, colour: str) -> None:
    """(T, 2) places, with a disk where they begin."""
    x, y = places.T.numpy()
    axis.plot(x, y, color=colour, linewidth=2.2)
    axis.plot(x[0], y[0], "o", color=colour, markersize=8)


def _marks(views: Mapping[str, tuple[Tensor, str, str]]) -> tuple[list[Line2D], list[str]]:
    """What the legend of forecasts shows, and its words."""
    marks: dict[str, tuple[str, str, Any]] = {
        "positive: start, true path": (CHARGES[1], "o", "-"),
        "negative": (CHARGES[0], "o", "-"),
        "true end": (GREY, "o", ""),
        **{name: (colour, marker, "") for name, (_, marker, colour) in views.items()},
    }
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle=line, markeredgewidth=2)
        for colour, marker, line in marks.values()
    ]
    handles[2].set(fillstyle="none", markersize=11)
    return handles, list(marks)


def _frame(axis: Axes, title: str, box: Tensor) -> None:
    """A square frame around points (N, 2), without numbers; a line shows a round length."""
    low, high = box.amin(0), box.amax(0)
    half = 0.6 * float((high - low).max())
    x, y = (float(m) for m in (low + high) / 2)
    axis.set(xlim=(x - half, x + half), ylim=(y - half, y + half), xticks=[], yticks=[])
    axis.set_box_aspect(1)
    axis.spines[:].set_color(GREY)
    axis.set_title(title, color=GREY, fontsize=TITLE, loc="left")
    length = 1 if half > 1.5 else 0.2
    left, floor = x - 0.92 * half, y - 0.92 * half
    axis.plot([left, left + length], [floor, floor], color=GREY, linewidth=2)
    axis.text(
        left, floor + 0.04 * half, f"length {length}", color=GREY, fontsize=SMALLEST, va="bottom"
    )


def earthworks(surface: Surface, ways: tuple[Tensor, Tensor, Tensor], width: float) -> bytes:
    """A map coloured by its height about the mean, and where its heaps of earth are carried.

    Args:
        surface: the map.
        ways: (C, 2) where heaps are and (C, 2) where they go, in units of the longer side; (C,)
            what part of the earth each is.
        width: inches.
    """
    assert surface.grid
    heights = surface.truth[:, 2].view(surface.grid)
    above = (heights - heights.mean()).numpy()
    places = surface.truth[:, :2]
    across, along = map(float, places.amax(0) - places.amin(0))
    side = max(across, along)
    figure = Figure(figsize=(width, width * along / across + 0.6), layout="constrained")
    axis = figure.subplots()
    most = float(np.quantile(np.abs(above), 0.98))
    ground = LinearSegmentedColormap.from_list("ground", EARTH)
    box = (0, across / side, 0, along / side)
    image = axis.imshow(above, cmap=ground, vmin=-most, vmax=most, extent=box)
    starts, ends, share = (t.cpu() for t in ways)
    sizes = (share / share.max()).sqrt().numpy()
    for start, end, size in zip(starts.numpy(), ends.numpy(), sizes, strict=True):
        width_and_head = {"linewidth": 0.5 + 2 * size, "mutation_scale": 6 + 6 * size}
        whole_way = {"shrinkA": 0, "shrinkB": 0}
        style = {"arrowstyle": "-|>", "color": INK, **width_and_head, **whole_way}
        axis.annotate("", end, start, arrowprops=style)
    axis.set_axis_off()
    bar = figure.colorbar(image, ax=axis, orientation="horizontal", shrink=0.8, aspect=40, pad=0.02)
    bar.set_label(f"height above the mean [{surface.unit}]", color=GREY, fontsize=SMALLEST)
    bar.ax.tick_params(colors=GREY, labelsize=SMALLEST)
    bar.outline.set_visible(False)
    return png(figure)


def overlaid(fixed: Tensor, views: Mapping[str, Tensor], width: float) -> bytes:
    """A cloud (N, 3) and another one (M, 3) in several places, from the flattest side."""
    rows, columns = (len(views), 1) if width < PHONE else (1, len(views))
    every = torch.cat([fixed, *views.values()])
    plane = torch.linalg.svd(fixed - fixed.mean(0), full_matrices=False).Vh[:2].T
    high = height_of(every @ plane, width / columns)
    figure = Figure(figsize=(width, rows * high + 0.4), layout="constrained")
    axes: Any = figure.subplots(rows, columns, sharex=True, sharey=True)
    for axis, (title, moving) in zip(axes.flat, views.items(), strict=True):
        for points, colour, name in ((fixed, CHARGES[0], "first scan"), (moving, ACCENT, "second")):
            size = 0.5 * dot_size(len(points), width / columns)
            x, y = (points @ plane).T.numpy()
            axis.scatter(x, y, s=size, color=colour, linewidths=0, alpha=0.8, label=name)
        axis.set_title(title, color=GREY, fontsize=TITLE, loc="left")
        axis.set_aspect("equal")
        axis.set_axis_off()
    handles, names = axes.flat[0].get_legend_handles_labels()
    _legend(figure, handles, names, width)
    return png(figure)


def parity(views: Mapping[str, tuple[Tensor, Tensor]], width: float) -> bytes:
    """Numbers that should be equal, (true, found) by what they are; a line where they are."""
    columns = 1 if width < PHONE else len(views)
    rows, each = len(views) // columns, width / columns
    figure = Figure(figsize=(width, rows * each), layout="constrained")
    axes: Any = figure.subplots(rows, columns, squeeze=False)
    for axis, (name, (truth, found)) in zip(axes.flat, views.items(), strict=True):
        ends = [float(end) for end in torch.cat([truth, found]).aminmax()]
        axis.plot(ends, ends, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)))
        axis.plot(truth.cpu(), found.cpu(), ".", color=ACCENT, alpha=0.3, markersize=4)
        axis.set_title(name, color=GREY, fontsize=TITLE, loc="left")
        axis.set(xlabel="computed", ylabel="predicted")
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


def _scatter(axis: Axes, surface: Surface, points: Tensor, width: float) -> None:
    """The held-out points seen along their flattest direction, coloured by their error."""
    rows = surface.held_out
    x, y = (points[rows] @ _plane(surface)).T.numpy()
    error = (points - surface.truth)[rows].norm(dim=1).numpy()
    size, most = dot_size(len(x), width), 2 * surface.sigma
    axis.scatter(x, y, c=error, s=size, linewidths=0, cmap="viridis", vmin=0, vmax=most)
    axis.set_aspect("equal")


def dot_size(count: int, width: float) -> float:
    """Of a scatter of so many points that fill a part so many inches wide, in square points."""
    return min(max(0.14 * (72 * width) ** 2 / count, 2.0), 40.0)


def _plane(surface: Surface) -> Tensor:
    """(3, 2) the two directions in which the held-out points lie apart most."""
    held_out = surface.truth[surface.held_out]
    centred = held_out - held_out.mean(0)
    directions: Tensor = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, 1:].flip(1)
    return directions


def height_of(places: Tensor, width: float) -> float:
    """Inches of a picture that points (N, 2), at one scale, fill with their title."""
    wide, high = map(float, places.amax(0) - places.amin(0))
    return min(width, 0.5 + width * high / max(wide, 1e-9))


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
    width: float,
) -> bytes:
    """The voxels (N, 3), once for each view, below each other.

    Args:
        places: whole numbers.
        views: (N,) which of the colours each voxel has, by title.
        names: what the colours mean; none where the views say it.
        colours: by number.
        width: inches.
    """
    voxels = places.cpu().numpy()
    voxels = voxels - voxels.min(0)
    if np.ptp(voxels[:, 1]) > np.ptp(voxels[:, 0]):  # the longer side along the picture
        voxels = np.stack([voxels[:, 1], voxels[:, 0].max() - voxels[:, 0], voxels[:, 2]], 1)
    order = np.argsort(voxels @ _axes()[2], kind="stable")  # far ones first
    low, high = (f(_flat(voxels), axis=0) for f in (np.min, np.max))
    across, upwards = high - low + 2
    tall = min(width * upwards / across, 0.6 * width)
    figure = Figure(figsize=(width, len(views) * (tall + 0.3) + 0.3), layout="constrained")
    axes: Any = figure.subplots(len(views), 1, squeeze=False)
    shades = np.array([to_rgb(colour) for colour in colours])
    for axis, (title, which) in zip(axes.flat, views.items(), strict=True):
        _draw(axis, voxels[order], shades[which.cpu().numpy()[order]])
        axis.set_title(title, color=GREY, fontsize=TITLE, loc="left")
    if names:
        patches = [Patch(color=c, label=n) for n, c in zip(names, colours, strict=True)]
        _legend(figure, patches, names, width)
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
