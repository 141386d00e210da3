"""products: a message-passing filter learns to restore a surface from a noisy measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from torchweft import explain, products
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
    message_layer,
    neighbour_mean,
    plain_gather,
    step_of,
    tiles_of,
)
from torchweft.demo.pictures import WINDOW, curve, panels, whole
from torchweft.demo.snippets import shown

__all__ = ["chapter"]

MEASURED, OURS = "as measured", "trained network"
STEP_ROUNDS, SURFACE_ROUNDS = 9, 3

_FORMULA = (
    "<span><i>z<sub>i</sub></i> = Σ<sub><i>e</i>∈N(<i>i</i>)</sub> "
    "<i>φ</i>(<i>g<sub>e</sub></i>) ⊗ <i>x</i><sub><i>j</i>(<i>e</i>)</sub></span> "
    "<span><i>x<sub>i</sub></i> ← <i>x<sub>i</sub></i> + silu(Σ<sub><i>f</i></sub> "
    "<i>z<sub>if</sub> W<sub>f</sub></i> + <i>b</i>)</span> "
    "<span><i>p<sub>i</sub></i> ← <i>p<sub>i</sub></i> + σ⟨<i>w</i>, <i>x<sub>i</sub></i>⟩ "
    "<i>n<sub>i</sub></i></span>"
)


def chapter(options: Options) -> page.Chapter:
    """Learn on one part of the surface, restore all of it, judge on the part held out."""
    device = options.device
    surface = load(options.points, options.seed, options.key)
    torch.manual_seed(options.seed)
    model = SurfaceFilter().to(device)
    tiles = tiles_of(surface, device, options.seed)
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
    calls = explain(restore, model, graph, surface)
    blocks = [
        *_story(surface, graph, errors, times),
        page.figure(partial(panels, surface, views), _panels_caption(surface, errors)),
        _errors_table(surface, errors),
        _times_table(times, tiles[0], graph),
        page.figure(partial(curve, *_learning(surface, losses, errors, rival)), _CURVE),
    ]
    if surface.grid:
        caption = "The whole map, restored. The filter was trained below the dashed line."
        blocks.append(page.figure(partial(whole, surface, restored), caption))
    blocks += [
        page.details("How exact: each product against float64", _accuracy_table(model, tiles[0])),
        page.details("What runs: torchweft.explain of the restoration", page.code(str(calls))),
        page.documentation({"products": "families/products", "PyG layers": "how-to/use_with_pyg"}),
    ]
    title = "Message passing: a network that removes noise"
    return page.Chapter("torchweft.products", title, tuple(blocks))


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
    models = {"torchweft": model, "plain torch": plain}
    steps = {name: step_of(m, tile) for name, m in models.items()}
    passes = {name: partial(_amount, m, graph) for name, m in models.items()}
    device = graph.src.device
    return {
        "training step": interleaved(steps, device, STEP_ROUNDS),
        "inference": interleaved(passes, device, SURFACE_ROUNDS),
    }


def _accuracies(model: SurfaceFilter, tile: Graph) -> list[OpError]:
    """Errors of each product that the chapter uses, on its own inputs."""
    phi = model.kernel(tile.geometry).detach()
    x = torch.randn(len(tile.rows), model.CHANNELS, device=phi.device)
    z = plain_gather(phi, x, tile)
    weight = model.weights[-1].detach()
    rise = tile.offset[:, 2:].contiguous()
    closeness = (-tile.offset[:, 0].square()).exp()

    def gather(a: Tensor, b: Tensor) -> Tensor:
        return products.indexed_outer_segment(a, b, None, tile.src, tile.seg)

    def mix(a: Tensor, b: Tensor) -> Tensor:
        return products.vecmat_segment(a, b, tile.matrices).squeeze(1)

    def mean(a: Tensor, b: Tensor) -> Tensor:
        return neighbour_mean(a, b, tile)

    def plain_mean(a: Tensor, b: Tensor) -> Tensor:
        zeros = a.new_zeros(len(tile.rows), a.shape[1])
        return zeros.index_add(0, tile.dst, a * b.unsqueeze(1))

    return [
        *op_errors(
            "indexed_outer_segment", gather, lambda a, b: plain_gather(a, b, tile), (phi, x)
        ),
        *op_errors("vecmat_segment", mix, lambda a, b: a.flatten(1) @ b.flatten(0, 1), (z, weight)),
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
    text = (
        f"{surface.name}: {count:,} points of a surface. Each is measured with an error of "
        f"{surface.sigma:.3g} {surface.unit} (one standard deviation), and {SPIKES:.0%} of them "
        f"with {SPIKE:g} times that error. A network passes messages between each point and its "
        f"{NEIGHBOURS} nearest neighbours ({len(graph.src):,} edges) and predicts how far the "
        f"point has to move. It is trained on {1 - float(surface.held_out.float().mean()):.0%} of "
        "the surface. Every error below is that of the other points, which are held out."
    )
    if errors[OURS] >= errors[MEASURED]:
        text += " On this cloud it makes them worse: they differ too much from what it learned."
    if surface.small:
        text += page.SHORT
    numbers = [
        (_length(errors[MEASURED], surface), "error of the constant guess: the points as measured"),
        (_length(others, surface), "error of the best filter without training"),
        *page.leads(times),
        (_length(errors[OURS], surface), "error of the trained network"),
    ]
    meaning = (
        "φ is a small MLP of where a neighbour lies relative to the point. `indexed_outer_segment` "
        "multiplies and sums over all edges in one pass, without storing a message for each edge; "
        "`vecmat_segment` applies the layer's matrices. Gradients are sums of the same kind, with "
        "a fixed order of summation: training repeats bit for bit."
    )
    return [
        page.paragraph(text),
        page.cards(numbers),
        page.formula(_FORMULA),
        page.paragraph(meaning),
        shown(message_layer),
    ]


def _length(error: float, surface: Surface) -> str:
    unit = surface.unit if surface.grid else "sp."
    return f"{error:#.3g}\N{NO-BREAK SPACE}{unit}"


def _panels_caption(surface: Surface, errors: Mapping[str, float]) -> str:
    numbers = ", ".join(f"{name} {error:#.3g}" for name, error in errors.items())
    most = f"{2 * surface.sigma:.2g} {surface.unit} or more"
    distance = f"coloured by the distance to the truth, from 0 (dark) to {most} (yellow)"
    what = "in shaded relief" if surface.grid else distance
    return (
        f"A part of the held-out surface, {what}. Root mean square errors of all held-out points "
        f"[{surface.unit}]: {numbers}."
    )


_CURVE = (
    f"Training, on a logarithmic axis. Thin: the error of each step, on one tile of the training "
    f"part. Thick: the median of {WINDOW} steps. Dashed and dotted: errors without training, on "
    "the held-out part."
)


def _learning(
    surface: Surface, losses: Sequence[float], errors: Mapping[str, float], rival: str
) -> tuple[list[float], dict[str, float], str]:
    """Arguments of the picture of the training."""
    levels = {name: errors[name] for name in (MEASURED, rival)}
    return [surface.sigma * loss for loss in losses], levels, f"RMS error [{surface.unit}]"


def _errors_table(surface: Surface, errors: Mapping[str, float]) -> str:
    noisy = errors[MEASURED]
    rows = [
        (name, f"{error:#.3g}", f"{1 - error / noisy:.0%}" if error < noisy else "–")
        for name, error in errors.items()
    ]
    spacing = "" if surface.grid else " A spacing (sp.) is the median distance of nearest points."
    caption = (
        "Distance to the true points on the held-out part. The filters without training have the "
        f"widths and numbers of passes that are best on that part.{spacing}"
    )
    best = min(range(len(rows)), key=[*errors.values()].__getitem__)
    return page.table(caption, ["", f"RMS error [{surface.unit}]", "noise removed"], rows, best)


def _accuracy_table(model: SurfaceFilter, tile: Graph) -> str:
    rows = [(a.name, f"{a.relative:.1e}", f"{a.ratio:.2g}") for a in _accuracies(model, tile)]
    caption = (
        "Each product in float32 against plain torch in float64. The last column is the error of "
        "the worst element over its bound, which is computed from its terms: below 1 is right."
    )
    return page.table(caption, ["float32", "relative error", "error / bound"], rows)


def _times_table(times: Mapping[str, Mapping[str, float]], tile: Graph, graph: Graph) -> str:
    f, c = SurfaceFilter.KERNELS, SurfaceFilter.CHANNELS
    caption = (
        "The same network in torchweft and in plain torch: index_select, multiply, index_add, "
        "which is what message passing in Torch Geometric runs. Medians; the calls alternate. "
        f"Training step: forward and backward on {len(tile.rows):,} points. Inference: "
        f"{len(graph.rows):,} points, {len(graph.src):,} edges, for which plain torch stores "
        f"{4 * len(graph.src) * f * c / 1e6:,.0f} MB of messages in each layer."
    )
    return page.times(caption, times)
