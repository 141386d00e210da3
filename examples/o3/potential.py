"""An interatomic potential: trained on energies and forces, then used for molecular dynamics
==========================================================================================

``python examples/potential.py --out potential``

The organic molecules of ASE's G2 set that are made of H, C, N and O are shaken; GFN2-xTB
(``tblite``), or where that is not installed ASE's EMT, gives energies and forces.  An equivariant
network in the manner of NequIP learns both: forces are gradients of its energy, so learning takes
gradients of gradients.  The trained potential is then an ASE calculator.  It moves a molecule for a
picosecond, and the energy that it should conserve is looked at.

The network is `torchweft.demo.models.potential.Potential`, 170 lines of public names of
`torchweft.o3`.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from ase import units
from ase.build import molecule
from ase.calculators.calculator import Calculator, all_changes
from ase.md.velocitydistribution import Stationary, thermalize_momenta
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS

import torchweft
from torchweft.demo.data.molecules import LABELS, NUMBERS, Molecules, best_labels
from torchweft.demo.measure import machine, versions
from torchweft.demo.models import potential as matching
from torchweft.demo.models.potential import (
    Potential,
    Settings,
    energies_and_forces,
    errors,
    fit,
    like,
    molecules,
    new_potential,
)
from torchweft.demo.pictures import curve, parity
from torchweft.progress import track

EVERY = 10  # steps of dynamics between two looks at the energy


class PotentialCalculator(Calculator):
    """ASE's view of a trained potential: energies in eV, forces in eV/Å.

    Args:
        model: computes in its own precision, on its own device.
    """

    implemented_properties = ("energy", "forces")

    def __init__(self, model):
        super().__init__()
        self.model = model

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        """The energy, and the forces with it."""
        super().calculate(atoms, properties, system_changes)
        shifts = self.model.shifts
        force = torch.zeros(len(self.atoms), 3)
        one = Molecules(
            torch.tensor([NUMBERS.index(number) for number in self.atoms.numbers]),
            torch.from_numpy(self.atoms.positions),
            torch.tensor([0, len(self.atoms)]),
            force.new_zeros(1),
            force,
        )
        energy, force = energies_and_forces(self.model, one.to(shifts.device, shifts.dtype))
        self.results = {"energy": float(energy), "forces": force.cpu().double().numpy()}


def dynamics(model, name, kelvin, femtoseconds, steps, seed=0):
    """The energies of a molecule that moves freely: rows of (ps, potential, kinetic), in eV."""
    atoms = molecule(name)
    atoms.calc = PotentialCalculator(like(model, Potential, torch.float64))
    BFGS(atoms, logfile=None).run(fmax=0.01, steps=200)
    random = np.random.RandomState(seed)
    thermalize_momenta(atoms, 2 * kelvin, rng=random)  # half of it stays
    Stationary(atoms)
    verlet = VelocityVerlet(atoms, timestep=femtoseconds * units.fs)
    rows = []
    for number in track(range(steps // EVERY + 1), "dynamics"):
        if number:
            verlet.run(EVERY)
        now = number * EVERY * femtoseconds / 1000
        rows.append((now, atoms.get_potential_energy(), atoms.get_kinetic_energy()))
    return np.array(rows)


def conservation(rows, atoms):
    """How the total energy drifts (a line through it) and swings, beside the kinetic energy."""
    time_, potential, kinetic = rows.T
    total = potential + kinetic
    slope, height = np.polyfit(time_, total, 1)
    return {
        "drift_mev_per_atom_ps": 1e3 * slope / atoms,
        "swing_mev_per_atom": 1e3 * float(np.std(total - slope * time_ - height)) / atoms,
        "kinetic_mev_per_atom": 1e3 * float(kinetic.mean()) / atoms,
        "picoseconds": float(time_[-1]),
    }


def table(found):
    """What was found, in lines."""
    lines = [f"{'root mean square error':28s} {'energy [meV/atom]':>18s} {'force [meV/Å]':>14s}"]
    for name, error in found.items():
        lines.append(f"{name:28s} {1e3 * error.energy:18.1f} {1e3 * error.force:14.1f}")
    return "\n".join(lines)


def learn(options, device):
    """A trained model, the errors on held-out geometries, and the pictures."""
    begin = time.perf_counter()
    data = molecules(options.seed, options.labels, options.shakes)
    labelled = time.perf_counter() - begin
    torch.manual_seed(options.seed)
    settings = Settings(options.channels, options.lmax, options.layers)
    model = new_potential(data.train, settings, torch.float32).to(device)
    train, test = (some.to(device, torch.float32) for some in (data.train, data.test))
    begin = time.perf_counter()
    losses = fit(model, train, options.seed, options.steps)
    seconds = time.perf_counter() - begin
    energy, force = energies_and_forces(model, test)
    atoms = torch.zeros_like(energy).index_add(0, test.owner, model.shifts[test.element])
    nothing = errors(atoms, torch.zeros_like(force), test)
    found = {"elements alone, no forces": nothing, "learned": errors(energy, force, test)}
    pictures = {
        "learning": curve(losses, {"no forces": nothing.force}, "RMSE of forces [eV/Å]"),
        "forces": parity({"forces [eV/Å]": (test.force.flatten(), force.flatten())}),
    }
    times = {"labels_seconds": labelled, "training_seconds": seconds}
    return model, data, found, pictures, times


def main():
    """Read the arguments, train, move a molecule, write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--shakes", type=int, default=matching.LEARNED_FROM, help="a molecule")
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--lmax", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--labels", choices=sorted(LABELS), default=best_labels())
    parser.add_argument("--molecule", default="CH3CH2OH", help="that moves; a name of the G2 set")
    parser.add_argument("--kelvin", type=float, default=300)
    parser.add_argument("--femtoseconds", type=float, default=0.5, help="a step of dynamics")
    parser.add_argument("--dynamics", type=int, default=2000, help="steps of it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("potential"), help="a folder")
    options = parser.parse_args()
    device = torch.device(options.device)

    model, data, found, pictures, times = learn(options, device)
    print(f"{len(data.train.energy)} geometries with energies of {data.labels}, others held out")
    print(table(found))
    rows = dynamics(model, options.molecule, options.kelvin, options.femtoseconds, options.dynamics)
    energy = conservation(rows, len(molecule(options.molecule)))
    print(
        "{} for {picoseconds:.2f} ps: the energy drifts {drift_mev_per_atom_ps:+.1e} meV an atom "
        "and ps and swings {swing_mev_per_atom:.1e} meV an atom, the kinetic energy is "
        "{kinetic_mev_per_atom:.1f} meV an atom".format(options.molecule, **energy)
    )
    options.out.mkdir(parents=True, exist_ok=True)
    for name, png in pictures.items():
        (options.out / f"{name}.png").write_bytes(png)
    torch.save(model.state_dict(), options.out / "potential.pt")
    facts = {
        "labels": data.labels,
        "test": {name: error._asdict() for name, error in found.items()},
        "dynamics": {"molecule": options.molecule, **energy},
        **times,
        "steps": options.steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "machine": machine(device),
        "versions": f"torchweft {torchweft.__version__}, {versions()}",
    }
    (options.out / "potential.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    print(f"{options.out}: potential.json, potential.pt, {', '.join(f'{n}.png' for n in pictures)}")


if __name__ == "__main__":
    main()
