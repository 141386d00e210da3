"""The class of ASE that `calculator` makes; this module needs ase."""

from __future__ import annotations

from typing import Any

import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes

from torchweft.errors import ShapeError
from torchweft.o3.dynamics.neighbours import NeighbourList
from torchweft.o3.dynamics.potentials import Potential, Structure

__all__ = ["PotentialCalculator"]


class PotentialCalculator(Calculator):
    """Energy in eV, forces in eV/Å and stress in eV/Å³ of one structure after another."""

    def __init__(
        self, potential: Potential, skin: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.implemented_properties = ["energy", "free_energy", "forces", "stress"]
        self.potential, self.dtype, self.device = potential, dtype, device
        self.neighbours = NeighbourList(potential.cutoff, skin)

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Any = (),
        system_changes: Any = all_changes,
    ) -> None:
        """Fill `results`, as ASE calls it where atoms have changed."""
        super().calculate(atoms, properties, system_changes)  # type: ignore[no-untyped-call]
        found = self.potential.call(self._structure(self.atoms))
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
        known = self.potential.numbers
        unknown = {s for s, z in zip(atoms.symbols, atoms.numbers, strict=True) if z not in known}
        if known and unknown:
            raise ShapeError(
                f"the atoms have {', '.join(sorted(unknown))}: the model knows the atomic numbers "
                f"{sorted(known)} alone. Take these atoms out, or a model of their elements."
            )
        positions = torch.as_tensor(atoms.positions, device=self.device)
        cell = torch.as_tensor(atoms.cell.array, device=self.device)
        src, dst, shift = self.neighbours(positions, cell, atoms.pbc)
        return Structure(
            torch.as_tensor(atoms.numbers, device=self.device).long(),
            positions.to(self.dtype, copy=True),
            cell.to(self.dtype),
            src,
            dst,
            shift.to(self.dtype),
            atoms.cell.rank == 3,
        )
