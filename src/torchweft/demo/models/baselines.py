"""What needs no learning: the mean and the median of the neighbours, with their best settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from torchweft import products
from torchweft.demo.data.surface import Surface
from torchweft.demo.models.filter import NEIGHBOURS, Graph

__all__ = ["best_filters", "neighbour_mean"]

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
    """Of the neighbours and the point itself, whose rise is 0."""
    rises = torch.nn.functional.pad(rise.view(-1, NEIGHBOURS), (0, 1))
    return rises.median(dim=1, keepdim=True).values
