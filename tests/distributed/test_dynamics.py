"""Molecular dynamics over ranks: trajectories are those of one process, and atoms migrate.

Seen red with: velocities of other atoms after a migration, forces on the halo's rows dropped.
"""

import functools
import re
from pathlib import Path

import pytest
import torch

from tests.distributed.test_faults import torchrun
from tests.ranks import run
from torchweft import o3
from torchweft.distributed import Atoms, DistributedNeighbourList, VelocityVerlet, forces_of
from torchweft.errors import ShapeError

F64 = torch.float64
CUTOFF, STEP, STEPS = 2.5, 0.02, 20
CELL = torch.tensor([[5.2, 0.0, 0.4], [0.9, 5.0, 0.0], [0.0, -0.5, 5.4]], dtype=F64)


@functools.cache
def atoms():
    """A hot liquid of two kinds of atoms."""
    generator = torch.Generator().manual_seed(0)
    places = torch.cartesian_prod(*[torch.arange(4.0, dtype=F64)] * 3) / 4
    shaken = places + 0.02 * torch.randn(len(places), 3, generator=generator, dtype=F64)
    velocities = 2 * torch.randn(len(places), 3, generator=generator, dtype=F64)
    numbers = 1 + torch.arange(len(places)) % 2
    ids = torch.arange(len(places))
    return Atoms(ids, numbers, shaken @ CELL, velocities, numbers.double())


def energy(numbers, vectors, neighbours, exchanged=None):
    """Embedded atoms and their neighbours' densities: a pair energy, and a second layer."""
    halo, src, dst, _ = neighbours
    r = vectors.norm(dim=1)
    smooth = (1 - (r / CUTOFF).square()).pow(3)
    strength = numbers[src] * numbers[dst]
    rows = len(exchanged(numbers)) if exchanged else halo.num_rows
    none = torch.zeros(rows, dtype=F64)  # index_add has another order on a GPU at every call
    density = none.index_put((dst,), strength * smooth, accumulate=True)
    everywhere = exchanged(density) if exchanged else halo(density)
    meeting = everywhere[src] * density[dst] * smooth
    return (smooth / r.pow(6)).sum() / 2 - (1 + density).sqrt().sum() + 0.01 * meeting.sum()


def one_process(start, steps=STEPS):
    """(positions, velocities, energy) after some steps, by lists that are built anew."""
    _, numbers, x, v, masses = start

    def forces(x):
        x = x.detach().requires_grad_()
        src, dst, shift = o3.neighbour_list(x.detach(), CUTOFF, CELL, True)
        vectors = x[dst] - x[src] + shift @ CELL
        total = energy(numbers, vectors, (None, src, dst, shift), exchanged=lambda rows: rows)
        return total.detach(), -torch.autograd.grad(total, x)[0]

    found, f = forces(x)
    for _ in range(steps):
        v = v + STEP / 2 * f / masses[:, None]
        x = x + STEP * v
        found, f = forces(x)
        v = v + STEP / 2 * f / masses[:, None]
    return x, v, found


def trajectory(rank, size, group):
    """Where atoms are at the end, and how many came to this rank on the way."""
    begin = Atoms(*(t if rank == 0 else t[:0] for t in atoms()))  # one rank has them all
    settings = {"cutoff": CUTOFF, "cell": CELL, "pbc": True, "skin": 0.4, "group": group}
    dynamics = VelocityVerlet(forces_of(energy, CELL), begin, STEP, **settings)
    owned = dynamics.atoms.ids
    dynamics.run(STEPS)
    came = int((~torch.isin(dynamics.atoms.ids, owned)).sum())
    again = VelocityVerlet(forces_of(energy, CELL), begin, STEP, **settings)
    again.run(STEPS)
    assert all(t.equal(u) for t, u in zip(dynamics.atoms, again.atoms, strict=True))
    return dynamics.atoms, dynamics.energy, came, dynamics.neighbours.builds


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_trajectories_are_those_of_one_process(size):
    x, v, total = one_process(atoms())
    # rounding grows as fast from a start that was rounded once more
    rounded = atoms()._replace(positions=atoms().positions * (1 + torch.finfo(F64).eps))
    near = one_process(rounded)
    grown = max(float((a - b).abs().max()) for a, b in zip((x, v, total), near, strict=True))
    found = run(trajectory, size)
    seen = torch.cat([part.ids for part, *_ in found]).sort()[0]
    assert seen.equal(atoms().ids)
    assert len({float(energy) for _, energy, *_ in found}) == 1
    for part, total_there, came, builds in found:
        assert part.numbers.equal(atoms().numbers[part.ids])
        assert (part.positions - x[part.ids]).abs().max() <= 8 * grown
        assert (part.velocities - v[part.ids]).abs().max() <= 8 * grown
        assert (total_there - total).abs() <= 8 * grown
        assert builds > 2
        assert came or size == 1


def faulty(rank, size, group):
    start = Atoms(*(t[rank::size] for t in atoms()))

    def wrong(numbers, vectors, neighbours):
        return vectors if rank else vectors.sum()

    with pytest.raises(ShapeError) as raised:
        VelocityVerlet(forces_of(wrong), start, STEP, cutoff=CUTOFF, group=group)
    return str(raised.value)


def test_an_energy_of_more_elements_is_told_on_all():
    first, second = run(faulty, 2)
    assert first == second
    assert "rank 1: the energy is (" in first
    assert "it must be a tensor of one element" in first


def test_an_energy_without_a_gradient_is_refused():
    """Red before: forces of zero, without a word."""
    start = atoms()
    near = DistributedNeighbourList(CUTOFF)(start.ids, start.positions)
    constant = forces_of(lambda numbers, vectors, neighbours: vectors.detach().sum())
    with pytest.raises(ShapeError, match=r"energy of \d+ edges has no gradient.* without no_grad"):
        constant(start, near)
    apart = start._replace(positions=100 * start.positions)
    _, forces = constant(apart, DistributedNeighbourList(CUTOFF)(apart.ids, apart.positions))
    assert not forces.any()


def test_the_example_runs_under_torchrun(tmp_path):
    script = Path(__file__).parents[2] / "examples/distributed/dynamics_over_ranks.py"
    options = "--side", "4", "--steps", "20"
    done, errors, results = torchrun(script, *options, ranks=2, folder=tmp_path)
    assert not done.returncode, errors
    pattern = r"rank (\d): (\d+) atoms, step (\d+): (\S+) eV an atom"
    told = re.findall(pattern, "".join(results))
    found = {(rank, step): (int(n), energy) for rank, n, step, energy in told}
    assert len(found) == 4
    for step in ("0", "20"):
        (first, energy), (second, same) = (found[rank, step] for rank in ("0", "1"))
        assert first + second == 256
        assert energy == same
