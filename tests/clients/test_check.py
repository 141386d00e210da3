"""o3.check of real MACE: its numbers are those of the models, its lists name every module.

Seen red with: the original's errors in the place of ours, a batch that is not copied.
"""

import copy

import pytest
import torch

pytest.importorskip("mace")

from mace.calculators import MACECalculator

from tests.clients.maces import as_batch, mace, rattled
from torchweft import o3
from torchweft.errors import DTypeError, ShapeError


def values(model, batch):
    given = {k: v.clone() if torch.is_tensor(v) else v for k, v in batch.items()}
    found = model(given, compute_stress=True)
    return {name: found[name].detach().double() for name in ("energy", "forces", "stress")}


@pytest.fixture(scope="module")
def example():
    torch.manual_seed(0)
    return mace(torch.float32), as_batch(rattled(), dtype=torch.float32)


@pytest.fixture(scope="module")
def report(example):
    return o3.check(*example)


def test_differences_and_errors_are_those_of_the_models(example, report):
    model, batch = example
    exact = values(
        copy.deepcopy(model).double(),
        {k: v.double() if v.is_floating_point() else v for k, v in batch.items()},
    )
    theirs, ours = values(model, batch), values(o3.from_mace(copy.deepcopy(model)), batch)
    assert [c.name for c in report.comparisons] == ["energy", "forces", "stress"]
    for c in report.comparisons:
        t, o, e = theirs[c.name], ours[c.name], exact[c.name]
        expected = (t.abs().max(), (o - t).abs().max(), (t - e).abs().max(), (o - e).abs().max())
        assert c[1:] == tuple(map(float, expected))
        assert c.relative == c.difference / c.largest


def test_the_model_and_the_batch_stay_as_they_were(example, report):
    model, batch = example
    assert not any(type(m).__module__.startswith("torchweft") for m in model.modules())
    assert not any(tensor.requires_grad for tensor in batch.values())
    assert report.ms_torchweft > 0
    assert report.gain == report.ms_original / report.ms_torchweft


def test_takes_a_batch_of_the_calculator(example):
    """As docs/migrate/mace.md has it, for users who have atoms of ASE and no data loader."""
    calc = MACECalculator(models=[example[0]], device="cpu", default_dtype="float32")
    report = o3.check(calc.models[0], calc._atoms_to_batch(rattled()).to_dict())
    assert [c.name for c in report.comparisons] == ["energy", "forces", "stress"]


def test_what_was_turned_and_what_was_left(example, report):
    model, _ = example
    before = dict(model.named_modules())
    converted = dict(o3.from_mace(copy.deepcopy(model)).named_modules())
    for name, original, ours in report.turned:
        assert type(before[name]).__module__.partition(".")[0] == original.partition(".")[0]
        assert ours.startswith("torchweft.")
        assert type(converted[name]).__module__.startswith("torchweft.")
    assert "interactions.0.conv_tp" in {turned.name for turned in report.turned}
    left = dict(report.left)
    assert left["atomic_energies_fn"] == "mace.AtomicEnergiesBlock"
    for name, module in converted.items():
        if type(module).__module__.startswith("e3nn."):
            assert any(f"{name}.".startswith(f"{outer}.") for outer in left), name


def test_the_report_is_a_table(report):
    lines = str(report).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["energy", "forces", "stress"]
    assert len({len(line) for line in lines[:4]}) == 1
    assert "times as fast" in lines[4]
    assert lines[5].startswith("turned: ")
    assert lines[6].startswith("left: ")


def test_a_model_without_results_is_refused():
    class Nothing(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, batch):
            return {"charges": None}

    with pytest.raises(DTypeError, match=r"returned a dict with charges: .* Pass the model"):
        o3.check(Nothing(mace(torch.float32)), {})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_positions_that_are_not_finite_are_refused(example, value):
    """Differences of NaN would say nothing."""
    model, batch = example
    positions = batch["positions"].clone()
    positions[0, 0] = value
    with pytest.raises(ShapeError, match=rf"model's energy .*positions\[0, 0\] is {value}.* Look"):
        o3.check(model, batch | {"positions": positions})


def test_results_that_are_not_finite_are_refused(example):
    model, batch = example
    model = copy.deepcopy(model)
    model.scale_shift.scale.fill_(float("nan"))
    with pytest.raises(ShapeError, match=r"model's energy .* from its own weights.* Look"):
        o3.check(model, batch)
