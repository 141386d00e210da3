"""Whole transformers in the benchmark, small: L-GATr's own network is checked beside ours.

Seen red with: a conversion that changes weights, results that are others by a thousandth.
"""

import pytest
import torch

pytest.importorskip("lgatr")

from benchmarks.harness import load_suite, run
from benchmarks.peers import lgatr
from benchmarks.workloads import networks
from tests.recorders import captured
from torchweft.clifford import from_lgatr

CPU = torch.device("cpu")
CASES = load_suite("networks", "L-GATr tiny").cases


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr("benchmarks.harness.runner.BUDGET_S", 0.001)


def measured(case):
    said = []
    (rows,) = run("toy", [case], [lgatr], CPU, said.append)
    return {row.peer: row for row in rows}, said


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_are_right(case):
    rows, said = measured(case)
    assert said == []
    assert [*rows] == ["torchweft", "L-GATr"]
    for row in rows.values():
        assert row.bound_ratio <= 1
        assert row.ms_p50 > 0


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_a_network_with_other_weights_is_left_out(case, monkeypatch):
    def other(state, configuration):
        found = from_lgatr(state, configuration=configuration)
        first = next(name for name in found if name.endswith("mvs2mvs.weight"))
        return {**found, first: found[first] + 0.001 * found[first].square()}

    monkeypatch.setattr(lgatr, "from_lgatr", other)
    rows, (line,) = measured(case)
    assert [*rows] == ["torchweft"]
    assert "in float64 it differs from the oracle by" in line


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_a_wrong_result_is_red(case, monkeypatch):
    right = networks._network

    def wrong(settings, backend=None):
        network = right(settings, backend)
        if backend is None:  # else it is the oracle's
            network.register_forward_hook(lambda _, given, found: (1.001 * found[0], found[1]))
        return network

    monkeypatch.setattr(networks, "_network", wrong)
    rows, said = measured(case)
    assert rows["torchweft"].ms_p50 is None
    assert any("red" in line for line in said)


def test_a_training_step_leaves_the_weights_and_can_be_recorded():
    workload = CASES[1].build(CPU, None)
    (theirs,) = lgatr.adapt(workload)
    for function in (workload.function, theirs.function):
        recorded, recorder = captured(function, *workload.inputs)
        first, *_, last = (recorded(*workload.inputs).clone() for _ in range(4))
        torch.testing.assert_close(first, last, rtol=0, atol=0)
        torch.testing.assert_close(function(*workload.inputs), last, rtol=0, atol=0)
        assert recorder.replays > 0
