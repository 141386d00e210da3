"""Plots of `torchweft inspect`: PNG bytes, as `pictures` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from torchweft.demo.inspection.inspection import TILES, Layer
from torchweft.demo.page.pictures import ACCENT, GREY, INK, plain_axis, png
from torchweft.voxels import GemmGroups

__all__ = ["groups_picture", "offsets_picture", "waste_picture"]

LETTERS = 7  # numbers are written into squares of at most so many places a side


def offsets_picture(layer: Layer) -> bytes:
    """What part of the voxels has a neighbour at each offset, one square a plane."""
    k = layer.kernel
    share = (100 * layer.counts.double() / layer.voxels).view(k, k, k)
    others = share.flatten().sort().values[: max(k**3 - 1, 1)]
    most = max(float(others[-1]), 1e-9)  # itself, 100 %, would leave no colours for the others
    figure = Figure(figsize=(9.6, 9.6 / min(max(k, 3), 6) + 0.5), layout="constrained")
    axes: Any = figure.subplots(1, k, squeeze=False)
    for plane, axis in enumerate(axes.flat):
        axis.imshow(share[:, :, plane].numpy(), cmap="YlOrBr", vmin=0, vmax=most)
        offset = plane - (k - 1) // 2
        axis.set_title(f"third axis {offset:+d}".replace("+0", "0"), color=GREY, fontsize=10)
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        if k <= LETTERS:
            _write(axis, share[:, :, plane].tolist(), most)
    axes[0, 0].set_xlabel("second axis →", color=GREY)
    axes[0, 0].set_ylabel("← first axis", color=GREY)
    return png(figure)


def _write(axis: Any, rows: list[list[float]], most: float) -> None:
    for row, numbers in enumerate(rows):
        for column, number in enumerate(numbers):
            colour = "white" if number > 0.6 * most else INK
            size = 9 if len(rows) <= 4 else 6
            axis.text(column, row, f"{number:.3g}", ha="center", va="center", color=colour,
                      fontsize=size)  # fmt: skip


def waste_picture(layers: Sequence[Layer]) -> bytes:
    """Tile waste over the size of voxels."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    axis = figure.subplots()
    sizes = [layer.size for layer in layers]
    for order, colour in (("ascending", GREY), ("by mask", ACCENT)):
        for rows, style in zip(TILES, ("-", (0, (4, 3))), strict=True):
            waste = [layer.waste[order, rows] for layer in layers]
            label = f"{order}, {rows} rows"
            axis.plot(sizes, waste, "o", linestyle=style, color=colour, label=label, linewidth=2)
    axis.set(xlabel="edge of a voxel [the file's unit]", ylabel="tile waste", xscale="log")
    axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axis.minorticks_off()
    axis.set_ylim(bottom=1)
    axis.legend(frameon=False, labelcolor=GREY)
    plain_axis(axis)
    return png(figure)


def groups_picture(found: GemmGroups) -> bytes:
    """The rows of each group's product, and what of them is padding."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    axis = figure.subplots()
    places = range(len(found.groups))
    used = [group.req for group in found.groups]
    padding = [group.alloc - group.req for group in found.groups]
    axis.bar(places, used, color=ACCENT, width=0.7, label="pairs")
    axis.bar(places, padding, bottom=used, color=GREY, width=0.7, label="padding")
    for place, group in zip(places, found.groups, strict=True):
        axis.text(place, group.alloc, f"{len(group.members)}", color=GREY, ha="center", va="bottom")
    axis.set(xlabel="group", ylabel="rows", xticks=places)
    axis.legend(frameon=False, labelcolor=GREY)
    plain_axis(axis)
    return png(figure)
