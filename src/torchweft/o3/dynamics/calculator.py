"""Potentials as ASE calculators: models of MACE, NequIP and SevenNet, and a user's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchweft.errors import BackendError, DTypeError
from torchweft.o3.dynamics.potentials import potential_of
from torchweft.o3.graph import Graph

if TYPE_CHECKING:
    from torchweft.o3.dynamics.ase_calculator import PotentialCalculator

__all__ = ["calculator"]

Energy = Callable[[Tensor, Tensor, Graph], Tensor]
"""The energy of atomic numbers (N,), vectors of edges (E, 3) and their graph."""


def calculator(
    model: nn.Module | Energy,
    *,
    cutoff: float | None = None,
    skin: float = 0.5,
    head: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PotentialCalculator:
    """An ASE calculator of energy, forces -∂E/∂positions and stress (∂E/∂strain) / volume.

    Args:
        model: a model of MACE (MACE or ScaleShiftMACE), NequIP, Allegro or SevenNet, converted by
            `from_mace` and the like or as it is; or a function or module of your own,
            `model(numbers, vectors, graph) -> energy` with the atomic numbers (N,), the vectors of
            the edges (E, 3) from src to the image of dst, in Å, the `Graph` of the edges, one for
            all layers, and an energy of one element, in eV.
        cutoff: of a model of your own, in Å; the others have theirs.
        skin: by how much candidates of the neighbour list exceed the cutoff, in Å: the list is
            rebuilt only when an atom has moved by half of it.
        head: of a model of MACE with several heads; a single head needs no name.
        dtype: to which the model is converted; None: that of its parameters, or torch's default.
            NequIP's models keep the one they were built in, SevenNet's are of float32.
        device: where it computes; None: where its parameters are, or on the CPU.

    Returns:
        An `ase.calculators.calculator.Calculator` with energy, free_energy, forces, and stress
        where the cell has a volume, in ASE's units (eV, eV/Å, eV/Å³).  Its `neighbours` is the
        `NeighbourList`.  The model is moved to dtype and device and set to evaluation mode, and its
        parameters no longer require gradients.  It may be moved again, and its weights changed,
        between calculations.

    Raises:
        BackendError: ase or vesin is not installed.
        DTypeError: a model of a kind without an energy, a cutoff that is missing or given twice, a
            dtype that the model cannot have.
        ShapeError: an unknown head; from a calculation, atoms of an unknown element, positions that
            are NaN, a periodic cell without a volume, an energy without a gradient.

    Cost: on a GPU a calculation replays a CUDA graph, which `torchweft.capture` records in the
    third calculation for the same atoms, with room for a tenth more edges, which are beyond the
    cutoff.  A function or module of your own must be zero there, such as by a smooth cutoff and
    `where`, must not wait for the GPU, and must not depend on Python values that change.  One that
    waits or is not zero is launched kernel by kernel, with a warning that says why; SevenNet's
    models are launched so without a warning.

    Source: the interface is ASE's, https://gitlab.com/ase/ase.

    Example:
        >>> import torch
        >>> from ase.build import molecule
        >>> from torchweft import o3
        >>> def springs(numbers, vectors, graph):
        ...     return (vectors.norm(dim=1) - 1).square().sum() / 2
        >>> atoms = molecule("H2O")
        >>> atoms.calc = o3.calculator(springs, cutoff=1.2, dtype=torch.float64)
        >>> round(float(atoms.get_potential_energy()), 6)
        0.001976
        >>> bool(abs(atoms.get_forces().sum(0)).max() < 1e-12)
        True
    """
    if importlib.util.find_spec("ase") is None:
        raise BackendError(
            "ase is not installed: a calculator is a class of it. Run pip install "
            "'torchweft[md]', which has vesin too."
        )
    from torchweft.o3.dynamics.ase_calculator import PotentialCalculator

    if not callable(model):
        raise DTypeError(
            f"model is a {type(model).__name__}: it must be a model of MACE, NequIP or SevenNet, "
            "or a function of (numbers, vectors, graph). Load it first, e.g. by torch.load."
        )
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    device = torch.device(device or ("cpu" if first is None else first.device))
    turned = dtype or (torch.get_default_dtype() if first is None else first.dtype)
    potential = potential_of(model, cutoff, head, turned)
    if not isinstance(model, nn.Module):
        return PotentialCalculator(potential, None, skin, device)
    model.to(device).eval().requires_grad_(False)
    if dtype is not None:
        model.to(dtype)
    return PotentialCalculator(potential, model, skin, device)
