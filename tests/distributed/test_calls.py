"""A model over ranks is compared once a call, and its host waits once, before rows are sent.

MACE's calls are counted in tests/clients/test_distributed_mace.py.
Seen red with: each call of the halo compared, tables of the layers compared where they are read,
ranks that do not tell each other what they know (a hang), energies added up one by one.
"""

import functools
import itertools

import pytest
import torch

from tests.distributed.test_potentials import crystal, part_of
from tests.host_waits import steps
from tests.ranks import run
from torchweft.core.collectives import total
from torchweft.distributed import potential
from torchweft.errors import ShapeError
from torchweft.o3.adapters.sources import extended, mark_reads_sources

WIDTH, LAYERS = 4, 2


class Model(torch.nn.Module):
    """Layers that read rows of others, and forces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = [3] + [WIDTH] * LAYERS
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(*pair, dtype=torch.float64) for pair in itertools.pairwise(sizes)
        )
        mark_reads_sources(self)

    def forward(self, data, training=False):
        src, dst = data["edge_index"]
        x = positions = data["positions"].requires_grad_()
        for layer in self.layers:
            sums = torch.zeros_like(x)  # index_add has another order on a GPU at every call
            x = sums.index_put((dst,), extended(x)[src], accumulate=True)
            x = layer(x).sin()
        energies = x.sum(1)
        energy = energies.sum()[None]
        (slope,) = torch.autograd.grad(energy, positions, create_graph=training)
        squares = energies.square().sum()[None]
        return {"energy": energy, "interaction_energy": squares, "forces": -slope}


def parts(rank, size, group):
    part = part_of(rank, size)
    data = {
        "positions": crystal()[0][part.global_ids],
        "edge_index": torch.stack([part.src, part.dst]),
    }
    return part.halo(group), data


def counted(rank, size, group):
    model, (halo, data) = Model(), parts(rank, size, group)

    def call(training):
        found = potential(model, data, halo, training=training)
        if training:
            squares = total(found["forces"].square().sum(), group)
            (found["energy"].sum() + squares).backward()

    calls = [functools.partial(call, training) for training in (False, True)]
    return [[steps(of_kind) for _ in range(3)] for of_kind in calls]


def test_gradients_begin_in_the_thread_of_the_call():
    """So that second gradients come to the exchanges in the same order on every rank."""
    model, threads, enabled = Model(), [], torch._C._is_multithreading_enabled
    model.register_forward_pre_hook(lambda *_: threads.append(enabled()))
    halo, data = parts(0, 1, None)
    potential(model, data, halo)
    assert (threads, enabled()) == ([False], True)


def test_steps_of_a_call():
    forces = ["exchange"] * 2 * LAYERS
    inside = ["sum", "read"]  # between hosts
    for of_forces, of_training in run(counted, 2):
        rest = ["sum", *["exchange"] * 2 * LAYERS]  # of the loss, and second gradients
        assert of_forces[0].count("sum") == len(["whole", "results"]) + LAYERS
        assert of_forces[1:] == [[*inside, *forces, "sum"]] * 2
        assert of_training[1:] == [[*inside, *forces, "sum", *rest]] * 2


def same(model, halo, data, group):
    """Whether results are those of layers that are compared one by one: of a fresh model."""
    fresh = Model()
    fresh.load_state_dict(model.state_dict())
    found, expected = (potential(m, data, halo) for m in (model, fresh))
    return all(found[name].equal(expected[name]) for name in expected)


def differing(rank, size, group):
    """Ranks that know different calls compare each, and faults are told on all, also later."""
    model, (halo, data) = Model(), parts(rank, size, group)
    texts = []
    for _ in range(2):
        assert same(model, halo, data, group)
    more = data | ({"weights": torch.ones(3)} if rank else {})  # no call was of this kind
    for _ in range(2):
        assert same(model, halo, more, group)
    few = data | {"positions": data["positions"][rank:]}
    for given, options in ((few, {}), (data, {"training": rank == 0})):
        with pytest.raises(ShapeError) as raised:
            potential(model, given, halo, **options)
        texts.append(str(raised.value))
        assert same(model, halo, data, group)
    return texts


def test_ranks_that_differ():
    first, second = run(differing, 2)
    assert first == second
    assert "rank 1: the data has" in first[0]
    assert "the ranks differ in options" in first[1]


def changed(rank, size, group):
    """A model that became another on all ranks makes other calls than the ones before."""
    model, (halo, data) = Model(), parts(rank, size, group)
    potential(model, data, halo)
    first, second = model.layers
    model.layers = torch.nn.ModuleList([first, second, second])
    with_more, again = (steps(lambda: potential(model, data, halo)) for _ in range(2))
    model.layers = torch.nn.ModuleList([torch.nn.Linear(3, 5, dtype=torch.float64)] * 1)
    potential(model, data, halo)
    return with_more.count("read"), again.count("read")


def test_a_changed_model_is_compared_again():
    for with_more, again in run(changed, 2):
        assert (with_more, again) == (2, 1)  # the whole call, and the one that is new
