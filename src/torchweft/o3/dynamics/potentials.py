"""How models of several libraries are asked for energy, forces and stress of one structure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.adapters.replacing import is_of
from torchweft.o3.graph import Graph

__all__ = ["Potential", "Results", "Structure", "potential_of"]


class Structure(NamedTuple):
    """Atoms and their edges on the model's device, in its dtype."""

    species: Tensor  # (N, ...), the same tensor as long as the atoms are of the same elements
    positions: Tensor  # (N, 3)
    cell: Tensor  # (3, 3), vectors that do not repeat are those of a unit cell where there are none
    src: Tensor  # (E,)
    dst: Tensor  # (E,)
    shift: Tensor  # (E, 3)
    solid: bool  # the cell has a volume


class Results(NamedTuple):
    """What a potential gives of a structure."""

    energy: Tensor  # one element
    forces: Tensor  # (N, 3)
    stress: Tensor | None  # (3, 3), None where the cell has no volume
    slope: Tensor | None = None  # (E, 3), ∂E/∂vectors, of functions of these


class Potential(NamedTuple):
    """A model as a function of structures."""

    cutoff: float
    numbers: tuple[int, ...]  # atomic numbers that it knows; none where it takes any
    dtype: torch.dtype | None  # of positions, cells and shifts; None: that of the parameters
    species: Callable[[Tensor, torch.dtype], Tensor]  # of atomic numbers (N,), in this dtype
    call: Callable[[Structure], Results]
    recordable: bool = True  # edges beyond the cutoff change nothing, and the host reads no value


def potential_of(
    model: Any, cutoff: float | None, head: str | None, dtype: torch.dtype
) -> Potential:
    """The potential of a model of MACE, NequIP or SevenNet, or of a function, in a dtype."""
    makers = {
        ("mace", "MACE"): _mace,
        ("nequip", "GraphModel"): _nequip,
        ("sevenn", "AtomGraphSequential"): _sevennet,
    }
    for (package, name), make in makers.items():
        if is_of(package, name, model):
            if cutoff is not None:
                raise DTypeError(
                    f"cutoff={cutoff} was given with a {type(model).__name__}, which has its own: "
                    "it is for functions. Leave it out."
                )
            return make(model, head, dtype)
    if any(is_of(package, type(model).__name__, model) for package, _ in makers):
        known = ", ".join(f"{package}'s {name}" for package, name in makers)
        raise DTypeError(
            f"model is a {type(model).__name__}, which calculator does not support: it must be "
            f"{known} or a subclass. Pass the whole model, or a function of (numbers, vectors, "
            "graph)."
        )
    if cutoff is None:
        raise DTypeError(
            "cutoff is None: a model of your own needs one for its edges. Pass "
            "cutoff=5.0, for example."
        )
    _check_no_head(head, model)
    own = isinstance(model, nn.Module) and next(model.parameters(), None) is not None
    call = functools.partial(_of_energy, model)
    return Potential(float(cutoff), (), None if own else dtype, _as_they_are, call)


def _of_energy(model: Callable[[Tensor, Tensor, Graph], Tensor], s: Structure) -> Results:
    """Results of a function of (numbers, vectors, graph), by its gradient with the vectors."""
    with torch.enable_grad():
        vectors = s.positions[s.dst] - s.positions[s.src] + s.shift @ s.cell
        vectors = vectors.requires_grad_()
        energy = model(s.species, vectors, Graph(s.src, s.dst, len(s.species)))
        if not isinstance(energy, Tensor) or energy.numel() != 1:
            given = tuple(energy.shape) if isinstance(energy, Tensor) else type(energy).__name__
            raise ShapeError(
                f"the model's energy is {given}: it must be a tensor of one element. Return the "
                "sum over atoms."
            )
        slope = _slope(energy, vectors)
    forces = torch.zeros_like(s.positions).index_add(0, s.src, slope)
    forces = forces.index_add(0, s.dst, -slope)
    virial = vectors.detach().T @ slope
    stress = (virial + virial.T) / (2 * _volume(s.cell)) if s.solid else None
    return Results(energy.detach(), forces, stress, slope)


def _slope(energy: Tensor, vectors: Tensor) -> Tensor:
    """∂E/∂vectors; 0 without edges, where a function may return an energy of atoms alone."""
    slope = None
    if energy.requires_grad:
        (slope,) = torch.autograd.grad(energy.sum(), vectors, allow_unused=True)
    if slope is None and len(vectors):
        raise ShapeError(
            "the model's energy has no gradient by the vectors of the edges, of which forces are "
            "made: it must depend on them. Compute it without no_grad, detach and item(), or add "
            "0 * vectors.sum() to an energy that is the same wherever the atoms are."
        )
    return torch.zeros_like(vectors) if slope is None else slope


def _volume(cell: Tensor) -> Tensor:
    """By products, which a CUDA graph holds; `det` factors the matrix."""
    volume: Tensor = (cell[0] * torch.linalg.cross(cell[1], cell[2])).sum()
    return volume.abs()


def _mace(model: Any, head: str | None, dtype: torch.dtype) -> Potential:
    heads = list(getattr(model, "heads", None) or ["Default"])
    if head is None and len(heads) > 1:
        raise ShapeError(
            f"the model has the heads {heads}: one must be chosen. Pass head={heads[0]!r}."
        )
    if head is not None and head not in heads:
        raise ShapeError(f"head is {head!r} and the model has {heads}. Pass one of these.")
    if getattr(model, "embedding_specs", None):
        raise DTypeError(
            f"the model takes {sorted(model.embedding_specs)} besides atoms: the calculator has "
            "none of them. Use mace.calculators.MACECalculator with the converted model."
        )
    numbers = tuple(int(z) for z in model.atomic_numbers)
    chosen = heads.index(head) if head else 0

    def one_hot(found: Tensor, dtype: torch.dtype) -> Tensor:
        return nn.functional.one_hot(_places(found, numbers), len(numbers)).to(dtype)

    def call(s: Structure) -> Results:
        zero = s.src.new_zeros
        data = {
            "positions": s.positions,
            "node_attrs": s.species,
            "edge_index": torch.stack([s.src, s.dst]),
            "unit_shifts": s.shift,
            "shifts": s.shift @ s.cell,
            "cell": s.cell,
            "batch": zero(len(s.species)),
            "ptr": torch.arange(2, device=s.src.device) * len(s.species),
            "head": zero(1) + chosen,
        }
        out = model(data, compute_force=True, compute_virials=s.solid)
        stress = -out["virials"] / _volume(s.cell) if s.solid else None
        return _results(out, "energy", "forces", stress)

    return Potential(float(model.r_max), numbers, None, one_hot, call)


def _nequip(model: Any, head: str | None, dtype: torch.dtype) -> Potential:
    from ase.data import atomic_numbers

    _check_no_head(head, model)
    names = list(model.type_names)
    unknown = [name for name in names if name not in atomic_numbers]
    if unknown or not names:
        raise DTypeError(
            f"the model's types are {names}: the calculator needs chemical symbols, to know them "
            "by atomic numbers. Use NequIPCalculator with the converted model and its transforms."
        )
    if dtype != model.model_dtype:
        raise DTypeError(
            f"dtype is {dtype} and the model was built in {model.model_dtype}, which NequIP fixes "
            "then. Leave dtype out, or build the model with another model_dtype."
        )
    numbers = tuple(atomic_numbers[name] for name in names)

    def call(s: Structure) -> Results:
        data = {
            "pos": s.positions,
            "atom_types": s.species,
            "edge_index": torch.stack([s.src, s.dst]),
            "edge_cell_shift": s.shift,
            "cell": s.cell[None],
        }
        out = model(data)
        return _results(out, "total_energy", "forces", out["stress"] if s.solid else None)

    cutoff = float(model.metadata["r_max"])
    return Potential(cutoff, numbers, torch.float64, lambda found, _: _places(found, numbers), call)


def _sevennet(model: Any, head: str | None, dtype: torch.dtype) -> Potential:
    _check_no_head(head, model)
    if model.modal_map:
        raise DTypeError(
            f"the model has the modalities {sorted(model.modal_map)}: the calculator takes models "
            "with one. Use SevenNetCalculator with the converted model."
        )
    if dtype != torch.float32:
        raise DTypeError(
            f"dtype is {dtype}: SevenNet embeds elements in float32, so its models compute in it "
            "alone. Leave dtype out."
        )
    model.set_is_batch_data(False)

    def call(s: Structure) -> Results:
        data = {
            "x": s.species,
            "atomic_numbers": s.species,
            "pos": s.positions,
            "edge_index": torch.stack([s.src, s.dst]),
            "edge_vec": s.positions[s.dst] - s.positions[s.src] + s.shift @ s.cell,
            "cell_lattice_vectors": s.cell,
            "pbc_shift": s.shift,
            "cell_volume": _volume(s.cell),
            "num_atoms": torch.tensor(len(s.species), device=s.src.device),
        }
        out = model(data)
        stress = None
        if s.solid:
            xx, yy, zz, xy, yz, zx = -out["inferred_stress"]
            stress = torch.stack([xx, xy, zx, xy, yy, yz, zx, yz, zz])
        return _results(out, "inferred_total_energy", "inferred_force", stress)

    # its polynomial cutoff is not zero beyond, and the host reads the elements of atoms
    cutoff, known = float(model.cutoff), tuple(model.type_map)
    return Potential(cutoff, known, dtype, _as_they_are, call, recordable=False)


def _results(out: Mapping[str, Tensor], energy: str, forces: str, stress: Tensor | None) -> Results:
    reshaped = None if stress is None else stress.detach().reshape(3, 3)
    return Results(out[energy].detach(), out[forces].detach(), reshaped)


def _as_they_are(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    return numbers


def _places(numbers: Tensor, known: tuple[int, ...]) -> Tensor:
    """The place of each atomic number among those that a model knows."""
    places = numbers.new_zeros(max(known) + 1)
    places[list(known)] = torch.arange(len(known), device=numbers.device)
    return places[numbers]


def _check_no_head(head: str | None, model: object) -> None:
    if head is not None:
        raise DTypeError(
            f"head={head!r} was given with a {type(model).__name__}: heads are MACE's. Leave it "
            "out."
        )
