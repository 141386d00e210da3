"""torch_geometric on the stand-in for torch_scatter: the numbers are those it has without.

Each runs in a process of its own: torch_geometric looks for torch_scatter when it is imported.
"""

import json
import subprocess
import sys
import textwrap

import pytest
import torch

pytest.importorskip("torch_geometric")

PROGRAM = """
    import json, sys, torch, torchweft
    if sys.argv[1] == "stand-in":
        torchweft.compat.install("torch_scatter")
    import torch_geometric as pyg
    assert pyg.typing.WITH_TORCH_SCATTER == (sys.argv[1] == "stand-in")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(60, 8, requires_grad=True)
    edges = torch.randint(0, 60, (2, 400))
    edges = edges[:, edges[1].argsort(stable=True)]
    results = []
    for reduce in ("sum", "mean", "min", "max", "mul"):
        results.append(pyg.utils.scatter(x[edges[0]], edges[1], 0, dim_size=60, reduce=reduce))
    for name in ("Sum", "Mean", "Max", "Min", "Std", "Softmax"):
        aggregate = getattr(pyg.nn, f"{name}Aggregation")()
        results.append(aggregate(x[edges[0]], edges[1], dim_size=60))
    results.append(pyg.utils.softmax(x[edges[0]], edges[1], num_nodes=60))
    for layer in (pyg.nn.GATConv(8, 4, heads=2), pyg.nn.GCNConv(8, 4), pyg.nn.SAGEConv(8, 4)):
        results.append(layer(x, edges))
    results.append(torch.autograd.grad(sum(z.sin().sum() for z in results), x)[0])
    print(json.dumps([z.tolist() for z in results]))
"""


def test_numbers_with_the_stand_in_are_those_without():
    ours, theirs = (
        json.loads(
            subprocess.run(
                [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM), how],
                capture_output=True, text=True, check=True,
            ).stdout
        )
        for how in ("stand-in", "alone")
    )  # fmt: skip
    assert len(ours) == len(theirs) == 16
    for pair in zip(ours, theirs, strict=True):
        own, plain = (torch.tensor(numbers, dtype=torch.float64) for numbers in pair)
        error = (own - plain).abs().max() / plain.abs().max()
        assert error < 400 * torch.finfo(torch.float64).eps  # edges of the longest sum
