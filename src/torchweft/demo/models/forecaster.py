"""An equivariant network that predicts where charged bodies go: CEGNN's for n-body systems.

A body is three multivectors: its charge, a scalar; its position from the system's middle and its
velocity, vectors.  Every two bodies of a system exchange messages, told by the product of their
charges; what comes out is the vector from where a body is to where it will be.

The systems are simulated on the spot:

    ẍ_i = Σ_{j≠i} q_i q_j (x_i − x_j) / |x_i − x_j|³,   q_i = ±1

This is the field's n-body comparison (Satorras, Hoogeboom and Welling 2021): five bodies start at
x ~ N(0, 1) with |v| = 1/2.  A step of 0.001 first changes the velocity, then moves the body; no
component of a force exceeds 100; every hundredth step is a frame.  Given frame 30, predict the
positions of frame 40.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from torchweft.clifford import (
    CEMLP,
    EGCL,
    Algebra,
    MessagePlan,
    MultivectorLinear,
    MVLayerNorm,
    MVSiLU,
    SteerableGeometricProduct,
    message_plan,
)
from torchweft.demo.models.learning import gradient_step, learned

__all__ = [
    "ALGEBRA",
    "Data",
    "DenseForecaster",
    "Forecaster",
    "Starts",
    "Systems",
    "Trajectories",
    "complete_graphs",
    "embedded",
    "fit",
    "forces",
    "predicted",
    "rmse",
    "simulate",
    "simulated",
    "starts",
    "step_of",
    "systems_of",
    "turned",
]

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
    return gradient_step(model, lambda: (model(systems, plan) - systems.target).square().mean())


def predicted(model: nn.Module, systems: Systems) -> Tensor:
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


EPS = 1e-6

Stage = tuple[MultivectorLinear, MVSiLU, SteerableGeometricProduct, MVLayerNorm]


class DenseForecaster(nn.Module):
    """What `model` computes, from its own parameters."""

    path: Tensor
    cayley: Tensor
    squares: Tensor
    grades: Tensor

    def __init__(self, model: Forecaster) -> None:
        super().__init__()
        self.model = model
        grades, paths = ALGEBRA.grades, ALGEBRA.path_of
        triples = itertools.product(grades, grades, grades)
        path = torch.tensor([paths.get(triple, len(paths)) for triple in triples])
        like = model.projection.weight
        self.register_buffer("path", path.view(3 * (len(grades),)))
        self.register_buffer("cayley", ALGEBRA.cayley(like.dtype))
        self.register_buffer("squares", torch.tensor(ALGEBRA.squares, dtype=like.dtype))
        self.register_buffer("grades", torch.tensor(grades))
        self.to(like.device)

    def forward(self, systems: Systems, plan: MessagePlan) -> Tensor:
        """(S, n, 3), as `Forecaster` has it."""
        bodies, messages = (a.permute(1, 2, 0) for a in embedded(systems, plan))
        h = self._linear(bodies, self.model.embedding)
        for layer in self.model.layers:
            h = self._pass(h, cast(EGCL, layer), plan, messages)
        change = self._linear(h, self.model.projection)[:, 0, 1:4]
        return systems.position + change.reshape(systems.position.shape)

    def _pass(self, h: Tensor, layer: EGCL, plan: MessagePlan, messages: Tensor) -> Tensor:
        difference = h.index_select(0, plan.dst) - h.index_select(0, plan.src)
        message = self._mlp(torch.cat([difference, messages], 1), layer.edge_model)
        count = h.new_zeros(len(h)).index_add(0, plan.dst, h.new_ones(len(plan.dst)))
        total = torch.zeros_like(h).index_add(0, plan.dst, message)
        mean = total / count.clamp(min=1)[:, None, None]
        return h + self._mlp(torch.cat([h, mean], 1), layer.node_model)

    def _mlp(self, x: Tensor, mlp: CEMLP) -> Tensor:
        for layer in mlp.layers:
            linear, gate, product, norm = cast(Stage, layer.children())
            x = self._gate(self._linear(x, linear), gate)
            x = self._norm(self._steerable(x, product), norm)
        return x

    def _linear(self, x: Tensor, module: MultivectorLinear) -> Tensor:
        out = torch.einsum("nfi,ifg->ngi", x, module.weight[self.grades])
        if module.bias is not None:
            out = out + nn.functional.pad(module.bias.unsqueeze(1), (0, len(self.grades) - 1))
        return out

    def _gate(self, x: Tensor, module: MVSiLU) -> Tensor:
        invariants = torch.cat([x[..., :1], self._squares(x)[..., 1:]], -1)
        gates = (module.a.T * invariants + module.b.T).sigmoid()
        return gates[..., self.grades] * x

    def _steerable(self, x: Tensor, module: SteerableGeometricProduct) -> Tensor:
        right = self._linear(x, module.linear_right)
        norms = _root(self._squares(right))
        divisors = module.normalization.a.sigmoid().T * (norms - 1) + 1 + EPS
        right = right / divisors[..., self.grades]
        weight = nn.functional.pad(module.weight, (0, 1))[:, self.path] * self.cayley
        product = torch.einsum("nfi,fijk,nfk->nfj", x, weight, right)
        return (self._linear(x, module.linear_left) + product) / 2**0.5

    def _norm(self, x: Tensor, module: MVLayerNorm) -> Tensor:
        norms = _root(self._squares(x).sum(-1, keepdim=True))
        return module.a.unsqueeze(1) * x / (norms.mean(1, keepdim=True) + EPS)

    def _squares(self, x: Tensor) -> Tensor:
        """⟨x̃_g x_g⟩₀ of each grade: (rows, F, n + 1)."""
        squares = self.squares * x * x
        return torch.stack([squares[..., b.start : b.stop].sum(-1) for b in ALGEBRA.of_grade], -1)


def _root(square: Tensor) -> Tensor:
    """|square|^½, smooth at 0."""
    return (square.square() + 1e-16) ** 0.25


BODIES = 5
STEP = 1e-3
STEPS_A_FRAME = 100
SPEED = 0.5
STRONGEST = 100.0

NOISE = 2 * 49 * 3 * BODIES


class Starts(NamedTuple):
    """S systems of n bodies at time 0.  Systems come last: every step works on long rows."""

    charge: Tensor  # (n, S), ±1
    position: Tensor  # (n, 3, S)
    velocity: Tensor  # (n, 3, S)


class Trajectories(NamedTuple):
    """S systems of n bodies in T frames."""

    charge: Tensor  # (S, n)
    position: Tensor  # (T, S, n, 3)
    velocity: Tensor  # (T, S, n, 3), that of half a step before the position


def starts(systems: int, seed: int) -> Starts:
    """Random systems, one after the other as the comparison draws them: seed 43 gives its own."""
    random = np.random.RandomState(seed)
    charges, positions, directions = [], [], []
    for _ in range(systems):
        charges.append(np.where(random.random_sample(BODIES) < 0.5, -1.0, 1.0))
        positions.append(random.standard_normal((3, BODIES)))
        directions.append(random.standard_normal((3, BODIES)))
        random.standard_normal(NOISE)  # of size zero in the comparison, but drawn
    x, v = (torch.from_numpy(np.stack(a, axis=-1)).transpose(0, 1) for a in (positions, directions))
    velocity = SPEED * v / v.norm(dim=1, keepdim=True)
    return Starts(torch.from_numpy(np.stack(charges, axis=-1)), x.contiguous(), velocity)


def forces(position: Tensor, charge: Tensor) -> Tensor:
    """F_i = Σ_{j≠i} q_i q_j (x_i − x_j) / |x_i − x_j|³, no component beyond 100: (n, 3, S)."""
    across = position.unsqueeze(1) - position  # (n, n, 3, S), 0 from a body to itself
    itself = torch.eye(len(position), device=position.device)[:, :, None]
    inverse = (across.square().sum(2) + itself).rsqrt()
    size = charge.unsqueeze(1) * charge * inverse.pow(3)
    return (across * size.unsqueeze(2)).sum(1).clamp(-STRONGEST, STRONGEST)


def simulate(start: Starts, frames: int) -> Trajectories:
    """The first frames, on the device of `start` and in its precision."""
    charge, x, v = start
    positions, velocities = [], []
    for _ in range(frames):
        for _ in range(STEPS_A_FRAME):
            v = v + STEP * forces(x, charge)
            x = x + STEP * v
        positions.append(x)
        velocities.append(v)
    found = (torch.stack(t).permute(0, 3, 1, 2).contiguous() for t in (positions, velocities))
    return Trajectories(charge.T.contiguous(), *found)
