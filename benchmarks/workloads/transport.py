"""Builds the workloads of optimal transport: two clouds, uniform in the unit cube.

A single number has no noise to speak of, so the check is made on several clouds.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.recipes import Random
from torchweft.reductions import SamplesLoss

__all__ = ["BLUR", "SCALING", "transport_case"]

BLUR, SCALING = 0.05, 0.5

CHECKED = {"online": 16, "multiscale": 4}
"""Clouds of the check."""

CHECKED_POINTS = 1024
"""Points of each of them."""


def transport_case(name: str, points: int, way: str = "online") -> Case:
    """The debiased Sinkhorn divergence of two clouds.

    "online" takes all pairs at each step, and is held against dense matrices; "multiscale" leaves
    pairs out, and is held against itself on the CPU.
    """
    return Case(
        name,
        way,
        functools.partial(_workload, points, way),
        phases=("forward", "forward+backward"),
        check_batch=CHECKED[way],
    )


def _workload(points: int, way: str, device: torch.device, check_batch: int | None) -> Workload:
    shape = (points,) if check_batch is None else (check_batch, CHECKED_POINTS)
    random = Random(device)
    x, y = (torch.special.ndtr(random.normal(*shape, 3)) for _ in range(2))
    loss = SamplesLoss("sinkhorn", p=2, blur=BLUR, scaling=SCALING, backend=way)

    def function(x: Tensor, y: Tensor, backend: str | None = None) -> Tensor:
        if x.dim() == 2 or way == "online":
            found: Tensor = loss(x, y)
            return found
        return torch.stack([loss(*pair) for pair in zip(x, y, strict=True)])

    def oracle(x: Tensor, y: Tensor, scale: None = None) -> Tensor:
        return _dense(x, y) if way == "online" else function(x.cpu(), y.cpu()).to(x.device)

    steps = math.ceil(math.log(BLUR / math.sqrt(3)) / math.log(SCALING)) + 3
    pairs = points**2 if way == "online" else 0  # how many are left depends on the clouds
    return Workload(
        "transport",
        (x, y),
        {},
        function,
        oracle,
        4 * steps * pairs * 12,
        x.element_size(),
        f"rows={points} columns={points} dim=3",
        polynomial=False,
        gradients=1 / steps,  # of the last potentials alone
    )


def _dense(x: Tensor, y: Tensor) -> Tensor:
    """The same steps on dense matrices, see `torchweft.reductions.transport.sinkhorn`."""
    both = torch.cat([x, y], -2).detach()
    diameter = float((both.amax(-2) - both.amin(-2)).norm(dim=-1).max())
    steps = math.ceil(math.log(BLUR / diameter) / math.log(SCALING) - 1e-9)
    lengths = [diameter, *(diameter * SCALING**n for n in range(steps)), BLUR]
    temperatures = [length**2 for length in lengths]

    def update(temperature: float, at: Tensor, points: Tensor, potential: Tensor) -> Tensor:
        # the potential and its points are held: the gradient is that of the dual value
        pairs = at.unsqueeze(-2) - points.detach().unsqueeze(-3)
        scores = (potential.detach().unsqueeze(-2) - pairs.square().sum(-1) / 2) / temperature
        return -temperature * (scores.logsumexp(-1) - math.log(points.shape[-2]))

    def all_updates(temperature: float, potentials: list[Tensor]) -> list[Tensor]:
        f, g, own_x, own_y = potentials
        pairs = ((x, y, g), (y, x, f), (x, x, own_x), (y, y, own_y))
        return [update(temperature, *pair) for pair in pairs]

    with torch.no_grad():
        start = [torch.zeros_like(p[..., 0]) for p in (x, y, x, y)]
        potentials = all_updates(temperatures[0], start)
        for temperature in temperatures:
            new = all_updates(temperature, potentials)
            potentials = [(a + b) / 2 for a, b in zip(potentials, new, strict=True)]
    f, g, own_x, own_y = (p.mean(-1) for p in all_updates(temperatures[-1], potentials))
    return f + g - own_x - own_y
