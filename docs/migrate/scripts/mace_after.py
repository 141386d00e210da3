"""Energy and forces of an ethanol molecule by the same model, computed by torchweft."""

import torch
from ase.build import molecule
from mace.calculators import MACECalculator

from torchweft import o3

calc = MACECalculator(model_paths="my.model", device="cpu", default_dtype="float32")
calc.models = [o3.from_mace(model) for model in calc.models]

atoms = molecule("CH3CH2OH")
atoms.calc = calc
energy, forces = atoms.get_potential_energy(), atoms.get_forces()
result = torch.tensor([energy, *forces.flatten()])
print(f"{energy:.4f} eV, forces {forces.shape}")
