"""How models of several libraries are asked for energy, forces and stress of one structure."""

from __future__ import annotations

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

    numbers: Tensor  # (N,) int64, atomic numbers
    positions: Tensor  # (N, 3)
    cell: Tensor  # (3, 3), zeros where there is none
    src: Tensor  # (E,)
    dst: Tensor  # (E,)
    shift: Tensor  # (E, 3)
    solid: bool  # the cell has a volume


class Results(NamedTuple):
    """What a potential gives of a structure."""

    energy: Tensor  # one element
    forces: Tensor  # (N, 3)
    stress: Tensor | None  # (3, 3), None where the cell has no volume


class Potential(NamedTuple):
    """A model as a function of structures."""

    cutoff: float
    numbers: tuple[int, ...]  # atomic numbers that it knows; none where it takes any
    call: Callable[[Structure], Results]


def potential_of(model: Any, cutoff: float | None, head: str | None) -> Potential:
    """The potential of a model of MACE, NequIP or SevenNet, or of a function."""
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
            return make(model, head)
    if any(is_of(package, type(model).__name__, model) for package, _ in makers):
        known = ", ".join(f"{package}'s {name}" for package, name in makers)
        raise DTypeError(
            f"model is a {type(model).__name__}, which no calculator knows: it must be {known} or "
            "a class of them. Pass the whole model, or a function of (numbers, vectors, graph)."
        )
    if cutoff is None:
        raise DTypeError(
            "there is no cutoff: a model of one's own needs it for its edges. Pass cutoff=5.0, say."
        )
    _check_no_head(head, model)
    return Potential(float(cutoff), (), lambda structure: _of_energy(model, structure))


def _of_energy(model: Callable[[Tensor, Tensor, Graph], Tensor], s: Structure) -> Results:
    """Results of a function of (numbers, vectors, graph), by its gradient with the vectors."""
    with torch.enable_grad():
        vectors = s.positions[s.dst] - s.positions[s.src] + s.shift @ s.cell
        vectors = vectors.requires_grad_()
        energy = model(s.numbers, vectors, Graph(s.src, s.dst, len(s.numbers)))
        if not isinstance(energy, Tensor) or energy.numel() != 1:
            given = tuple(energy.shape) if isinstance(energy, Tensor) else type(energy).__name__
            raise ShapeError(
                f"the model's energy is {given}: it must be a tensor of one element. Return the "
                "sum over atoms."
            )
        slope = torch.zeros_like(vectors)
        if energy.requires_grad:
            slope, *_ = torch.autograd.grad(
                energy.sum(), vectors, allow_unused=True, materialize_grads=True
            )
    forces = torch.zeros_like(s.positions).index_add(0, s.src, slope)
    forces = forces.index_add(0, s.dst, -slope)
    virial = vectors.detach().T @ slope
    stress = (virial + virial.T) / (2 * s.cell.det().abs()) if s.solid else None
    return Results(energy.detach(), forces, stress)


def _mace(model: Any, head: str | None) -> Potential:
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

    def call(s: Structure) -> Results:
        zero = s.src.new_zeros
        data = {
            "positions": s.positions,
            "node_attrs": _one_hot(s.numbers, numbers, s.positions.dtype),
            "edge_index": torch.stack([s.src, s.dst]),
            "unit_shifts": s.shift,
            "shifts": s.shift @ s.cell,
            "cell": s.cell,
            "batch": zero(len(s.numbers)),
            "ptr": torch.tensor([0, len(s.numbers)], device=s.src.device),
            "head": zero(1) + chosen,
        }
        out = model(data, compute_force=True, compute_stress=s.solid)
        return _results(out, "energy", "forces", out["stress"] if s.solid else None)

    return Potential(float(model.r_max), numbers, call)


def _nequip(model: Any, head: str | None) -> Potential:
    from ase.data import atomic_numbers

    _check_no_head(head, model)
    names = list(model.type_names)
    unknown = [name for name in names if name not in atomic_numbers]
    if unknown or not names:
        raise DTypeError(
            f"the model's types are {names}: the calculator needs chemical symbols, to know them "
            "by atomic numbers. Use NequIPCalculator with the converted model and its transforms."
        )
    numbers = tuple(atomic_numbers[name] for name in names)

    def call(s: Structure) -> Results:
        data = {
            "pos": s.positions,
            "atom_types": _places(s.numbers, numbers),
            "edge_index": torch.stack([s.src, s.dst]),
            "edge_cell_shift": s.shift,
            "cell": s.cell[None],
        }
        out = model(data)
        return _results(out, "total_energy", "forces", out["stress"] if s.solid else None)

    return Potential(float(model.metadata["r_max"]), numbers, call)


def _sevennet(model: Any, head: str | None) -> Potential:
    _check_no_head(head, model)
    if model.modal_map:
        raise DTypeError(
            f"the model has the modalities {sorted(model.modal_map)}: the calculator takes models "
            "with one. Use SevenNetCalculator with the converted model."
        )
    model.set_is_batch_data(False)

    def call(s: Structure) -> Results:
        data = {
            "x": s.numbers,
            "atomic_numbers": s.numbers,
            "pos": s.positions,
            "edge_index": torch.stack([s.src, s.dst]),
            "edge_vec": s.positions[s.dst] - s.positions[s.src] + s.shift @ s.cell,
            "cell_lattice_vectors": s.cell,
            "pbc_shift": s.shift,
            "cell_volume": s.cell.det().abs(),
            "num_atoms": torch.tensor(len(s.numbers), device=s.src.device),
        }
        out = model(data)
        stress = None
        if s.solid:
            xx, yy, zz, xy, yz, zx = -out["inferred_stress"]
            stress = torch.stack([xx, xy, zx, xy, yy, yz, zx, yz, zz])
        return _results(out, "inferred_total_energy", "inferred_force", stress)

    return Potential(float(model.cutoff), tuple(model.type_map), call)


def _results(out: Mapping[str, Tensor], energy: str, forces: str, stress: Tensor | None) -> Results:
    reshaped = None if stress is None else stress.detach().reshape(3, 3)
    return Results(out[energy].detach(), out[forces].detach(), reshaped)


def _places(numbers: Tensor, known: tuple[int, ...]) -> Tensor:
    """The place of each atomic number among those that a model knows."""
    places = numbers.new_zeros(max(known) + 1)
    places[list(known)] = torch.arange(len(known), device=numbers.device)
    return places[numbers]


def _one_hot(numbers: Tensor, known: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return nn.functional.one_hot(_places(numbers, known), len(known)).to(dtype)


def _check_no_head(head: str | None, model: object) -> None:
    if head is not None:
        raise DTypeError(
            f"head={head!r} was given with a {type(model).__name__}: heads are MACE's. Leave it "
            "out."
        )
