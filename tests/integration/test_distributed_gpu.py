"""Domains, neighbours and dynamics of one rank on a GPU: those of the CPU."""

import pytest
import torch

from tests.distributed.test_domains import STRUCTURES
from tests.distributed.test_dynamics import CELL, CUTOFF, STEP, atoms, energy
from tests.neighbours import rows
from torchweft.distributed import (
    Atoms,
    DistributedNeighbourList,
    Domains,
    VelocityVerlet,
    forces_of,
)

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)


@pytest.mark.parametrize("name", STRUCTURES)
def test_domains_and_lists_are_those_of_the_cpu(name):
    positions, cell, pbc, cutoff = STRUCTURES[name]
    there = positions.cuda(), None if cell is None else cell.cuda(), pbc
    owner = Domains(*there, parts=4).owner(positions.cuda())
    assert owner.cpu().equal(Domains(positions, cell, pbc, parts=4).owner(positions))
    ids = torch.arange(len(positions))
    found = DistributedNeighbourList(cutoff)(ids.cuda(), *there)
    assert rows(found[1:]) == rows(DistributedNeighbourList(cutoff)(ids, positions, cell, pbc)[1:])


def test_trajectories_repeat_and_are_those_of_the_cpu():
    found = []
    for device in ("cpu", "cuda", "cuda"):
        begin, cell = Atoms(*(t.to(device) for t in atoms())), CELL.to(device)

        def here(*given, device=device):
            with torch.device(device):
                return energy(*given)

        dynamics = VelocityVerlet(
            forces_of(here, cell), begin, STEP, cutoff=CUTOFF, cell=cell, pbc=True
        )
        dynamics.run(3)
        found.append(dynamics.atoms.positions.cpu())
    cpu, gpu, again = found
    assert gpu.equal(again)
    torch.testing.assert_close(gpu, cpu)
