"""A potential whose launches are recorded: steps of molecular dynamics replay one CUDA graph.

The record has room for more edges than there are.  What fills the room are copies of the first
edges, moved by

    (shift + away) @ cell,   away = (3 · cutoff / |cell[0]|, 0, 0)

so that they are two cutoffs long or longer, where models with a smooth cutoff have exact zeros.
`capture` compares a call with them to one without before it records.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor, nn

from torchweft.capturing.functions import capture
from torchweft.errors import CaptureError
from torchweft.o3.dynamics.potentials import Potential, Results, Structure

__all__ = ["RecordedPotential"]

ROOM = 1.1
"""Edges that there is room for, over those of the structure that is recorded."""


class RecordedPotential:
    """A potential as a function of structures; those on a GPU are recorded.

    There is one record at a time.  It is made anew for atoms of other elements, where a structure
    has more edges than there is room for (a warning says so, once), and where the memory of the
    model's weights is another one.  A potential that cannot be recorded runs as it is; a warning
    says why.

    Args:
        potential: what is recorded.
        model: whose weights the record reads; None: of a function, which are not known.
    """

    def __init__(self, potential: Potential, model: nn.Module | None) -> None:
        self._potential, self._model = potential, model
        self._run: Callable[..., Any] | None = None
        self._recorded: Hashable = None  # what the record is for
        self._most = 0  # edges that it has room for
        self._told, self._runs_as_it_is = False, not potential.recordable

    def __call__(self, structure: Structure) -> Results:
        """Energy, forces and stress."""
        if self._runs_as_it_is or not _is_recorded(structure):
            return self._potential.call(structure)
        self._prepare(structure)
        assert self._run is not None
        try:
            energy, forces, stress, _ = self._run(*_arguments(structure))
        except CaptureError as error:
            self._run, self._runs_as_it_is = None, True
            warnings.warn(
                f"the model runs without a CUDA graph, launch by launch: {error}", stacklevel=2
            )
            return self._potential.call(structure)
        return Results(energy, forces, stress)

    def _prepare(self, structure: Structure) -> None:
        """Have a record that serves a structure."""
        edges, atoms = len(structure.src), len(structure.species)
        wanted = id(structure.species), structure.solid, structure.positions.dtype, self._weights()
        if self._run is not None and wanted == self._recorded and edges <= self._most:
            return
        if wanted == self._recorded and not self._told:
            self._told = True
            warnings.warn(
                f"the structure has {edges} edges and its record has room for {self._most}: it is "
                "recorded anew, now and, without a warning, whenever edges outgrow the room. Begin "
                "with the densest structure to record once.",
                stacklevel=3,
            )
        self._most = max(int(ROOM * edges), atoms, 3) + 1  # a size is known by its length
        self._recorded, self._run = wanted, None  # frees the memory of the record
        self._run = _captured(self._potential, structure, self._most)

    def _weights(self) -> Hashable:
        """Where the weights lie; `parameters()` and `buffers()` would take many times as long."""
        if self._model is None:
            return None
        tensors: list[Tensor | None] = []
        modules = [self._model]
        for module in modules:
            tensors += module._parameters.values()
            tensors += module._buffers.values()
            modules += [child for child in module._modules.values() if child is not None]
        return self._model.training, tuple(t.data_ptr() for t in tensors if t is not None)


def _is_recorded(structure: Structure) -> bool:
    """Whether structures where this one is have records: on a GPU; no atoms need none."""
    return structure.positions.is_cuda and len(structure.species) > 0


def _captured(potential: Potential, structure: Structure, most: int) -> Callable[..., Any]:
    """The potential as a function of the tensors of structures like this one, captured."""
    species, *_, solid = structure

    def call(
        positions: Tensor,
        cell: Tensor,
        src: Tensor,
        dst: Tensor,
        shift: Tensor,
        padding: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        away = padding * (3 * potential.cutoff / cell[0].norm())
        shift = shift + nn.functional.pad(away[:, None], (0, 2))
        found = potential.call(Structure(species, positions.detach(), cell, src, dst, shift, solid))
        felt = None if found.slope is None else (padding * found.slope.abs().amax(1)).any()
        return found.energy, found.forces, found.stress, felt

    rows = structure.src.new_zeros(most)
    example = structure._replace(src=rows, dst=rows, shift=structure.cell.new_zeros(most, 3))
    return capture(call, *_arguments(example), sizes={"src": (1.0, {"padding": 1.0})})


def _arguments(structure: Structure) -> tuple[Tensor, ...]:
    """Tensors that change from call to call; no edge is padding."""
    _, *tensors, _ = structure
    return *tensors, structure.cell.new_zeros(len(structure.src))
