"""An equivariant interatomic potential: energies of molecules, and forces as their gradients.

    A_i = Σ_{j: r_ij < r_c} tp(L h_j, Y(r_ij), R(|r_ij|) W) / √n
    h_i ← Gate(L_{z_i} (A_i, h_i)),   E_i = s Σ_layers ⟨v, h_i⟩_{0e} + E_{z_i}
    E = Σ_i E_i,   F = −∂E/∂x

h_i are features of an atom of element z_i: scalars, vectors and more.  Y are spherical harmonics,
R an MLP of Bessel functions that is smoothly zero at r_c, W a matrix, L linear maps, and n the mean
number of neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchweft.demo.data.molecules import NUMBERS, Molecules, cut, labelled, names, shaken
from torchweft.demo.models.learning import learned
from torchweft.o3 import (
    BesselBasis,
    Gate,
    Graph,
    Irreps,
    Linear,
    PolynomialCutoff,
    SphericalHarmonics,
    TensorProductConv,
    wigner_3j,
)

__all__ = [
    "Data",
    "Errors",
    "PlainPotential",
    "Potential",
    "Settings",
    "energies_and_forces",
    "errors",
    "fit",
    "like",
    "molecules",
    "new_potential",
    "step_of",
    "turned",
]


class Settings(NamedTuple):
    """The size of a potential."""

    channels: int = 16  # copies of each irrep that an atom has
    lmax: int = 2  # degree of features and of harmonics
    layers: int = 2
    radial: int = 32  # numbers of R
    basis: int = 12  # Bessel functions
    cutoff: float = 4.0  # Å


Pair = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """Features of atoms from those of their neighbours, and what they add to the energies.

    Args:
        inward: irreps of the features it takes.
        outward: irreps of those it gives.
        y: irreps of the harmonics of the edges' directions.
        settings: sizes.
    """

    layout = "ir_mul"  # channels are next to each other in memory

    def __init__(self, inward: Irreps, outward: Irreps, y: Irreps, settings: Settings) -> None:
        super().__init__()
        layout, radial, kinds = self.layout, settings.radial, len(NUMBERS)
        self.gate = gate_of(outward, layout)
        to = self.gate.irreps_in
        messages, paths = channelwise(inward, y, to)
        self.conv = TensorProductConv(inward, y, messages, paths, layout=layout)
        self.before = Linear(inward, inward, layout=layout)
        self.after = Linear(messages + inward, to, num_elements=kinds, layout=layout)
        self.radial = radial_network(settings)
        self.weights = Linear(f"{radial}x0e", f"{self.conv.weight_numel}x0e")
        self.readout = Linear(outward, "1x0e", layout=layout)

    def forward(self, h: Tensor, element: Tensor, y: Tensor, radial: Tensor, graph: Graph) -> Pair:
        """Features (N, D), and energies (N,)."""
        messages = self.convolved(self.before(h), y, self.radial(radial), graph)
        h = self.gate(self.after(torch.cat([messages, h], 1), element=element))
        return h, self.readout(h).squeeze(1)

    def convolved(self, x: Tensor, y: Tensor, radial: Tensor, graph: Graph) -> Tensor:
        """Σ_j tp(x_j, y_ij, radial_ij W): no message is stored.

        The weights are, a row an edge, which is faster; where memory is short, conv takes radial=
        and radial_weight= in their place.
        """
        found: Tensor = self.conv(x, y, self.weights(radial), graph)
        return found


class Potential(nn.Module):
    """Molecular energies, invariant under rotation, reflection and translation.

    Args:
        settings: its size.
        shifts: (elements,) the energy of a single atom of each.
        scale: of what the atoms' surroundings change, about the size of a force.
        neighbours: mean number of them.
    """

    shifts: Tensor
    scale: Tensor
    layer: type[Layer] = Layer
    graph: Callable[[Tensor, Tensor, int], Graph] = Graph

    def __init__(self, settings: Settings, shifts: Tensor, scale: float, neighbours: float) -> None:
        super().__init__()
        self.settings, self.neighbours = settings, neighbours
        self.register_buffer("shifts", shifts)
        self.register_buffer("scale", torch.tensor(scale))
        c, lmax = settings.channels, settings.lmax
        self.harmonics = SphericalHarmonics(range(lmax + 1), True, "component")
        self.bessel = BesselBasis(settings.cutoff, settings.basis)
        self.envelope = PolynomialCutoff(settings.cutoff)
        self.embedding = nn.Embedding(len(NUMBERS), c)
        inward = [Irreps([(c, "0e")])] + [self.harmonics_of(c)] * (settings.layers - 1)
        outward = [self.harmonics_of(c)] * (settings.layers - 1) + [Irreps([(c, "0e")])]
        self.layers = nn.ModuleList(
            self.layer(a, b, self.harmonics.irreps_out, settings)
            for a, b in zip(inward, outward, strict=True)
        )

    def harmonics_of(self, copies: int) -> Irreps:
        """So many copies of each irrep of the harmonics."""
        return Irreps([(copies, ir) for _, ir in self.harmonics.irreps_out])

    def forward(self, molecules: Molecules) -> Tensor:
        """(M,) energies, which can be differentiated by the positions."""
        src, dst = cut(molecules, self.settings.cutoff)
        energy = self.energies(molecules.element, molecules.position, src, dst)
        return torch.zeros_like(molecules.energy).index_add(0, molecules.owner, energy)

    def energies(self, element: Tensor, position: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        """(N,) energies of atoms with neighbours src[e] of dst[e]."""
        graph = self.graph(src, dst, len(element))
        across = position[src] - position[dst]
        lengths = across.norm(dim=1, keepdim=True)
        y = self.harmonics(across) / self.neighbours**0.5  # and messages with them
        radial = self.bessel(lengths) * self.envelope(lengths)
        h = self.embedding(element)
        energy = torch.zeros_like(h[:, 0])
        for layer in self.layers:
            h, more = layer(h, element, y, radial, graph)
            energy = energy + more
        return self.scale * energy + self.shifts[element]


def channelwise(
    irreps: Irreps, harmonics: Irreps, wanted: Irreps
) -> tuple[Irreps, list[tuple[int, int, int, str, bool]]]:
    """Every product of an item with a harmonic that is wanted, each an output item of its own."""
    found = [
        (i, j, (mul, ir))
        for i, (mul, a) in enumerate(irreps)
        for j, (_, b) in enumerate(harmonics)
        for ir in a * b
        if ir in wanted
    ]
    out, place, _ = Irreps([item for _, _, item in found]).sort()
    return out, [(i, j, place[k], "uvu", True) for k, (i, j, _) in enumerate(found)]


def gate_of(irreps: Irreps, layout: str) -> Gate:
    """Scalars through SiLU, all others multiplied by a gate of their own."""
    scalars = Irreps([item for item in irreps if item.ir.is_scalar()])
    gated = Irreps([item for item in irreps if not item.ir.is_scalar()])
    gates = Irreps([(gated.num_irreps, "0e")] if gated else [])
    act_gates = [torch.sigmoid] * len(gates)
    return Gate(scalars, [nn.functional.silu], gates, act_gates, gated, layout=layout)


def radial_network(settings: Settings) -> nn.Sequential:
    """R of the Bessel functions; without biases, so that zero stays zero at the cutoff."""
    inner = nn.Linear(settings.basis, settings.radial, bias=False)
    outer = nn.Linear(settings.radial, settings.radial, bias=False)
    for linear in (inner, outer):
        nn.init.kaiming_normal_(linear.weight)
    return nn.Sequential(inner, nn.SiLU(), outer, nn.SiLU())


class PlainLayer(Layer):
    """The same in plain torch: index_select, einsum, multiply, index_add; messages are stored."""

    def convolved(self, x: Tensor, y: Tensor, radial: Tensor, graph: Graph) -> Tensor:
        """Σ_j tp(x_j, y_ij, radial_ij W), instruction by instruction."""
        conv, c = self.conv, self.conv.irreps_in1[0].mul
        given = x.index_select(0, graph.src)
        weights = self.weights(radial).view(len(y), -1, 1, c)
        firsts, seconds = conv.irreps_in1.slices(), conv.irreps_in2.slices()
        messages = []
        for number in sorted(range(len(conv.instructions)), key=self._place):
            met = conv.instructions[number]
            first, second = conv.irreps_in1[met.i_in1].ir, conv.irreps_in2[met.i_in2].ir
            out = conv.irreps_out[met.i_out].ir
            table = wigner_3j(first.l, second.l, out.l, dtype=x.dtype, device=x.device)
            matrix = torch.einsum("abm,eb->ema", met.path_weight * table, y[:, seconds[met.i_in2]])
            block = given[:, firsts[met.i_in1]].view(len(y), -1, c)
            messages.append((matrix @ block * weights[:, number]).flatten(1))
        zeros = x.new_zeros(graph.num_nodes, conv.irreps_out.dim)
        return zeros.index_add(0, graph.dst, torch.cat(messages, 1))

    def _place(self, number: int) -> int:
        """The item of the messages that an instruction makes."""
        return self.conv.instructions[number].i_out


class PlainPotential(Potential):
    """A potential of plain layers; parameters are those of `Potential`."""

    layer = PlainLayer


def like(model: Potential, kind: type[Potential], dtype: torch.dtype) -> Potential:
    """Another kind of potential with the parameters of `model`."""
    copy = kind(model.settings, model.shifts, float(model.scale), model.neighbours)
    copy.load_state_dict(copy.state_dict() | model.state_dict())
    return copy.to(model.shifts.device, dtype)


def energies_and_forces(
    model: nn.Module, molecules: Molecules, *, train: bool = False
) -> tuple[Tensor, Tensor]:
    """E (M,) and F = −∂E/∂x (N, 3); to be differentiated again if `train`."""
    position = molecules.position.detach().requires_grad_()
    energy: Tensor = model(molecules._replace(position=position))
    (slope,) = torch.autograd.grad(energy.sum(), position, create_graph=train)
    return energy if train else energy.detach(), -slope


LEARNED_FROM, HELD_OUT = 30, 4  # shakes of each molecule
STEPS = 500
BATCH = 16  # molecules
RATE = 2e-2
ENERGY = 5.0  # what an error of 1 eV an atom costs, in errors of 1 eV/Å of a force
ROUND = 1e-4  # (eV/Å)²: errors of forces below its root count by their squares


class Data(NamedTuple):
    """Molecules to learn from, others to judge by, and whose energies they have."""

    train: Molecules
    test: Molecules
    labels: str


class Errors(NamedTuple):
    """Root mean squares."""

    energy: float  # eV, of an atom
    force: float  # eV/Å, of a component


def molecules(seed: int, labels: str, shakes: int) -> Data:
    """Every molecule, shaken in `shakes` ways to learn from and in some more to judge by."""
    random = np.random.default_rng(seed)
    copies = [shaken(name, shakes + HELD_OUT, random) for name in names()]
    train = [atoms for some in copies for atoms in some[HELD_OUT:]]
    test = [atoms for some in copies for atoms in some[:HELD_OUT]]
    every = labelled([*test, *train], labels)
    rows = torch.arange(len(every.energy))
    return Data(every.of(rows[len(test) :]), every.of(rows[: len(test)]), labels)


def new_potential(train: Molecules, settings: Settings, dtype: torch.dtype) -> Potential:
    """A potential that starts from elements' energies, by least squares, and the forces' size."""
    counts = torch.zeros(len(train.energy), len(NUMBERS), dtype=torch.float64)
    counts.index_put_((train.owner, train.element), counts.new_ones(()), accumulate=True)
    shifts = torch.linalg.pinv(counts) @ train.energy.double()
    neighbours = len(cut(train, settings.cutoff)[0]) / len(train.element)
    scale = float(train.force.square().mean().sqrt())
    return Potential(settings, shifts, scale, neighbours).to(dtype)


def fit(model: Potential, train: Molecules, seed: int, steps: int) -> list[float]:
    """The RMS error of the forces of each step: Adam, random batches, one cycle of the rate."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(train.energy), (steps, BATCH), generator=generator)
    squares = learned(
        model,
        rows.to(train.ptr.device).unbind(),
        lambda batch: step_of(model, train.of(batch))(),
        RATE,
        rising=0.1,
    )
    return [square**0.5 for square in squares]


def step_of(model: nn.Module, batch: Molecules) -> Callable[[], Tensor]:
    """One step, which leaves its gradients in the model; the mean square error of the forces.

    What is made small is the mean length of the forces' errors: a square would be that of the few
    stiffest bonds.

    Forces are gradients already, so the gradient of their error is a second derivative.
    """

    def step() -> Tensor:
        model.zero_grad()
        energy, force = energies_and_forces(model, batch, train=True)
        wrong = (force - batch.force).square().sum(1)
        of_atom = (energy - batch.energy) / batch.size
        loss = (wrong + ROUND).sqrt().mean() + ENERGY * of_atom.abs().mean()
        torch.autograd.backward(loss)
        return wrong.detach().mean() / 3

    return step


def errors(energy: Tensor, force: Tensor, truth: Molecules) -> Errors:
    """Root mean square errors of energies per atom and of forces."""
    of_atom = (energy - truth.energy) / truth.size
    return Errors(*(float(e.square().mean().sqrt()) for e in (of_atom, force - truth.force)))


def turned(batch: Molecules, seed: int) -> tuple[Molecules, Tensor]:
    """The molecules, turned, mirrored and moved at random; and the turn, (3, 3)."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q
    turn = (-turn.det().sign() * turn).to(batch.position)
    shift = torch.randn(3, generator=generator).to(batch.position)
    return batch._replace(
        position=batch.position @ turn.T + shift, force=batch.force @ turn.T
    ), turn
