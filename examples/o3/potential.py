"""Train an interatomic potential, and run molecular dynamics
==========================================================

``pip install 'torchweft[md]' matplotlib``, then ``python potential.py``

An equivariant network in the manner of NequIP (Batzner et al. 2022) learns energies and forces of
small organic molecules. Forces are gradients of its energy, so learning takes second derivatives.
Labels are of GFN2-xTB where `tblite` is installed, else of ASE's EMT potential. Errors are those on
held-out geometries. The trained potential then moves a molecule, as an ASE calculator, and the
total energy, which should be conserved, is printed and drawn.

.. image:: /images/examples/potential.png
   :alt: predicted against true forces, and the energies of a molecule that moves
"""

# sphinx_gallery_thumbnail_path = 'images/examples/potential.png'
import argparse
import importlib.util
from typing import NamedTuple

import numpy as np
import torch
from ase import units
from ase.build import molecule
from ase.calculators.emt import EMT
from ase.md.velocitydistribution import thermalize_momenta
from ase.md.verlet import VelocityVerlet
from torch import nn

from torchweft import o3

NAMES = ("CH4", "C2H6", "CH3OH", "CH3CH2OH", "CH3CHO", "HCOOH", "CH3NO2", "H2CO", "CH3CN", "C3H8")
ELEMENTS = (1, 6, 7, 8)
CUTOFF = 4.0  # Å
LAYOUT = "ir_mul"  # channels fastest, which is faster


class Layer(nn.Module):
    """h_i ← Gate(L_{z_i} (Σ_j tp(L h_j, Y(r_ij), R(|r_ij|)), h_i)), and the energies of h_i.

    Args:
        irreps_in: of the features that it takes.
        irreps_out: of those that it returns, scalars first.
        harmonics: irreps of Y.
        basis: number of radial functions.
    """

    def __init__(self, irreps_in, irreps_out, harmonics, basis):
        super().__init__()
        scalars = o3.Irreps([item for item in irreps_out if item.ir.is_scalar()])
        gated = o3.Irreps([item for item in irreps_out if not item.ir.is_scalar()])
        gates = o3.Irreps([(gated.num_irreps, "0e")] if gated else [])
        acts = [nn.functional.silu], [torch.sigmoid] * len(gates)
        self.gate = o3.Gate(scalars, acts[0], gates, acts[1], gated, layout=LAYOUT)
        wanted = self.gate.irreps_in
        products = [
            (i, j, (mul, ir))
            for i, (mul, a) in enumerate(irreps_in)
            for j, (_, b) in enumerate(harmonics)
            for ir in a * b
            if ir in wanted
        ]
        messages, place, _ = o3.Irreps([item for _, _, item in products]).sort()
        paths = [(i, j, place[k], "uvu", True) for k, (i, j, _) in enumerate(products)]
        self.conv = o3.TensorProductConv(irreps_in, harmonics, messages, paths, layout=LAYOUT)
        # without biases, so that messages are zero at the cutoff
        weights = nn.Linear(32, self.conv.weight_numel, bias=False)
        self.radial = nn.Sequential(nn.Linear(basis, 32, bias=False), nn.SiLU(), weights)
        self.before = o3.Linear(irreps_in, irreps_in, layout=LAYOUT)
        self.after = o3.Linear(
            messages + irreps_in, wanted, num_elements=len(ELEMENTS), layout=LAYOUT
        )
        self.readout = o3.Linear(irreps_out, "1x0e", layout=LAYOUT)

    def forward(self, h, element, y, radial, graph):
        """Features (N, D) and energies (N,)."""
        messages = self.conv(self.before(h), y, self.radial(radial), graph)
        h = self.gate(self.after(torch.cat([messages, h], 1), element=element))
        return h, self.readout(h).squeeze(1)


class Potential(nn.Module):
    """The energy of atoms [eV], invariant under rotations, reflections and translations.

    Args:
        shifts: (elements,) the energy of a single atom of each element.
        scale: about the size of a force.
        neighbours: the mean number of neighbours of an atom.
        channels: copies of each irrep.
    """

    def __init__(self, shifts, scale, neighbours, channels=16):
        super().__init__()
        self.scale, self.neighbours = scale, neighbours
        self.register_buffer("shifts", shifts)
        self.register_buffer("place", torch.zeros(max(ELEMENTS) + 1, dtype=torch.int64))
        self.place[list(ELEMENTS)] = torch.arange(len(ELEMENTS))
        self.harmonics = o3.SphericalHarmonics(range(3), True, "component")
        self.bessel, self.envelope = o3.BesselBasis(CUTOFF, 8), o3.PolynomialCutoff(CUTOFF)
        self.embedding = nn.Embedding(len(ELEMENTS), channels)
        scalars = o3.Irreps([(channels, "0e")])
        features = o3.Irreps([(channels, ir) for _, ir in self.harmonics.irreps_out])
        self.layers = nn.ModuleList(
            Layer(a, b, self.harmonics.irreps_out, 8)
            for a, b in ((scalars, features), (features, scalars))
        )

    def energies(self, numbers, vectors, graph):
        """(N,) energies of the atoms; see `forward`."""
        element = self.place[numbers]
        lengths = vectors.norm(dim=1, keepdim=True)
        y = self.harmonics(vectors) / self.neighbours**0.5
        radial = self.bessel(lengths) * self.envelope(lengths)
        h, total = self.embedding(element), 0
        for layer in self.layers:
            h, energy = layer(h, element, y, radial, graph)
            total = total + energy
        return self.scale * total + self.shifts[element]

    def forward(self, numbers, vectors, graph):
        """The energy of atomic numbers (N,), vectors of edges (E, 3) and their graph."""
        return self.energies(numbers, vectors, graph).sum()


class Batch(NamedTuple):
    """M molecules of N atoms in all."""

    numbers: torch.Tensor  # (N,) atomic numbers
    positions: torch.Tensor  # (N, 3), Å
    owner: torch.Tensor  # (N,) the molecule of each atom
    energy: torch.Tensor  # (M,), eV
    forces: torch.Tensor  # (N, 3), eV/Å


def batch_of(structures):
    """ASE's atoms, with their calculators' results, as one batch."""
    sizes = torch.tensor([len(atoms) for atoms in structures])
    return Batch(
        torch.from_numpy(np.concatenate([atoms.numbers for atoms in structures])),
        torch.tensor(np.concatenate([atoms.positions for atoms in structures])).float(),
        torch.arange(len(structures)).repeat_interleave(sizes),
        torch.tensor([atoms.get_potential_energy() for atoms in structures]).float(),
        torch.tensor(np.concatenate([atoms.get_forces() for atoms in structures])).float(),
    )


def labels():
    """A calculator of ASE for the labels."""
    if importlib.util.find_spec("tblite"):
        from tblite.ase import TBLite

        return TBLite(method="GFN2-xTB", verbosity=0)
    return EMT()


def displaced(names, copies, random):
    """Copies of molecules whose atoms are displaced at random, with energies and forces."""
    found = []
    for name in names:
        for _ in range(copies):
            atoms = molecule(name)
            atoms.positions += random.uniform(0.01, 0.07) * random.standard_normal((len(atoms), 3))
            atoms.calc = labels()
            found.append(atoms)
    return found


def energies_and_forces(model, batch, train=False):
    """Energies (M,), and forces −∂E/∂x (N, 3) that can be differentiated if `train`."""
    x = batch.positions.detach().requires_grad_()
    src, dst, _ = o3.neighbour_list(batch.positions, CUTOFF, batch=batch.owner)
    graph = o3.Graph(src, dst, len(x))
    atoms = model.energies(batch.numbers, x[dst] - x[src], graph)
    energy = torch.zeros_like(batch.energy).index_add(0, batch.owner, atoms)
    (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=train)
    return energy, -slope


def new_potential(batch):
    """A potential that starts from the elements' energies, by least squares."""
    counts = torch.zeros(len(batch.energy), len(ELEMENTS))
    element = torch.tensor([ELEMENTS.index(z) for z in batch.numbers.tolist()])
    counts.index_put_((batch.owner, element), torch.ones(()), accumulate=True)
    shifts = torch.linalg.pinv(counts) @ batch.energy
    src, _, _ = o3.neighbour_list(batch.positions, CUTOFF, batch=batch.owner)
    scale = float(batch.forces.square().mean().sqrt())
    return Potential(shifts, scale, len(src) / len(element))


def fit(model, structures, steps, device):
    """Adam on batches of 16 molecules, with one cycle of the learning rate."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps)
    for step in range(1, steps + 1):
        rows = torch.randint(len(structures), (16,)).tolist()
        batch = Batch(*(t.to(device) for t in batch_of([structures[row] for row in rows])))
        energy, forces = energies_and_forces(model, batch, train=True)
        sizes = batch.owner.bincount()
        errors = (forces - batch.forces).square().sum(1)
        # lengths of the errors, not their squares, which would be those of a few stiff bonds
        loss = (errors + 1e-4).sqrt().mean() + 5 * ((energy - batch.energy) / sizes).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: root mean square force error {(errors.mean() / 3) ** 0.5:.3f}")


def dynamics(model, name, kelvin=300, femtoseconds=0.5, steps=200):
    """Potential and total energy [eV] of a molecule that moves, (steps + 1, 2)."""
    atoms = molecule(name)
    atoms.calc = o3.calculator(model.double(), cutoff=CUTOFF)
    thermalize_momenta(atoms, kelvin, rng=np.random.default_rng(0))
    verlet = VelocityVerlet(atoms, femtoseconds * units.fs)
    return np.array(
        [(atoms.get_potential_energy(), atoms.get_total_energy()) for _ in verlet.irun(steps)]
    )


def draw(true, predicted, energies):
    """Forces on held-out geometries, and energies of the dynamics."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.scatter(true.flatten().cpu(), predicted.flatten().cpu(), s=2)
    left.set(title="held-out forces [eV/Å]", xlabel="true", ylabel="predicted")
    right.plot(energies - energies[0, 1], label=["potential", "total"])
    right.set(title="energy [eV]", xlabel="step of dynamics")
    right.legend()
    figure.savefig("potential.png", dpi=80)


def main():
    """Train, print the errors on held-out geometries, run dynamics, save model and picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="of training")
    parser.add_argument("--molecule", default="CH3CH2OH", help="for dynamics, a name of ASE's G2")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    train, test = (displaced(NAMES, copies, random) for copies in (30, 5))
    model = new_potential(batch_of(train)).to(device)
    fit(model, train, options.steps, device)

    batch = Batch(*(t.to(device) for t in batch_of(test)))
    energy, forces = energies_and_forces(model, batch)
    wrong = [(energy - batch.energy) / batch.owner.bincount(), forces - batch.forces]
    of_energy, of_force = (1e3 * float(e.detach().square().mean().sqrt()) for e in wrong)
    size = 1e3 * float(batch.forces.square().mean().sqrt())
    print(f"held out: energies {of_energy:.1f} meV an atom, ", end="")
    print(f"forces {of_force:.0f} meV/Å of {size:.0f}")
    energies = dynamics(model, options.molecule)
    swing, change = np.ptp(energies, axis=0)
    print(f"dynamics: the potential energy varies by {swing:.3f} eV, the total by {change:.5f} eV")
    torch.save(model.state_dict(), "potential.pt")
    draw(batch.forces, forces, energies)


if __name__ == "__main__":
    main()
