"""The benchmark's CPU suite of voxels beside the real spconv: each case, on few voxels.

Seen red with: outputs of strided layers left in spconv's order, pairs turned round.
"""

import pytest
import torch

pytest.importorskip("spconv")

from benchmarks.harness.gate import expected_results, judge
from benchmarks.peers import spconv
from benchmarks.suites.voxels_cpu import CASES

pytestmark = pytest.mark.filterwarnings("ignore")

VOXELS = 600


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_spconv_computes_the_case(case, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    workload = case.build(torch.device("cpu"), VOXELS)
    candidate = spconv.adapt(workload)
    if workload.inputs[0].dtype == torch.bfloat16:
        assert candidate == "spconv has no bfloat16"
        return
    expected = expected_results("forward", workload, candidate, case.tf32)
    assert judge("forward", candidate, expected).ratio <= 1


def test_several_threads_are_refused(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    workload = CASES[0].build(torch.device("cpu"), 60)
    assert "set OMP_NUM_THREADS=1" in spconv.adapt(workload)
