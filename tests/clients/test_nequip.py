"""from_nequip on models of the real NequIP, and the modifier by its own programs.

Errors are measured by the original's own: those of its float32 results, scaled to the precision.
Seen red with: items of products joined in ir_mul rows, the training mode lost on conversion.
"""

import functools
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

pytest.importorskip("nequip")
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from nequip.data import AtomicDataDict, from_ase, register_fields
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.model import NequIPGNNModel
from nequip.nn.embedding import PolynomialCutoff
from nequip.utils.global_state import set_global_state

from tests.clients.agreement import (
    assert_agree,
    default_dtype,
    names_of,
    operations,
    trained,
)
from torchweft import o3
from torchweft.errors import DTypeError

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
R_MAX = 4.0
VARIANTS = {
    "parity": {},
    "no parity": {"parity": False, "l_max": 2, "num_features": [8, 4, 2]},
    "deep radial": {"radial_mlp_depth": 2, "radial_mlp_width": 8, "bessel_trainable": True},
    "no radial": {"radial_mlp_depth": 0},
    "norm": {"convnet_nonlinearity_type": "norm"},
    "resnet": {"convnet_resnet": True, "num_layers": 3},
    "no self-connection": {"convnet_sc": False},
    "by type": {"avg_num_neighbors": {"O": 9.0, "Si": 4.0}, "readout_mlp_hidden_layers_depth": 1},
    "cutoffs": {"per_edge_type_cutoff": {"Si": 3.0}, "type_embed_num_features": 3},
}


@pytest.fixture(autouse=True)
def state():
    set_global_state(allow_tf32=False)


def original(dtype="float64", **settings):
    own = {"seed": 0, "model_dtype": dtype, "r_max": R_MAX, "type_names": ["O", "Si"]}
    own |= {"num_layers": 2, "l_max": 1, "num_features": 4, "avg_num_neighbors": 16.0}
    own |= {"per_type_energy_scales": 1.0, "per_type_energy_shifts": 0.5}
    return NequIPGNNModel(**own | settings).train()


def rounded(**settings):
    """The model in float32, with the weights of the one in float64."""
    model = original("float32", **settings)
    model.load_state_dict(original(**settings).state_dict())
    return model


@functools.cache
def batch():
    """Two crystals, one of them rattled."""
    crystal = bulk("SiO", "zincblende", a=4.9)
    crystal.rattle(0.1, seed=0)
    frames = [crystal, bulk("SiO", "rocksalt", a=4.6)]
    species = ChemicalSpeciesToAtomTypeMapper(
        model_type_names=["O", "Si"], chemical_species_to_atom_type_map={"O": "O", "Si": "Si"}
    )
    edges = NeighborListTransform(r_max=R_MAX)
    with default_dtype(torch.float64):
        return AtomicDataDict.batched_from_list([edges(species(from_ase(a))) for a in frames])


def results(model, call=None):
    """What training sees: energies, forces, stress, gradients of a loss, a Hessian's product."""
    data = dict(batch())
    data["pos"] = data["pos"].clone().requires_grad_()
    out = (call or model)(data)
    vector = torch.arange(data["pos"].numel(), dtype=torch.float64).view_as(data["pos"]).cos()
    (product,) = torch.autograd.grad(
        out["forces"], data["pos"], vector.to(out["forces"]), retain_graph=True
    )
    found = trained(model, out["total_energy"], out["forces"])
    return found | {"stress": out["stress"].detach(), "product": product}


def exactly(model, data=None):
    """Results with NequIP's cutoff as a product: its sum of powers cancels near the radius.

    In float64 the sum's derivative is off by 1e-13, fifty times as much as the product's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolynomialCutoff, "forward", _cutoff)
        return results(model) if data is None else model(dict(data))


def _cutoff(module, x):
    inside = (1 - x).clamp(min=0)
    terms = [(k + 1) * (k + 2) / 2 * x**k for k in range(int(module.p))]
    return inside**3 * sum(terms)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_gives_what_it_gave(variant):
    settings = VARIANTS[variant]
    model, single = original(**settings), rounded(**settings)
    exact, noisy = exactly(model), results(single)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = {name: id(p) for name, p in model.named_parameters()}

    found = o3.from_nequip(model)
    assert {name: id(p) for name, p in found.named_parameters()} == parameters
    assert not names_of(found, "e3nn")
    assert_agree(results(found), exact, noisy)
    assert_agree(results(o3.from_nequip(single)), exact, noisy, torch.float32)

    # weights go both ways, with every table
    other = original(**settings)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(1.25)
    other.load_state_dict(o3.to_e3nn(found), strict=True)
    assert_agree(exactly(other), results(found), noisy, multiple=64)
    found.load_state_dict(state, strict=True)
    assert_agree(results(found), exact, noisy)


def test_functions_of_lengths_are_torchwefts():
    model = o3.from_nequip(original())
    assert [type(m) for m in model.modules() if isinstance(m, o3.BesselBasis)]
    assert not [m for m in model.modules() if isinstance(m, PolynomialCutoff)]


def test_self_connections_are_by_type():
    model = o3.from_nequip(original())
    connections = [m for m in model.modules() if type(m).__name__ == "SelfConnection"]
    assert connections
    assert not names_of(model, "e3nn")
    fields = {"field": "charge", "num_features": 2, "min": 0, "max": 1}
    register_fields(graph_fields=["charge"])
    mixed = o3.from_nequip(original(categorical_graph_field_embed=[fields]))
    assert not [m for m in mixed.modules() if type(m).__name__ == "SelfConnection"]
    assert not names_of(mixed, "e3nn")


def test_constants_are_not_those_of_float32():
    """A converted float32 model in float64 is the model in float64 with these weights."""
    settings = {"num_features": 4, "radial_mlp_width": 12, "type_embed_num_features": 3}
    single = original("float32", **settings)
    double = original(**settings)
    double.load_state_dict(single.state_dict(), strict=True)
    exact = exactly(double)
    found = o3.from_nequip(single).double()
    for module in found.modules():  # where NequIP casts the edges' numbers to
        if hasattr(module, "_output_dtype"):
            module._output_dtype = torch.float64
    assert_agree(results(found), exact, results(rounded(**settings)))


def test_two_fifths_of_the_operations():
    model = original(l_max=3, num_layers=3).eval()
    data = dict(batch())
    before = operations(lambda: model(dict(data)))
    o3.from_nequip(model)
    for module in model.modules():  # None is torch under a dispatch mode
        if isinstance(module, o3.SphericalHarmonics | o3.BesselBasis | o3.PolynomialCutoff):
            pytest.importorskip("numba")
            module.backend = "numba"
    after = operations(lambda: model(dict(data)))
    assert after <= 0.4 * before, (after, before)


def test_a_graph_is_sorted_once(monkeypatch):
    """One graph a call, also where edges have changed in place."""
    made, kind = [], o3.Graph
    monkeypatch.setattr(
        "torchweft.o3.graph.Graph", lambda *edges: made.append(kind(*edges)) or made[-1]
    )
    model = original(num_layers=3).eval()
    edges = ("edge_index", "edge_cell_shift")
    data = dict(batch()) | {name: batch()[name].clone() for name in edges}
    turned = {
        "edge_index": data["edge_index"].flip(1),
        "edge_cell_shift": data["edge_cell_shift"].flip(0),
    }
    others = dict(data) | turned
    exact = [exactly(model, d)["forces"] for d in (data, others)]
    o3.from_nequip(model)
    found = [model(dict(data))["forces"]]
    assert len(made) == 1
    for name in edges:
        data[name].copy_(turned[name])
    found.append(model(dict(data))["forces"])
    assert len(made) == 2
    scale = torch.finfo(torch.float64).eps * 64
    for a, b in zip(found, exact, strict=True):
        assert (a - b).abs().max() <= scale * b.abs().max()


@pytest.mark.slow
def test_compiled_for_training(monkeypatch):
    """NequIP's own train-time compilation, by AOTAutograd without code generation."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    exact, noisy = exactly(original()), results(rounded())
    model = original(compile_mode="compile")
    o3.from_nequip(model)
    out = model(dict(batch()))
    found = trained(model, out["total_energy"], out["forces"])
    assert_agree(found, {name: exact[name] for name in found}, noisy)


def test_what_is_no_such_model():
    with pytest.raises(DTypeError, match="from_nequip was given a Linear: it must hold layers"):
        o3.from_nequip(torch.nn.Linear(1, 1))
    with pytest.raises(DTypeError, match="before it is scripted or compiled"):
        o3.from_nequip(o3.from_nequip(original()))


CONFIG = """
run: [train]
cutoff_radius: 4.0
data:
  _target_: nequip.data.datamodule.ASEDataModule
  train_file_path: train.xyz
  val_file_path: train.xyz
  seed: 0
  transforms:
    - _target_: nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper
      model_type_names: [O, Si]
    - {{_target_: nequip.data.transforms.NeighborListTransform, r_max: 4.0}}
  train_dataloader: {{_target_: torch.utils.data.DataLoader, batch_size: 2}}
  val_dataloader: {{_target_: torch.utils.data.DataLoader, batch_size: 2}}
trainer:
  _target_: lightning.Trainer
  accelerator: cpu
  max_epochs: 1
  enable_progress_bar: false
  callbacks:
    - {{_target_: lightning.pytorch.callbacks.ModelCheckpoint, dirpath: ., save_last: true}}
training_module:
  _target_: nequip.train.EMALightningModule
  loss:
    _target_: nequip.train.EnergyForceLoss
    coeffs: {{total_energy: 1.0, forces: 1.0}}
  val_metrics:
    _target_: nequip.train.EnergyForceMetrics
    coeffs: {{total_energy_mae: 1.0, forces_mae: 1.0}}
  optimizer: {{_target_: torch.optim.Adam, lr: 0.01}}
  model:
    _target_: nequip.model.modify
    modifiers: [{modifiers}]
    model:
      _target_: nequip.model.NequIPGNNModel
      seed: 0
      model_dtype: float64
      type_names: [O, Si]
      r_max: 4.0
      num_layers: 2
      l_max: 1
      num_features: 4
      avg_num_neighbors: 16.0
      per_type_energy_scales: 1.0
      per_type_energy_shifts: 0.0
"""


def installed(folder):
    """An environment in which torchweft has the entry points of its pyproject.toml."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / "torchweft-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchweft\nVersion: 0\n")
    lines = [f"{k} = {v}" for k, v in points["nequip.extension"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[nequip.extension]", *lines]))
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)])}


def train(folder, modifiers, environment):
    """The state that nequip-train writes."""
    folder.mkdir()
    frames = []
    for seed in range(2):
        atoms = bulk("SiO", "zincblende", a=4.9)
        atoms.rattle(0.1, seed=seed)
        forces = [[0.1, 0.2, 0.3 * seed], [-0.1, -0.2, -0.3 * seed]]
        atoms.calc = SinglePointCalculator(atoms, energy=float(seed), forces=forces)
        frames.append(atoms)
    write(folder / "train.xyz", frames)
    (folder / "config.yaml").write_text(CONFIG.format(modifiers=modifiers))
    program = [sys.executable, "-m", "nequip.scripts.train", "-cp", folder, "-cn", "config.yaml"]
    run = subprocess.run(
        [*program, "hydra.run.dir=."], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]


def test_a_modifier_in_nequips_yaml(tmp_path):
    """nequip-train with it and without it writes the same checkpoint, but for rounding."""
    environment = installed(tmp_path)
    found = train(tmp_path / "ours", "{modifier: enable_torchweft}", environment)
    exact = train(tmp_path / "theirs", "", environment)
    assert found.keys() == exact.keys()
    weights = [name for name in exact if name.endswith("weight") and exact[name].numel()]
    moved = max((found[name] - exact[name]).abs().max() for name in weights)
    assert moved <= 0.01 * torch.finfo(torch.float64).eps ** 0.5  # of Adam's step; by Adam's root
