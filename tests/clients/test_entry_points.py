"""MACE's own programs reach torchweft without a change: MACECalculator and mace_run_train.

Seen red with: a conversion that is not undone before saving, a model of other weights than those
that were trained, a calculator that keeps MACE's layers.
"""

import json
import sys

import pytest
import torch

pytest.importorskip("mace")

from ase.build import molecule
from ase.calculators.lj import LennardJones
from ase.io import write
from mace.calculators import MACECalculator
from mace.cli import run_train

from tests.clients.maces import mace, rattled
from torchweft import o3
from torchweft.errors import BackendError, WeftError
from torchweft.o3.adapters import mace_run_train
from torchweft.testing import assert_as_accurate, plain_error

TRAINING = [
    "--name=tiny",
    "--E0s=average",
    "--model=MACE",
    "--hidden_irreps=4x0e+4x1o",
    "--max_ell=2",
    "--correlation=2",
    "--r_max=3.0",
    "--valid_fraction=0.2",
    "--batch_size=4",
    "--valid_batch_size=4",
    "--max_num_epochs=2",
    "--device=cpu",
    "--default_dtype=float64",
    "--seed=1",
    "--plot=False",
    "--ema",
    "--log_level=ERROR",
]


def properties(model, dtype, convert):
    """Energy, forces and stress of a structure by MACECalculator."""
    calc = MACECalculator(models=[model], default_dtype=dtype)
    if convert:
        calc.models = [o3.from_mace(model) for model in calc.models]
        assert any(type(m).__module__.startswith("torchweft") for m in calc.models[0].modules())
    atoms = rattled()
    atoms.calc = calc
    values = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
    return [torch.as_tensor(value, dtype=torch.float64) for value in values]


def test_a_calculator_of_mace_takes_converted_models():
    exact = properties(mace(), "float64", convert=False)
    rounded = properties(mace(torch.float32), "float32", convert=False)
    found = properties(mace(), "float64", convert=True)
    for ours, theirs, plain in zip(found, exact, rounded, strict=True):
        noise = plain_error(plain.float(), theirs, torch.float64)
        rounding = torch.finfo(torch.float64).eps * theirs.abs()  # of the last sum
        assert_as_accurate(ours, theirs, torch.maximum(noise, rounding))


@pytest.fixture
def molecules(tmp_path, monkeypatch):
    """Ten shaken molecules with energies and forces, in train.xyz of the working folder."""
    monkeypatch.chdir(tmp_path)
    frames = []
    for seed in range(10):
        atoms = molecule("CH3CH2OH")
        atoms.rattle(0.05, seed=seed)
        atoms.calc = LennardJones(sigma=1.0, epsilon=0.1, rc=4.0)
        atoms.info["REF_energy"] = atoms.get_potential_energy()
        atoms.arrays["REF_forces"] = atoms.get_forces()
        atoms.calc = None
        frames.append(atoms)
    write("train.xyz", frames)


def trained(run, folder):
    """The model, the losses and the last checkpoint that a training left."""
    run([*TRAINING, "--train_file=train.xyz", f"--work_dir={folder}"])
    with open(f"{folder}/results/tiny_run-1_train.txt") as file:
        losses = [row["loss"] for row in map(json.loads, file) if "loss" in row]
    model = torch.load(f"{folder}/tiny.model", weights_only=False)
    checkpoint = torch.load(f"{folder}/checkpoints/tiny_run-1_epoch-1.pt", weights_only=False)
    return model, torch.tensor(losses, dtype=torch.float64), checkpoint["model"]


def run_of_mace(arguments):
    run_train.run(run_train.tools.build_default_arg_parser().parse_args(arguments))


@pytest.mark.usefixtures("molecules")
def test_a_training_run_of_mace_trains_converted_models():
    """To the same weights, which are saved as MACE's own."""
    theirs, losses, _ = trained(run_of_mace, "theirs")
    ours, found, checkpoint = trained(mace_run_train.main, "ours")
    half_of_the_digits = torch.finfo(torch.float64).eps ** 0.5
    assert ((found - losses).abs() < half_of_the_digits * losses).all()
    assert type(ours) is type(theirs)
    assert not any(type(m).__module__.startswith("torchweft") for m in ours.modules())
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        error = (parameter - expected[name]).abs().max()
        assert error < half_of_the_digits * expected[name].abs().max(), name
    missing, _ = theirs.load_state_dict(checkpoint, strict=False)
    assert not expected.keys() & set(missing)
    for name, parameter in theirs.named_parameters():  # without --ema's mean
        assert parameter.isfinite().all(), name


@pytest.mark.parametrize("flag", ["--enable_cueq=True", "--enable_oeq=True", "--lora=True"])
def test_other_conversions_are_refused(flag):
    name = flag.partition("=")[0]
    with pytest.raises(WeftError, match=f"was given {name}: .* Leave these arguments out"):
        mace_run_train.main([*TRAINING, "--train_file=train.xyz", flag])


def test_an_old_mace_is_refused(monkeypatch):
    monkeypatch.delattr(run_train, "run_oeq_to_e3nn")
    with pytest.raises(BackendError, match=r"does not convert .*mace-torch>=0\.3\.16"):
        mace_run_train.main(TRAINING)


def test_the_absence_of_mace_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "mace.cli", None)
    with pytest.raises(BackendError, match=r"needs MACE.*pip install 'mace-torch>=0\.3\.16'"):
        mace_run_train.main(TRAINING)
