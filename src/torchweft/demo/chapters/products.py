"""products: a message-passing filter learns to restore a surface from a noisy measurement."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from torchweft import explain
from torchweft.demo import Options, page
from torchweft.demo.data.surface import SPIKE, SPIKES, Surface, load
from torchweft.demo.measure import OpError, interleaved, op_errors
from torchweft.demo.models.filter import (
    NEIGHBOURS,
    Graph,
    PlainFilter,
    SurfaceFilter,
    best_filters,
    fit,
    graph_of,
    neighbour_mean,
    step_of,
    tiles_of,
)
from torchweft.demo.pictures import curve, panels, whole

__all__ = ["chapter"]

MEASURED, OURS = "as measured", "learned filter"
STEP_ROUNDS, SURFACE_ROUNDS = 9, 3

_FORMULA = (
    "<i>z<sub>i</sub></i> = Σ<sub><i>e</i>∈N(<i>i</i>)</sub> "
    "<i>φ</i>(<i>g<sub>e</sub></i>) ⊗ <i>x</i><sub><i>j</i>(<i>e</i>)</sub> &emsp; "
    "<i>x<sub>i</sub></i> ← <i>x<sub>i</sub></i> + silu(Σ<sub><i>f</i></sub> "
    "<i>z<sub>if</sub> W<sub>f</sub></i> + <i>b</i>) &emsp; "
    "<i>p<sub>i</sub></i> ← <i>p<sub>i</sub></i> + σ⟨<i>w</i>, <i>x<sub>i</sub></i>⟩ "
    "<i>n<sub>i</sub></i>"
)


def chapter(options: Options) -> page.Chapter:
    """Learn on one part of the surface, restore all of it, judge on the part held out."""
    device = options.device
    surface = load(options.points, options.seed, options.key)
    torch.manual_seed(options.seed)
    model = SurfaceFilter().to(device)
    tiles = tiles_of(surface, device)
    losses = fit(model, tiles, options.seed)

    graph = graph_of(surface, torch.arange(len(surface.truth))).to(device)
    filters = best_filters(surface, graph, surface.held_out)
    restored = restore(model, graph, surface)
    errors = {MEASURED: surface.rmse(surface.noisy, surface.held_out)}
    errors |= {name: error for name, (error, _) in filters.items()}
    errors[OURS] = surface.rmse(restored, surface.held_out)
    rival = min(filters, key=lambda name: filters[name][0])
    views = {
        MEASURED: surface.noisy,
        rival: filters[rival][1],
        OURS: restored,
        "the truth": surface.truth,
    }
    times = _times(model, tiles[0], graph)
    blocks = [
        *_story(surface, graph, errors, times),
        page.figure(panels(surface, views), _panels_caption(surface, errors)),
        _errors_table(surface, errors),
        page.figure(
            curve(
                [surface.sigma * loss for loss in losses],
                _levels(errors, rival),
                f"RMSE [{surface.unit}]",
            ),
            f"Learning: RMSE of each of {len(losses)} steps, one tile of the learned-from part a "
            "step, and over 21 steps together. Dashed: without learning, on the held-out part.",
        ),
    ]
    if surface.grid:
        blocks.append(page.figure(whole(surface, restored), "The whole map, restored."))
    blocks += [
        _accuracy_table(_accuracies(model, tiles[0])),
        _times_table(times, tiles[0], graph),
        page.paragraph("What torchweft launches to restore the surface, from `torchweft.explain`:"),
        page.code(str(explain(restore, model, graph, surface))),
    ]
    return page.Chapter(
        "torchweft.products", "A filter that learns a surface from its noise", tuple(blocks)
    )


def restore(model: SurfaceFilter, graph: Graph, surface: Surface) -> Tensor:
    """p + σ·f(graph)·n for every point of the surface."""
    return surface.noisy + surface.sigma * _amount(model, graph).cpu() * surface.frames[:, 2]


def _amount(model: SurfaceFilter, graph: Graph) -> Tensor:
    with torch.no_grad():
        amount: Tensor = model(graph)
    return amount


def _times(model: SurfaceFilter, tile: Graph, graph: Graph) -> dict[str, dict[str, float]]:
    """Milliseconds of torchweft and of plain torch, turn by turn."""
    plain = PlainFilter().to(graph.src.device)
    plain.load_state_dict(model.state_dict())
    models = {"torchweft": model, "torch": plain}
    steps = {name: step_of(m, tile) for name, m in models.items()}
    passes = {name: partial(_amount, m, graph) for name, m in models.items()}
    device = graph.src.device
    return {
        "one step of learning": interleaved(steps, device, STEP_ROUNDS),
        "the surface restored": interleaved(passes, device, SURFACE_ROUNDS),
    }


def _accuracies(model: SurfaceFilter, tile: Graph) -> list[OpError]:
    """Errors of each product that the chapter uses, on its own inputs."""
    phi = model.kernel(tile.geometry).detach()
    x = torch.randn(len(tile.rows), model.CHANNELS, device=phi.device)
    z = model.gather(phi, x, tile)
    weight = model.weights[-1].detach()
    rise = tile.offset[:, 2:].contiguous()
    closeness = (-tile.offset[:, 0].square()).exp()
    ops = (SurfaceFilter, PlainFilter)
    gather, plain_gather = ((lambda a, b, f=f: f.gather(a, b, tile)) for f in ops)
    mix, plain_mix = ((lambda a, b, f=f: f.mix(a, b, tile)) for f in ops)

    def mean(a: Tensor, b: Tensor) -> Tensor:
        return neighbour_mean(a, b, tile)

    def plain_mean(a: Tensor, b: Tensor) -> Tensor:
        zeros = a.new_zeros(len(tile.rows), a.shape[1])
        return zeros.index_add(0, tile.dst, a * b.unsqueeze(1))

    return [
        *op_errors("indexed_outer_segment", gather, plain_gather, (phi, x)),
        *op_errors("vecmat_segment", mix, plain_mix, (z, weight)),
        *op_errors("vecsca_segment", mean, plain_mean, (rise, closeness)),
    ]


def _story(
    surface: Surface,
    graph: Graph,
    errors: Mapping[str, float],
    times: Mapping[str, Mapping[str, float]],
) -> list[str]:
    """What was done, with the numbers that matter."""
    count = len(surface.truth)
    others = min(error for name, error in errors.items() if name not in (MEASURED, OURS))
    step = times["one step of learning"]
    text = (
        f"{surface.name}: {count:,} points of a real surface. An instrument measures each with an "
        f"error of {surface.sigma:.3g} {surface.unit} (one σ), and {SPIKES:.0%} of them with "
        f"{SPIKE:g} times as much. A small network passes messages between each point and its "
        f"{NEIGHBOURS} nearest, {len(graph.src):,} edges in all. It learns from "
        f"{1 - float(surface.held_out.float().mean()):.0%} of the surface; every error below is "
        "that of the rest, which it has never seen."
    )
    if errors[OURS] >= errors[MEASURED]:
        text += " Here it does more harm than good: the rest is not like what it learned from."
    numbers = [
        (f"{errors[MEASURED]:#.3g} {surface.unit}", "RMSE as measured"),
        (f"{others:#.3g} {surface.unit}", "best filter without learning"),
        (
            f"{step['torch'] / step['torchweft']:.1f} ×",
            "the speed of plain torch, learning",
        ),
        (f"{errors[OURS]:#.3g} {surface.unit}", "RMSE of the learned filter"),
    ]
    meaning = (
        "φ is a small MLP of where a neighbour lies and how far it rises: a convolution whose "
        "kernel is learned, and which learns to distrust outliers. Both sums are one call each: "
        "`indexed_outer_segment` over the edges, `vecmat_segment` over the matrices of a layer. "
        "Their gradients are again such sums, over the same tables, and no sum depends on the "
        "order in which threads arrive: learning repeats bit for bit."
    )
    return [
        page.paragraph(text),
        page.cards(numbers),
        page.formula(_FORMULA),
        page.paragraph(meaning),
    ]


def _panels_caption(surface: Surface, errors: Mapping[str, float]) -> str:
    numbers = ", ".join(f"{name} {error:#.3g}" for name, error in errors.items())
    most = f"{2 * surface.sigma:.2g} {surface.unit} or more"
    distance = f"coloured by the distance to the truth, from 0 (dark) to {most} (yellow)"
    what = "in shaded relief" if surface.grid else distance
    return f"A part of the held-out surface, {what}. RMSE of all of it [{surface.unit}]: {numbers}."


def _levels(errors: Mapping[str, float], rival: str) -> dict[str, float]:
    return {name: errors[name] for name in (MEASURED, rival)}


def _errors_table(surface: Surface, errors: Mapping[str, float]) -> str:
    noisy = errors[MEASURED]
    rows = [
        (name, f"{error:#.3g}", f"{1 - error / noisy:.0%}" if error < noisy else "–")
        for name, error in errors.items()
    ]
    caption = (
        "Distance to the truth on the held-out part. Mean and median are shown at the widths and "
        "numbers of passes that serve them best there."
    )
    best = min(range(len(rows)), key=[*errors.values()].__getitem__)
    return page.table(caption, ["", f"RMSE [{surface.unit}]", "removed"], rows, best)


def _accuracy_table(accuracies: list[OpError]) -> str:
    rows = [(a.name, f"{a.relative:.1e}", f"{a.ratio:.2g}") for a in accuracies]
    caption = (
        "Error of every product used, against plain torch in float64. The last column is the worst "
        "element's error over its bound, computed from its terms: below 1 is right."
    )
    return page.table(caption, ["float32", "relative error", "error / bound"], rows)


def _times_table(times: Mapping[str, Mapping[str, float]], tile: Graph, graph: Graph) -> str:
    f, c = SurfaceFilter.KERNELS, SurfaceFilter.CHANNELS
    caption = (
        "The same filter in torchweft and in plain torch (index_select, multiply, index_add), "
        "taking "
        f"turns; medians. A step: forward and backward on {len(tile.rows):,} points, "
        f"{len(tile.src):,} edges. The surface: {len(graph.rows):,} points, {len(graph.src):,} "
        f"edges, of which plain torch writes {4 * len(graph.src) * f * c / 1e6:,.0f} MB a layer."
    )
    return page.times(caption, times)
