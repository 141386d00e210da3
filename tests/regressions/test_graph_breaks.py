"""A lazy tensor that was begun in a traced graph goes on after the graph broke, as under FSDP2.

Red before: "'str' object has no attribute 'args'", since a traced formula is kept as its text.
"""

import torch

from torchweft.reductions import Vi, Vj
from torchweft.testing.contract import assert_same_bits


def kernel(x, y, between):
    difference = Vi(x) - Vj(y)
    between()
    return (-(difference**2).sum(-1)).exp().sum(1)


def test_a_graph_that_breaks_within_a_formula():
    torch.manual_seed(0)
    x, y = torch.randn(5, 3), torch.randn(7, 3)
    compiled = torch.compile(kernel, backend="eager")
    broken = compiled(x, y, torch._dynamo.graph_break)
    assert_same_bits(broken, kernel(x, y, lambda: None), "kernel")
