"""`torchweft inspect`: what the layers of a network cost on a point cloud, as a page.

L = Σ_k pairs of offset k         operations 2 L C², of a dense layer 2 K (voxels of the box) C²
tile waste = Σ_tiles (rows of the tile · offsets that one of its rows needs) / L
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

import torchweft
from torchweft.demo import page
from torchweft.demo.data.readers import read_points
from torchweft.demo.measure import versions
from torchweft.demo.pictures import ACCENT, GREY, INK, LAND, blocks, plain_axis, png
from torchweft.errors import DTypeError, ShapeError
from torchweft.progress import step, track
from torchweft.reductions import LazyTensor
from torchweft.voxels import GemmGroups, SparseTensor, greedy_group, kernel_map, voxelize

__all__ = [
    "NEAR",
    "TILES",
    "Layer",
    "by_mask",
    "descending",
    "inspect",
    "layer_of",
    "padding_of",
    "spacing_of",
    "tile_waste",
]

FACTORS = (0.5, 1.0, 2.0, 4.0)  # of the voxel size
SHOWN = 60_000  # voxels of a picture, at most
ALIGNMENTS = (4, 64, 128)
LETTERS = 7  # numbers are written into squares of at most so many places a side


def inspect(
    file: Path,
    size: float | None,
    kernel: int,
    channels: int,
    out: Path,
    key: str | None = None,
) -> Path:
    """Voxelize a cloud at a few sizes, write `out/index.html`, and return its path.

    Args:
        file: of points, in a format of `read_points`.
        size: edge of a voxel; None is twice the median distance of a point to its nearest.
        kernel: of every axis; 3 and 5 are shown beside it.
        channels: C, in and out.
        out: folder of the page.
        key: name of the points in an .npz or .pt of several arrays.

    Raises:
        ShapeError, DTypeError, BackendError, FileNotFoundError: what cannot be inspected.
        NotADirectoryError: `out` cannot be made or written.
    """
    _check(size, kernel, channels)
    points = read_points(file, key)
    page.make_folder(out)
    if len(points) < 2:
        raise ShapeError(
            f"{file} holds {len(points)} finite points: at least 2 are needed. "
            "Pass a file with more points."
        )
    with step("measuring distances of points"):
        chosen = float(f"{2 * spacing_of(points):.2g}") if size is None else size
    kernels = sorted({3, 5, kernel})
    sizes = track([factor * chosen for factor in FACTORS], "voxels")
    clouds = {edge: _voxels(points, edge) for edge in sizes}
    cases = [(edge, k) for edge in clouds for k in kernels]
    layers = [layer_of(clouds[edge], edge, k) for edge, k in track(cases, "layers")]
    with step("drawing the page"):
        text = _page(file.name, len(points), clouds, layers, chosen, kernel, channels)
    path = out / "index.html"
    path.write_text(text, encoding="utf-8")
    return path


def _voxels(points: Tensor, size: float) -> SparseTensor:
    return voxelize(points, size, points[:, :1], origin=points.amin(0))[0]


def _check(size: float | None, kernel: int, channels: int) -> None:
    if size is not None and not 0 < size < float("inf"):
        raise DTypeError(
            f"--size is {size}: the edge of a voxel must be positive and finite. Pass --size 0.1, "
            "or leave it out: it then follows from the cloud."
        )
    for name, value in (("--kernel", kernel), ("--channels", channels)):
        if value < 1:
            raise ShapeError(
                f"{name} is {value}: it must be at least 1. Pass {name} 3, for example."
            )


def _page(
    name: str,
    num_points: int,
    clouds: Mapping[float, SparseTensor],
    layers: Sequence[Layer],
    size: float,
    kernel: int,
    channels: int,
) -> str:
    """The page as HTML; `clouds` are the voxels by their edge, `layers` those of all cases."""
    chosen = next(layer for layer in layers if (layer.size, layer.kernel) == (size, kernel))
    chapters = [
        page.Chapter("The cloud", name, _cloud(num_points, clouds, chosen)),
        page.Chapter("Sizes and kernels", "What a layer costs", _costs(layers, chosen, channels)),
        page.Chapter("Pairs", "Which neighbours there are", _offsets(chosen)),
        page.Chapter("Tiles", "Wasted multiplications on a GPU", _tiles(layers, kernel)),
        page.Chapter("Groups", "One product for several offsets", _groups(chosen)),
    ]
    facts = [
        ("file", name),
        ("layer", f"submanifold, kernel {kernel}³, {channels} → {channels} channels, float16"),
        ("versions", f"torchweft {torchweft.__version__}, {versions()}"),
    ]
    return page.page("A cloud as voxels", _LEAD, chapters, facts)


_LEAD = (
    "Numbers to choose voxel sizes, kernels and algorithms by: the pairs of neighbours, the "
    "operations and memory of a layer, and the part of a GPU's work that is wasted."
)


def _cloud(num_points: int, clouds: Mapping[float, SparseTensor], chosen: Layer) -> tuple[str, ...]:
    numbers = [
        (f"{num_points:,}", "points"),
        (f"{chosen.voxels:,}", f"voxels of edge {chosen.size:g}"),
        (f"{100 * chosen.voxels / chosen.box:.3g}%", "of their box are voxels"),
        (f"{chosen.pairs / chosen.voxels:.2f}", f"pairs a voxel, kernel {chosen.kernel}³"),
    ]
    fits = [edge for edge, tensor in clouds.items() if len(tensor) <= SHOWN]
    if not fits:
        return (page.cards(numbers),)
    edge = min(fits, key=lambda e: abs(e - chosen.size))
    places = clouds[edge].C[:, 1:]
    picture = partial(blocks, places, {f"edge {edge:g}": _levels(places[:, 2])}, (), LAND)
    return page.cards(numbers), page.figure(
        picture, "Its voxels, coloured by height: green is low, white high."
    )


def _levels(height: Tensor) -> Tensor:
    """(N,) which fifth of the voxels each belongs to, by height."""
    edges = height.double().quantile(torch.linspace(0, 1, len(LAND) + 1, dtype=torch.float64)[1:-1])
    return torch.bucketize(height.double(), edges)


def _costs(layers: Sequence[Layer], chosen: Layer, channels: int) -> tuple[str, ...]:
    parts = [f"{part} [MB]" for part in chosen.bytes(channels)]
    head = ["edge, kernel", "voxels", "pairs / voxel", "GFLOP", "of dense", *parts]
    rows = [
        (
            _named(layer),
            f"{layer.voxels:,}",
            f"{layer.pairs / layer.voxels:.2f}",
            f"{layer.operations(channels) / 1e9:.3g}",
            f"1 / {layer.saved(channels):,.0f}",
            *(f"{count / 1e6:.3g}" for count in layer.bytes(channels).values()),
        )
        for layer in layers
    ]
    text = (
        "Small voxels have few neighbours: a large kernel on them needs few multiplications but "
        "a large kernel map. Where a voxel has nearly as many pairs as with the next kernel size, "
        "a coarser level with the smaller kernel reaches as far at a lower cost."
    )
    caption = (
        f"A submanifold layer, {channels} → {channels} channels: operations forward and their "
        "part of a dense layer's on the box; memory in float16. Edges are in the file's unit. "
        "Gathered rows are what gather, multiply and scatter would store; torchweft holds no "
        "more than "
        "a chunk of them."
    )
    return page.paragraph(text), page.table(caption, head, rows, layers.index(chosen))


def _named(layer: Layer) -> str:
    """A name that does not wrap."""
    return f"{layer.size:g},\N{NO-BREAK SPACE}{layer.kernel}³"


def _offsets(chosen: Layer) -> tuple[str, ...]:
    text = (
        "How many of the voxels have a neighbour at each offset. An offset at which few voxels "
        "have one costs a weight and a row of the kernel map as any other. Flat kernels, such as "
        "3 × 3 × 1 followed by 1 × 1 × 3, leave such offsets out."
    )
    caption = (
        f"Voxels with a neighbour at each offset, of {chosen.voxels:,}, in percent; edge "
        f"{chosen.size:g}, one square for each place along the third axis."
    )
    return page.paragraph(text), page.figure(partial(_offsets_picture, chosen), caption)


def _tiles(layers: Sequence[Layer], kernel: int) -> tuple[str, ...]:
    text = (
        "A GPU kernel multiplies tiles of rows: all rows of a tile at each offset that one of "
        "them needs. With rows in ascending order, those of a tile need different offsets. With "
        "rows sorted by the offsets that they need (by mask), fewer multiplications are wasted. "
        f"torchweft's GPU kernels sort rows so, {NEAR:,} at a time. 1 means no waste."
    )
    cases = [(order, rows) for order in ("ascending", "by mask") for rows in TILES]
    head = ["edge, kernel", *(f"{order}, {rows} rows" for order, rows in cases)]
    lines = [(_named(layer), *(f"{layer.waste[case]:.2f}" for case in cases)) for layer in layers]
    caption = "Tile waste: multiplications of the tiles over those of the pairs."
    picture = partial(_waste_picture, [layer for layer in layers if layer.kernel == kernel])
    return (
        page.paragraph(text),
        page.figure(picture, f"Tile waste with kernel {kernel}³ over the size of voxels."),
        page.table(caption, head, lines),
    )


def _groups(chosen: Layer) -> tuple[str, ...]:
    text = (
        "A layer that gathers rows into a buffer and multiplies them there is fast with few, "
        "large products, so offsets with few pairs share one. `torchweft.voxels.greedy_group` "
        "makes groups of up to six offsets, those with the most pairs first, and pads their rows "
        "to a multiple; `build_masks` gives the place of each pair in the buffer."
    )
    found = greedy_group(descending(chosen.counts))
    rows = [
        (f"{alignment}", f"{count:,}", f"{share:.2%}")
        for alignment in ALIGNMENTS
        for count, share in [padding_of(chosen.counts, alignment)]
    ]
    caption = "Groups of at most six offsets, at several alignments of their rows."
    return (
        page.paragraph(text),
        page.figure(
            partial(_groups_picture, found),
            f"Rows of each group, edge {chosen.size:g}, kernel {chosen.kernel}³, rows in multiples "
            "of 4; above a bar, its offsets.",
        ),
        page.table(caption, ["rows in multiples of", "groups", "padding"], rows),
    )


def _offsets_picture(layer: Layer, width: float) -> bytes:
    """What part of the voxels has a neighbour at each offset, one square a plane."""
    k = layer.kernel
    share = (100 * layer.counts.double() / layer.voxels).view(k, k, k)
    others = share.flatten().sort().values[: max(k**3 - 1, 1)]
    most = max(float(others[-1]), 1e-9)  # itself, 100 %, would leave no colours for the others
    figure = Figure(figsize=(width, width / min(max(k, 3), 6) + 0.5), layout="constrained")
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


def _waste_picture(layers: Sequence[Layer], width: float) -> bytes:
    """Tile waste over the size of voxels."""
    figure = Figure(figsize=(width, max(0.36 * width, 2.8)), layout="constrained")
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


def _groups_picture(found: GemmGroups, width: float) -> bytes:
    """The rows of each group's product, and what of them is padding."""
    figure = Figure(figsize=(width, max(0.36 * width, 2.8)), layout="constrained")
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


TILES = (64, 128)  # rows of a tile of the GPU kernels
NEAR = 2**20  # rows that those kernels sort by mask among themselves
BITS = 63  # of a sort key
ASKED = 1000  # points whose nearest neighbour gives the spacing
MOST = 2**28  # entries of a table, one GB of them


class Layer(NamedTuple):
    """A submanifold layer on a cloud's voxels.

    Args:
        size: edge of a voxel.
        kernel: of every axis.
        voxels: N.
        box: voxels of the box around them.
        counts: (K,) pairs of each offset.
        waste: by (order, rows of a tile), order "ascending" or "by mask".
    """

    size: float
    kernel: int
    voxels: int
    box: int
    counts: Tensor
    waste: dict[tuple[str, int], float]

    @property
    def pairs(self) -> int:
        """L, of all offsets."""
        return int(self.counts.sum())

    def operations(self, channels: int) -> int:
        """2 L C², forward."""
        return 2 * self.pairs * channels**2

    def saved(self, channels: int) -> float:
        """Operations of torch's dense layer on the box, for each of this layer's."""
        return 2 * len(self.counts) * self.box * channels**2 / self.operations(channels)

    def bytes(self, channels: int) -> dict[str, int]:
        """What a layer in float16 keeps, and what gathering its rows would add."""
        tables = 1 if self.kernel % 2 else 2  # of an odd kernel one serves both directions
        return {
            "in, out": 2 * 2 * self.voxels * channels,
            "map": tables * 4 * len(self.counts) * self.voxels,
            "weight": 2 * len(self.counts) * channels**2,
            "gathered": 2 * self.pairs * channels,
        }


def layer_of(tensor: SparseTensor, size: float, kernel: int) -> Layer:
    """The numbers of a submanifold layer on voxels in ascending order."""
    num_offsets = kernel**tensor.dim
    if num_offsets * len(tensor) > MOST:
        raise ShapeError(
            f"a kernel of {kernel} on {len(tensor):,} voxels of edge {size:g} makes tables of "
            f"{num_offsets * len(tensor):,} entries: {MOST:,} are the most that are inspected. "
            "Pass a larger --size, a smaller --kernel, or a part of the cloud."
        )
    found = kernel_map(tensor, kernel)
    there = found.sources >= 0
    order = by_mask(there)
    waste = {("ascending", rows): tile_waste(there, rows) for rows in TILES}
    there = there.index_select(1, order)
    waste |= {("by mask", rows): tile_waste(there, rows) for rows in TILES}
    box = int(torch.tensor(tensor.spatial_shape).prod())
    return Layer(size, kernel, len(tensor), box, found.counts, waste)


def by_mask(there: Tensor) -> Tensor:
    """(N,) the rows in the order of the GPU kernels' tiles, from (K, N): whether a pair is there.

    Rows are sorted by their masks among their NEAR neighbours: Gray codes, in which neighbours
    differ at one offset, the rarest offset in the highest bit.  Offsets past 63 bits, the most
    frequent ones, do not count.
    """
    count = there.shape[1]
    near = torch.arange(count) // NEAR
    bits = min(len(there), BITS - int(near.amax() if count else 0).bit_length())
    rarest = there.sum(1).argsort(stable=True)[:bits]
    key = torch.zeros(count, dtype=torch.int64)
    for place, offset in enumerate(rarest.tolist()):
        key += there[offset].long() << (bits - 1 - place)
    for log in range(6):
        key ^= key >> (1 << log)
    return torch.argsort((near << bits) | key, stable=True)


def tile_waste(there: Tensor, rows: int) -> float:
    """Products of tiles of so many rows over those of the pairs, (K, N) in the order of tiles."""
    padded = torch.nn.functional.pad(there, (0, -there.shape[1] % rows))
    needed = padded.view(len(there), -1, rows).any(2).sum()
    return rows * int(needed) / max(int(there.sum()), 1)


def spacing_of(points: Tensor) -> float:
    """Median distance of a point to the nearest at another place, over a thousand of them."""
    asked = torch.linspace(0, len(points) - 1, min(ASKED, len(points))).long()
    squares = LazyTensor(points[asked][:, None]).sqdist(LazyTensor(points[None]))
    elsewhere = (-squares).ifelse(torch.inf, squares)  # inf where the square is 0
    found = float(elsewhere.min(1).median().sqrt())
    if found == float("inf"):
        raise ShapeError(
            f"all {len(points)} points are at one place: a voxel size follows from distances. "
            "Pass --size, or another cloud."
        )
    return found


def padding_of(counts: Tensor, alignment: int) -> tuple[int, float]:
    """How many groups `greedy_group` makes of the pairs, and what part of their rows is padding."""
    groups = greedy_group(descending(counts), alignment)
    return len(groups.groups), 1 - int(counts.sum()) / max(groups.total_slots, 1)


def descending(counts: Tensor) -> list[int]:
    """The counts of the offsets with a pair, most first."""
    most: list[int] = counts[counts > 0].sort(descending=True).values.tolist()
    return most
