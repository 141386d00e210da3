"""Norms of numbers whose squares leave float32's range.

Under powers of two the results are the same bits: gates are 0 or 1, eps is less than a round-off.
Red before: NaN from inputs of 3e9 on, where a gate of 0 met an infinite square; zeros for rows of
1e20; gradients without the norm's share from 1e13 on, where 1/√s³ is 0.
"""

import pytest
import torch

from tests.conftest import BACKENDS, INTERPRETED
from torchweft import clifford
from torchweft.clifford import Algebra
from torchweft.clifford.programs import operator as cpu
from torchweft.testing.contract import assert_same_bits

pytestmark = [pytest.mark.kernels, pytest.mark.parametrize("backend", BACKENDS)]

CALLS = {
    "chain": lambda x, y, w, **kinds: clifford.gelu_geometric_product_norm(x, y, w, **kinds),
    "fully connected": lambda x, y, w, **kinds: clifford.gelu_geometric_product_norm(
        x, y, w.T[:, :, None].expand(-1, -1, 3), fully_connected=True, **kinds
    ),
    "rms_norm": lambda x, y, w, **kinds: clifford.rms_norm(x, **kinds),
}


def run(name, algebra, scale, **kinds):
    """The result and the gradients of inputs of a size; the latter in its inverse."""
    generator = torch.Generator().manual_seed(0)
    blades, paths = algebra.num_blades, len(algebra.paths)
    shapes = ((blades, 3, 8), (blades, 3, 8), (8, paths), (blades, 3, 8))
    x, y, w, direction = (torch.randn(shape, generator=generator) for shape in shapes)
    leaves = [(x * scale).requires_grad_(), (y * scale).requires_grad_(), w.requires_grad_()]
    out = CALLS[name](*leaves, algebra=algebra, **kinds)
    seed = torch.ones_like(out) if out.shape != direction.shape else direction
    found = torch.autograd.grad(out, leaves, seed, allow_unused=True)
    gradients = [g if g is None else g * s for g, s in zip(found, (scale, scale, 1), strict=True)]
    return [out.detach(), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("norm", ["euclidean", "metric"])
@pytest.mark.parametrize("metric", [(1, 1), (1, -1)])
@pytest.mark.parametrize("name", CALLS)
def test_results_are_the_same_at_any_size(name, metric, norm, backend):
    algebra, kinds = Algebra(metric), {"norm": norm, "backend": backend}
    expected = run(name, algebra, 2.0**20, **kinds)
    assert all(bool(part.isfinite().all()) and bool(part.any()) for part in expected)
    for exponent in (26, 32, 44):  # 6.7e7, 4.3e9, 1.8e13
        for found, exact in zip(run(name, algebra, 2.0**exponent, **kinds), expected, strict=True):
            assert_same_bits(found, exact, f"{name} at 2^{exponent}")


def test_loops_multiply_in_the_order_of_the_program(backend, monkeypatch):
    """Red before: numba multiplied 1/√s three times before anything small met it."""
    if INTERPRETED:
        pytest.skip("needs a process without TRITON_INTERPRET=1: numba's loops")
    monkeypatch.setattr(cpu, "COMPILED", 0)
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
    expected = []
    for scale in (2.0**-12, 1.0, 2.0**40):
        leaf = (x * scale).requires_grad_()
        out = clifford.rms_norm(leaf, Algebra((1, 1)), backend=backend)
        (first,) = torch.autograd.grad(out, leaf, x, create_graph=True)
        expected += [out, first, *torch.autograd.grad(first, leaf, x)]
    assert all(bool(part.isfinite().all()) for part in expected)


def test_a_small_eps_keeps_small_numbers(backend):
    algebra = Algebra((1, 1))
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
    expected = clifford.rms_norm(x, algebra, eps=0.0, backend=backend)
    found = clifford.rms_norm(x * 2.0**-40, algebra, eps=0.0, backend=backend)
    assert_same_bits(found, expected, "at 2^-40")
