"""One structure over ranks: energy, forces and stress of converted MACE and NequIP models.

    E = Σ over ranks of E_n, n own atoms,      F_n = −∂E/∂x_n at the owner of n,
    stress = Σ over ranks of what each rank's edges add to it

A rank calls the model with its own atoms and the edges that end at them.  Positions, attributes
and, in each layer, features of the atoms that these edges come from arrive by the halo, and their
gradients return by it; all else is computed once, by the owner.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.core import private
from torchweft.core.collectives import Group, total, world
from torchweft.distributed.agreement import Calls, Made
from torchweft.distributed.halo import Halo, calls_inside
from torchweft.errors import BackendError, ShapeError
from torchweft.o3.adapters.sources import reading, reads_sources

__all__ = ["potential"]

SUMS = (
    *("energy", "interaction_energy", "contributions", "virials"),  # MACE
    *("total_energy", "virial"),  # NequIP
    "stress",
)
"""Results that are sums over atoms or edges."""

POSITIONS = ("positions", "pos")
"""Names of positions, of MACE and NequIP, which models let require gradients."""

ATOMS = (*POSITIONS, "node_attrs", "atom_types")
"""Names of what the halo extends, of MACE and NequIP."""


def potential(
    model: nn.Module, data: Mapping[str, Any], halo: Halo, **options: Any
) -> dict[str, Any]:
    """Results of a converted model for a structure whose atoms are spread over several ranks.

    Every rank of the halo's group must call it.

    Args:
        model: of `o3.from_mace` (MACE, ScaleShiftMACE) or `o3.from_nequip`, with the same weights
            on every rank; may be wrapped.
        data: the model's input for this rank: rows of its own atoms, `shard.global_ids` of the
            whole structure; `edge_index` with the numbers of a `Shard`, and rows of its edges,
            `shard.edges` of the whole list; cells and other values of structures.
        halo: of these atoms, `shard.halo()`.
        **options: arguments of the model, such as MACE's training and compute_stress.

    Returns:
        The model's results.  Energies, virials and stress are those of the whole structure, on
        every rank; rows (forces, energies and features of atoms) are of own atoms.

    Raises:
        BackendError: the model reads rows of atoms outside the layers that the adapters convert, or
            other derivatives are requested.
        ShapeError: the data has another number of atoms than the halo, or ranks differ.

    Training: a loss has one value, with a copy on every rank.  Sum what belongs to atoms by
    `total`, call backward on every rank, and add the parts of the weights' gradients:

        found = potential(model, data, halo, training=True)
        squares = (found["forces"] - forces).square().sum()
        loss = (found["energy"] - energy).square().sum() + total(squares)
        loss.backward()
        for weight in model.parameters():
            torch.distributed.all_reduce(weight.grad)

    Cost: beyond the work on own atoms and edges, an exchange of positions and one of features in
    each layer; as many for forces, and twice as many for a gradient of the forces.  The ranks'
    hosts compare the call once, from its second time on.

    Example:
        >>> from torchweft.distributed import potential
        >>> found = potential(model, data, shard.halo(), training=True)  # doctest: +SKIP
    """
    kept = _made.setdefault(model, {})
    kind = None if world(halo.group)[1] == 1 else _kind(model, data, options)
    calls = Calls(
        "potential",
        lambda: _facts(model, data, halo, options),
        halo.group,
        kept.get(kind, ()),
    )
    # nodes that forces make for their gradients are numbered in the thread of the others: all ranks
    # then come to the exchanges of second gradients in one order
    with (
        torch.autograd.set_multithreading_enabled(False),
        calls_inside(halo, calls),
        reading(halo.num_rows, halo),
    ):
        found = model(dict(data), **options)
    if calls.made:
        kept[kind] = calls.made
    return {**found, **_totals(found, halo.group)}


_made: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, list[Made]]] = (
    weakref.WeakKeyDictionary()
)
"""Calls of the halo in a call of a model, by the kind of the call."""


def _kind(model: nn.Module, data: Mapping[str, Any], options: Mapping[str, Any]) -> Hashable:
    """All that says which calls of the halo a model makes, and of what rows."""
    tensors = [(name, x) for name, x in data.items() if isinstance(x, Tensor)]
    return (
        tuple((n, x.dtype, x.dim(), x.requires_grad or n in POSITIONS) for n, x in tensors),
        tuple(weight.requires_grad for weight in model.parameters()),
        (model.training, torch.is_grad_enabled(), private.any_autocast()),
        repr(options),
    )


def _totals(found: Mapping[str, Any], group: Group | None) -> dict[str, Tensor]:
    """Results that are sums, of all ranks: those of a dtype by one all_reduce."""
    sums = {k: v for k, v in found.items() if k in SUMS and isinstance(v, Tensor)}
    if world(group)[1] == 1:
        return sums
    added: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in sums.values()):
        some = {k: x for k, x in sums.items() if x.dtype == dtype}
        joined = total(torch.cat([x.flatten() for x in some.values()]), group)
        parts = joined.split_with_sizes([x.numel() for x in some.values()])
        added |= {
            k: part.clone().view(x.shape) for (k, x), part in zip(some.items(), parts, strict=True)
        }
    return added


def _facts(
    model: nn.Module, data: Mapping[str, Any], halo: Halo, options: Mapping[str, Any]
) -> dict[str, Any]:
    if not reads_sources(model):
        raise BackendError(
            f"potential was given a {type(model).__name__}: only energies of MACE, ScaleShiftMACE "
            "and NequIP models that torchweft converted read rows of other ranks. Convert the "
            "model by o3.from_mace or o3.from_nequip, or call halo(x) in layers of your own."
        )
    rows = [len(data[name]) for name in ATOMS if name in data]
    other = next((count for count in rows if count != halo.num_rows), None)
    if not rows or other is not None:
        raise ShapeError(
            f"the data has {other} atoms and the halo {halo.num_rows} own rows: the data must have "
            "the rank's own atoms. Pass rows shard.global_ids of the whole structure."
        )
    return {"mode": "training" if model.training else "evaluation", "options": dict(options)}
