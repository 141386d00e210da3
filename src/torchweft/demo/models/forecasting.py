"""Learning to foretell charged bodies, and how well it was learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchweft.clifford.layers.cegnn import MessagePlan
from torchweft.demo.data.charges import Trajectories, simulate, starts
from torchweft.demo.models.forecaster import Forecaster, Systems, complete_graphs, systems_of
from torchweft.demo.models.learning import learned

__all__ = ["Data", "fit", "foretold", "rmse", "simulated", "step_of", "turned"]

LEARNED_FROM, HELD_OUT = 500, 200  # systems
BATCH = 100
STEPS = 100
RATE = 2e-2
FRAMES = 41


class Data(NamedTuple):
    """Systems to learn from, and others to judge by with all their frames."""

    train: Systems
    test: Systems
    frames: Trajectories  # of the test systems


def simulated(seed: int, device: torch.device) -> Data:
    """All systems, new for each seed, simulated in float64."""
    found = simulate(starts(LEARNED_FROM + HELD_OUT, seed), FRAMES)
    systems = systems_of(found).to(device, torch.float32)
    rows = torch.arange(LEARNED_FROM + HELD_OUT, device=device)
    frames = Trajectories(*(t.narrow(t.dim() // 4, LEARNED_FROM, HELD_OUT) for t in found))
    return Data(systems.of(rows[:LEARNED_FROM]), systems.of(rows[LEARNED_FROM:]), frames)


def fit(model: Forecaster, systems: Systems, seed: int) -> list[float]:
    """The RMSE of each step: Adam, random batches, one cycle of the rate."""
    device = systems.charge.device
    plan = complete_graphs(BATCH, systems.charge.shape[1]).to(device)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(systems.charge), (STEPS, BATCH), generator=generator).to(device)
    losses = learned(
        model,
        rows.unbind(),
        lambda batch: step_of(model, systems.of(batch), plan)(),
        RATE,
        rising=0.1,
    )
    return [loss**0.5 for loss in losses]


def step_of(model: nn.Module, systems: Systems, plan: MessagePlan) -> Callable[[], Tensor]:
    """One forward and backward pass, which leaves its gradients in the model."""

    def step() -> Tensor:
        model.zero_grad()
        loss: Tensor = (model(systems, plan) - systems.target).square().mean()
        torch.autograd.backward(loss)
        return loss.detach()

    return step


def foretold(model: nn.Module, systems: Systems) -> Tensor:
    """The positions of all bodies at the later frame."""
    plan = complete_graphs(*systems.charge.shape).to(systems.charge.device)
    with torch.no_grad():
        positions: Tensor = model(systems, plan)
    return positions


def rmse(positions: Tensor, systems: Systems) -> float:
    """Root of the mean squared error of a coordinate."""
    return float((positions - systems.target).square().mean().sqrt())


def turned(systems: Systems, seed: int) -> tuple[Systems, Callable[[Tensor], Tensor]]:
    """The systems, turned, mirrored and moved at random; and how positions are moved so."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q
    turn = (-turn.det().sign() * turn).to(systems.position)
    shift = torch.randn(3, generator=generator).to(systems.position)

    def move(positions: Tensor) -> Tensor:
        there: Tensor = positions @ turn.T + shift
        return there

    charge, position, velocity, target = systems
    return Systems(charge, move(position), velocity @ turn.T, move(target)), move
