"""A message-passing filter for noisy surfaces, in torchweft and in plain torch.

    φ_e = MLP(g_e)                                      what edge e is good for, F numbers
    z_i = Σ_{e ∈ N(i)} φ_e ⊗ x_{j(e)}                   (F, C): a convolution whose kernel is φ
    x_i ← x_i + silu(Σ_f z_if W_f + b)                  three times, from x = 1
    p_i ← p_i + σ·⟨w, x_i⟩·n_i                          the point moves along its normal

g_e = (right, ahead, rise) of neighbour j seen from point i: the rise lets φ distrust outliers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchweft import products
from torchweft.demo.data.surface import Surface, measured, nearest, split
from torchweft.demo.models.learning import gradient_step, learned
from torchweft.progress import track

__all__ = [
    "Graph",
    "PlainFilter",
    "SurfaceFilter",
    "best_filters",
    "fit",
    "graph_of",
    "message_layer",
    "neighbour_mean",
    "plain_gather",
    "step_of",
    "tiles_of",
]

NEIGHBOURS = 8


class Graph(NamedTuple):
    """Some points of a surface, each with its neighbours: edge e goes from src[e] to dst[e]."""

    rows: Tensor  # (N,) rows of the surface
    src: Tensor  # (E,)
    dst: Tensor  # (E,) non-decreasing
    seg: Tensor  # (N + 1,) the edges of point i are seg[i] .. seg[i + 1] - 1
    offset: Tensor  # (E, 3) right, ahead, rise of the neighbour, in units of the spacing
    geometry: Tensor  # (E, 4) what φ sees
    target: Tensor  # (N, 1) how far the point is off along its normal, in units of σ
    matrices: Tensor  # (2,) the one segment of the F matrices of a layer: 0, F

    def to(self, device: torch.device) -> Graph:
        """The same on another device."""
        return Graph(*(t.to(device) for t in self))


def graph_of(surface: Surface, rows: Tensor) -> Graph:
    """The graph of some rows of a surface: each point and its eight nearest."""
    near = nearest(surface.base[rows], NEIGHBOURS)
    src = near.flatten()
    dst = torch.arange(len(rows)).repeat_interleave(NEIGHBOURS)
    points, frames = surface.noisy[rows], surface.frames[rows]
    steps = (points[src] - points[dst]).view(*near.shape, 3)
    offset = (steps @ frames.mT).flatten(0, 1) / surface.spacing
    rise = offset[:, 2:] * surface.spacing / surface.sigma
    error = (surface.truth[rows] - points).unsqueeze(1) @ frames[:, 2:].mT
    return Graph(
        rows=rows,
        src=src,
        dst=dst,
        seg=torch.arange(len(rows) + 1) * NEIGHBOURS,
        offset=offset,
        # bounded, with one scale for noise and one for spikes
        geometry=torch.cat([offset[:, :2], (rise / 2).tanh(), (rise / 8).tanh()], dim=1),
        target=error[:, 0] / surface.sigma,
        matrices=torch.tensor([0, SurfaceFilter.KERNELS]),
    )


def message_layer(phi: Tensor, x: Tensor, weight: Tensor, bias: Tensor, graph: Graph) -> Tensor:
    """x_i + silu(Σ_f z_if W_f + b): (N, C).  No (E, F, C) tensor is ever formed."""
    # z_i = Σ φ_e ⊗ x_j over the edges e from j to i: (N, F, C).
    # Edge e comes from point src[e]; those of point i are seg[i] … seg[i + 1] - 1.
    z = products.indexed_outer_segment(phi, x, None, graph.src, graph.seg)
    # Σ_f z_if W_f: the points are a batch, the F matrices of the layer one segment.
    mixed = products.vecmat_segment(z, weight, graph.matrices).squeeze(1)
    return x + nn.functional.silu(mixed + bias)


class SurfaceFilter(nn.Module):
    """How far each point of a graph is off its surface, in units of σ: (N, 1)."""

    KERNELS, CHANNELS, LAYERS, HIDDEN = 8, 12, 3, 16

    def __init__(self) -> None:
        super().__init__()
        f, c = self.KERNELS, self.CHANNELS
        self.kernel = nn.Sequential(nn.Linear(4, self.HIDDEN), nn.SiLU(), nn.Linear(self.HIDDEN, f))
        widths = [1] + [c] * (self.LAYERS - 1)
        self.weights = nn.ParameterList(torch.randn(f, n, c) / (f * n) ** 0.5 for n in widths)
        self.biases = nn.ParameterList(torch.zeros(c) for _ in widths)
        self.readout = nn.Linear(c, 1)

    def forward(self, graph: Graph) -> Tensor:
        """(N, 1) from the graph alone: it is invariant to where the surface lies."""
        phi = self.kernel(graph.geometry)
        x = phi.new_ones(len(graph.rows), 1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = self.layer(phi, x, weight, bias, graph)
        amount: Tensor = self.readout(x)
        return amount

    layer = staticmethod(message_layer)


class PlainFilter(SurfaceFilter):
    """The same filter in plain torch: index_select, multiply, index_add."""

    @staticmethod
    def layer(phi: Tensor, x: Tensor, weight: Tensor, bias: Tensor, graph: Graph) -> Tensor:
        """The same layer, with one (F, C) block of memory for each edge."""
        mixed = plain_gather(phi, x, graph).flatten(1) @ weight.flatten(0, 1)
        return x + nn.functional.silu(mixed + bias)


def plain_gather(phi: Tensor, x: Tensor, graph: Graph) -> Tensor:
    """z_i = Σ_{e ∈ N(i)} φ_e ⊗ x_{j(e)}: (N, F, C)."""
    terms = phi.unsqueeze(2) * x.index_select(0, graph.src).unsqueeze(1)
    return terms.new_zeros(len(graph.seg) - 1, *terms.shape[1:]).index_add(0, graph.dst, terms)


TILE = 4096  # points at most
STEPS = 300
RATE = 1.5e-2


def tiles_of(surface: Surface, device: torch.device, seed: int) -> list[Graph]:
    """Graphs of parts that may be learned from; their plans are built once, at the first step.

    A part of few points is measured again until there are `TILE` of them, with other noise.
    """
    rows = (~surface.held_out).nonzero().squeeze(1)
    generator = torch.Generator().manual_seed(seed + 1)  # `seed` gave the first noise
    copies = [measured(surface, generator) for _ in range(TILE // len(rows))]
    parts = [(s, part) for s in (surface, *copies) for part in split(s.base[rows], TILE)]
    return [graph_of(s, rows[part]).to(device) for s, part in track(parts, "neighbours")]


def fit(model: SurfaceFilter, tiles: Sequence[Graph], seed: int) -> list[float]:
    """The RMSE of each step, in units of σ: Adam, one tile a step, one cycle of the rate."""
    order = torch.randint(len(tiles), (STEPS,), generator=torch.Generator().manual_seed(seed))
    losses = learned(model, order.tolist(), lambda number: step_of(model, tiles[number])(), RATE)
    return [loss**0.5 for loss in losses]


def step_of(model: SurfaceFilter, tile: Graph) -> Callable[[], torch.Tensor]:
    """One forward and backward pass, which leaves its gradients in the model."""
    return gradient_step(model, lambda: (model(tile) - tile.target).square().mean())


WIDTHS = (0.7, 1.0, 2.0)  # of the Gaussian weights, in units of the spacing
PASSES = (1, 2, 3)

Step = Callable[[Tensor], Tensor]


def neighbour_mean(rise: Tensor, weight: Tensor, graph: Graph) -> Tensor:
    """Σ_{e ∈ N(i)} w_e rise_e for (E, 1) rises: (N, 1)."""
    return products.vecsca_segment(rise, weight, graph.seg)


def best_filters(surface: Surface, graph: Graph, judged: Tensor) -> dict[str, tuple[float, Tensor]]:
    """RMSE and points of each filter at the settings that serve it best on the judged rows.

    The settings are chosen with the truth at hand: a favour that the learned filter does not get.
    """
    points = surface.noisy.to(graph.src.device)
    means = [_mean(graph, width) for width in WIDTHS]
    medians = _repeated(points, _median, surface, graph)
    found = {
        "mean of neighbours": (p for m in means for p in _repeated(points, m, surface, graph)),
        "median of neighbours": medians,
        "median, then mean": (
            p for q in medians[:2] for m in means for p in _repeated(q, m, surface, graph)
        ),
    }
    return {name: _best(all_points, surface, judged) for name, all_points in found.items()}


def _best(candidates: Iterable[Tensor], surface: Surface, judged: Tensor) -> tuple[float, Tensor]:
    ready = (points.cpu() for points in candidates)
    return min(((surface.rmse(p, judged), p) for p in ready), key=lambda found: found[0])


def _repeated(points: Tensor, step: Step, surface: Surface, graph: Graph) -> list[Tensor]:
    """The points after 1, 2, 3 passes of p_i ← p_i + step(rises)·n_i."""
    normals = surface.frames[:, 2].to(points.device)
    passes = []
    for _ in PASSES:
        across = points[graph.src] - points[graph.dst]
        rise = (across * normals[graph.dst]).sum(1, keepdim=True)
        points = points + step(rise) * normals
        passes.append(points)
    return passes


def _mean(graph: Graph, width: float) -> Step:
    """Gaussian weights; the point itself has weight 1 and rise 0."""
    weight = (-graph.offset[:, :2].square().sum(1) / (2 * width**2)).exp()
    total = 1 + neighbour_mean(torch.ones_like(weight).unsqueeze(1), weight, graph)
    return lambda rise: neighbour_mean(rise, weight, graph) / total


def _median(rise: Tensor) -> Tensor:
    """Median over the neighbours and the point itself, whose rise is 0."""
    rises = torch.nn.functional.pad(rise.view(-1, NEIGHBOURS), (0, 1))
    return rises.median(dim=1, keepdim=True).values
