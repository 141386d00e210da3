"""Energy and forces of an ethanol molecule by a MACE model of yours, my.model."""

import torch
from ase.build import molecule
from mace.calculators import MACECalculator

calc = MACECalculator(model_paths="my.model", device="cpu", default_dtype="float32")

atoms = molecule("CH3CH2OH")
atoms.calc = calc
energy, forces = atoms.get_potential_energy(), atoms.get_forces()
result = torch.tensor([energy, *forces.flatten()])
print(f"{energy:.4f} eV, forces {forces.shape}")
