"""A training step of the example's potential, with a convolution of ours or of somebody else.

    z = (E, F),  F = −∂E/∂x;   forward+backward: z and ∂⟨z, g⟩/∂θ of every parameter θ

A loss of energies and forces has the gradient g.  Molecules are shaken pieces of a cubic lattice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.suites.equivariant import Layer, flops_of
from benchmarks.suites.recipes import DTYPE, Random
from weft.bench.case import Candidate, Case, Workload
from weft.demo.molecules import NUMBERS, Molecules, cut
from weft.demo.potential import (
    PlainPotential,
    Potential,
    Settings,
    energies_and_forces,
    like,
)
from weft.o3 import TensorProductConv

__all__ = ["OP", "Convolution", "training_case", "with_convolution"]

OP = "training step"
SPACING, SHAKE = 1.5, 0.1  # Å, of the lattice

Convolution = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of x, y, w, src and dst."""


class Edges(NamedTuple):
    """What somebody else's convolution is given; ours sorts them."""

    src: Tensor
    dst: Tensor
    num_nodes: int


class Other(Potential):
    """The potential with another convolution."""

    graph = Edges


def training_case(name: str, settings: Settings, molecules: int, side: int) -> Case:
    """Molecules of side³ atoms."""
    build = functools.partial(_step, settings, molecules, side)
    return Case(name, "batch", build, ("forward+backward",), check_batch=2)


def with_convolution(
    name: str, backend: str, workload: Workload, convolution: Callable[[Layer, Tensor], Convolution]
) -> Candidate:
    """The step with another convolution, in every layer one of its own."""
    given: Potential = workload.tables["model"]
    model = like(given, Other, DTYPE)
    for layer in model.layers:
        found = convolution(_layer(layer.conv), workload.inputs[0])
        layer.convolved = functools.partial(_convolved, found, layer)
    function = functools.partial(_energies_and_forces, model, workload.tables["molecules"])
    return Candidate(name, backend, function, workload.inputs, workload.oracle)


def _convolved(
    convolution: Convolution, layer: nn.Module, x: Tensor, y: Tensor, radial: Tensor, graph: Edges
) -> Tensor:
    return convolution(x, y, radial @ layer.radial_weight, graph.src, graph.dst)


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
