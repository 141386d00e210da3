"""The examples of MACE: a converted model computes what it did, training learns, energy is kept.

Seen red with: a weight of the converted model 1 % too large.
"""

import os
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("mace")

from tests.clients.agreement import assert_agree

EXAMPLES = Path(__file__).parents[2] / "examples/o3"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    """Examples write pictures and models where they run."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_three_lines_keep_energies_and_forces(capsys):
    names = runpy.run_path(str(EXAMPLES / "mace_in_three_lines.py"))
    names["main"]()
    assert "torchweft" in capsys.readouterr().out
    assert os.path.getsize("mace_in_three_lines.png") > 0

    def results(calculator):
        found = names["stretched"](calculator, np.linspace(1.1, 2.2, 6))
        return dict(zip(("energies", "forces"), torch.from_numpy(found), strict=True))

    exact, rounded = (
        results(names["MACECalculator"]("untrained.model", device="cpu", default_dtype=dtype))
        for dtype in ("float64", "float32")
    )
    assert_agree(results(names["converted"]("untrained.model")), exact, rounded, torch.float32)


def test_the_example_runs(capsys):
    found = runpy.run_path(str(EXAMPLES / "mace_potential.py"), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 10
    atoms = found["atoms"]
    assert abs(found["after"] - found["before"]) < atoms.get_kinetic_energy() / 10


def test_the_example_can_be_copied():
    """At most 70 lines of code."""
    text = (EXAMPLES / "mace_potential.py").read_text("utf-8").rpartition('"""\n\n# sphinx')[2]
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert 20 < len(lines) <= 70
