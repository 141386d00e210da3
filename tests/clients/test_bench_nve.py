"""Molecular dynamics of the benchmark, a few steps on a processor."""

import json
import sys

import pytest
import torch

pytest.importorskip("mace")
pytest.importorskip("vesin")

from ase import units

from benchmarks import nve
from benchmarks.workloads.potential import Settings


def test_runs_begin_alike_and_their_drifts_are_written(monkeypatch, tmp_path):
    out = tmp_path / "nve.json"
    monkeypatch.setattr(nve, "SETTINGS", Settings("2x0e+2x1o", 1, 2, pair_repulsion=True))
    arguments = ["--atoms=8", "--steps=6", "--e3nn-steps=4", f"--out={out}"]
    monkeypatch.setattr(sys, "argv", ["nve", *arguments])
    nve.main()
    found = json.loads(out.read_text())
    assert (found["atoms"], found["step_fs"]) == (8, nve.STEP)
    runs = found["runs"]
    assert {name: run["steps"] for name, run in runs.items()} == {
        "MACECalculator": 4, "e3nn": 6, "torchweft": 6,
    }  # fmt: skip
    kinetic = 1e3 * 1.5 * units.kB * nve.KELVIN  # meV an atom
    near = torch.finfo(torch.float32).eps ** 0.5
    for run in runs.values():
        drifts, e3nn = run["drift_of_4_steps"], runs["e3nn"]["drift_of_4_steps"]
        assert abs(drifts["largest_mev"] - e3nn["largest_mev"]) < near * kinetic
        assert run["ns_a_day"] == pytest.approx(86.4 * nve.STEP / run["ms_a_step"])


def test_drift_of_a_line_and_of_an_oscillation():
    line = nve.drift([2.0 + 0.001 * step for step in range(11)], atoms=4)
    assert line == pytest.approx({"slope_mev_ps": 250.0 / nve.STEP, "largest_mev": 2.5})
    wave = nve.drift([(-1.0) ** step for step in range(1001)], atoms=2)
    assert abs(wave["slope_mev_ps"]) < wave["largest_mev"] / 100
    assert wave["largest_mev"] == pytest.approx(1000.0)


def test_a_number_of_atoms_that_is_no_crystal():
    with pytest.raises(SystemExit, match=r"--atoms 100: it must be 8 n³\. Pass 64, 216 or 512"):
        nve.start(100)
