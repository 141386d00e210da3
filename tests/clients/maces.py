"""Small models of the real MACE and structures for them; mace is imported when they are built."""

from typing import Any

import ase
import numpy as np
import torch
from ase.build import bulk

from torchweft.core.default_dtype import default_dtype

__all__ = ["R_MAX", "as_batch", "mace", "rattled"]

R_MAX = 5.0  # Å
ELEMENTS = (8, 14)


def rattled(repeat: tuple[int, int, int] = (1, 1, 1), seed: int = 0) -> ase.Atoms:
    """Diamond of Si and O in turn, shaken: 8 atoms a cell, 28 neighbours within 5 Å."""
    atoms = bulk("Si", "diamond", a=5.43, cubic=True)
    atoms.symbols[::2] = "O"
    atoms *= repeat
    atoms.rattle(0.1, seed=seed)
    return atoms


def mace(dtype: torch.dtype = torch.float64, **settings: Any) -> torch.nn.Module:
    """ScaleShiftMACE of two layers, 4x0e+4x1o, l ≤ 2, correlation 2, of seed 0.

    Args:
        dtype: of its weights, which are those of float64 rounded to it.
        **settings: arguments of the class that are to be others.
    """
    from mace import modules  # it lets e3nn 0.4.4 load its constants

    # isort: split
    from e3nn import o3

    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    hidden = settings.pop("hidden_irreps", "4x0e+4x1o")
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model = modules.ScaleShiftMACE(
            **{
                "r_max": R_MAX,
                "num_bessel": 8,
                "num_polynomial_cutoff": 5,
                "max_ell": 2,
                "interaction_cls": block,
                "interaction_cls_first": block,
                "num_interactions": 2,
                "num_elements": len(ELEMENTS),
                "hidden_irreps": o3.Irreps(hidden),
                "MLP_irreps": o3.Irreps("16x0e"),
                "gate": torch.nn.functional.silu,
                "atomic_energies": np.array([-1.0, -2.0]),
                "avg_num_neighbors": 28.0,
                "atomic_numbers": list(ELEMENTS),
                "correlation": 2,
                "atomic_inter_scale": 1.0,
                "atomic_inter_shift": 0.0,
                **settings,
            }
        )
    return model.to(dtype)


def as_batch(*structures: ase.Atoms, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Structures as MACE's models take them."""
    from mace import data
    from mace.tools import AtomicNumberTable, torch_geometric

    table = AtomicNumberTable(ELEMENTS)
    with default_dtype(dtype):
        rows = [
            data.AtomicData.from_config(data.config_from_atoms(atoms), z_table=table, cutoff=R_MAX)
            for atoms in structures
        ]
    return torch_geometric.Batch.from_data_list(rows).to_dict()
