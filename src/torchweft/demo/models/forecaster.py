"""An equivariant network that foretells where charged bodies go: CEGNN's for n-body systems.

A body is three multivectors: its charge, a scalar; its position from the system's middle and its
velocity, vectors.  Every two bodies of a system exchange messages, told by the product of their
charges; what comes out is the vector from where a body is to where it will be.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchweft.clifford import Algebra
from torchweft.clifford.layers.basic import MultivectorLinear
from torchweft.clifford.layers.cegnn import EGCL, MessagePlan, message_plan
from torchweft.demo.data.charges import Trajectories

__all__ = ["ALGEBRA", "Forecaster", "Systems", "complete_graphs", "embedded", "systems_of"]

ALGEBRA = Algebra((1, 1, 1))
BEFORE, AFTER = 30, 40  # frames


class Systems(NamedTuple):
    """S systems of n bodies: what is known, and what is asked."""

    charge: Tensor  # (S, n)
    position: Tensor  # (S, n, 3)
    velocity: Tensor  # (S, n, 3)
    target: Tensor  # (S, n, 3)

    def of(self, rows: Tensor) -> Systems:
        """Some of them."""
        return Systems(*(t.index_select(0, rows) for t in self))

    def to(self, device: torch.device, dtype: torch.dtype) -> Systems:
        """On another device, in another precision."""
        return Systems(*(t.to(device, dtype) for t in self))


def systems_of(found: Trajectories) -> Systems:
    """Frame 30 of simulated systems, and the positions of frame 40."""
    x = found.position
    return Systems(found.charge, x[BEFORE], found.velocity[BEFORE], x[AFTER])


def complete_graphs(systems: int, bodies: int) -> MessagePlan:
    """Messages between every two bodies of each system."""
    first, second = (~torch.eye(bodies, dtype=torch.bool)).nonzero().T
    begin = bodies * torch.arange(systems).unsqueeze(1)
    dst, src = ((begin + side).flatten() for side in (first, second))
    return message_plan(src, dst, systems * bodies)


def embedded(systems: Systems, plan: MessagePlan) -> tuple[Tensor, Tensor]:
    """(8, bodies, 3) multivectors of the bodies, and (8, messages, 1) of the messages."""
    charge, position, velocity, _ = systems
    bodies = charge.new_zeros(ALGEBRA.num_blades, charge.numel(), 3)
    bodies[0, :, 0] = charge.flatten()
    bodies[1:4, :, 1] = (position - position.mean(1, keepdim=True)).flatten(0, 1).T
    bodies[1:4, :, 2] = velocity.flatten(0, 1).T
    messages = charge.new_zeros(ALGEBRA.num_blades, len(plan.src), 1)
    messages[0, :, 0] = charge.flatten()[plan.src] * charge.flatten()[plan.dst]
    return bodies, messages


class Forecaster(nn.Module):
    """Positions of the bodies at the later frame.

    Args:
        features: multivectors a body has inside.
        layers: how often messages are passed.
    """

    def __init__(self, features: int = 28, layers: int = 3) -> None:
        super().__init__()
        self.embedding = MultivectorLinear(3, features, ALGEBRA)
        self.layers = nn.ModuleList(EGCL(features, ALGEBRA, edge_features=1) for _ in range(layers))
        self.projection = MultivectorLinear(features, 1, ALGEBRA)

    def forward(self, systems: Systems, plan: MessagePlan) -> Tensor:
        """(S, n, 3); `plan` is that of `complete_graphs`."""
        bodies, messages = embedded(systems, plan)
        h = self.embedding(bodies)
        for layer in self.layers:
            h = layer(h, plan, messages)
        change: Tensor = self.projection(h)[1:4, :, 0]
        return systems.position + change.T.reshape(systems.position.shape)
