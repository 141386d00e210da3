"""The benchmark's CPU suite of voxels beside the real spconv: each case, on few voxels.

Seen red with: outputs of strided layers left in spconv's order, pairs held against our table.
"""

import pytest
import torch

pytest.importorskip("spconv")

from benchmarks.harness.runner import _candidates, _check
from benchmarks.peers import spconv
from benchmarks.suites.voxels_cpu import CASES

pytestmark = pytest.mark.filterwarnings("ignore")

VOXELS = 600


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_spconv_computes_the_case(case, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    workload = case.build(torch.device("cpu"), VOXELS)
    if workload.inputs[0].dtype == torch.bfloat16:
        assert spconv.adapt(workload) == "spconv has no bfloat16"
        return
    said = []
    candidates = _candidates(case, workload, [spconv], said.append, set())
    verdicts = _check("forward", workload, candidates, case.tf32, said.append)
    assert not said
    assert list(verdicts) == ["torchweft numba", "spconv cpu"]
    assert all(verdict.ratio <= 1 for verdict in verdicts.values())


def test_several_threads_are_refused(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    workload = CASES[0].build(torch.device("cpu"), 60)
    assert "set OMP_NUM_THREADS=1" in spconv.adapt(workload)
