"""The norm of scalars beside multivectors: by a program as exact as torch's own.

Seen red with: no mean, squares less the square of the mean.
"""

import pytest
import torch
from torch import nn

from tests.conftest import INTERPRETED
from tests.nearness import beside
from torchweft.clifford import PGA, EquiLayerNorm
from torchweft.testing import assert_as_accurate, plain_error

DEVICE = "cpu" if INTERPRETED else "cuda"
HAS_KERNELS = INTERPRETED or torch.cuda.is_available()
pytestmark = [pytest.mark.kernels, pytest.mark.skipif(not HAS_KERNELS, reason="needs a CUDA GPU")]

DRAWS = 32


def results(norm, scalars, order):
    """The scalars after the norm, and gradients of an order by the scalars and their gains."""
    scalars = scalars.detach().to(DEVICE).requires_grad_()
    norm = norm.to(scalars)
    over = [scalars, *(p for p in norm.parameters() if p.dim() == 1)]
    _, out = norm(scalars.new_zeros(16, *scalars.shape[:-1], 2), scalars)
    grads = torch.autograd.grad(out.pow(3).sum(), over, create_graph=order > 1)
    if order > 1:
        grads = torch.autograd.grad(sum(g.square().sum() for g in grads), over)
    return [t.detach() for t in (out, *grads)]


def built(backend, width, gains):
    norm = EquiLayerNorm(PGA, gains=(2, width) if gains else None, backend=backend)
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("mean", [0.0, 300.0])
@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("shape", [(4,), (3, 33, 4), (7, 5), (2, 130)])
def test_a_program_norms_scalars_as_torch_does(shape, gains, mean, order):
    """Of a few numbers a row, and of many; their mean may be far from 0."""
    generator = torch.Generator().manual_seed(sum(shape))
    scalars = torch.randn(shape, generator=generator) + mean
    exact = results(built("torch", shape[-1], gains), scalars.double(), order)
    found = results(built("triton", shape[-1], gains), scalars, order)
    moved = [beside([scalars], seed)[0] for seed in range(DRAWS)]
    plain = [results(built("torch", shape[-1], gains), m, order) for m in moved]
    for n, result in enumerate(found):
        noise = torch.stack([plain_error(p[n], exact[n], result.dtype) for p in plain])
        assert_as_accurate(result, exact[n], noise)


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one(rows):
    given = torch.ones(16, rows, 2, device=DEVICE), torch.ones(rows, 3, device=DEVICE)
    _, out = EquiLayerNorm(PGA, backend="triton")(*given)
    torch.testing.assert_close(out, torch.zeros_like(given[1]), rtol=0, atol=0)
