"""MACE with torchweft: converted, recorded, trained, and run in molecular dynamics
================================================================================

``pip install mace-torch 'torchweft[md]'``, then ``python examples/mace_potential.py``

A model of MACE learns energies and forces of shaken ethanol (by ASE's EMT, which needs nothing
installed). Its layers are torchweft's after one line, and on a GPU each training step is one replay
of a CUDA graph. Molecules have 9 atoms that all see each other, so shapes are the same in every
batch; where they vary, give `capture` their sizes. The trained model then moves the molecule.
"""

import numpy as np
import torch
from ase import units
from ase.build import molecule
from ase.calculators.emt import EMT
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from mace import data, modules
from mace.tools import AtomicNumberTable, torch_geometric

# isort: split
from e3nn.o3 import Irreps  # mace comes first: it lets this version of e3nn load

import torchweft
from torchweft import o3

device, cutoff, elements = "cuda" if torch.cuda.is_available() else "cpu", 6.0, [1, 6, 8]
torch.manual_seed(0)

rows = []
for seed in range(64):
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.05, seed=seed)
    atoms.calc = EMT()
    atoms.info["REF_energy"] = atoms.get_potential_energy()
    atoms.arrays["REF_forces"] = atoms.get_forces()
    config = data.config_from_atoms(atoms, data.KeySpecification.from_defaults())
    rows.append(data.AtomicData.from_config(config, AtomicNumberTable(elements), cutoff))
loader = torch_geometric.dataloader.DataLoader(rows, batch_size=8, shuffle=True)

block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
model = modules.ScaleShiftMACE(
    r_max=cutoff, num_bessel=8, num_polynomial_cutoff=5, max_ell=2, num_interactions=2,
    interaction_cls=block, interaction_cls_first=block, num_elements=len(elements),
    atomic_numbers=elements, hidden_irreps=Irreps("16x0e + 16x1o"), MLP_irreps=Irreps("16x0e"),
    gate=torch.nn.functional.silu, correlation=2, avg_num_neighbors=8.0,
    atomic_energies=np.zeros(len(elements)), atomic_inter_scale=1.0,
    atomic_inter_shift=float(np.mean([row.energy.item() / 9 for row in rows])),
)  # fmt: skip
model = o3.from_mace(model).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=device == "cuda")


def step(batch):
    """Of Adam; returns the loss."""
    optimizer.zero_grad()
    found = model(batch, training=True)
    energy, force = found["energy"] - batch["energy"], found["forces"] - batch["forces"]
    loss = (energy / 9).square().mean() + force.square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


step = torchweft.capture(step, next(iter(loader)).to(device).to_dict())
for epoch in range(10):
    losses = [float(step(batch.to(device).to_dict())) for batch in loader]
    print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f} eV², eV²/Å²")

atoms = molecule("CH3CH2OH")
atoms.calc = o3.calculator(model.eval())
MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=np.random.default_rng(0))
dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
before = atoms.get_total_energy()
dynamics.run(100)
print(f"the total energy moved by {1e3 * (atoms.get_total_energy() - before):.2f} meV in 50 fs")
