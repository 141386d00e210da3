"""Organic molecules, shaken, with energies and forces; many of them as one set of atoms.

They are of the G2 set.  Energies are those of GFN2-xTB, a quantum-mechanical tight binding, where
`tblite` is installed, and else those of ASE's effective medium theory, which knows these elements
for tests.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweft.errors import BackendError
from torchweft.progress import track

if TYPE_CHECKING:  # what has no need of molecules' names has none of ase
    from ase import Atoms

__all__ = [
    "LABELS",
    "NUMBERS",
    "Molecules",
    "best_labels",
    "cut",
    "labelled",
    "names",
    "pairs",
    "shaken",
]

NUMBERS = (1, 6, 7, 8)  # atomic numbers: H, C, N, O
SHAKES = (0.01, 0.07)  # Å: the standard deviation of a shake, uniform between these

Array = np.ndarray[Any, Any]
Label = Callable[["Atoms"], tuple[float, Array]]


class Molecules(NamedTuple):
    """M molecules of N atoms in all; energies in eV, lengths in Å."""

    element: Tensor  # (N,) place in NUMBERS
    position: Tensor  # (N, 3)
    ptr: Tensor  # (M + 1,) the atoms of molecule m are ptr[m] .. ptr[m + 1] − 1
    energy: Tensor  # (M,)
    force: Tensor  # (N, 3)

    @property
    def size(self) -> Tensor:
        """(M,) atoms of each."""
        return self.ptr.diff()

    @property
    def owner(self) -> Tensor:
        """(N,) the molecule of each atom."""
        rows = torch.arange(len(self.energy), device=self.ptr.device)
        return rows.repeat_interleave(self.size, output_size=len(self.element))

    def of(self, rows: Tensor) -> Molecules:
        """Some of them."""
        size = self.size[rows]
        ptr = torch.cat([size.new_zeros(1), size.cumsum(0)])
        atoms = _runs(self.ptr[rows], size)
        return Molecules(
            self.element[atoms], self.position[atoms], ptr, self.energy[rows], self.force[atoms]
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> Molecules:
        """On another device, in another precision."""
        element, position, ptr, energy, force = (t.to(device) for t in self)
        return Molecules(element, position.to(dtype), ptr, energy.to(dtype), force.to(dtype))


def pairs(position: Tensor, ptr: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
    """(src, dst): every two atoms of a molecule that are closer than the cutoff; sorted by dst.

    All pairs within each molecule are looked at: Σ_m N_m² distances.  The host asks how many they
    are, and how many are near.
    """
    size, atoms = ptr.diff(), len(position)
    rows = torch.arange(max(atoms, len(size)), device=ptr.device)
    own = rows[: len(size)].repeat_interleave(size, output_size=atoms)
    src = _runs(ptr[own], size[own])
    dst = rows[:atoms].repeat_interleave(size[own], output_size=len(src))
    near = (position[src] - position[dst]).square().sum(1) < cutoff**2
    keep = (near & (src != dst)).nonzero().squeeze(1)
    return src[keep], dst[keep]


def cut(molecules: Molecules, cutoff: float) -> tuple[Tensor, Tensor]:
    """Their pairs."""
    return pairs(molecules.position.detach(), molecules.ptr, cutoff)


def names() -> list[str]:
    """The G2 set's organic molecules: C, H and perhaps N and O, 4 atoms or more, spins paired."""
    from ase.collections import g2

    return [
        name
        for name in sorted(g2.names)
        if len(_made(name)) > 3
        and {1, 6} <= set((atoms := _made(name)).numbers.tolist()) <= set(NUMBERS)
        and not atoms.get_initial_magnetic_moments().any()  # type: ignore[no-untyped-call]
    ]


def shaken(name: str, times: int, random: np.random.Generator) -> list[Atoms]:
    """Copies whose atoms are displaced by normal numbers, each copy by another deviation."""
    copies = [_made(name) for _ in range(times)]
    for atoms in copies:
        atoms.positions += random.uniform(*SHAKES) * random.standard_normal(atoms.positions.shape)
    return copies


def labelled(systems: Sequence[Atoms], labels: str) -> Molecules:
    """Atoms with the energies and forces of LABELS[labels], in float64."""
    label = LABELS[labels]
    with _one_thread():
        found = [label(atoms) for atoms in track(systems, f"labels, {labels}")]
    places = {number: place for place, number in enumerate(NUMBERS)}
    element = [places[number] for atoms in systems for number in atoms.numbers.tolist()]
    size = torch.tensor([0, *map(len, systems)])
    return Molecules(
        torch.tensor(element),
        torch.from_numpy(np.concatenate([atoms.positions for atoms in systems])),
        size.cumsum(0),
        torch.tensor([energy for energy, _ in found], dtype=torch.float64),
        torch.from_numpy(np.concatenate([force for _, force in found])),
    )


def best_labels() -> str:
    """The best of LABELS that is installed."""
    return "GFN2-xTB" if importlib.util.find_spec("tblite") else "EMT"


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Molecules this small take many times as long on threads that outnumber the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # of the OpenMP that tblite shares
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _made(name: str) -> Atoms:
    from ase.build import molecule

    atoms: Atoms = molecule(name)  # type: ignore[no-untyped-call]
    return atoms


def _xtb(atoms: Atoms) -> tuple[float, Array]:
    if importlib.util.find_spec("tblite") is None:
        raise BackendError(
            "tblite is not installed: energies of GFN2-xTB are computed by it. Run pip install "
            "tblite, or take ASE's energies, EMT."
        )
    from ase.units import Bohr, Hartree
    from tblite.interface import Calculator

    calculator = Calculator("GFN2-xTB", atoms.numbers, atoms.positions / Bohr)
    calculator.set("verbosity", 0)
    found = calculator.singlepoint()
    return float(found["energy"]) * Hartree, -found["gradient"] * (Hartree / Bohr)


def _emt(atoms: Atoms) -> tuple[float, Array]:
    from ase.calculators.emt import EMT

    model: Any = EMT  # ase has no types
    found = model()
    found.calculate(atoms, ["energy", "forces"])
    return float(found.results["energy"]), found.results["forces"]


LABELS: dict[str, Label] = {"GFN2-xTB": _xtb, "EMT": _emt}


def _runs(begin: Tensor, size: Tensor) -> Tensor:
    """begin[0], begin[0] + 1, … (size[0] of them), begin[1], …"""
    before = size.cumsum(0) - size
    steps = torch.arange(int(size.sum()), device=size.device)
    return steps + (begin - before).repeat_interleave(size, output_size=len(steps))
