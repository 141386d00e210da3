"""Records with room of functions that exchange with other ranks: a training step of a network.

On a CPU replays run the function again (tests/recorders.py), on GPUs they are graphs of CUDA.
Seen red with: statistics that count padding, or the rows of one rank; a rank that records anew
alone, whose exchanges the others do not answer.
"""

import copy
import warnings

import pytest
import torch
from torch import distributed

import torchweft
from tests.contract.test_voxels_padded import (
    COUNTS,
    assert_as_plain,
    cloud,
    network,
    state,
    training,
)
from tests.ranks import KIND, SIZE, run
from tests.recorders import captured
from torchweft.core.collectives import everywhere, total
from torchweft.voxels import padded_sizes, prepare

MANY = 400
"""Voxels that are drawn on the last rank for the fourth call; the record has no room for them."""

CALLS = 5


def clouds(rank, size):
    """Those of a rank, of other voxels on each."""
    counts = [COUNTS[(rank + n) % len(COUNTS)] for n in range(CALLS)]
    counts[3] = MANY if rank == size - 1 else counts[3]
    return [cloud(count, CALLS * rank + n) for n, count in enumerate(counts)]


def on_rank(rank, size, _, wide):
    """(states of recorded steps, of eager ones, warnings); wide: eager ones in float64 alone."""
    net = network()
    if wide:
        return eager(net.double(), rank, size), None, None
    plain = eager(copy.deepcopy(net), rank, size)
    first, *rest = (prepare(net, tensor) for tensor in clouds(rank, size))
    labels, sizes = of(first), padded_sizes(first, 1.3, labels=-100)
    record = torchweft.capture if KIND == "cuda" else _stand_in
    step = record(training(net), first, labels, sizes=sizes)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [state(net, step(tensor, of(tensor))) for tensor in (first, *rest)]
    return found, plain, [str(each.message) for each in told if "room for" in str(each.message)]


def _stand_in(*given, **options):
    return captured(*given, **options)[0]


def eager(net, rank, size):
    step, dtype = training(net), next(net.parameters()).dtype
    tensors = [tensor.replace(tensor.F.to(dtype)) for tensor in clouds(rank, size)]
    return [state(net, step(tensor, of(tensor))) for tensor in tensors]


def of(tensor):
    """Its labels."""
    return torch.arange(len(tensor)) % 3


@pytest.mark.skipif(KIND == "shared", reason="gloo is not recorded")
def test_a_training_step():
    """As accurate as eager calls; all ranks record anew where one lacks room."""
    exact = [states for states, _, _ in run(on_rank, SIZE, True)]
    for rank, (found, plain, told) in enumerate(run(on_rank, SIZE, False)):
        by_result = (zip(*calls, strict=True) for calls in (found, exact[rank], plain))
        for result in zip(*by_result, strict=True):
            assert_as_plain(*result)
        (text,) = told
        assert ("sizes on another rank do not fit" in text) == (rank < SIZE - 1)


def counting_padding(rank, size, group):
    """What each rank is told where the results of the first one count padding."""

    def function(x, weight):
        rows = x if rank == 0 else weight[:, None] * x
        return total(torch.ones(()), group) * rows.sum()

    x, weight = torch.rand(10, 2), torch.ones(10)
    run, _ = captured(function, x, weight, sizes={"x": (1.1, {"weight": 0})})
    run(x, weight)
    with pytest.raises(torchweft.CaptureError) as told:
        run(x, weight)
    return str(told.value)


def test_padding_in_a_result_of_one_rank():
    first, second = run(counting_padding, 2)
    assert first.startswith("result 0 differs with padding")
    assert second == "a result differs with padding on another rank: see its error."


def answers(rank, size, group):
    halves = [distributed.new_group([0, 1]), distributed.new_group([2, 3])][rank // 2]
    across = [distributed.new_group([0, 2]), distributed.new_group([1, 3])][rank % 2]
    yes = everywhere(True, [halves, across]), everywhere(True, [])
    return *yes, everywhere(rank != 3, [halves]), everywhere(rank != 3, [halves, across])


@pytest.mark.skipif(SIZE < 4, reason="two groups of two ranks")
def test_all_ranks_of_some_groups():
    found = run(answers, 4)
    assert found == [(True, True, rank < 2, False) for rank in range(4)]
