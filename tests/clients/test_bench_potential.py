"""Whole potentials in the benchmark, small: ours and others' are checked and timed.

Seen red with: a weight that is another by a thousandth, forces of the wrong sign, edges whose
shifts stayed in the old order.
"""

import copy
import json
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

pytest.importorskip("mace")

from benchmarks import g2_labels, train_mace
from benchmarks.harness import load_suite, run
from benchmarks.peers import e3nn, luna
from benchmarks.workloads import potential
from benchmarks.workloads.potential import Settings, Structures, potential_cases
from tests.recorders import captured
from torchweft import o3
from torchweft.errors import CaptureError
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


def test_a_training_run_is_that_of_e3nn(monkeypatch, capsys, tmp_path):
    """Losses of all epochs agree to the square root of float32's round-off; weights load back."""
    labels, out = tmp_path / "labels.npz", tmp_path / "training.json"
    monkeypatch.setattr(g2_labels, "best_labels", lambda: "EMT")
    monkeypatch.setattr(sys, "argv", ["g2_labels", str(labels), "--molecules=12"])
    g2_labels.main()
    monkeypatch.setattr(train_mace, "SETTINGS", Settings("2x0e+2x1o", 1, 2))
    monkeypatch.setattr(train_mace, "BATCH", 4)
    monkeypatch.setattr(sys, "argv", ["train_mace", str(labels), "--epochs=3", f"--out={out}"])
    train_mace.main()
    *epochs, _ = map(json.loads, capsys.readouterr().out.strip().splitlines()[-4:])
    assert [row["epoch"] for row in epochs] == [0, 1, 2]
    found = json.loads(out.read_text())
    assert (found["labels"], found["molecules"], found["held_out_molecules"]) == ("EMT", 12, 2)
    losses = found["loss"]
    near = torch.finfo(torch.float32).eps ** 0.5
    for theirs, ours in zip(losses["e3nn"], losses["torchweft"], strict=True):
        assert abs(ours - theirs) < near * theirs
    assert losses["torchweft"][-1] < losses["torchweft"][0]
    for error in ("energy", "forces"):
        theirs, ours = (found["held_out"][name][error] for name in ("e3nn", "torchweft"))
        assert abs(ours - theirs) < near * theirs
        theirs, ours = (found["loaded_back"][f"{name}, {error}"] for name in losses)
        assert ours <= 4 * theirs


def test_a_model_that_cannot_be_recorded_is_left_out(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(g2_labels, "best_labels", lambda: "EMT")
    labels, out = tmp_path / "labels.npz", tmp_path / "training.json"
    np.savez(labels, **g2_labels.made(12)._asdict())
    monkeypatch.setattr(train_mace, "SETTINGS", Settings("2x0e+2x1o", 1, 2))
    epoch, refused = train_mace.epoch, []

    def refusing(run, given):
        if refused:
            return epoch(run, given)
        refused.append(run)
        raise CaptureError("a line waits")

    monkeypatch.setattr(train_mace, "epoch", refusing)
    monkeypatch.setattr(sys, "argv", ["train_mace", str(labels), "--epochs=1", f"--out={out}"])
    train_mace.main()
    assert "e3nn is left out: a line waits" in capsys.readouterr().out
    assert [*json.loads(out.read_text())["loss"]] == ["torchweft"]


def test_a_captured_training_step_is_the_step(monkeypatch, tmp_path):
    """Padded batches, the last one smaller: losses of a twin that is trained launch by launch."""
    monkeypatch.setattr(g2_labels, "best_labels", lambda: "EMT")
    labels, recorder = g2_labels.made(18), []
    monkeypatch.setattr(train_mace, "BATCH", 5)  # elements are 4

    def capture(function, *examples, sizes):
        run, made = captured(function, *examples, sizes=sizes)
        recorder.append(made)
        return run

    monkeypatch.setattr("torchweft.capture", capture, raising=False)
    given = train_mace.batches(labels, [*range(18)], CPU)
    plain = potential.mace_model(Settings("2x0e+2x1o", 1, 2), (1, 6, 7, 8))
    models = [o3.from_mace(copy.deepcopy(plain).float()) for _ in range(2)]
    runs = [train_mace.trained(m, given, c) for m, c in zip(models, (False, True), strict=True)]
    for _ in range(3):
        for trained in runs:
            train_mace.epoch(trained, given)
    near = torch.finfo(torch.float32).eps ** 0.5
    for a, b in zip(*(trained.losses for trained in runs), strict=True):
        assert abs(a - b) < near * a
    assert recorder[0].replays > 0
