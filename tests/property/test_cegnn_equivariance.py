"""CEGNN's graph layers turn with their input, and compute what the dense formulation does.

Seen red with: a bias on all blades, a message from h_i + h_j, positions that are not centred.
"""

import pytest
import torch

from torchweft.clifford import Algebra
from torchweft.clifford.layers.cegnn import EGCL, message_plan
from torchweft.demo.models.forecaster import (
    DenseForecaster,
    Forecaster,
    Systems,
    complete_graphs,
    turned,
)
from torchweft.testing import assert_as_accurate
from torchweft.testing.equivariance import PROMISED, assert_equivariant

FEATURES = 6


def disturbed(module):
    """Every parameter away from what it starts with."""
    torch.manual_seed(0)
    for p in module.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("metric", [(1, 1, 1), (1, -1, -1, -1), (0, 1, 1, 1)], ids=str)
def test_a_graph_layer_is_equivariant(metric, dtype):
    algebra = Algebra(metric)
    generator = torch.Generator().manual_seed(0)
    layer = disturbed(EGCL(FEATURES, algebra, edge_features=2)).to(dtype)
    src, dst = torch.randint(7, (2, 20), generator=generator)
    plan = message_plan(src, dst, 7)
    h = torch.randn(algebra.num_blades, 7, FEATURES, generator=generator)
    edges = torch.randn(algebra.num_blades, 20, 2, generator=generator)
    function = lambda h, edges: layer(h, plan, edges)  # noqa: E731
    assert_equivariant(function, [h.to(dtype), edges.to(dtype)], algebra)


@pytest.fixture(scope="module")
def systems():
    generator = torch.Generator().manual_seed(0)
    charge = 1.0 - 2.0 * torch.randint(2, (6, 5), generator=generator)
    return Systems(charge, *torch.randn(3, 6, 5, 3, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_forecasts_turn_and_move_with_the_bodies(systems, dtype):
    model = disturbed(Forecaster(FEATURES, 2)).to(dtype)
    wide = systems.to(torch.device("cpu"), dtype)
    plan = complete_graphs(6, 5)
    for seed in range(3):
        moved, move = turned(wide, seed)
        expected = move(model(wide, plan)).detach()
        error = (model(moved, plan) - expected).detach().abs().max() / expected.abs().max()
        assert error <= PROMISED[dtype]


def test_the_dense_formulation_is_the_same_network(systems):
    """Output and gradients, within the error that the dense formulation has in float32."""
    model = disturbed(Forecaster(FEATURES, 2))
    plan = complete_graphs(6, 5)
    found = {}
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        batch = systems.to(torch.device("cpu"), dtype)
        for name, network in (("torchweft", model), ("dense", DenseForecaster(model))):
            out = network(batch, plan)
            loss = (out - batch.target).square().mean()
            found[name, dtype] = [out, *torch.autograd.grad(loss, list(model.parameters()))]
    exact = found["dense", torch.float64]
    for ours, plain, true in zip(
        found["torchweft", torch.float64], found["dense", torch.float32], exact, strict=True
    ):
        noise = (plain.double() - true).detach().abs()
        assert_as_accurate(ours, true.detach(), noise)
