"""Molecular dynamics of atoms that are spread over ranks, and migrate.

v ← v + ½ Δt F / m      x ← x + Δt v      F = −∂E/∂x      v ← v + ½ Δt F / m
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.collectives import Group, all_sum
from torchweft.distributed.agreement import agree
from torchweft.distributed.atoms.domains import Domains
from torchweft.distributed.atoms.neighbours import DistributedNeighbourList, Neighbours
from torchweft.errors import ShapeError

__all__ = ["Atoms", "VelocityVerlet", "forces_of"]


class Atoms(NamedTuple):
    """The atoms that a rank owns, in the units of one system, such as eV, Å, u and Å √(u/eV).

    Args:
        ids: (n,) int64, the number of each atom among those of all ranks.
        numbers: (n,) integers, atomic numbers.
        positions: (n, 3), which may lie outside the cell.
        velocities: (n, 3).
        masses: (n,).

    Example:
        >>> import torch
        >>> from torchweft.distributed import Atoms
        >>> x = torch.tensor([[0.0, 0.0, 0.0], [1.1, 0.0, 0.0]])
        >>> len(Atoms(torch.arange(2), torch.ones(2), x, 0 * x, torch.ones(2)).ids)
        2
    """

    ids: Tensor
    numbers: Tensor
    positions: Tensor
    velocities: Tensor
    masses: Tensor


Energy = Callable[[Tensor, Tensor, Neighbours], Tensor]
Forces = Callable[[Atoms, Neighbours], tuple[Tensor, Tensor]]


def forces_of(energy: Energy, cell: Tensor | None = None) -> Forces:
    """Forces as −∂E/∂positions of an energy that is a sum of the ranks' parts.

    Args:
        energy: `energy(numbers, vectors, neighbours)`, this rank's part of the energy, one element:
            of the atomic numbers (n + h,) of own atoms and the halo's, the vectors (E, 3) of the
            edges, from src to the image of dst, and the `Neighbours`.  Features of nodes reach
            other ranks by `neighbours.halo(x)`, as often on every rank.
        cell: (3, 3), three lattice vectors as rows.

    Returns:
        A function of (atoms, neighbours) that returns the energy of all ranks, and the forces (n,
        3) on own atoms.  It raises a ShapeError on every rank where an energy has not one element,
        or no gradient.

    Cost: two exchanges of rows of the halo, and one back, besides those of the energy.

    Example:
        >>> import torch
        >>> from torchweft.distributed import Atoms, DistributedNeighbourList, forces_of
        >>> def spring(numbers, vectors, neighbours):
        ...     return (vectors.norm(dim=1) - 1).square().sum() / 4  # an edge each way
        >>> x = torch.tensor([[0.0, 0.0, 0.0], [1.5, 0.0, 0.0]])
        >>> atoms = Atoms(torch.arange(2), torch.ones(2), x, 0 * x, torch.ones(2))
        >>> energy, forces = forces_of(spring)(atoms, DistributedNeighbourList(2.0)(atoms.ids, x))
        >>> float(energy), forces[:, 0].tolist()
        (0.125, [0.5, -0.5])
    """

    def forces(atoms: Atoms, neighbours: Neighbours) -> tuple[Tensor, Tensor]:
        halo, src, dst, shift = neighbours
        numbers = halo(atoms.numbers)
        with torch.enable_grad():
            positions = atoms.positions.detach().requires_grad_()
            x = halo(positions)
            vectors = x[dst] - x[src]
            if cell is not None:
                vectors = vectors + shift @ cell
            part = energy(numbers, vectors, neighbours)
            agree("forces", lambda: _checked(part, len(src)), halo.group)
            part = part.sum() + 0 * x.sum()  # so that a rank without edges takes the way back too
            (slope,) = torch.autograd.grad(part, positions)
        return all_sum(part.detach(), halo.group), -slope

    return forces


class VelocityVerlet:
    """Molecular dynamics at constant energy over ranks, by velocity Verlet steps.

    One neighbour list and one halo serve many steps.

    Every rank of the group builds it, and calls `run`, together.

    Args:
        forces: of (atoms, neighbours): the energy of all ranks and the forces on own atoms, e.g. of
            `forces_of`.
        atoms: atoms of this rank, any part of all atoms: at the start they migrate to the rank that
            owns their box.
        time_step: Δt, in the atoms' unit of time.
        cutoff: of the neighbour list, in the unit of the positions.
        cell: (3, 3), three lattice vectors as rows, the same on every rank.
        pbc: whether images repeat along each lattice vector: a bool or (3,).
        skin: atoms migrate, boxes are balanced and neighbours are searched again when an atom has
            moved by half of it.
        group: the ranks; None: all.

    Raises:
        ShapeError, DTypeError: on every rank, as `Domains` and `DistributedNeighbourList`.

    The trajectory is that of one process to rounding.

    Example:
        >>> import torch
        >>> from torchweft.distributed import Atoms, VelocityVerlet, forces_of
        >>> def spring(numbers, vectors, neighbours):
        ...     return (vectors.norm(dim=1) - 1).square().sum() / 4  # an edge each way
        >>> x = torch.tensor([[0.0, 0.0, 0.0], [1.1, 0.0, 0.0]], dtype=torch.float64)
        >>> atoms = Atoms(torch.arange(2), torch.ones(2), x, 0 * x, torch.ones(2))
        >>> dynamics = VelocityVerlet(forces_of(spring), atoms, 0.1, cutoff=2.0)
        >>> round(float(dynamics.energy), 6)
        0.005
        >>> dynamics.run(10)
        >>> round(float(dynamics.atoms.positions[1, 0]), 3)
        1.058
    """

    def __init__(
        self,
        forces: Forces,
        atoms: Atoms,
        time_step: float,
        *,
        cutoff: float,
        cell: Tensor | None = None,
        pbc: Any = False,
        skin: float = 0.5,
        group: Group | None = None,
    ) -> None:
        self._compute, self._step = forces, time_step
        self._cell, self._pbc, self._group = cell, pbc, group
        self.atoms = atoms
        """Those that this rank owns now."""
        self.neighbours = DistributedNeighbourList(cutoff, skin, group)
        """Its `builds` counts the searches."""
        self.energy: Tensor
        """Of all ranks, without the kinetic one."""
        self.forces: Tensor
        """(n, 3), on own atoms."""
        self._update()

    def run(self, steps: int) -> None:
        """Makes a number of steps.

        Args:
            steps: how many.
        """
        for _ in range(steps):
            atoms = self._kicked()
            positions = atoms.positions + self._step * atoms.velocities
            self.atoms = atoms._replace(positions=positions)
            self._update()
            self.atoms = self._kicked()

    def _kicked(self) -> Atoms:
        """After half a step of the forces."""
        change = (self._step / 2) * self.forces / self.atoms.masses[:, None]
        return self.atoms._replace(velocities=self.atoms.velocities + change)

    def _update(self) -> None:
        """Energy and forces, of neighbours whose atoms have migrated before they are searched."""
        space = self._cell, self._pbc
        if not self.neighbours.serves(self.atoms.ids, self.atoms.positions, *space):
            domains = Domains(self.atoms.positions, *space, group=self._group)
            ids, numbers, positions, velocities, masses = self.atoms
            moved = domains.migrate(ids, positions, numbers, velocities, masses)
            ids, positions, numbers, velocities, masses = moved
            self.atoms = Atoms(ids, numbers, positions, velocities, masses)
        found = self.neighbours(self.atoms.ids, self.atoms.positions, *space)
        self.energy, self.forces = self._compute(self.atoms, found)


def _checked(part: Any, edges: int) -> Mapping[str, Any]:
    if not isinstance(part, Tensor) or part.numel() != 1:
        given = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
        raise ShapeError(
            f"the energy is {given}: it must be a tensor of one element. Return the sum over the "
            "atoms of this rank."
        )
    if edges and not part.requires_grad:
        raise ShapeError(
            f"the energy of {edges} edges has no gradient, of which forces are made: it must "
            "depend on their vectors. Compute it without no_grad, detach and item()."
        )
    return {"dtype": part.dtype}
