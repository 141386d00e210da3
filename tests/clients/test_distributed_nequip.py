"""Converted NequIP models over ranks: energy, forces, stress and training are those of one process.

The oracle is the original of e3nn in one process.  Errors are measured by those of its float32
results, scaled to the precision.
Seen red with: the stress of each rank's own edges.
"""

import functools
import pickle

import pytest
import torch

pytest.importorskip("nequip")
from ase.build import bulk, molecule
from nequip.data import AtomicDataDict, from_ase
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.utils.global_state import set_global_state

from tests.clients.agreement import assert_agree, default_dtype
from tests.clients.test_nequip import R_MAX, original, rounded
from tests.ranks import run
from torchweft import o3
from torchweft.distributed import Halo, potential, shard, total
from torchweft.errors import BackendError

pytestmark = pytest.mark.filterwarnings("ignore")

ZBL = {
    "_target_": "nequip.nn.pair_potential.ZBL",
    "chemical_species": ["O", "Si"],
    "units": "metal",
}
MODELS = {
    "plain": {},
    "by type": {
        "avg_num_neighbors": {"O": 9.0, "Si": 4.0},
        "per_edge_type_cutoff": {"Si": 3.0},
        "convnet_resnet": True,
        "num_layers": 3,
        "pair_potential": ZBL,
    },
}
STRUCTURES = ("crystal", "molecule")


@functools.cache
def structure(name):
    """A rattled periodic crystal, or a molecule, as a batch of one."""
    if name == "crystal":
        atoms = bulk("SiO", "zincblende", a=4.6, cubic=True)
        atoms.rattle(0.1, seed=0)
    else:
        atoms = molecule("SiO") * 1 + molecule("SiH4")
        atoms.symbols[atoms.symbols == "H"] = "O"
        atoms.positions[2:] += 1.7
        atoms.rattle(0.05, seed=0)
    species = ChemicalSpeciesToAtomTypeMapper(
        model_type_names=["O", "Si"], chemical_species_to_atom_type_map={"O": "O", "Si": "Si"}
    )
    edges = NeighborListTransform(r_max=R_MAX)
    with default_dtype(torch.float64):
        return AtomicDataDict.batched_from_list([edges(species(from_ase(atoms)))])


def part_of(whole, rank, size, owner=None):
    """A rank's shard of a structure, and its data; row 0 of NequIP's edges is added to."""
    dst, src = whole["edge_index"]
    positions = whole["pos"] if owner is None else None
    part = shard(src, dst, len(whole["pos"]), rank, size, positions, owner)
    own = {name: whole[name][part.global_ids] for name in ("pos", "atom_types", "batch")}
    own |= {name: whole[name] for name in ("cell", "pbc", "num_atoms") if name in whole}
    if "edge_cell_shift" in whole:
        own["edge_cell_shift"] = whole["edge_cell_shift"][part.edges]
    return part, own | {"edge_index": torch.stack([part.dst, part.src])}


def results(call, model, data, ids, add):
    """Energy, forces and stress, and a part of the gradients of a loss of all three."""
    found = call(dict(data))
    targets = torch.arange(60.0, dtype=torch.float64).view(20, 3).cos()[ids]
    names = ["total_energy", "forces", "virial", "atomic_energy"]
    names += ["stress"] if data["pbc"].all() else []
    loss = found["total_energy"].sin().sum() + found["virial"].sin().sum()
    loss = loss + add((found["forces"] - targets).square().sum())
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    grads = {n: g for n, g in zip(weights, grads, strict=True) if g is not None}
    return {name: found[name].detach() for name in names}, grads


def of_one_process(model, name):
    whole = structure(name)
    ids = torch.arange(len(whole["pos"]))
    rows, grads = results(model, model, whole, ids, lambda part: part)
    return rows | grads


def owners(name, size):
    """The molecule leaves the last rank without atoms, and has a rank with one."""
    atoms = len(structure(name)["pos"])
    return None if name == "crystal" else torch.arange(atoms).clamp(max=max(size - 2, 0))


def of_ranks(rank, size, group, models):
    set_global_state(allow_tf32=False)
    every = {}
    for variant, saved in models.items():
        model = pickle.loads(saved)
        for name in STRUCTURES:
            part, own = part_of(structure(name), rank, size, owners(name, size))
            halo = part.halo(group)
            call = functools.partial(potential, model, halo=halo)
            found = results(call, model, own, part.global_ids, lambda part: total(part, group))
            again = call(dict(own))
            assert again["forces"].equal(found[0]["forces"])
            assert again["pos"].shape == own["pos"].shape
            assert "lmp_mliap_data" not in again
            grads = {n: total(grad, group) for n, grad in found[1].items()}
            every[variant, name] = part.global_ids, found[0], grads
    return every


def test_structures_over_ranks_are_those_of_one_process():
    set_global_state(allow_tf32=False)
    exact, noisy, saved = {}, {}, {}
    for variant, settings in MODELS.items():
        model, single = original(**settings), rounded(**settings)
        for name in STRUCTURES:
            exact[variant, name] = of_one_process(model, name)
            noisy[variant, name] = of_one_process(single, name)
        saved[variant] = pickle.dumps(o3.from_nequip(model))
    for size in (2, 4):
        found = run(of_ranks, size, saved)
        for case, expected in exact.items():
            ids, rows, grads = zip(*(ranks[case] for ranks in found), strict=True)
            whole = rows[0] | grads[0]
            order = torch.cat(ids).argsort()
            for key in ("forces", "atomic_energy"):
                whole[key] = torch.cat([part[key] for part in rows])[order]
            for key in ("total_energy", "virial"):
                assert all(part[key].equal(rows[0][key]) for part in rows)
            assert_agree(whole, expected, noisy[case])


def test_other_models_are_told_apart():
    set_global_state(allow_tf32=False)
    whole = structure("molecule")
    halo = Halo(torch.arange(len(whole["pos"])), torch.arange(0))  # of one rank
    model = original()
    with pytest.raises(BackendError, match="given a GraphModel: only energies of MACE"):
        potential(model, dict(whole), halo)
    found = potential(o3.from_nequip(model), dict(whole), halo)
    assert found["forces"].equal(model(dict(whole))["forces"])
