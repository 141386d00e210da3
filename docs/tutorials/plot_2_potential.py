r"""o3: an equivariant potential for small molecules
================================================

A potential gives the energy of a molecule and the force on each atom. The energy must not change
when the molecule is turned, and the forces must turn with it. A network of `torchweft.o3` layers
has these properties by construction, for any weights. We build one, train it on energies and
forces of six small molecules, and test it on structures that it has not seen, and on a seventh
molecule. Ten minutes to read.
"""

import matplotlib.pyplot as plt
import torch
from ase.build import molecule
from ase.calculators.emt import EMT
from torch import nn

from torchweft import o3

torch.manual_seed(0)
plt.rcParams.update({"figure.figsize": (5, 3.8), "font.size": 12})

# %%
# Data
# ----
# Molecules with atoms that are moved at random, by 0.1 Å in each direction. The labels come from
# EMT, a simple model that is part of ASE: with quantum chemistry in its place the rest stays as it
# is. Energies are in eV, lengths in Å.
ELEMENTS = ["H", "C", "O"]
SEEN = ["H2O", "CH4", "C2H4", "C2H6", "H2CO", "CH3OH"]
UNSEEN = "CH3CH2OH"


def structures(name, count, seed):
    """Elements, positions, energy and forces of some structures of a molecule."""
    for number in range(count):
        atoms = molecule(name)
        atoms.rattle(0.1, seed=1000 * seed + number)
        atoms.calc = EMT()
        yield (
            torch.tensor([ELEMENTS.index(symbol) for symbol in atoms.symbols]),
            torch.tensor(atoms.positions, dtype=torch.float32),
            atoms.get_potential_energy(),
            torch.tensor(atoms.get_forces(), dtype=torch.float32),
        )


def batch(rows):
    """Many structures as one set of atoms; `owner` is the structure of an atom."""
    element, position, energy, force = zip(*rows, strict=True)
    owner = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(e) for e in element]))
    return (
        torch.cat(element),
        torch.cat(position),
        owner,
        torch.tensor(energy, dtype=torch.float32),
        torch.cat(force),
    )


train_rows = [row for i, name in enumerate(SEEN) for row in structures(name, 40, seed=i)]
held_out = batch([row for i, name in enumerate(SEEN) for row in structures(name, 15, seed=10 + i)])
unseen = batch(list(structures(UNSEEN, 30, seed=20)))
print(f"{len(train_rows)} structures to train on")

# %%
# Energies of atoms that are alone explain most of the energy of a molecule. They are one number for
# each element, found by least squares on the training structures; the network learns the rest.
element, _, owner, energy, force = batch(train_rows)
counts = torch.zeros(len(train_rows), len(ELEMENTS))
counts.index_put_((owner, element), torch.ones(len(element)), accumulate=True)
atomic = torch.linalg.lstsq(counts, energy[:, None]).solution.flatten()
scale = force.square().mean().sqrt()  # eV/Å, the size of the forces
print({e: round(a, 2) for e, a in zip(ELEMENTS, atomic.tolist(), strict=True)})
print(f"size of the forces {scale:.2f} eV/Å")

# %%
# Edges
# -----
# An edge leads from an atom to each atom within 4 Å. The network sees its direction as spherical
# harmonics of degrees 0, 1 and 2, and its length as Bessel functions times a cutoff, which is zero
# with its slope where edges end.
CUTOFF = 4.0
harmonics = o3.SphericalHarmonics([0, 1, 2], True, "component")
bessel, envelope = o3.BesselBasis(CUTOFF, 8), o3.PolynomialCutoff(CUTOFF)
print(harmonics.irreps_out)

# %%
# `1x0e+1x1o+1x2e` is one scalar, one vector and one quadrupole: the *irreps* of an edge. Features
# of an atom have irreps as well, with several copies of each.
#
# A layer
# -------
# - The **message** of an edge is the tensor product of the neighbour's features with the harmonics:
#   every pair of irreps that can give a wanted one is a *path*. Each path has a weight that depends
#   on the length of the edge, by a small network.
# - `TensorProductConv` multiplies, and sums the messages that arrive at an atom, in one operation.
# - A linear map for each element mixes the copies; a gate multiplies vectors and quadrupoles by
#   scalars. None of these steps depends on the orientation.
COPIES = 16
HIDDEN = o3.Irreps(f"{COPIES}x0e+{COPIES}x1o+{COPIES}x2e")


def paths(irreps_in, wanted):
    """The irreps of the messages, and the instructions of the product that gives them."""
    found = [
        (i, j, (copies, irrep))
        for i, (copies, a) in enumerate(irreps_in)
        for j, (_, b) in enumerate(harmonics.irreps_out)
        for irrep in a * b
        if irrep in wanted
    ]
    messages, place, _ = o3.Irreps([item for *_, item in found]).sort()
    return messages, [(i, j, place[k], "uvu", True) for k, (i, j, _) in enumerate(found)]


class Layer(nn.Module):
    """Features of atoms from those of their neighbours."""

    def __init__(self, irreps_in):
        super().__init__()
        messages, instructions = paths(irreps_in, HIDDEN)
        options = {"layout": "ir_mul"}  # copies side by side, which is faster
        self.conv = o3.TensorProductConv(
            irreps_in, harmonics.irreps_out, messages, instructions, **options
        )
        self.gate = o3.Gate(
            f"{COPIES}x0e", [nn.functional.silu], f"{2 * COPIES}x0e", [torch.sigmoid],
            f"{COPIES}x1o+{COPIES}x2e", **options,
        )  # fmt: skip
        self.mix = o3.Linear(messages, self.gate.irreps_in, num_elements=3, **options)
        self.radial = nn.Sequential(
            nn.Linear(8, 32, bias=False),
            nn.SiLU(),
            nn.Linear(32, self.conv.weight_numel, bias=False),
        )

    def forward(self, x, element, y, r, graph):
        messages = self.conv(x, y, self.radial(r), graph)
        return self.gate(self.mix(messages, element=element))


# %%
# The potential: features of the elements, two layers, and the scalars of each layer read as energy.
# Forces are the negative gradient of the energy. Training differentiates them again
# (`create_graph=True`): the layers are differentiable to any order.


class Potential(nn.Module):
    """Energies (structures,) and forces (atoms, 3)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(ELEMENTS), COPIES)
        self.layers = nn.ModuleList([Layer(o3.Irreps(f"{COPIES}x0e")), Layer(HIDDEN)])
        self.readouts = nn.ModuleList(o3.Linear(HIDDEN, "1x0e", layout="ir_mul") for _ in "12")

    def forward(self, element, position, owner, count):
        position = position.detach().requires_grad_()
        src, dst, _ = o3.neighbour_list(position.detach(), CUTOFF, batch=owner)
        graph = o3.Graph(src, dst, len(element))
        edge = position[src] - position[dst]
        length = edge.norm(dim=1, keepdim=True)
        y, r = harmonics(edge), bessel(length) * envelope(length)
        x, of_atom = self.embedding(element), atomic[element]
        for layer, readout in zip(self.layers, self.readouts, strict=True):
            x = layer(x, element, y, r, graph)
            of_atom = of_atom + scale * readout(x).squeeze(1)
        energy = torch.zeros(count).index_add(0, owner, of_atom)
        (slope,) = torch.autograd.grad(energy.sum(), position, create_graph=self.training)
        return energy, -slope


# %%
# The symmetry is there before any training: turn a molecule, and the energy stays while the forces
# turn.
model = Potential()
element, position, owner, energy, force = unseen
turn = o3.rand_matrix()
before = model(element, position, owner, len(energy))
after = model(element, position @ turn.T, owner, len(energy))
print(f"energies differ by {(after[0] - before[0]).abs().max():.1e} eV of {before[0][0]:.1f} eV")
print(f"forces differ by {(after[1] - before[1] @ turn.T).abs().max():.1e} eV/Å after turning")

# %%
# Training
# --------
EPOCHS, SIZE = 40, 16
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)


def errors(data):
    """Mean absolute errors: energies in meV for each atom, forces in meV/Å."""
    element, position, owner, energy, force = data
    model.eval()
    found_energy, found_force = model(element, position, owner, len(energy))
    atoms = torch.bincount(owner)
    of_energy = ((found_energy - energy) / atoms).abs().mean().item()
    return 1000 * of_energy, 1000 * (found_force - force).abs().mean().item()


curve = []
for _ in range(EPOCHS):
    model.train()
    for rows in torch.randperm(len(train_rows)).split(SIZE):
        element, position, owner, energy, force = batch([train_rows[i] for i in rows])
        found_energy, found_force = model(element, position, owner, len(energy))
        atoms = torch.bincount(owner)
        loss = 10 * ((found_energy - energy) / atoms).square().mean()
        loss = (loss + (found_force - force).square().mean()) / scale**2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    schedule.step()
    curve.append(errors(held_out)[1])

# %%
# How good is it?
# ---------------
# Errors of energies in meV for each atom, and of forces in meV/Å; below each stands that of the
# constant guess: the atomic energies, and no force.


def constant(data):
    """Errors of the atomic energies and of zero forces."""
    element, _, owner, energy, force = data
    guess = torch.zeros(len(energy)).index_add(0, owner, atomic[element])
    of_energy = ((guess - energy) / torch.bincount(owner)).abs().mean().item()
    return 1000 * of_energy, 1000 * force.abs().mean().item()


print("              energy  forces")
for name, data in (("held-out", held_out), (UNSEEN, unseen)):
    for who, (of_energy, of_force) in ((name, errors(data)), ("  constant", constant(data))):
        print(f"{who:12s} {of_energy:7.1f} {of_force:7.0f}")

# %%
figure, axis = plt.subplots()
axis.semilogy(curve, label="held-out structures")
axis.axhline(constant(held_out)[1], color="grey", linestyle="dashed", label="constant guess")
axis.set(xlabel="epoch", ylabel="force error, meV/Å")
axis.legend()
figure.tight_layout()

# %%
# Forces of the seventh molecule, component by component.
element, position, owner, energy, force = unseen
found = model(element, position, owner, len(energy))[1].detach()
limit = float(force.abs().max())
figure, axis = plt.subplots(figsize=(5, 4.6))
axis.plot([-limit, limit], [-limit, limit], color="grey", linewidth=1)
axis.scatter(force.flatten(), found.flatten(), s=6)
axis.set(title=f"{UNSEEN}, never seen", xlabel="force by EMT, eV/Å", ylabel="by the model, eV/Å")
figure.tight_layout()
plt.show()
