"""voxels: a sparse U-Net learns to tell the ridges of a surface from its slopes and valleys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torchweft.demo import Options, page
from torchweft.demo.data.surface import SHARE, Part, Surface, kinds_of, landforms, load, split
from torchweft.demo.measure import OpError, interleaved, op_errors
from torchweft.demo.models.segmenter import (
    PlainSegmenter,
    Segmenter,
    confusion,
    fit,
    predicted,
    step_of,
)
from torchweft.demo.pictures import blocks, curve
from torchweft.voxels import SparseTensor, kernel_map, sparse_conv, sparse_inverse_conv
from torchweft.voxels.reference import dense_conv

__all__ = ["chapter"]

COLOURS = ("#3f7cac", "#cfc6b4", "#b8481a")  # of the kinds
ROUNDS = 9
FEW = 600  # voxels: a dense box of them is small enough for float64

_FORMULA = (
    "<i>y</i>[<i>o</i>] = Σ<sub><i>k</i></sub> <i>x</i>[in(<i>o</i>, <i>k</i>)] "
    "<i>w</i>[<i>k</i>] &emsp; in(<i>o</i>, <i>k</i>): the voxel at offset <i>k</i> from "
    "<i>o</i>, where there is one"
)


def chapter(options: Options) -> page.Chapter:
    """Learn on one part of the surface, tell the kinds of voxels of the other."""
    surface = load(options.points, options.seed, options.key)
    tiles, test = landforms(surface, options.device)
    torch.manual_seed(options.seed)
    model = Segmenter().to(options.device)
    losses = fit(model, tiles, options.seed)
    scores = predicted(model, test.tensor)
    table = confusion(scores.argmax(1), test.label)
    plain = PlainSegmenter().to(options.device)
    plain.load_state_dict(model.state_dict())
    times = _times(model, plain, tiles[0], test)
    chance = _entropy(torch.cat([tile.label for tile in tiles]))
    places, kinds = test.tensor.C[:, 1:], kinds_of(surface)
    views = {"computed from the surface": test.label, "learned": scores.argmax(1)}
    return page.Chapter(
        "torchweft.voxels",
        "A network that knows a ridge when it sees one",
        (
            *_story(surface, tiles, test, table, times),
            page.figure(
                blocks(places, views, kinds, COLOURS),
                "The held-out part as the network sees it: voxels, here coloured by kind. "
                f"The same for {float(table.diag().sum() / table.sum()):.1%} of them.",
            ),
            _kinds_table(kinds, table),
            page.figure(
                curve(losses, {"shares of the kinds": chance}, "cross entropy"),
                f"Learning: cross entropy of each of {len(losses)} steps, one tile a step, and its "
                "root mean square over 21 steps. Dashed: knowing only how frequent each kind is.",
            ),
            _network_table(model, plain, test.tensor),
            _accuracy_table(tiles[0].tensor),
            _times_table(times, tiles[0], test),
        ),
    )


def _entropy(label: Tensor) -> float:
    """−Σ p log p over the kinds."""
    share = torch.bincount(label).double() / len(label)
    return float(torch.special.entr(share).sum())


def _times(
    model: Segmenter, plain: Segmenter, tile: Part, test: Part
) -> dict[str, dict[str, float]]:
    """Milliseconds of torchweft and of plain torch, turn by turn."""
    models = {"torchweft": model, "torch": plain}
    steps = {name: step_of(m, tile) for name, m in models.items()}
    passes = {name: partial(predicted, m, test.tensor) for name, m in models.items()}
    device = tile.label.device
    # learned statistics move while a step is timed: the passes come first
    predicting = interleaved(passes, device, ROUNDS)
    return {
        "one step of learning": interleaved(steps, device, ROUNDS),
        "prediction of the held-out part": predicting,
    }


def _story(
    surface: Surface,
    tiles: Sequence[Part],
    test: Part,
    table: Tensor,
    times: dict[str, dict[str, float]],
) -> list[str]:
    """What was done, with the numbers that matter."""
    box = torch.tensor(test.tensor.spatial_shape).prod()
    low, middle, high = kinds_of(surface)
    measure = (
        "the mean curvature of its smoothed heights"
        if surface.grid
        else "how far the neighbours of a point leave their plane (surface variation)"
    )
    text = (
        f"{surface.name} again, now as voxels of three kinds, told apart by {measure}: the lowest "
        f"{SHARE:.0%} of those that are learned from are “{low}”, the highest {SHARE:.0%} "
        f"“{high}”, all others “{middle}”. The network is given neither that number nor the "
        "altitude. It sees which voxels are there, and how high the surface lies within each. "
        "Every number below is of a part that it has never seen: "
        f"{len(test.label):,} voxels in a box of {int(box):,}."
    )
    pairs = float(kernel_map(test.tensor, 3).counts.sum()) / len(test.label)
    overlap = _overlaps(table)
    numbers = [
        (f"{pairs:.1f}", "neighbours of a voxel at the 27 offsets, itself too"),
        (f"{100 * len(test.label) / int(box):.3g}%", "of the box are voxels"),
        (f"{times['one step of learning']['torchweft']:.0f} ms", "for a step of learning"),
        (f"{float(overlap.mean()):.2f}", "mean overlap (IoU) with the truth"),
    ]
    meaning = (
        "Submanifold convolutions keep the voxels as they are, strided ones go to a coarser level, "
        "inverse ones back to the very voxels that they came from. The pairs are found once "
        "for each set of voxels and cached with it; empty space costs nothing. No sum "
        "depends on the order of the rows or of threads: learning repeats bit for bit. "
        f"{len(tiles)} tiles are learned from, three in four of them mirror images."
    )
    return [
        page.paragraph(text),
        page.cards(numbers),
        page.formula(_FORMULA),
        page.paragraph(meaning),
    ]


def _overlaps(table: Tensor) -> Tensor:
    """Intersection over union of each kind."""
    both = table.diag().double()
    return both / (table.sum(0) + table.sum(1) - both)


def _kinds_table(kinds: Sequence[str], table: Tensor) -> str:
    rows = [
        (name, *(f"{int(n):,}" for n in line), f"{float(overlap):.2f}")
        for name, line, overlap in zip(kinds, table, _overlaps(table), strict=True)
    ]
    caption = (
        "Voxels of the held-out part: what they are (rows) and what they were taken for (columns)."
    )
    return page.table(caption, ["", *kinds, "IoU"], rows)


def _network_table(model: Segmenter, plain: Segmenter, tensor: SparseTensor) -> str:
    """The network's output against float64."""
    oracle = PlainSegmenter().to(tensor.device, torch.float64)
    oracle.load_state_dict(model.state_dict())
    exact = predicted(oracle, tensor.to(torch.float64))
    rows = []
    for name, network in {"torchweft": model, "plain torch": plain}.items():
        scores = predicted(network, tensor).double()
        error = float((scores - exact).norm() / exact.norm())
        differing = int((scores.argmax(1) != exact.argmax(1)).sum())
        rows.append((name, f"{error:.1e}", f"{differing:,}"))
    caption = (
        "The scores of the held-out part against plain torch in float64, and how many voxels "
        "another kind would win."
    )
    return page.table(caption, ["float32", "relative error", "other kinds"], rows)


def _accuracies(tensor: SparseTensor) -> list[OpError]:
    """Errors of each type of layer against torch's dense convolution of some of the voxels."""
    device = tensor.device
    places = tensor.C[split(tensor.C[:, 1:].cpu().float(), FEW)[0].to(device)]
    fine = SparseTensor(torch.randn(len(places), 16, device=device), places, tensor.spatial_shape)
    down = partial(sparse_conv, kernel_size=2, stride=2, submanifold=False, indice_key="down")
    coarse = down(fine, torch.randn(8, 16, 24, device=device))

    def dense(
        x: Tensor, w: Tensor, on: SparseTensor, to: SparseTensor, k: int, mode: str
    ) -> Tensor:
        none, ones, steps = (0,) * 3, (1,) * 3, (1 if on is to else 2,) * 3
        grid = dense_conv(
            on.replace(x).dense(), w, (k,) * 3, stride=steps, padding=none, dilation=ones, mode=mode
        )
        sample, *rest = to.C.long().T
        return grid.movedim(1, -1)[(sample, *rest)]

    kinds = {
        "submanifold, 3³": (
            lambda x, w: sparse_conv(fine.replace(x), w, 3).feats,
            partial(dense, on=fine, to=fine, k=3, mode="submanifold"),
            (fine.feats, torch.randn(27, 16, 16, device=device)),
        ),
        "strided, 2³": (
            lambda x, w: down(fine.replace(x), w).feats,
            partial(dense, on=fine, to=coarse, k=2, mode="strided"),
            (fine.feats, torch.randn(8, 16, 24, device=device)),
        ),
        "inverse, 2³": (
            lambda x, w: sparse_inverse_conv(coarse.replace(x), w, "down").feats,
            partial(dense, on=coarse, to=fine, k=2, mode="transposed"),
            (coarse.feats, torch.randn(8, 24, 16, device=device)),
        ),
    }
    return [
        error
        for name, (ours, exact, inputs) in kinds.items()
        for error in op_errors(name, ours, exact, inputs)
    ]


def _accuracy_table(tensor: SparseTensor) -> str:
    rows = [(a.name, f"{a.relative:.1e}", f"{a.ratio:.2g}") for a in _accuracies(tensor)]
    caption = (
        f"Error of each kind of layer on {FEW} voxels or fewer, against torch's dense convolution "
        "of their box in float64. The last column is the worst element's error over its bound, "
        "computed from its terms: below 1 is right."
    )
    return page.table(caption, ["float32", "relative error", "error / bound"], rows)


def _times_table(times: dict[str, dict[str, float]], tile: Part, test: Part) -> str:
    caption = (
        "The same network in torchweft and in plain torch (index_select, mm and index_add for each "
        "offset; the kernel maps are torchweft's and cost it nothing), taking turns; medians. A "
        "step: "
        f"forward and backward on {len(tile.label):,} voxels. The held-out part: "
        f"{len(test.label):,}."
    )
    return page.times(caption, times)
