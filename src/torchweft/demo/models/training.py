"""Learning a filter from the part of a surface that is not held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchweft.demo.data.neighbours import split
from torchweft.demo.data.surface import Surface
from torchweft.demo.models.filter import Graph, SurfaceFilter, graph_of
from torchweft.demo.models.learning import learned
from torchweft.progress import track

__all__ = ["fit", "step_of", "tiles_of"]

TILE = 4096  # points at most
STEPS = 300
RATE = 1.5e-2


def tiles_of(surface: Surface, device: torch.device) -> list[Graph]:
    """Graphs of parts that may be learned from; their plans are built once, at the first step."""
    rows = (~surface.held_out).nonzero().squeeze(1)
    parts = split(surface.base[rows], TILE)
    return [graph_of(surface, rows[part]).to(device) for part in track(parts, "neighbours")]


def fit(model: SurfaceFilter, tiles: Sequence[Graph], seed: int) -> list[float]:
    """The RMSE of each step, in units of σ: Adam, one tile a step, one cycle of the rate."""
    order = torch.randint(len(tiles), (STEPS,), generator=torch.Generator().manual_seed(seed))
    losses = learned(model, order.tolist(), lambda number: step_of(model, tiles[number])(), RATE)
    return [loss**0.5 for loss in losses]


def step_of(model: SurfaceFilter, tile: Graph) -> Callable[[], torch.Tensor]:
    """One forward and backward pass, which leaves its gradients in the model."""

    def step() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = (model(tile) - tile.target).square().mean()
        torch.autograd.backward(loss)
        return loss.detach()

    return step
