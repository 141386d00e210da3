"""geomloss on the stand-in for pykeops: its lazy and its clustered solvers beside its dense one.

Seen red with: a column of the ranges' transpose, `_shape` missing, so that its solvers of samples
take a lazy cost for no array.
"""

import numpy as np
import pytest
import torch

from tests.clients.stand_ins import import_over

import_over("pykeops", "geomloss")
from geomloss import SamplesLoss, _backends, ot

from tests.clients.agreement import assert_agree
from torchweft.reductions import LazyTensor
from torchweft.reductions import numpy as arrays

pytestmark = pytest.mark.filterwarnings("ignore")


def clouds(dtype):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(n, 3, generator=generator, dtype=torch.float64) for n in (60, 80))
    a, b = (torch.rand(len(p), generator=generator, dtype=torch.float64) + 0.1 for p in (x, y))
    return [t.to(dtype).requires_grad_() for t in (a / a.sum(), x, b / b.sum(), y)]


def results(dtype, loss, backend, **options):
    """A loss and its gradients in weights and points."""
    given = clouds(dtype)
    value = SamplesLoss(loss, backend=backend, **options)(*given)
    grads = torch.autograd.grad(value, given)
    return {str(n): t.detach().double() for n, t in enumerate((value, *grads))}


EXACT = {"p": 2, "blur": 0.25, "diameter": 2.0}
"""Its lazy solvers round 1 / ε to float32: here each is a power of two."""


@pytest.mark.parametrize(
    ("loss", "backend", "options"),
    [
        ("sinkhorn", "online", EXACT | {"reach": 0.5}),
        # cells of one point, and no pair left out: its coarse problem is the whole one
        ("sinkhorn", "multiscale", EXACT | {"cluster_scale": 2**-10, "truncate": None}),
        ("gaussian", "online", {"blur": 0.25}),
    ],
)
def test_losses_are_those_of_dense_matrices(loss, backend, options):
    exact, rounded = (
        results(dtype, loss, "tensorized", **options) for dtype in (torch.float64, torch.float32)
    )
    assert_agree(results(torch.float64, loss, backend, **options), exact, rounded, multiple=64)


@pytest.mark.parametrize("cast", [torch.as_tensor, np.asarray])
def test_plans_between_samples(cast, monkeypatch):
    """Its newer interface takes lazy costs of both libraries; without pykeops they are dense."""
    a, x, b, y = (cast(t.detach().numpy()) for t in clouds(torch.float64))
    found = ot.solve_sample(x, y, a=a, b=b, reg=0.25, max_iter=50)
    assert type(found.lazy_plan) is (LazyTensor if cast is torch.as_tensor else arrays.LazyTensor)
    columns = found.lazy_plan.sum(axis=0).reshape(-1)
    monkeypatch.setattr(_backends, "keops_available", False)
    exact = ot.solve_sample(x, y, a=a, b=b, reg=0.25, max_iter=50)
    assert exact.lazy_plan is None
    for given, expected in (
        (found.value, exact.value),
        (found.potential_a, exact.potential_a),
        (columns, exact.plan.sum(0)),
    ):
        given, expected = torch.as_tensor(given), torch.as_tensor(expected)
        rounding = 1024 * torch.finfo(torch.float64).eps * expected.abs().max()
        assert (given - expected).abs().max() <= rounding
