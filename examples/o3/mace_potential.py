"""Train a MACE model, and run molecular dynamics
==============================================

``pip install mace-torch 'torchweft[md]'``, then ``python mace_potential.py``

A MACE model is converted by one line and learns energies and forces of displaced ethanol molecules,
labelled by ASE's EMT potential, which needs no other package. On a GPU each training step is one
replay of a CUDA graph. All atoms of a molecule are neighbours, so shapes are the same in every
batch; where they vary, pass their sizes to `capture`. The trained model then runs dynamics.

.. image:: /images/examples/mace_potential.png
   :alt: the loss falls, and the total energy stays while the potential energy changes
"""

# sphinx_gallery_thumbnail_path = 'images/examples/mace_potential.png'

import matplotlib.pyplot as plt
import numpy as np
import torch
from ase import units
from ase.build import molecule
from ase.calculators.emt import EMT
from ase.md.velocitydistribution import thermalize_momenta
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
    """One step of Adam; returns the loss."""
    optimizer.zero_grad()
    found = model(batch, training=True)
    energy, force = found["energy"] - batch["energy"], found["forces"] - batch["forces"]
    loss = (energy / 9).square().mean() + force.square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


step = torchweft.capture(step, next(iter(loader)).to(device).to_dict())
losses = []
for epoch in range(10):
    found = [float(step(batch.to(device).to_dict())) for batch in loader]
    losses.append(sum(found) / len(found))
    print(f"epoch {epoch}: loss {losses[-1]:.4f} eV², eV²/Å²")

atoms = molecule("CH3CH2OH")
atoms.calc = o3.calculator(model.eval())
thermalize_momenta(atoms, 300, rng=np.random.default_rng(0))
dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
rows = [
    (atoms.get_potential_energy(), atoms.get_total_energy())
    for _ in dynamics.irun(100)  # 50 fs
]
before, after = rows[0][1], rows[-1][1]
print(f"the total energy changed by {1e3 * (after - before):.2f} meV in 50 fs")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
left.semilogy(losses)
left.set(title="loss", xlabel="epoch")
right.plot(rows, label=["potential", "total"])
right.set(title="energy [eV]", xlabel="step of dynamics")
right.legend()
figure.savefig("mace_potential.png", dpi=80)
