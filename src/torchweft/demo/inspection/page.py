"""The page of `torchweft inspect`: what one needs to choose voxel sizes, kernels and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import torchweft
from torchweft.demo.inspection.inspection import NEAR, TILES, Layer, descending, padding_of
from torchweft.demo.inspection.pictures import groups_picture, offsets_picture, waste_picture
from torchweft.demo.measure import versions
from torchweft.demo.page import page
from torchweft.demo.page.blocks import blocks
from torchweft.demo.page.pictures import LAND
from torchweft.voxels import SparseTensor, greedy_group

__all__ = ["written"]

SHOWN = 60_000  # voxels of a picture, at most
ALIGNMENTS = (4, 64, 128)


def written(
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
        page.Chapter("Tiles", "What a GPU multiplies in vain", _tiles(layers, kernel)),
        page.Chapter("Groups", "One product for several offsets", _groups(chosen)),
    ]
    facts = [
        ("file", name),
        ("layer", f"submanifold, kernel {kernel}³, {channels} → {channels} channels, float16"),
        ("versions", f"torchweft {torchweft.__version__}, {versions()}"),
    ]
    return page.page("A cloud as voxels", _LEAD, chapters, facts)


_LEAD = (
    "What one needs to choose voxel sizes, kernels and algorithms: who meets whom, how much of a "
    "GPU's work is wasted, and what a layer costs."
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
    picture = blocks(places, {f"edge {edge:g}": _levels(places[:, 2])}, (), LAND)
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
        "Small voxels have few neighbours: a large kernel on them multiplies little but keeps a "
        "large map. Where pairs a voxel approach those of the next kernel size, a coarser level "
        "with the smaller kernel sees as far for less."
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
        "How many of the voxels have a neighbour at each offset. Offsets that few voxels have "
        "cost a weight and a row of the map for little: a flat kernel, say 3 × 3 × 1 beside "
        "1 × 1 × 3, leaves them out."
    )
    caption = (
        f"Voxels with a neighbour at each offset, of {chosen.voxels:,}, in percent; edge "
        f"{chosen.size:g}, one square for each place along the third axis."
    )
    return page.paragraph(text), page.figure(offsets_picture(chosen), caption)


def _tiles(layers: Sequence[Layer], kernel: int) -> tuple[str, ...]:
    text = (
        "A tile of rows is multiplied at each offset that one of its rows needs. In ascending "
        "order neighbours along one axis share a tile, their other neighbours differ; rows sorted "
        f"by which offsets they have need fewer. torchweft's GPU kernels sort so, among "
        f"{NEAR:,} rows "
        "at a time. 1 is no waste."
    )
    cases = [(order, rows) for order in ("ascending", "by mask") for rows in TILES]
    head = ["edge, kernel", *(f"{order}, {rows} rows" for order, rows in cases)]
    lines = [(_named(layer), *(f"{layer.waste[case]:.2f}" for case in cases)) for layer in layers]
    caption = "Tile waste: multiplications of the tiles over those of the pairs."
    picture = waste_picture([layer for layer in layers if layer.kernel == kernel])
    return (
        page.paragraph(text),
        page.figure(picture, f"Tile waste with kernel {kernel}³ over the size of voxels."),
        page.table(caption, head, lines),
    )


def _groups(chosen: Layer) -> tuple[str, ...]:
    text = (
        "Who gathers rows into a buffer and multiplies them there wants few, large products: "
        "offsets with few pairs share one. `torchweft.voxels.greedy_group` packs them, most pairs "
        "first, up to six to a group, and fills rows up to a multiple; `build_masks` gives the "
        "slot of each pair."
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
            groups_picture(found),
            f"Rows of each group, edge {chosen.size:g}, kernel {chosen.kernel}³, rows in multiples "
            "of 4; above a bar, its offsets.",
        ),
        page.table(caption, ["rows in multiples of", "groups", "padding"], rows),
    )
