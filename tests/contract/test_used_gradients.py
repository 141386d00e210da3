"""A pass for some inputs alone, such as forces from an energy, computes no other gradient.

Seen red with: what `needs_input_grad` says taken for what a pass uses; leaves that are asked for
left out; the gradient of the tensor behind the one that is used.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchweft import o3

pytestmark = pytest.mark.kernels


class Results(TorchDispatchMode):
    """How many tensors torchweft's operators give."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.namespace == "torchweft":
            self.count += 1 if isinstance(found, torch.Tensor) else len(found)
        return found


def linear(x, w):
    element = torch.tensor([1, 0, 1])
    return o3.Linear("2x0e", "2x0e", num_elements=2, internal_weights=False)(x, w, element=element)


def conv(x, w):
    edges = torch.tensor([0, 1, 2])
    layer = o3.TensorProductConv("2x0e", "1x0e", "2x0e", [(0, 0, 0, "uvu", True)])
    return layer(x, torch.ones(3, 1), w, edges, edges.flip(0))


CALLS = {linear: (2, 4), conv: (3, 2)}  # by either kind of operator; of what shape is w


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_only_gradients_that_are_used_are_computed(call, leaf):
    given = [torch.randn(3, 2, requires_grad=True), torch.randn(CALLS[call], requires_grad=True)]
    inputs = given if leaf else [1 * t for t in given]
    z = call(*inputs)
    both = torch.autograd.grad(z.sum(), inputs, retain_graph=True)
    for n, wanted in enumerate(inputs):
        with Results() as results:
            (found,) = torch.autograd.grad(z.sum(), wanted, retain_graph=True)
        assert results.count == 1
        assert found.tolist() == both[n].tolist()
    with Results() as results:
        z.sum().backward(retain_graph=True)
    assert results.count == 2
    assert [t.grad.tolist() for t in given] == [t.tolist() for t in both]
    given[0].grad = None
    with Results() as results:
        z.sum().backward(inputs=[given[0]])
    assert results.count == 1
    assert given[0].grad.tolist() == both[0].tolist()
