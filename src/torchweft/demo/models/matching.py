"""Learning energies and forces of molecules, and how well they were learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchweft.demo.data.molecules import NUMBERS, Molecules, cut, labelled, names, shaken
from torchweft.demo.models.learning import learned
from torchweft.demo.models.potential import Potential, Settings, energies_and_forces

__all__ = ["Data", "Errors", "errors", "fit", "molecules", "new_potential", "step_of", "turned"]

LEARNED_FROM, HELD_OUT = 30, 4  # shakes of each molecule
STEPS = 500
BATCH = 16  # molecules
RATE = 2e-2
ENERGY = 5.0  # what an error of 1 eV an atom costs, in errors of 1 eV/Å of a force
ROUND = 1e-4  # (eV/Å)²: errors of forces below its root count by their squares


class Data(NamedTuple):
    """Molecules to learn from, others to judge by, and whose energies they have."""

    train: Molecules
    test: Molecules
    labels: str


class Errors(NamedTuple):
    """Root mean squares."""

    energy: float  # eV, of an atom
    force: float  # eV/Å, of a component


def molecules(seed: int, labels: str, shakes: int) -> Data:
    """Every molecule, shaken in `shakes` ways to learn from and in some more to judge by."""
    random = np.random.default_rng(seed)
    copies = [shaken(name, shakes + HELD_OUT, random) for name in names()]
    train = [atoms for some in copies for atoms in some[HELD_OUT:]]
    test = [atoms for some in copies for atoms in some[:HELD_OUT]]
    every = labelled([*test, *train], labels)
    rows = torch.arange(len(every.energy))
    return Data(every.of(rows[len(test) :]), every.of(rows[: len(test)]), labels)


def new_potential(train: Molecules, settings: Settings, dtype: torch.dtype) -> Potential:
    """A potential that starts from elements' energies, by least squares, and the forces' size."""
    counts = torch.zeros(len(train.energy), len(NUMBERS), dtype=torch.float64)
    counts.index_put_((train.owner, train.element), counts.new_ones(()), accumulate=True)
    shifts = torch.linalg.pinv(counts) @ train.energy.double()
    neighbours = len(cut(train, settings.cutoff)[0]) / len(train.element)
    scale = float(train.force.square().mean().sqrt())
    return Potential(settings, shifts, scale, neighbours).to(dtype)


def fit(model: Potential, train: Molecules, seed: int, steps: int) -> list[float]:
    """The RMS error of the forces of each step: Adam, random batches, one cycle of the rate."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(train.energy), (steps, BATCH), generator=generator)
    squares = learned(
        model,
        rows.to(train.ptr.device).unbind(),
        lambda batch: step_of(model, train.of(batch))(),
        RATE,
        rising=0.1,
    )
    return [square**0.5 for square in squares]


def step_of(model: nn.Module, batch: Molecules) -> Callable[[], Tensor]:
    """One step, which leaves its gradients in the model; the mean square error of the forces.

    What is made small is the mean length of the forces' errors: a square would be that of the few
    stiffest bonds.

    Forces are gradients already, so the gradient of their error is a second derivative.
    """

    def step() -> Tensor:
        model.zero_grad()
        energy, force = energies_and_forces(model, batch, train=True)
        wrong = (force - batch.force).square().sum(1)
        of_atom = (energy - batch.energy) / batch.size
        loss = (wrong + ROUND).sqrt().mean() + ENERGY * of_atom.abs().mean()
        torch.autograd.backward(loss)
        return wrong.detach().mean() / 3

    return step


def errors(energy: Tensor, force: Tensor, truth: Molecules) -> Errors:
    """Of energies and forces."""
    of_atom = (energy - truth.energy) / truth.size
    return Errors(*(float(e.square().mean().sqrt()) for e in (of_atom, force - truth.force)))


def turned(batch: Molecules, seed: int) -> tuple[Molecules, Tensor]:
    """The molecules, turned, mirrored and moved at random; and the turn, (3, 3)."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q
    turn = (-turn.det().sign() * turn).to(batch.position)
    shift = torch.randn(3, generator=generator).to(batch.position)
    return batch._replace(
        position=batch.position @ turn.T + shift, force=batch.force @ turn.T
    ), turn
