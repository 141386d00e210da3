"""The n-body simulator: Coulomb's law, what it conserves, and the comparison's own data.

Seen red with: an inverse square of the distance for the cube, a partner left out, a drift of
another length, a kick from half a step ahead.
"""

import pytest
import torch

from torchweft.demo.models import forecaster as charges
from torchweft.demo.models.forecaster import Starts, forces, simulate, starts
from torchweft.testing import assert_within_bound

FRAMES = 3
STEPS = FRAMES * charges.STEPS_A_FRAME


@pytest.fixture(scope="module")
def start():
    """Bodies of one sign repel each other: no encounter is close, no force is clipped."""
    drawn = starts(64, seed=1)
    return Starts(torch.ones_like(drawn.charge), 2 * drawn.position, drawn.velocity)


@pytest.fixture(scope="module")
def found(start):
    return simulate(start, FRAMES)


def test_forces_follow_coulombs_law():
    charge, x, _ = starts(64, seed=0)
    across = x.unsqueeze(1) - x  # (n, n, 3, S)
    size = charge.unsqueeze(1) * charge / across.square().sum(2) ** 1.5
    size[range(5), range(5)] = 0
    terms = across * size.unsqueeze(2)
    exact = terms.sum(1).clamp(-100, 100)
    # four terms of eight roundings each
    assert_within_bound(forces(x, charge), exact, terms.abs().sum(1), 4 * 8)


def test_momentum_is_conserved(start, found):
    """But for two roundings a body and step."""
    before, after = start.velocity.sum(0).T, found.velocity[-1].sum(1)
    sizes = torch.cat([start.velocity.abs().amax((0, 1)), found.velocity.abs().amax((0, 2, 3))])
    bound = 2 * STEPS * len(start.charge) * torch.finfo(torch.float64).eps * sizes.view(2, -1)
    assert ((after - before).abs() <= bound.amax(0).unsqueeze(1)).all()


def _energy(x, v, charge):
    """H(x, v): half a kick brings the velocity to the time of the position."""
    v = v + charges.STEP / 2 * forces(x, charge)
    first, second = torch.combinations(torch.arange(5)).T
    distance = (x[first] - x[second]).norm(dim=1)
    return v.square().sum((0, 1)) / 2 + (charge[first] * charge[second] / distance).sum(0)


def _step_error(x, v, charge):
    """How far the energy is from what a leapfrog conserves: h²(|vᵀV″v|/12 + |F|²/24)."""
    force, along = torch.func.jvp(lambda y: forces(y, charge), (x,), (v,))
    curvature = (v * along).sum((0, 1)).abs() / 12
    return charges.STEP**2 * (curvature + force.square().sum((0, 1)) / 24)


def test_energy_is_conserved(start, found):
    views = [found.position.movedim(1, -1), found.velocity.movedim(1, -1)]
    energies, errors = (
        torch.stack([f(x, v, start.charge) for x, v in zip(*views, strict=True)])
        for f in (_energy, _step_error)
    )
    assert ((energies[-1] - energies[0]).abs() <= errors[-1] + errors[0]).all()


def test_one_seed_gives_the_same_systems():
    few, many = starts(3, seed=43), starts(5, seed=43)
    for a, b in zip(few, many, strict=True):
        torch.testing.assert_close(a, b[..., :3], rtol=0, atol=0)
    assert few.charge.abs().eq(1).all()
    speeds = few.velocity.norm(dim=1)
    torch.testing.assert_close(speeds, torch.full_like(speeds, charges.SPEED))
