"""torch.compile around the products: no recompilation when sizes change, gradients inside.

Seen red with: a size read as a Python number in the call.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.cases.products import OPS
from tests.conftest import INTERPRETED
from torchweft import products

if INTERPRETED:
    pytest.skip("torch.compile is checked without TRITON_INTERPRET", allow_module_level=True)

pytestmark = pytest.mark.slow

INDEX = torch.tensor([0, 2, 1, 3, 3])
SEG = torch.tensor([0, 2, 2, 5])


def call(x, weight):
    y = products.indexed_vecmat_scale_gather(x.sin(), weight, index1=INDEX, index2=INDEX, seg=SEG)
    return products.indexed_inner(y, y)


def inputs(batch):
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, 4, 8, generator=generator, requires_grad=True)
    return x, torch.randn(4, 8, 6, generator=generator, requires_grad=True)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_one_compilation_serves_every_batch():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for batch in (7, 9, 33):  # no other size is 7: torch takes equal sizes for one
        leaves = inputs(batch)
        found, expected = compiled(*leaves), call(*leaves)
        same(found, expected)
        gradients = (torch.autograd.grad(z.sum(), leaves) for z in (found, expected))
        for pair in zip(*gradients, strict=True):
            same(*pair)
    assert counter.frame_count == 1


def test_each_op_is_compiled_by_itself():
    """All seven, thrice: past the recompile limit if they shared one code object, as they did."""
    torch.compiler.reset()
    for batch in (2, 3, 4):
        for op, dims in OPS.items():
            function = getattr(products, f"indexed_{op}_scale_gather")
            compiled = torch.compile(function, fullgraph=True, backend="eager")
            x, y = (torch.randn(batch, 4, *({"C": 4, "D": 3}[c] for c in d)) for d in dims)
            same(compiled(x, y, index1=INDEX, index2=INDEX), function(x, y, None, INDEX, INDEX))


def test_export_with_a_batch_of_any_size():
    class Module(torch.nn.Module):
        def forward(self, x, weight):
            return call(x, weight)

    batch = torch.export.Dim("batch", min=2)
    example = tuple(a.detach() for a in inputs(7))
    program = torch.export.export(Module(), example, dynamic_shapes=({0: batch}, {}))
    for size in (3, 17):
        leaves = tuple(a.detach() for a in inputs(size))
        same(program.module()(*leaves), call(*leaves))
