"""The benchmark's network is what its oracle computes, and its vectors hold every parameter.

Seen red with: absolute weights in the oracle, its inverse layers read as strided ones, linear maps
cut where norms are, vectors that no gradient reaches.
"""

from pathlib import Path

import pytest
import torch

from benchmarks.harness import load_peers, load_suite
from benchmarks.harness.gate import expected_results, worst_ratio
from benchmarks.harness.runner import _candidates
from torchweft.testing import assert_as_accurate, plain_error

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture
def unet_case(monkeypatch):
    monkeypatch.chdir(ROOT)
    load_suite("voxels")  # puts the clone on the path
    from benchmarks.workloads.voxels_unet import unet_case

    return unet_case


@pytest.mark.parametrize("options", [{}, {"fresh": True}, {"inference": True}], ids=str)
def test_the_network_is_its_oracle(options, unet_case):
    case = unet_case("sphere64", 14, **options)
    workload = case.build(CPU, 600)
    (ours,) = _candidates(case, workload, [], print, frozenset()).values()
    parameters = list(workload.tables["model"].parameters())
    assert sum(map(len, workload.inputs[1:])) == sum(p.numel() for p in parameters)
    for phase in case.phases:
        assert worst_ratio(phase, ours, expected_results(phase, workload, ours, False)) <= 1


def test_inference_is_evaluation(unet_case):
    training, inference = (
        unet_case("sphere64", 14, inference=inference).build(CPU, 600)
        for inference in (False, True)
    )
    training.tables["model"].eval()  # by running statistics
    with torch.no_grad():
        expected = training.oracle(*(t.double() for t in training.inputs))
        rough = training.oracle(*training.inputs)
        found = inference.function(*inference.inputs)
    assert_as_accurate(found, expected, plain_error(rough, expected, found.dtype))


def test_only_spconv_has_the_network(unet_case):
    workload = unet_case("sphere64", 14).build(CPU, 60)
    for peer in load_peers():
        if peer.NAME not in ("spconv", "spconv-triton"):
            assert isinstance(peer.adapt(workload), str), peer.NAME
