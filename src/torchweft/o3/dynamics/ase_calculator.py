"""The class of ASE that `calculator` makes; this module needs ase."""

from __future__ import annotations

from typing import Any

import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes
from torch import Tensor, nn

from torchweft.core.table_copies import mark_constant
from torchweft.errors import ShapeError
from torchweft.o3.dynamics.neighbours import NeighbourList
from torchweft.o3.dynamics.potentials import Potential, Structure
from torchweft.o3.dynamics.recording import RecordedPotential

__all__ = ["PotentialCalculator"]


class PotentialCalculator(Calculator):
    """Energy in eV, forces in eV/Å and stress in eV/Å³ of one structure after another."""

    def __init__(
        self, potential: Potential, model: nn.Module | None, skin: float, device: torch.device
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.implemented_properties = ["energy", "free_energy", "forces", "stress"]
        self.potential, self._model, self._device = potential, model, device
        self._species: tuple[Any, Tensor] | None = None
        self._results_of = RecordedPotential(potential, model)
        self.neighbours = NeighbourList(potential.cutoff, skin)

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Any = (),
        system_changes: Any = all_changes,
    ) -> None:
        """Fill `results`, as ASE calls it where atoms have changed."""
        super().calculate(atoms, properties, system_changes)  # type: ignore[no-untyped-call]
        found = self._results_of(self._structure(self.atoms))
        energy = float(found.energy)
        self.results = {
            "energy": energy,
            "free_energy": energy,
            "forces": found.forces.double().cpu().numpy(),
        }
        if found.stress is not None:
            stress = found.stress.double().cpu().numpy()
            self.results["stress"] = stress[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]  # Voigt's order

    def _structure(self, atoms: Any) -> Structure:
        dtype, device = self._dtype_and_device()
        positions = torch.as_tensor(atoms.positions, device=device)
        cell = torch.as_tensor(atoms.cell.array, device=device)
        src, dst, shift = self.neighbours(positions, cell, atoms.pbc)
        return Structure(
            self._species_of(atoms, dtype, device),
            positions.to(dtype, copy=True),
            torch.as_tensor(atoms.cell.complete().array, device=device).to(dtype),
            src,
            dst,
            shift.to(dtype),
            atoms.cell.rank == 3,
        )

    def _species_of(self, atoms: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """One tensor for all steps, which a record may know."""
        key = atoms.numbers.tobytes(), dtype, device
        if self._species is None or self._species[0] != key:
            self._check_elements(atoms)
            numbers = torch.tensor(atoms.numbers, dtype=torch.int64, device="cpu")
            species = self.potential.species(numbers, dtype).to(device)
            mark_constant(species)
            self._species = key, species
        return self._species[1]

    def _check_elements(self, atoms: Any) -> None:
        known = self.potential.numbers
        unknown = {s for s, z in zip(atoms.symbols, atoms.numbers, strict=True) if z not in known}
        if known and unknown:
            raise ShapeError(
                f"the atoms have {', '.join(sorted(unknown))}: the model has only the atomic "
                f"numbers {sorted(known)}. Remove these atoms, or use a model with their elements."
            )

    def _dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        """Those that the model has now."""
        first = None if self._model is None else next(self._model.parameters(), None)
        dtype, device = self.potential.dtype, self._device
        if first is not None:
            dtype, device = dtype or first.dtype, first.device
        assert dtype is not None
        return dtype, device
