"""reductions: kernel smoothing over all pairs and over blocks of pairs; optimal transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.demo import Options, page
from torchweft.demo.data.surface import Surface, load, split
from torchweft.demo.measure import interleaved, timed
from torchweft.demo.models import transport
from torchweft.demo.models.peers import installed
from torchweft.demo.models.transport import (
    Motion,
    angle,
    carried,
    heaps,
    levelling,
    registered,
    scans,
)
from torchweft.demo.pictures import earthworks, overlaid
from torchweft.demo.snippets import shown
from torchweft.reductions import BlockSparsity, LazyTensor
from torchweft.reductions.cluster import grid_cluster, sort_clusters

__all__ = ["chapter"]

POINTS = 150_000  # all pairs are some seconds of two cores
WIDTH = 1.5  # σ of the kernel, in spacings of the points
REACH = 5.0  # radius, in σ: the weight beyond is below e^−12.5
CELL = 6.0  # edge of the clusters, in spacings
ROUNDS = 3  # of what some of the points need; all pairs of all are timed once
FEW = 128  # points whose sums others and float64 form too: of all they would take minutes
BLOCK = 64  # rows of a block of plain torch

_FORMULA = (
    "<span><i>m<sub>i</sub></i> = Σ<sub><i>j</i></sub> <i>k<sub>ij</sub></i> <i>p<sub>j</sub></i> "
    "/ Σ<sub><i>j</i></sub> <i>k<sub>ij</sub></i></span> <span><i>k<sub>ij</sub></i> = exp(−|"
    "<i>q<sub>i</sub></i> − <i>q<sub>j</sub></i>|² / 2σ²)</span> "
    "<span><i>p<sub>i</sub></i> ← <i>p<sub>i</sub></i> + ⟨<i>m<sub>i</sub></i> − "
    "<i>p<sub>i</sub></i>, <i>n<sub>i</sub></i>⟩ <i>n<sub>i</sub></i></span>"
)


class Part(NamedTuple):
    """Points that lie together, sorted by cluster."""

    base: Tensor  # (N, 2 or 3) where they are, in units of σ
    noisy: Tensor  # (N, 3) what is smoothed
    truth: Tensor  # (N, 3) what it should be
    normal: Tensor  # (N, 3) along which points move
    mask: BlockSparsity  # pairs of clusters within reach

    @property
    def values(self) -> Tensor:
        """(N, 4) what is summed: points, and 1 for the sum of the weights."""
        return torch.cat([self.noisy, torch.ones_like(self.noisy[:, :1])], 1)


class Result(NamedTuple):
    """What one way to smooth gave."""

    pairs: int
    milliseconds: float
    error: float  # against float64, all pairs


def chapter(options: Options) -> page.Chapter:
    """Smooth a part of the surface in two ways, then carry earth or lay scans onto each other."""
    surface = load(options.points, options.seed, options.key)
    part = _part(surface, options.device)
    smooth = {
        "all pairs": partial(smoothed, part, None),
        "blocks of pairs": partial(smoothed, part, part.mask),
    }
    results, restored = _compared(part, smooth, options.device)
    times = _times(part, options.device)
    before, after = (_rms(values - part.truth) for values in (part.noisy, restored))
    transported = _levelled(surface, options) if surface.grid else _laid_over(surface, options)
    return page.Chapter(
        "torchweft.reductions",
        "Sums over all pairs of points, and optimal transport",
        (
            *_story(surface, part, results, times, (before, after)),
            _table(part, results),
            _times_table(part, times),
            *transported,
            page.documentation(
                {"reductions": "families/reductions", "KeOps programs": "migrate/pykeops"}
            ),
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


def weighted(
    part: Part, x: Tensor, mask: BlockSparsity | None = None, lazy: Any = LazyTensor
) -> Tensor:
    """Σ_j k(x_i, q_j) (p_j, 1): (len(x), 4); `lazy` may be that of KeOps."""
    squares = (lazy(x[:, None, :]) - lazy(part.base[None, :, :])) ** 2
    kernel = (-squares.sum(-1) / 2).exp()  # of all pairs; it is never stored
    if mask is not None:
        kernel.ranges = mask.ranges  # the pairs of clusters that are near each other
    sums: Tensor = kernel @ part.values
    return sums


def plain_weighted(part: Part, x: Tensor) -> Tensor:
    """The same in plain torch, over blocks of rows."""
    kernels = (
        torch.cdist(rows, part.base).square().div(-2).exp() for rows in torch.split(x, BLOCK)
    )
    return torch.cat([kernel @ part.values for kernel in kernels])


def _few(part: Part) -> slice:
    return slice(None, None, -(-len(part.base) // FEW))


def _times(part: Part, device: torch.device) -> dict[str, dict[str, float]]:
    """Milliseconds of torchweft, pykeops and plain torch for the sums of some of the points."""
    few = part.base[_few(part)].contiguous()
    ways: dict[str, Callable[[Part, Tensor], Tensor]] = {"torchweft": weighted}
    if installed("pykeops"):
        import pykeops.torch

        ways["pykeops"] = partial(weighted, lazy=pykeops.torch.LazyTensor)
    ways["plain torch"] = plain_weighted

    def gradient(way: Callable[[Part, Tensor], Tensor]) -> tuple[Tensor, ...]:
        x, base = (t.detach().requires_grad_() for t in (few, part.base))
        return torch.autograd.grad(way(part._replace(base=base), x).sum(), (x, base))

    sums = {name: partial(way, part, few) for name, way in ways.items()}
    gradients = {name: partial(gradient, way) for name, way in ways.items()}
    return {
        "sum": interleaved(sums, device, ROUNDS),
        "sum and gradient": interleaved(gradients, device, ROUNDS),
    }


def _times_table(part: Part, times: Mapping[str, Mapping[str, float]]) -> str:
    keops = (
        "pykeops: the same lines with its LazyTensor. "
        if installed("pykeops")
        else "pykeops is not installed here: pip install pykeops adds it. "
    )
    caption = (
        f"The sums of {len(part.base[_few(part)]):,} of the points over all {len(part.base):,}, "
        f"and their gradients by all points. {keops}Plain torch: cdist, exp and a product of "
        f"matrices, {BLOCK} rows at a time. Medians; the calls alternate."
    )
    return page.times(caption, times)


def _compared(
    part: Part, ways: Mapping[str, Callable[[], Tensor]], device: torch.device
) -> tuple[dict[str, Result], Tensor]:
    wide = part._replace(
        base=part.base.double(), noisy=part.noisy.double(), normal=part.normal.double()
    )
    few = _few(part)
    exact = smoothed(wide, None, few)
    pairs = {"all pairs": len(part.base) ** 2, "blocks of pairs": part.mask.num_pairs()}
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
    surface: Surface,
    part: Part,
    results: dict[str, Result],
    times: Mapping[str, Mapping[str, float]],
    rms: tuple[float, float],
) -> list[str]:
    dense, sparse = results.values()
    text = (
        f"{len(part.base):,} noisy points of {surface.name} are smoothed: each moves towards the "
        f"mean of all points under Gaussian weights with σ = {WIDTH:g} spacings. All pairs of "
        "points are summed, and no matrix of pairs is stored. Most weights are nearly zero: where "
        f"the boxes around two clusters of points are more than {REACH:g} σ apart, their pairs can "
        f"be left out, which leaves {100 * sparse.pairs / dense.pairs:.3g}% of all pairs."
    )
    if surface.small:
        text += page.SHORT
    unit = surface.unit if surface.grid else "sp."
    faster = page.ratio(dense.milliseconds, sparse.milliseconds)
    numbers = [
        (
            f"{rms[0]:#.3g}\N{NO-BREAK SPACE}{unit}",
            "error of the constant guess: the points as measured",
        ),
        *page.leads(times),
        (faster, "time of all pairs / time of blocks of pairs"),
        (f"{rms[1]:#.3g}\N{NO-BREAK SPACE}{unit}", "error after smoothing"),
    ]
    return [
        page.paragraph(text),
        page.cards(numbers),
        page.formula(_FORMULA),
        shown(weighted, smoothed),
    ]


def _table(part: Part, results: dict[str, Result]) -> str:
    rows = [
        (name, f"{r.pairs:,}", f"{r.milliseconds:.1f}", f"{r.error:.1e}")
        for name, r in results.items()
    ]
    caption = (
        f"Smoothing {len(part.base):,} points in float32, without the first call, which compiles. "
        f"Error: of {len(part.base[_few(part)]):,} points, against all pairs in float64, relative "
        "to how far they are moved."
    )
    return page.table(caption, ["", "pairs", "milliseconds", "error"], rows)


def _levelled(surface: Surface, options: Options) -> tuple[str, ...]:
    """A map is levelled: earth above its mean height goes to where ground is missing."""
    ground = levelling(surface)
    inputs = (part.to(options.device) for part in ground[:4])
    aims, seconds = timed(partial(carried, *inputs), options.device)
    way = (aims.cpu() - ground.cut).norm(dim=1)
    means, share = heaps(torch.cat([ground.cut, aims.cpu()], 1), ground.amount)
    starts, ends = means.tensor_split(2, 1)
    text = (
        "Optimal transport is a sum over all pairs too. Level the map: carry the earth from above "
        "the mean height (brown) to where ground is missing (blue), on the shortest ways in total. "
        f"{len(ground.cut):,} points give earth and {len(ground.fill):,} take it; the mean way is "
        f"{float((ground.amount * way).sum()) * ground.side:,.0f} {surface.unit}. Found in "
        f"{seconds:.1f} s with its gradient, the first call included."
    )
    caption = (
        "Where the earth goes. An arrow begins at the middle of a heap, the earth of one square of "
        "a grid, and ends at the middle of where it is carried. Thicker arrows carry more."
    )
    return (
        page.paragraph(text),
        shown(carried),
        page.figure(partial(earthworks, surface, (starts, ends, share)), caption),
    )


def _laid_over(surface: Surface, options: Options) -> tuple[str, ...]:
    """A cloud's second scan is laid onto its first."""
    found = scans(surface, options.seed)
    fixed, moving = (points.to(options.device) for points in found[:2])
    motion, seconds = timed(partial(registered, moving, fixed), options.device)
    motion = Motion(*(part.cpu() for part in motion))
    still = Motion(torch.eye(3), torch.zeros(3))
    truth = found.back(found.moving)
    rows = [
        (name, f"{angle(m, found.back):.2f}°", f"{_rms(m(found.moving) - truth):.3f}")
        for name, m in (("constant guess: no motion", still), ("found by transport", motion))
    ]
    text = (
        f"Optimal transport is a sum over all pairs too. Here it lays two scans of the cloud onto "
        f"each other: {len(fixed):,} of the noisy points, and {len(moving):,} others that were "
        f"rotated by {transport.ROTATION:g}° and shifted. In each of {transport.STEPS} steps the "
        "gradient of the transport cost says where each point should go, and the rotation and "
        f"shift that fit best are taken. {seconds:.1f} s, the first call included."
    )
    views = {"before": found.moving, "after": motion(found.moving)}
    caption = "The two scans before and after, from the flattest side of the cloud."
    errors = (
        "Error of the rotation, and root mean square distance of the points to where they belong, "
        "in units of the cloud's radius (the root mean square distance from its middle)."
    )
    return (
        page.paragraph(text),
        shown(registered),
        page.figure(partial(overlaid, found.fixed, views), caption),
        page.table(errors, ["", "rotation", "distance"], rows, 1),
    )
