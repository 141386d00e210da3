"""Layers of Torch Geometric with torchweft's sums, beside the originals: numbers and gradients.

Seen red with: src and dst exchanged, attention summed over what a node sends, the values of empty
segments kept, heads that take each other's attention, features of edges or the flow left out.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch_geometric")
from torch_geometric import nn, utils
from torch_geometric.nn.resolver import aggregation_resolver

from tests.clients.agreement import assert_agree
from torchweft.products import segment_max, segment_mean, segment_softmax, segment_sum

FILE = Path(__file__).parents[2] / "examples/products/pyg_layers.py"
SPEC = importlib.util.spec_from_file_location("pyg_layers", FILE)
example = sys.modules["pyg_layers"] = importlib.util.module_from_spec(SPEC)  # layers look it up
SPEC.loader.exec_module(example)
NODES, EDGES = 12, 60
GENERATOR = torch.Generator().manual_seed(0)
EDGE_INDEX = torch.randint(0, NODES - 2, (2, EDGES), generator=GENERATOR)  # two that none reach
X = torch.randn(NODES, 6, generator=GENERATOR)
MESSAGES = torch.randn(EDGES, 4, generator=GENERATOR)
WEIGHTS = torch.rand(EDGES, generator=GENERATOR)


def with_gradients(function, x, *parameters):
    """The result and the gradients of its sine, of two orders."""
    x = x.clone().requires_grad_()
    given = [x, *parameters]
    found = function(x)
    first = torch.autograd.grad(found.sin().sum(), given, create_graph=True)
    second = torch.autograd.grad(sum(g.sin().sum() for g in first), given, allow_unused=True)
    names = {f"gradient {n}": g for n, g in enumerate(first)}
    names |= {f"second {n}": g for n, g in enumerate(second) if g is not None}
    return {"result": found.detach(), **{name: g.detach() for name, g in names.items()}}


def assert_same_numbers(theirs, ours, x):
    """Both are made for a dtype: results in float64, by the noise of theirs in float32."""
    exact, rounded = (with_gradients(*theirs(x.to(d))) for d in (torch.float64, torch.float32))
    for dtype in (torch.float64, torch.float32):
        assert_agree(with_gradients(*ours(x.to(dtype))), exact, rounded, dtype)


@pytest.mark.parametrize("by", ["index", "ptr"])
@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min"])
def test_aggregations(kind, by):
    """Trailing dimensions, dim, a node without messages; theirs by ptr have no second gradients."""
    index = EDGE_INDEX[1] if by == "index" else EDGE_INDEX[1].sort().values
    table = {"index": index, "dim_size": NODES}
    bounds = torch.nn.functional.pad(index.bincount(minlength=NODES).cumsum(0), (1, 0))
    original, ours = aggregation_resolver(kind), example.SegmentAggregation(kind)
    own = table if by == "index" else {"ptr": bounds}
    for x in (MESSAGES, torch.stack([MESSAGES, MESSAGES.cos()])):
        assert_same_numbers(
            lambda x: (lambda x: original(x, **table, dim=-2), x),
            lambda x: (lambda x: ours(x, **own, dim=-2), x),
            x,
        )


LAYERS = {
    "GCN": (nn.GCNConv, example.FusedGCNConv, {}, []),
    "GCN of weights": (nn.GCNConv, example.FusedGCNConv, {"improved": True}, [WEIGHTS]),
    "GCN without weights": (nn.GCNConv, example.FusedGCNConv, {"normalize": False}, []),
    "GCN against edges": (nn.GCNConv, example.FusedGCNConv, {"flow": "target_to_source"}, []),
    "GAT": (nn.GATConv, example.FusedGATConv, {"heads": 3}, []),
    "GAT of edges": (nn.GATConv, example.FusedGATConv, {"heads": 3, "edge_dim": 4}, [MESSAGES]),
    "GAT of weights": (nn.GATConv, example.FusedGATConv, {"edge_dim": 1}, [WEIGHTS]),
    "GAT against edges": (nn.GATConv, example.FusedGATConv, {"flow": "target_to_source"}, []),
    "SAGE": (nn.SAGEConv, nn.SAGEConv, {"aggr": "mean"}, []),
    "graph convolution": (nn.GraphConv, nn.GraphConv, {"aggr": "max"}, []),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_from_the_originals_weights(name):
    theirs, ours, options, more = LAYERS[name]
    torch.manual_seed(0)
    original = theirs(6, 4, **options)
    if "aggr" in options:
        options = {"aggr": example.SegmentAggregation(options["aggr"])}
    layer = ours(6, 4, **options)
    layer.load_state_dict(original.state_dict(), strict=True)

    def call(module):
        def made(x):
            module.to(x.dtype)
            edges = [EDGE_INDEX, *(t.to(x.dtype) for t in more)]
            return lambda x: module(x, *edges), x, *module.parameters()

        return made

    assert_same_numbers(call(original), call(layer), X)


def test_functions():
    """Beside those of `torch_geometric.utils`."""
    index = EDGE_INDEX[1]
    for kind, ours in (("sum", segment_sum), ("mean", segment_mean), ("max", segment_max)):
        assert_same_numbers(
            lambda x, kind=kind: (lambda x: utils.scatter(x, index, 0, reduce=kind), x),
            lambda x, ours=ours: (lambda x: ours(x, index), x),
            MESSAGES,
        )
    assert_same_numbers(
        lambda x: (lambda x: utils.softmax(x, index), x),
        lambda x: (lambda x: segment_softmax(x, index), x),
        MESSAGES,
    )


def test_the_example_learns():
    _, label, labelled, predicted = example.learn()
    assert (predicted == label)[~labelled].float().mean() > 0.95
