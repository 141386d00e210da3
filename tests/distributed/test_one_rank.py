"""With one rank nothing is added: no operation of torch, no message, no thread.

Seen red with: the agreement of a group of one rank.
"""

import threading

import pytest
import torch

from tests.ranks import run
from torchweft.core.collectives import all_sum, exchange, total
from torchweft.core.private import DispatchMode
from torchweft.distributed import Halo, all_pairs, propagate_errors, shard_voxels
from torchweft.errors import ShapeError
from torchweft.reductions import Vi, Vj
from torchweft.voxels import SparseTensor


class Counted(DispatchMode):
    """The operations of torch that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def alone(rank=0, size=1, group=None):
    x = torch.randn(4, 2, requires_grad=True)
    scene = SparseTensor(torch.ones(2, 1), torch.tensor([[0, 1, 1], [0, 40, 1]]))
    halo = Halo(torch.arange(4), torch.arange(0), group)
    assert shard_voxels(scene, rank, size, group=group) is scene
    threads = threading.active_count()
    with Counted() as counted, propagate_errors(group):
        found = halo(x), halo.add(x), halo.finish(halo.begin(x))
        found += total(x, group), all_sum(x, group), exchange(x, [4], [4], group)
        assert threading.active_count() == threads
    assert all(one is x for one in found)
    return counted.names


def test_nothing_is_added_without_a_group():
    assert alone() == []


def test_processes_of_torchrun_need_a_group(monkeypatch):
    """Red before: each process reduced over its own rows alone and said nothing."""
    x = torch.ones(2, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with all_pairs():
        assert (Vi(x) - Vj(x)).abs().sum(1).tolist() == [[0.0], [0.0]]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ShapeError, match=r"torchrun started 2 .* Call .*init_process_group"),
        all_pairs(),
    ):
        pass
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # another program may set WORLD_SIZE
    with all_pairs():
        pass


def test_nothing_is_added_by_a_group_of_one_rank():
    assert run(alone, 1) == [[]]
