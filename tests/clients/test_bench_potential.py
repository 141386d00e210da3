"""Whole potentials in the benchmark, small: ours and others' are checked and timed.

Seen red with: a weight that is another by a thousandth, forces of the wrong sign, edges whose
shifts stayed in the old order.
"""

import json
import sys
from types import ModuleType

import pytest
import torch

pytest.importorskip("mace")

from benchmarks import train_mace
from benchmarks.harness import load_suite, run
from benchmarks.peers import e3nn, luna
from benchmarks.workloads import potential
from benchmarks.workloads.potential import Settings, Structures, potential_cases
from torchweft.o3 import TensorProductConv

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr("benchmarks.harness.runner.BUDGET_S", 0.001)


def e3nn_as_it_is(model):
    return model


def wrong(model):
    with torch.no_grad():
        model.interactions[1].linear.weight *= 1.001
    return model


class Peer:
    """A model of MACE, converted."""

    def __init__(self, name, convert, **options):
        self.NAME, self._convert, self._options = name, convert, options

    def missing(self):
        return None

    def adapt(self, workload):
        return potential.by_model(self.NAME, workload, self._convert, **self._options)


def measured(case, *peers):
    said = []
    (rows,) = run("toy", [case], peers, CPU, said.append)
    return {f"{row.peer} {row.backend}".replace("numba", "torch"): row for row in rows}, said


@pytest.mark.parametrize("mode", ["forces", "training"])
def test_models_are_held_to_mace_in_float64(mode):
    (case,) = load_suite("potential", f"tiny {mode}").cases
    others = Peer("wrong", wrong), Peer("foreign", e3nn_as_it_is, own_parameters=False)
    rows, said = measured(case, e3nn, *others)
    assert [*rows] == [f"{name} torch" for name in ("torchweft", "e3nn", "wrong", "foreign")]
    assert [line for line in said if "wrong" not in line] == []
    for name, row in rows.items():
        assert (row.bound_ratio <= 1) == (name != "wrong torch"), name
        assert row.ms_p50 > 0
        assert row.kernels is None  # there is no GPU


def test_a_training_step_leaves_the_weights():
    case = potential_cases("some", Structures(molecules=2), Settings("2x0e+2x1o", 1, 2))[1]
    workload = case.build(CPU, None)
    first, second = (workload.function(*workload.inputs) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


class Fused(TensorProductConv):
    """LunaEquivariance's convolution: a graph that was made before, edges sorted by target."""

    def __init__(self, *irreps_and_paths, dtype, **options):
        super().__init__(*irreps_and_paths, **options)
        self.to(dtype)

    def forward(self, x, y, w, graph):
        src, dst, num_nodes = graph
        return super().forward(x, y, w, src, dst, num_nodes)


def test_luna_takes_the_convolutions(monkeypatch):
    made = []

    def make_graph(src, dst, num_nodes):
        assert bool((dst.diff() >= 0).all())
        made.append(num_nodes)
        return src, dst, num_nodes

    library = ModuleType("LunaEquivariance")
    library.TensorProductConv, library.make_graph = Fused, make_graph
    monkeypatch.setitem(sys.modules, "LunaEquivariance", library)
    monkeypatch.setattr(luna, "missing", lambda: None)
    (case,) = load_suite("potential", "tiny forces").cases
    rows, _ = measured(case, luna)
    assert rows["LunaEquivariance torch"].bound_ratio <= 1
    assert made == [8]  # once for all layers and calls


def test_a_training_run_is_that_of_e3nn(monkeypatch, capsys):
    """Losses of all epochs agree to the square root of float32's round-off."""
    monkeypatch.setattr(train_mace, "SETTINGS", Settings("2x0e+2x1o", 1, 2))
    monkeypatch.setattr(sys, "argv", ["train_mace", "--epochs=3", "--molecules=4"])
    train_mace.main()
    _, *epochs = map(json.loads, capsys.readouterr().out.strip().splitlines()[-4:])
    assert [row["epoch"] for row in epochs] == [0, 1, 2]
    for row in epochs:
        theirs, ours = row["loss"]["e3nn"], row["loss"]["torchweft"]
        assert abs(ours - theirs) < torch.finfo(torch.float32).eps ** 0.5 * theirs
    assert epochs[-1]["loss"]["torchweft"] < epochs[0]["loss"]["torchweft"]
