"""Molecular dynamics over several GPUs
====================================

``torchrun --nproc-per-node 2 examples/distributed/dynamics_over_ranks.py``

A crystal of argon melts. Each rank owns the atoms in its part of space; atoms that have left it go
to another rank. Without a GPU the ranks are processes on the CPU.

.. image:: /images/examples/dynamics_over_ranks.svg
   :alt: atoms of two ranks, some of which go from one to the other
"""

# sphinx_gallery_thumbnail_path = 'images/examples/dynamics_over_ranks.svg'
import argparse

import torch
from torch import distributed

from torchweft.distributed import Atoms, VelocityVerlet, forces_of

SIGMA, EPSILON, CUTOFF = 3.4, 0.0104, 8.5  # Å, eV, Å
MASS, CELL, KELVIN = 39.95, 5.3, 8.617e-5  # u, Å, eV
FEMTOSECOND = 1 / 10.18  # in Å √(u / eV)


def energy(numbers, vectors, neighbours):
    """Lennard-Jones energy, zero at the cutoff; each pair has two edges, so an edge has a half."""
    ratio = (SIGMA / vectors.norm(dim=1)).pow(6)
    at_cutoff = (SIGMA / CUTOFF) ** 6
    return 2 * EPSILON * ((ratio.square() - ratio) - (at_cutoff**2 - at_cutoff)).sum()


def main():
    """Print the total energy per atom every 20 steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--side", type=int, default=4, help="cells of 4 atoms along each axis")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    on_gpus = torch.cuda.is_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.set_default_dtype(torch.float64)
    if on_gpus:
        torch.cuda.set_device(distributed.get_node_local_rank())
        torch.set_default_device("cuda")
    corners = torch.cartesian_prod(*[torch.arange(2 * options.side)] * 3)
    corners = corners[corners.sum(1) % 2 == 0]  # face-centred cubic
    ids = torch.arange(len(corners))[rank::size]  # any rows; the atoms go to their owners
    velocities = (2 * KELVIN * 300 / MASS) ** 0.5 * torch.randn(len(ids), 3)
    positions, masses = CELL / 2 * corners[ids].double(), torch.full((len(ids),), MASS)
    atoms = Atoms(ids, 18 + 0 * ids, positions, velocities, masses)
    cell = CELL * options.side * torch.eye(3)
    dynamics = VelocityVerlet(
        forces_of(energy, cell), atoms, 2 * FEMTOSECOND, cutoff=CUTOFF, cell=cell, pbc=True
    )
    for step in range(0, options.steps + 1, 20):
        kinetic = MASS / 2 * dynamics.atoms.velocities.square().sum()
        distributed.all_reduce(kinetic)
        whole = float(dynamics.energy + kinetic) / len(corners)
        here = f"rank {rank}: {len(dynamics.atoms.ids)} atoms"
        print(f"{here}, step {step}: {whole:.5f} eV an atom", flush=True)
        dynamics.run(20 if step < options.steps else 0)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
