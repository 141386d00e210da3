"""voxels: a sparse U-Net learns to tell the ridges of a surface from its slopes and valleys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from torchweft.demo import Options, page
from torchweft.demo.data.surface import SHARE, Part, Surface, kinds_of, landforms, load, split
from torchweft.demo.measure import OpError, interleaved, op_errors
from torchweft.demo.models.peers import SpconvSegmenter, installed
from torchweft.demo.models.segmenter import (
    Segmenter,
    confusion,
    fit,
    plain,
    predicted,
    step_of,
)
from torchweft.demo.pictures import WINDOW, blocks, curve
from torchweft.demo.snippets import shown
from torchweft.voxels import SparseTensor, kernel_map, sparse_conv, sparse_inverse_conv
from torchweft.voxels.reference import dense_conv

__all__ = ["chapter"]

COLOURS = ("#3f7cac", "#cfc6b4", "#b8481a")  # of the kinds
ROUNDS = 9
FEW = 600  # voxels: a dense box of them is small enough for float64

LEAST = 4096  # points of a cloud of which a network can learn

_FORMULA = (
    "<span><i>y</i>[<i>o</i>] = Σ<sub><i>k</i></sub> <i>x</i>[in(<i>o</i>, <i>k</i>)] "
    "<i>w</i>[<i>k</i>]</span> <span>in(<i>o</i>, <i>k</i>): the voxel at offset <i>k</i> from "
    "<i>o</i>, where there is one</span>"
)


def chapter(options: Options) -> page.Chapter:
    """Learn on one part of the surface, predict the kinds of voxels of the other."""
    surface, why = _surface(options)
    tiles, test = landforms(surface, options.device)
    torch.manual_seed(options.seed)
    model = Segmenter().to(options.device)
    losses = fit(model, tiles, options.seed)
    scores = predicted(model, test.tensor)
    table = confusion(scores.argmax(1), test.label)
    times = _times(model, tiles[0], test)
    every = torch.cat([tile.label for tile in tiles])
    places, kinds = test.tensor.C[:, 1:], kinds_of(surface)
    views = {"computed from the surface": test.label, "predicted": scores.argmax(1)}
    levels = {"frequencies alone": _entropy(every)}
    return page.Chapter(
        "torchweft.voxels",
        "Sparse convolutions: the kinds of voxels",
        (
            page.paragraph(f"{why}{_text(surface, test)}"),
            page.cards(_numbers(every, test, table, times)),
            page.formula(_FORMULA),
            page.paragraph(_meaning(tiles, test)),
            shown(Segmenter),
            page.figure(
                partial(blocks, places, views, kinds, COLOURS),
                _VOXELS,
            ),
            _kinds_table(kinds, table),
            _times_table(times, tiles[0], test),
            page.figure(partial(curve, losses, levels, "cross entropy"), _CURVE),
            page.details(
                "How exact: the network and its layers against float64",
                _network_table(model, test.tensor),
                _accuracy_table(tiles[0].tensor),
            ),
            page.documentation({"voxels": "families/voxels", "spconv programs": "migrate/spconv"}),
        ),
    )


_VOXELS = (
    "The held-out part as the network sees it: voxels, here coloured by kind. Above, the true "
    "kinds; below, what the network predicts."
)
_CURVE = (
    f"Training, on a logarithmic axis. Thin: the cross entropy of each step, on one tile. Thick: "
    f"the median of {WINDOW} steps. Dashed: the constant guess, which knows only how frequent each "
    "kind is."
)


def _surface(options: Options) -> tuple[Surface, str]:
    """What is learned, and why it is not the cloud that was given."""
    surface = load(options.points, options.seed, options.key)
    count = len(surface.truth)
    if surface.grid or count >= LEAST:
        return surface, ""
    why = (
        f"{surface.name} has {count:,} points, too few to train on its voxels ({LEAST:,} are "
        "needed): this chapter uses the elevation model that comes with matplotlib. "
    )
    return load(None, options.seed), why


def _entropy(label: Tensor) -> float:
    """−Σ p log p over the kinds."""
    share = torch.bincount(label).double() / len(label)
    return float(torch.special.entr(share).sum())


def _times(model: Segmenter, tile: Part, test: Part) -> dict[str, dict[str, float]]:
    """Milliseconds of torchweft, spconv and plain torch, in turns."""
    device = tile.label.device
    models: dict[str, nn.Module] = {"torchweft": model, "plain torch": plain(model)}
    passes = {name: partial(predicted, m, test.tensor) for name, m in models.items()}
    fresh: dict[str, nn.Module] = {"torchweft": model}
    if _has_spconv(device):
        fresh["spconv"] = SpconvSegmenter(model)
    new = {name: partial(_predicted_anew, m, test.tensor) for name, m in fresh.items()}
    # learned statistics move while a step is timed: the passes come first
    found = {"inference": interleaved(passes, device, ROUNDS)}
    if len(new) > 1:
        found["inference on new voxels"] = interleaved(new, device, ROUNDS)
    steps = {name: step_of(m, tile) for name, m in models.items()}
    return {"training step": interleaved(steps, device, ROUNDS), **found}


def _has_spconv(device: torch.device) -> bool:
    """Whether spconv is there and right: on the CPU its results are wrong with several threads."""
    return installed("spconv") and (device.type == "cuda" or torch.get_num_threads() == 1)


def _predicted_anew(model: nn.Module, tensor: SparseTensor) -> Tensor:
    """Scores of voxels that are seen for the first time: their neighbours are found too."""
    fresh = SparseTensor(tensor.feats, tensor.C, tensor.spatial_shape, tensor.batch_size)
    return predicted(model, fresh)


def _text(surface: Surface, test: Part) -> str:
    """What was done."""
    low, middle, high = kinds_of(surface)
    measure = (
        "the mean curvature of the smoothed heights"
        if surface.grid
        else "how far the neighbours of a point lie from a plane (surface variation)"
    )
    return (
        f"{surface.name}, as voxels of three kinds by {measure}: the lowest {SHARE:.0%} of the "
        f"training part are “{low}”, the highest {SHARE:.0%} “{high}”, the others “{middle}”. A "
        "sparse U-Net predicts the kind of each voxel from which voxels there are and how high the "
        "surface lies within each; it is given neither the curvature nor the altitude. Every "
        "number below is of the held-out part: "
        f"{len(test.label):,} voxels in a box of {_box(test):,}."
    )


def _box(part: Part) -> int:
    """Voxels that its box has room for."""
    return int(torch.tensor(part.tensor.spatial_shape).prod())


def _numbers(
    every: Tensor, test: Part, table: Tensor, times: dict[str, dict[str, float]]
) -> list[tuple[str, str]]:
    """The numbers that matter."""
    guess = torch.full_like(test.label, int(torch.bincount(every).argmax()))
    constant = confusion(guess, test.label)
    return [
        (f"{_share(constant):.1%}", "right by the constant guess: the most frequent kind"),
        (f"{float(_overlaps(constant).mean()):.2f}", "mean overlap (IoU) of that guess"),
        *page.leads(times),
        (f"{float(_overlaps(table).mean()):.2f}", "mean overlap (IoU) of the network"),
        (f"{_share(table):.1%}", "right by the network"),
    ]


def _share(table: Tensor) -> float:
    """Of the voxels that are right."""
    return float(table.diag().sum() / table.sum())


def _meaning(tiles: Sequence[Part], test: Part) -> str:
    pairs = float(kernel_map(test.tensor, 3).counts.sum()) / len(test.label)
    return (
        "Submanifold convolutions keep the voxels as they are, strided ones lead to a coarser "
        "level, inverse ones back to the same voxels. Only pairs of voxels that are there are "
        f"multiplied: {pairs:.1f} of 27 neighbours, in a box of which "
        f"{100 * len(test.label) / _box(test):.3g}% are voxels. The pairs are found once for each "
        "set of voxels and kept with it. Sums have a fixed order: training repeats bit for bit. "
        f"It uses {len(tiles)} tiles, three in four of them mirror images."
    )


def _overlaps(table: Tensor) -> Tensor:
    """Intersection over union of each kind."""
    both = table.diag().double()
    return both / (table.sum(0) + table.sum(1) - both)


def _kinds_table(kinds: Sequence[str], table: Tensor) -> str:
    rows = [
        (name, *(f"{int(n):,}" for n in line), f"{float(overlap):.2f}")
        for name, line, overlap in zip(kinds, table, _overlaps(table), strict=True)
    ]
    caption = "Voxels of the held-out part: their kinds (rows), and what is predicted (columns)."
    return page.table(caption, ["", *kinds, "IoU"], rows)


def _network_table(model: Segmenter, tensor: SparseTensor) -> str:
    """The network's output against float64."""
    oracle = plain(model).double()
    exact = predicted(oracle, tensor.to(torch.float64))
    rows = []
    for name, network in {"torchweft": model, "plain torch": plain(model)}.items():
        scores = predicted(network, tensor).double()
        error = float((scores - exact).norm() / exact.norm())
        differing = int((scores.argmax(1) != exact.argmax(1)).sum())
        rows.append((name, f"{error:.1e}", f"{differing:,}"))
    caption = (
        "The scores of the held-out part against plain torch in float64, and how many voxels "
        "would get another kind."
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
        f"Each kind of layer on {FEW} voxels or fewer, against torch's dense convolution of their "
        "box in float64. The last column is the error of the worst element over its bound, which "
        "is computed from its terms: below 1 is right."
    )
    return page.table(caption, ["float32", "relative error", "error / bound"], rows)


def _times_table(times: dict[str, dict[str, float]], tile: Part, test: Part) -> str:
    if "inference on new voxels" in times:
        spconv = "spconv: inference alone, as its CPU layers have no backward; it finds the pairs. "
    elif installed("spconv"):
        spconv = "spconv is not timed: on the CPU it is right with OMP_NUM_THREADS=1 only. "
    else:
        spconv = "spconv is not installed here: pip install spconv adds its CPU layers. "
    caption = (
        f"The same network with other convolutions. {spconv}Plain torch: index_select, mm and "
        "index_add for each offset, with torchweft's neighbour tables. Medians; the calls "
        f"alternate. Training step: forward and backward on {len(tile.label):,} voxels. Inference: "
        f"{len(test.label):,} voxels."
    )
    return page.times(caption, times)
