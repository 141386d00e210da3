"""A training step of the example's potential, by our layers and by those of somebody else.

    z = (E, F),  F = −∂E/∂x;   forward+backward: z and ∂⟨z, g⟩/∂θ of every parameter θ

A loss of energies and forces has the gradient g.  Molecules are shaken pieces of a cubic lattice.

A peer computes the whole model by layers of its own, in its own layout: harmonics, linear maps,
those by element, gates, convolutions.  What it lacks it takes from e3nn, as its users do.  Its
convolution in our model is no candidate: convolutions have cases of their own (W1 to W2n), and who
chooses between libraries chooses all layers of one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness.case import Candidate, Case, Workload
from benchmarks.workloads.equivariant import Layer, flops_of
from benchmarks.workloads.recipes import DTYPE, Random
from torchweft.demo.data.molecules import NUMBERS, Molecules, cut
from torchweft.demo.models.potential import (
    PlainPotential,
    Potential,
    Settings,
    energies_and_forces,
    like,
)
from torchweft.o3 import Gate, Irreps, Linear, TensorProductConv

__all__ = ["OP", "Convolution", "Library", "by_library", "training_case"]

OP = "training step"
SPACING, SHAKE = 1.5, 0.1  # Å, of the lattice

Convolution = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of x, y, w, src and dst."""


def _same(linear: Linear, weight: Tensor) -> Tensor:
    return weight


class Library(NamedTuple):
    """Somebody's layers, in a layout of their own; None: ours.

    Args:
        convolution: of a layer; `like` is a tensor of its dtype and device.
        harmonics: of irreps, a function of directions.
        linear: a function of x and our weight.
        by_element: a function of x, its weight and the element of each row.
        gate: a function of x.
        turned: of a linear by element, its weight in their order.
        back: our order of such a weight.
        by_rows_of_elements: whether atoms are to be sorted by element.
    """

    convolution: Callable[[Layer, Tensor], Convolution]
    harmonics: Callable[[Irreps, Tensor], Callable[[Tensor], Tensor]] | None = None
    linear: Callable[[Linear, Tensor], Callable[[Tensor, Tensor], Tensor]] | None = None
    by_element: Callable[[Linear, Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]] | None = None
    gate: Callable[[Gate, Tensor], Callable[[Tensor], Tensor]] | None = None
    turned: Callable[[Linear, Tensor], Tensor] = _same
    back: Callable[[Linear, Tensor], Tensor] = _same
    by_rows_of_elements: bool = False


class Edges(NamedTuple):
    """What somebody else's convolution is given; ours sorts them."""

    src: Tensor
    dst: Tensor
    num_nodes: int


class Other(Potential):
    """The potential by other layers."""

    graph = Edges


class Sorted(Other):
    """Atoms by element, edges by the atom that they add to."""

    def energies(self, element: Tensor, position: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        order = element.argsort(stable=True)
        rank = order.argsort()
        src, dst = rank[src], rank[dst]
        by = dst.argsort(stable=True)
        atoms = position.index_select(0, order)
        return super().energies(element[order], atoms, src[by], dst[by]).index_select(0, rank)


class Called(nn.Module):
    """A function in place of a layer, with the layer's weight, if it has one."""

    def __init__(self, function: Callable[..., Tensor], weight: Tensor | None = None) -> None:
        super().__init__()
        self.function = function
        self.weight = None if weight is None else nn.Parameter(weight)

    def forward(self, x: Tensor, *, element: Tensor | None = None) -> Tensor:
        """Of x, the weight and the element, those that there are."""
        return self.function(*(t for t in (x, self.weight, element) if t is not None))


def training_case(name: str, settings: Settings, molecules: int, side: int) -> Case:
    """Molecules of side³ atoms."""
    build = functools.partial(_step, settings, molecules, side)
    return Case(name, "batch", build, ("forward+backward",), check_batch=2)


def by_library(name: str, backend: str, workload: Workload, library: Library) -> Candidate:
    """The step by somebody else's layers, with the same weights."""
    given: Potential = workload.tables["model"]
    some = workload.inputs[0]
    model = like(given, Sorted if library.by_rows_of_elements else Other, DTYPE)
    if library.harmonics:
        model.harmonics = Called(library.harmonics(model.harmonics.irreps_out, some))
    for layer in model.layers:
        _exchange(layer, library, some)
    linears = {f"layers.{n}.after.weight": layer.after for n, layer in enumerate(given.layers)}
    names = [name for name, _ in model.named_parameters()]

    def oracle(*parameters: Tensor, scale: None = None) -> Tensor:
        ours = (
            library.back(linears[name], p) if name in linears else p
            for name, p in zip(names, parameters, strict=True)
        )
        return workload.oracle(*ours)

    inputs = tuple(p.detach() for p in model.parameters())
    function = functools.partial(_energies_and_forces, model, workload.tables["molecules"])
    return Candidate(name, backend, function, inputs, oracle)


def _exchange(layer: Any, library: Library, some: Tensor) -> None:
    """The operations of a layer by those of a library."""
    found = library.convolution(_layer(layer.conv), some)
    layer.convolved = functools.partial(_convolved, found, layer)
    if library.linear:
        for name in ("before", "readout"):
            linear = getattr(layer, name)
            called = Called(library.linear(linear, some), linear.weight.detach())
            setattr(layer, name, called)
    if library.by_element:
        weight = library.turned(layer.after, layer.after.weight.detach())
        layer.after = Called(library.by_element(layer.after, some), weight)
    if library.gate:
        layer.gate = Called(library.gate(layer.gate, some))


def _convolved(
    convolution: Convolution, layer: Any, x: Tensor, y: Tensor, radial: Tensor, graph: Edges
) -> Tensor:
    hidden = radial.shape[1]  # this linear map is torch's, as the others of the radial network
    matrix = layer.weights.weight.view(hidden, -1) / hidden**0.5
    return convolution(x, y, radial @ matrix, graph.src, graph.dst)


def _layer(conv: TensorProductConv) -> Layer:
    instructions = tuple(i[:5] for i in conv.instructions)
    return Layer(conv.irreps_in1, conv.irreps_in2, conv.irreps_out, instructions)


def _step(
    settings: Settings, count: int, side: int, device: torch.device, batch: int | None
) -> Workload:
    molecules = _molecules(batch or count, side, device)
    edges = len(cut(molecules, settings.cutoff)[0])
    torch.manual_seed(0)
    shifts = torch.zeros(len(NUMBERS), device=device)
    model = Potential(settings, shifts, 1.0, edges / len(molecules.element)).to(device)
    inputs = tuple(p.detach() for p in model.parameters())

    def function(*parameters: Tensor, backend: str | None = None) -> Tensor:
        return _energies_and_forces(model, molecules, *parameters)

    def oracle(*parameters: Tensor, scale: None = None) -> Tensor:
        dtype = parameters[0].dtype
        plain = like(model, PlainPotential, dtype)
        return _energies_and_forces(plain, molecules.to(device, dtype), *parameters)

    tables = {"model": model, "molecules": molecules}
    atoms, flops = len(molecules.element), sum(flops_of(_layer(m.conv)) for m in model.layers)
    shape = f"molecules={batch or count} atoms={atoms} E={edges} C={settings.channels}"
    return Workload(
        OP, inputs, tables, function, oracle, 4 * edges * flops,
        (len(molecules.energy) + 3 * atoms) * 4, shape, polynomial=False, gradients=3,
    )  # fmt: skip


def _energies_and_forces(model: Potential, molecules: Molecules, *parameters: Tensor) -> Tensor:
    """(M + 3N,), of a model with other parameters."""
    given = dict(zip((name for name, _ in model.named_parameters()), parameters, strict=True))

    def called(some: Molecules) -> Tensor:
        return torch.func.functional_call(model, given, (some,))

    with torch.enable_grad():  # forces are gradients, whoever asks for them
        energy, force = energies_and_forces(called, molecules, train=True)
    return torch.cat([energy, force.flatten()])


def _molecules(count: int, side: int, device: torch.device) -> Molecules:
    """Of random elements."""
    random = Random(device)
    lattice = torch.cartesian_prod(*3 * (SPACING * torch.arange(side, device=device),))
    atoms = count * len(lattice)
    return Molecules(
        random.index(len(NUMBERS), atoms).long(),
        lattice.repeat(count, 1) + SHAKE * random.normal(atoms, 3),
        len(lattice) * torch.arange(count + 1, device=device),
        random.normal(count),
        random.normal(atoms, 3),
    )
