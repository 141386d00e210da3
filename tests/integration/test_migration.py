"""Scripts of docs/migrate that need no other library, and e3nn's; the others: tests/clients."""

import re

import pytest
import torch

import torchweft
from tests.migration import SCRIPTS, result_of, results
from torchweft.testing import assert_as_accurate, plain_error

PAGES = SCRIPTS.parent
STAND_INS = {
    "minkowski_engine": "MinkowskiEngine",
    "pykeops": "pykeops",
    "spconv": "spconv",
    "torch_scatter": "torch_scatter",
    "torchsparse": "torchsparse",
}
NEED_THE_ORIGINAL = {"gatr_lgatr_cegnn", "mace", "nequip"}
"""Their scripts after convert its models: tests/clients/test_migration.py."""


def assert_numbers_agree(name):
    found, exact, plain = results(name)
    assert_as_accurate(found, exact, plain_error(plain, exact, found.dtype))


@pytest.fixture
def stand_in(request):
    name = STAND_INS[request.param]
    torchweft.compat.install(name)
    yield request.param
    torchweft.compat.uninstall(name)


@pytest.mark.parametrize("stand_in", STAND_INS, indirect=True)
def test_a_script_runs_unmodified_and_with_other_imports(stand_in):
    if stand_in == "torch_scatter":  # written with other functions
        assert_numbers_agree(stand_in)
        return
    before, after = result_of(f"{stand_in}_before"), result_of(f"{stand_in}_after")
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_numbers_are_those_of_e3nn():
    pytest.importorskip("e3nn")
    assert_numbers_agree("e3nn")


def test_transport_without_geomloss():
    assert result_of("geomloss_after").isfinite().all()


def test_a_checkpoint_of_flash_clifford(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"gp_weight": torch.randn(64, 20), "linear_weight": torch.randn(4, 64, 64)}
    state |= {"linear_bias": torch.zeros(1, 1, 64)}
    state |= {"weight_expansion": torch.tensor([0, 1, 1, 1, 2, 2, 2, 3])}
    torch.save(state, "layer.pt")
    assert result_of("flash_clifford_after").isfinite().all()


def test_every_script_is_short_shown_and_run():
    names = {file.stem.removesuffix("_before") for file in SCRIPTS.glob("*_before.py")}
    assert names == {*STAND_INS, *NEED_THE_ORIGINAL, "e3nn", "geomloss", "flash_clifford"}
    for name in names:
        page = (PAGES / f"{name}.md").read_text("utf-8")
        for side in ("before", "after"):
            text = (SCRIPTS / f"{name}_{side}.py").read_text("utf-8")
            assert len(text.splitlines()) <= 20
            assert f"{{literalinclude}} scripts/{name}_{side}.py" in page
    index = (PAGES / "index.md").read_text("utf-8")
    assert set(re.findall(r"^(\w+)$", index, re.MULTILINE)) == {*names, "equitorch"}
