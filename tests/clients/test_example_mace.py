"""The example of MACE runs, learns, and keeps the total energy."""

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("mace")

EXAMPLE = Path(__file__).parents[2] / "examples/o3/mace_potential.py"


def test_the_example_runs(capsys):
    found = runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 10
    atoms = found["atoms"]
    assert abs(atoms.get_total_energy() - found["before"]) < atoms.get_kinetic_energy() / 10


def test_the_example_can_be_copied():
    """At most 60 lines of code."""
    text = EXAMPLE.read_text("utf-8").rpartition('"""\n\nimport numpy')[2]
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 60
