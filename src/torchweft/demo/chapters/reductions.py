"""reductions: kernel smoothing, dense and block-sparse; the cheapest way to level the ground.

    cut  a_i ∝ max(h_i − h̄, 0) at p_i        fill  b_j ∝ max(h̄ − h_j, 0) at p_j

Heights h are over the plane that the points lie along.  Earth above the mean goes to where ground
is missing by optimal transport from a to b; the gradient of its cost says where the earth of a
point goes, p_i − (∂cost/∂p_i) / a_i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from torchweft.demo import Options, page
from torchweft.demo.data.surface import Surface, load, split
from torchweft.demo.measure import interleaved, timed
from torchweft.demo.pictures import ACCENT, GREY, height_of, png
from torchweft.reductions import BlockSparsity, LazyTensor, SamplesLoss
from torchweft.reductions.cluster.points import (
    cluster_ranges_centroids,
    grid_cluster,
    sort_clusters,
)

__all__ = ["Levelling", "arrows", "carried", "chapter", "heaps", "levelling"]

POINTS = 150_000  # all pairs are some seconds of two cores
WIDTH = 1.5  # σ of the kernel, in spacings of the points
REACH = 5.0  # radius, in σ: the weight beyond is below e^−12.5
CELL = 6.0  # edge of the clusters, in spacings
ROUNDS = 3  # of what some of the points need; all pairs of all are timed once
FEW = 512  # points whose sums plain torch and float64 form too: of all they would take minutes
BLOCK = 256  # rows of a block of plain torch

_FORMULA = (
    "<i>m<sub>i</sub></i> = Σ<sub><i>j</i></sub> <i>k<sub>ij</sub></i> <i>p<sub>j</sub></i> / "
    "Σ<sub><i>j</i></sub> <i>k<sub>ij</sub></i> &emsp; <i>k<sub>ij</sub></i> = exp(−|"
    "<i>q<sub>i</sub></i> − <i>q<sub>j</sub></i>|² / 2σ²) &emsp; "
    "<i>p<sub>i</sub></i> ← <i>p<sub>i</sub></i> + ⟨<i>m<sub>i</sub></i> − "
    "<i>p<sub>i</sub></i>, <i>n<sub>i</sub></i>⟩ <i>n<sub>i</sub></i>"
)


class Part(NamedTuple):
    """Points that lie together, sorted by cluster."""

    base: Tensor  # (N, 2 or 3) where they are, in units of σ
    noisy: Tensor  # (N, 3) what is smoothed
    truth: Tensor  # (N, 3) what it should be
    normal: Tensor  # (N, 3) along which points move
    mask: BlockSparsity  # pairs of clusters within reach


class Result(NamedTuple):
    """What one way to smooth gave."""

    pairs: int
    milliseconds: float
    error: float  # against float64, all pairs


def chapter(options: Options) -> page.Chapter:
    """Smooth a part of the surface in two ways, then level all of it."""
    surface = load(options.points, options.seed, options.key)
    part = _part(surface, options.device)
    smooth = {
        "all pairs": partial(smoothed, part, None),
        "blocks": partial(smoothed, part, part.mask),
    }
    results, restored = _compared(part, smooth, options.device)
    ground = levelling(surface)
    aims, seconds = timed(partial(carried, ground, options.device), options.device)
    before, after = (_rms(values - part.truth) for values in (part.noisy, restored))
    return page.Chapter(
        "torchweft.reductions",
        "Sums over all pairs, and over the pairs that matter",
        (
            *_story(surface, part, results, (before, after)),
            _table(part, results),
            _times_table(part, options.device),
            page.figure(arrows(ground, aims), _caption(surface, ground, aims, seconds)),
        ),
    )


def _part(surface: Surface, device: torch.device) -> Part:
    """Points that lie together, in clusters."""
    rows = split(surface.base, POINTS)[0]
    sigma = WIDTH * surface.spacing
    base = surface.base[rows] - surface.base[rows].mean(0)
    labels = grid_cluster(base, CELL * surface.spacing)
    columns = [base / sigma, surface.noisy[rows], surface.truth[rows], surface.frames[rows, 2]]
    columns, labels = sort_clusters([t.to(device) for t in columns], labels.to(device))
    mask = BlockSparsity.from_radius(columns[0], labels, columns[0], labels, REACH)
    return Part(columns[0], columns[1], columns[2], columns[3], mask)


def smoothed(part: Part, mask: BlockSparsity | None, rows: slice = slice(None)) -> Tensor:
    """Points moved along their normals to the mean of what is near, under Gaussian weights."""
    noisy, normal = part.noisy[rows], part.normal[rows]
    sums = weighted(part, part.base[rows], mask)
    change = sums[:, :-1] / sums[:, -1:] - noisy
    return noisy + (change * normal).sum(1, keepdim=True) * normal


def weighted(part: Part, x: Tensor, mask: BlockSparsity | None = None) -> Tensor:
    """Σ_j k(x_i, q_j) (p_j, 1): (len(x), 4)."""
    squares = (LazyTensor(x[:, None, :]) - LazyTensor(part.base[None, :, :])) ** 2
    kernel = (-squares.sum(-1) / 2).exp()
    if mask is not None:
        kernel.ranges = mask.ranges
    sums: Tensor = kernel @ _values(part)
    return sums


def plain_weighted(part: Part, x: Tensor) -> Tensor:
    """The same in plain torch, over blocks of rows."""
    values = _values(part)
    kernels = (
        torch.cdist(rows, part.base).square().div(-2).exp() for rows in torch.split(x, BLOCK)
    )
    return torch.cat([kernel @ values for kernel in kernels])


def _few(part: Part) -> slice:
    return slice(None, None, -(-len(part.base) // FEW))


def _values(part: Part) -> Tensor:
    return torch.cat([part.noisy, torch.ones_like(part.noisy[:, :1])], 1)


def _times_table(part: Part, device: torch.device) -> str:
    """All pairs of some points, in torchweft and in plain torch."""
    few = part.base[_few(part)]
    ways = {"torchweft": partial(weighted, part, few), "torch": partial(plain_weighted, part, few)}
    ms = interleaved(ways, device, ROUNDS)
    caption = (
        "The sums of some of the points over all pairs, in torchweft and in plain torch (cdist, "
        "exp and "
        f"a product of matrices, {BLOCK} rows at a time), taking turns; medians."
    )
    return page.times(caption, {f"{len(few):,} × {len(part.base):,} pairs": ms})


def _compared(
    part: Part, ways: Mapping[str, Callable[[], Tensor]], device: torch.device
) -> tuple[dict[str, Result], Tensor]:
    wide = part._replace(
        base=part.base.double(), noisy=part.noisy.double(), normal=part.normal.double()
    )
    few = _few(part)
    exact = smoothed(wide, None, few)
    pairs = {"all pairs": len(part.base) ** 2, "blocks": part.mask.num_pairs()}
    results = {}
    for name, way in ways.items():
        way()  # compiles
        found, seconds = timed(way, device)
        error = (found[few].double() - exact).norm() / (exact - wide.noisy[few]).norm()
        results[name] = Result(pairs[name], 1e3 * seconds, float(error))
    return results, found


def _rms(error: Tensor) -> float:
    return float(error.square().sum(1).mean().sqrt())


def _story(
    surface: Surface, part: Part, results: dict[str, Result], rms: tuple[float, float]
) -> list[str]:
    dense, sparse = results["all pairs"], results["blocks"]
    text = (
        f"{len(part.base):,} noisy points of {surface.name} are smoothed by Gaussian weights "
        f"with σ = {WIDTH:g} spacings. Every point is compared with every other, "
        "and no matrix is stored. Beyond a few σ the weights are nothing: clusters of points whose "
        f"boxes are farther apart than {REACH:g} σ are left out, and no pair within it is lost."
    )
    numbers = [
        (f"{100 * sparse.pairs / dense.pairs:.3g}%", "of the pairs are left"),
        (f"{sparse.error:.1e}", "error against all pairs in float64"),
        (f"{rms[0]:#.3g} → {rms[1]:#.3g}", f"distance to the truth [{surface.unit}], RMS"),
        (f"{dense.milliseconds / sparse.milliseconds:.1f} ×", "the speed of all pairs"),
    ]
    return [page.paragraph(text), page.cards(numbers), page.formula(_FORMULA)]


def _table(part: Part, results: dict[str, Result]) -> str:
    rows = [
        (name, f"{r.pairs:,}", f"{r.milliseconds:.1f}", f"{r.error:.1e}")
        for name, r in results.items()
    ]
    caption = (
        f"Smoothing {len(part.base):,} points in float32, after a first call that compiles. "
        f"Errors: of {len(part.base[_few(part)]):,} points, against all pairs in float64, as parts "
        "of how far they are moved."
    )
    return page.table(caption, ["", "pairs", "milliseconds", "error"], rows)


def _caption(surface: Surface, ground: Levelling, aims: Tensor, seconds: float) -> str:
    way = (aims - ground.cut).norm(dim=1)
    mean = float((ground.amount * way).sum()) * ground.side
    return (
        "Levelling the ground: earth above the mean height goes where ground is missing, by "
        f"optimal transport (Sinkhorn, cost |x − y|²/2, blur {BLUR:g} of the longer side). "
        f"{len(ground.cut):,} points give, {len(ground.fill):,} take, a mean way of {mean:,.0f} "
        f"{surface.unit}; {seconds:.1f} s with its gradient, compilation included. Drawn cell by "
        "cell; arrows: the largest heaps, from the gradient of the cost."
    )


CELLS = 40  # of the picture, along the longer side
BLUR = 0.02  # of the longer side
COLOURS = ("#b98d5c", "#3f7cac")  # cut, fill
SHOWN = 120  # arrows


class Levelling(NamedTuple):
    """Where earth is and where it is missing, in units of the longer side."""

    cut: Tensor  # (M, 2)
    amount: Tensor  # (M,) share of the earth
    fill: Tensor  # (N, 2)
    room: Tensor  # (N,) share of the room
    side: float  # the longer side, in the surface's unit


def levelling(surface: Surface) -> Levelling:
    """The points of a surface above its mean height, and those below."""
    places, height = _laid_flat(surface)
    side = float((places.amax(0) - places.amin(0)).max())
    places = (places - places.amin(0)) / side
    above = height - height.mean()
    up, down = above > 0, above < 0
    amount, room = (part / part.sum() for part in (above[up], above[down]))
    return Levelling(places[up], amount, places[down], room, side)


def _laid_flat(surface: Surface) -> tuple[Tensor, Tensor]:
    """(N, 2) places and (N,) heights: of a map its own, of a cloud along its axes."""
    if surface.grid:
        return surface.truth[:, :2], surface.truth[:, 2]
    centred = surface.truth - surface.truth.mean(0)
    axes = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)
    turned = centred @ axes
    return turned[:, :2], turned[:, 2]


def carried(ground: Levelling, device: torch.device) -> Tensor:
    """(M, 2) where the earth of each point goes, on average."""
    loss = SamplesLoss(blur=BLUR, debias=False)
    cut, amount, fill, room = (t.to(device) for t in ground[:4])
    cut = cut.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(amount, cut, room, fill), cut)
    return (cut.detach() - gradient / amount.unsqueeze(1)).cpu()


def heaps(values: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """(C, D) means of values under the weights `share`, and (C,) sums of these, by cell.

    The first two columns of values are places; cells are those of the picture.
    """
    labels = grid_cluster(values[:, :2], 1 / CELLS)
    _, means, shares = cluster_ranges_centroids(values, labels, weights=share)
    return means, shares


def arrows(ground: Levelling, aims: Tensor) -> bytes:
    """Earth and room, cell by cell, and the ways of the largest heaps."""
    means, amount = heaps(torch.cat([ground.cut, aims], 1), ground.amount)
    starts, ends = means.tensor_split(2, 1)
    holes, room = heaps(ground.fill, ground.room)
    height = height_of(torch.cat([starts, holes]), most=7.4)
    figure = Figure(figsize=(9.6, height), layout="constrained")
    axis = figure.subplots()
    for places, share, colour, name in (
        (starts, amount, COLOURS[0], "earth to carry away"),
        (holes, room, COLOURS[1], "room to fill"),
    ):
        x, y = places.T.numpy()
        sizes = (60 * share / share.max()).numpy()
        axis.scatter(x, y, s=sizes, color=colour, linewidths=0, alpha=0.55, label=name)
    largest = amount.argsort(descending=True)[:SHOWN]
    starts, ways = starts[largest], (ends - starts)[largest]
    axis.quiver(
        *starts.T.numpy(),
        *ways.T.numpy(),
        angles="xy",
        scale_units="xy",
        scale=1,
        width=0.0026,
        color=ACCENT,
        zorder=2,
    )
    axis.set_aspect("equal")
    axis.set_axis_off()
    figure.legend(loc="outside lower center", ncols=2, frameon=False, labelcolor=GREY)
    return png(figure)
