"""A converted MACE in `torchweft.capture`, with structures whose atoms and edges vary.

Molecules have a cell each, (graphs, 3, 3), and what depends on their number is made in the
function: padded atoms then belong to padded molecules.
"""

import copy

import pytest
import torch

pytest.importorskip("mace")

import ase.build
import numpy as np
from e3nn import o3 as e3
from mace import data, modules, tools
from mace.tools import torch_geometric

from tests.recorders import captured
from torchweft import o3

ELEMENTS = tools.AtomicNumberTable([8, 14])
NAMES = ("positions", "node_attrs", "edge_index", "shifts", "unit_shifts", "cell", "batch")
SIZES = {
    "positions": (1.1, {"batch": "cell"}),
    "shifts": (1.1, {"edge_index": "positions"}),
    "cell": 1.0,
}


def mace():
    torch.manual_seed(0)
    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    return modules.ScaleShiftMACE(
        r_max=4.0,
        num_bessel=4,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=block,
        interaction_cls_first=block,
        num_interactions=2,
        num_elements=2,
        hidden_irreps=e3.Irreps("8x0e+8x1o"),
        MLP_irreps=e3.Irreps("8x0e"),
        gate=torch.nn.functional.silu,
        atomic_energies=np.array([-3.0, -5.0]),
        avg_num_neighbors=8,
        atomic_numbers=ELEMENTS.zs,
        correlation=2,
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    ).double()


def structure(count, seed):
    generator = np.random.default_rng(seed)
    atoms = ase.build.bulk("Si", "diamond", a=5.4, cubic=True)
    atoms.numbers[::2] = 8
    atoms = atoms[:count]
    atoms.positions += generator.normal(0, 0.1, atoms.positions.shape)
    read = data.AtomicData.from_config(data.config_from_atoms(atoms), z_table=ELEMENTS, cutoff=4.0)
    loader = torch_geometric.dataloader.DataLoader([read], batch_size=1)
    batch = next(iter(loader)).to_dict()
    found = {name: batch[name] for name in NAMES} | {"cell": batch["cell"].view(-1, 3, 3)}
    return {k: t.double() if t.is_floating_point() else t for k, t in found.items()}


def results(model, given, training):
    cells = given["cell"]
    zeros = cells.new_zeros(len(cells) + 1, dtype=torch.int64)
    whole = given | {"cell": cells.view(-1, 3), "ptr": zeros, "head": zeros[:-1]}
    return model(whole, training=training, compute_force=True)


def agree(found, exact):
    """Nearer to float64's rounding than to that of float32."""
    between = (torch.finfo(torch.float64).eps * torch.finfo(torch.float32).eps) ** 0.5
    assert (found - exact).abs().max() <= exact.abs().max() * between


COUNTS = (8, 8, 8, 7, 8, 6, 8)


@pytest.mark.filterwarnings("ignore")
def test_forces():
    model = o3.from_mace(mace())

    def forces(given):
        out = results(model, given, training=False)
        return out["energy"], out["forces"]

    run, recorder = captured(forces, structure(8, 0), sizes=SIZES)
    for seed, count in enumerate(COUNTS):
        given = structure(count, seed)
        for found, exact in zip(run(given), forces(given), strict=True):
            agree(found, exact.detach())
    assert (recorder.rehearsals, recorder.records, recorder.replays) == (1, 1, 5)


@pytest.mark.filterwarnings("ignore")
def test_training_on_forces():
    model = o3.from_mace(mace())

    def trained(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(given, weight):
            optimizer.zero_grad()
            out = results(model, given, training=True)
            loss = (weight[:, None] * (out["forces"] - 0.1).square()).sum()
            loss.backward()
            optimizer.step()
            return loss

        return step

    twin = copy.deepcopy(model)
    step, plain = trained(model), trained(twin)
    sizes = SIZES | {"positions": (1.1, {"batch": "cell", "weight": 0})}
    weight = torch.ones(8, dtype=torch.float64)
    run, recorder = captured(step, structure(8, 0), weight, sizes=sizes)
    for seed, count in enumerate(COUNTS):
        given = structure(count, seed), weight[:count] / count
        agree(run(*given), plain(*given).detach())
    assert recorder.records == 1
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        agree(a.detach(), b.detach())
