"""MACE in three lines
===================

``pip install mace-torch torchweft``, then ``python mace_in_three_lines.py my.model``

`o3.from_mace` replaces the layers of a MACE model by torchweft's. The calculator of mace-torch uses
the model as before, and energies and forces keep their values:

.. code-block:: python

   from torchweft import o3

   calculator = MACECalculator(model_paths="my.model", device="cuda")
   calculator.models = [o3.from_mace(model) for model in calculator.models]

This program stretches a bond of ethanol with both models, and times a step of molecular dynamics.
Without a file it writes and takes a small model that is not trained.

.. image:: /images/examples/mace_in_three_lines.png
   :alt: energies and forces along a bond, the same for both models
"""

# sphinx_gallery_thumbnail_path = 'images/examples/mace_in_three_lines.png'
import sys
import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from ase import units
from ase.build import molecule
from ase.md.verlet import VelocityVerlet
from mace import modules
from mace.calculators import MACECalculator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def converted(path):
    """The calculator of mace-torch, with torchweft's layers in its model."""
    from torchweft import o3

    calculator = MACECalculator(model_paths=path, device=DEVICE)
    calculator.models = [o3.from_mace(model) for model in calculator.models]
    return calculator


def new_model(path):
    """Write a model of the usual layers, not trained, for hydrogen, carbon and oxygen."""
    from e3nn.o3 import Irreps

    torch.manual_seed(0)
    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    model = modules.ScaleShiftMACE(
        r_max=5.0, num_bessel=8, num_polynomial_cutoff=5, max_ell=3, num_interactions=2,
        interaction_cls=block, interaction_cls_first=block, num_elements=3,
        atomic_numbers=[1, 6, 8], hidden_irreps=Irreps("64x0e + 64x1o"), correlation=3,
        MLP_irreps=Irreps("16x0e"), gate=torch.nn.functional.silu, avg_num_neighbors=8.0,
        atomic_energies=np.zeros(3), atomic_inter_scale=1.0, atomic_inter_shift=0.0,
    )  # fmt: skip
    torch.save(model, path)


def stretched(calculator, distances):
    """Energies [eV], and forces along the bond [eV/Å], at lengths of the C-O bond [Å]."""
    atoms = molecule("CH3CH2OH")
    carbon, oxygen = 1, 2
    atoms.calc = calculator
    rows = []
    for distance in distances:
        atoms.set_distance(carbon, oxygen, distance, fix=0)
        bond = atoms.get_distance(carbon, oxygen, vector=True) / distance
        rows.append((atoms.get_potential_energy(), atoms.get_forces()[oxygen] @ bond))
    return np.array(rows).T


def milliseconds(calculator, steps=20):
    """Wall time of a step of molecular dynamics; the first steps compile and are not counted."""
    atoms = molecule("CH3CH2OH")
    atoms.calc = calculator
    dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
    dynamics.run(3)
    start = time.perf_counter()
    dynamics.run(steps)
    return 1e3 * (time.perf_counter() - start) / steps


def main(path=None):
    """Compare the two calculators and draw what they compute."""
    if path is None:
        path = "untrained.model"
        new_model(path)
    distances = np.linspace(1.1, 2.2, 12)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    calculators = {"mace-torch": MACECalculator(path, device=DEVICE), "torchweft": converted(path)}
    for (name, calculator), style in zip(calculators.items(), ("-", "o"), strict=True):
        energies, forces = stretched(calculator, distances)
        left.plot(distances, energies, style, label=name)
        right.plot(distances, forces, style, label=name)
        print(f"{name}: {milliseconds(calculator):.1f} ms a step of dynamics")
    left.set(title="energy [eV]", xlabel="length of the bond [Å]")
    right.set(title="force along the bond [eV/Å]", xlabel="length of the bond [Å]")
    left.legend()
    figure.savefig("mace_in_three_lines.png", dpi=80)


if __name__ == "__main__":
    main(*sys.argv[1:])
