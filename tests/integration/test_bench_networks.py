"""Whole transformers in the benchmark, small, without peers."""

import pytest
import torch

from benchmarks.harness import load_suite, run
from tests.recorders import captured

CPU = torch.device("cpu")
FORWARD, TRAINING = (
    load_suite("networks", f"tiny fp32 {mode}").cases for mode in ("forward", "training")
)


@pytest.mark.parametrize("case", [*FORWARD, *TRAINING], ids=lambda case: case.name)
def test_ours_is_right(monkeypatch, case):
    monkeypatch.setattr("benchmarks.harness.runner._measure", lambda *_: {})
    (rows,) = run("toy", [case], [], CPU, print)
    assert [row.bound_ratio <= 1 for row in rows] == [True]


@pytest.mark.parametrize("case", TRAINING, ids=lambda case: case.name)
def test_a_training_step_leaves_the_weights_and_can_be_recorded(case):
    """Seen red with Adam at a rate of 0.001."""
    workload = case.build(CPU, None)
    recorded, recorder = captured(workload.function, *workload.inputs)
    first, *_, last = (recorded(*workload.inputs).clone() for _ in range(4))
    torch.testing.assert_close(first, last, rtol=0, atol=0)
    assert recorder.replays > 0
