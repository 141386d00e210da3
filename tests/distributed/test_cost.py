"""Costs that are predicted: rows are those that halos move, times those of the formula.

Seen red with: rows counted once for each edge, messages counted for each row.
"""

import pytest
import torch

from tests.ranks import run
from torchweft import o3
from torchweft.distributed import DistributedNeighbourList, Domains, cost

SIDE, CUTOFF = 8.0, 2.0


def atoms():
    return SIDE * torch.rand(700, 3, generator=torch.Generator().manual_seed(0)).double()


CELL = SIDE * torch.eye(3, dtype=torch.float64)


def moved(rank, size, group, owner):
    ids = (owner == rank).nonzero().flatten()
    halo = DistributedNeighbourList(CUTOFF, 0.0, group)(ids, atoms()[ids], CELL, True).halo
    return cost.explain(halo, cost.Step(1e-6, (100.0, 300.0)))


@pytest.mark.parametrize("size", [2, 4])
def test_traffic_is_that_of_halos(size):
    owner = Domains(atoms(), CELL, True, parts=size).owner(atoms())
    owner[owner == size - 1] = 0  # a rank without atoms
    src, dst, _ = o3.neighbour_list(atoms(), CUTOFF, CELL, True)
    expected = cost.traffic(owner, src, dst, size)
    found = run(moved, size, owner)
    assert [part.traffic for part in found] == expected
    assert expected[-1] == (0, 0, 0, 0)
    for part in found:
        assert str(part).count("a step") == 3


def test_time_and_efficiency():
    network = cost.Network("cable", 1000.0, 0.5)
    step = cost.Step(0.01, (100.0, 300.0), 1.0)
    ranks = [cost.Traffic(200, 10, 20, 2), cost.Traffic(300, 30, 5, 1)]
    # rank 0: 1 + 2 s, two exchanges of 2 messages and 20 rows of 400 bytes in all: 2 + 8 s
    # rank 1: 1 + 3 s, two of 1 message and 30 rows: 1 + 12 s
    found = cost.predict(ranks, step, network)
    assert found.seconds == 17
    assert found.weak == (1 + 2.5) / 17
    assert found.strong == (1 + 5) / (2 * 17)
    assert cost.predict(ranks, step, network, overlapped=True).seconds == 13
    assert str(found) == "cable: 17 s a step, 20.6% of it computation"


def test_a_ring_sends_every_row_of_others_once():
    assert cost.ring(80, 8) == (10, 70, 70, 7)


def test_boxes_bound_the_halo_of_isotropic_cutoffs():
    side, spacing = 16, 1.0
    axis = torch.arange(side, dtype=torch.float64) * spacing
    grid = torch.cartesian_prod(axis, axis, axis)
    cell = side * spacing * torch.eye(3, dtype=torch.float64)
    owner = Domains(grid, cell, True, parts=64).owner(grid)
    src, dst, _ = o3.neighbour_list(grid, 2.1, cell, True)
    bound = cost.boxes(len(grid) / 64, 1.0, 2.1)
    for found in cost.traffic(owner, src, dst, 64):
        assert found.own == bound.own
        assert bound.halo / 2 < found.halo < bound.halo
        assert found.messages <= bound.messages


def test_a_halo_by_itself():
    text = str(cost.Cost(cost.Traffic(100, 50, 60, 3), cost.Step(1e-3, (1e3, 1e4)), ()))
    assert text.splitlines() == [
        "rows: 100 own, 50 of the halo (50.0% of own), 60 sent",
        "a step: 2 exchanges with 3 ranks, 660 kB sent, 550 kB received",
    ]
