"""Kernels for gpytorch beside gpytorch's own: values, gradients, and exact Gaussian processes.

The processes do what failed with gpytorch's KeOps kernels by its issue tracker: predicted variances
behind a preconditioner (2566, linear_operator 87), no ScaleKernel (2430), gradients in the points
of a prediction (1885), in lengthscales beside a matrix that is not formed (2296).
Seen red with: distances that are not scaled, a diagonal of other points, √(2ν) as 2ν, the matrix
formed for its product.
"""

import pytest
import torch

pytest.importorskip("gpytorch")
import gpytorch

from torchweft.errors import ShapeError
from torchweft.reductions import gpytorch as ours
from torchweft.testing import assert_as_accurate, plain_error

pytestmark = pytest.mark.filterwarnings("ignore")

KERNELS = {
    "rbf": ("RBFKernel", {}),
    "rbf, ard": ("RBFKernel", {"ard_num_dims": 3}),
    "rbf, two of three dimensions": ("RBFKernel", {"active_dims": (0, 2)}),
    "matern 1/2": ("MaternKernel", {"nu": 0.5}),
    "matern 3/2, ard": ("MaternKernel", {"nu": 1.5, "ard_num_dims": 3}),
    "matern 5/2, a batch": ("MaternKernel", {"nu": 2.5, "batch_shape": torch.Size([2])}),
}


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def values_and_gradients(module, name, options, dtype):
    kernel = getattr(module, name)(**options).to(dtype)
    kernel.lengthscale = 0.5 + torch.rand(
        kernel.lengthscale.shape, generator=torch.Generator().manual_seed(0), dtype=dtype
    )
    x, y, v = (
        draw(n, d, seed=n).to(dtype).requires_grad_() for n, d in ((30, 3), (20, 3), (20, 2))
    )
    product = kernel(x, y) @ v
    gradients = torch.autograd.grad(
        product.sin().sum(), (x, y, v, kernel.raw_lengthscale), retain_graph=True
    )
    rows = kernel(x)[..., 4:6, :].to_dense()
    return [product, *gradients, rows, kernel(x, y).to_dense(), kernel(x, diag=True)]


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    given = KERNELS[name]
    exact = values_and_gradients(gpytorch.kernels, *given, torch.float64)
    plain = values_and_gradients(gpytorch.kernels, *given, torch.float32)
    found = values_and_gradients(ours, *given, torch.float32)
    for a, b, c in zip(found, exact, plain, strict=True):
        assert_as_accurate(a, b, plain_error(c, b, torch.float32))


class Process(gpytorch.models.ExactGP):
    """A Gaussian process of mean 0."""

    def __init__(self, x, y, kernel):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean, self.kernel = gpytorch.means.ZeroMean(), kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


def fitted(kernel):
    """The likelihood of a process, its gradients, and its predictions with theirs."""
    x = draw(60, 2)
    process = Process(x, x.sin().sum(1), kernel).double()
    likelihood = process.likelihood
    settings = gpytorch.settings
    with (
        settings.max_cholesky_size(10),
        settings.min_preconditioning_size(10),
        settings.cg_tolerance(1e-8),
        settings.eval_cg_tolerance(1e-8),
        settings.max_preconditioner_size(15),
    ):
        torch.manual_seed(0)  # of the probe vectors
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, process)
        loss = objective(process(x), process.train_targets)
        gradients = torch.autograd.grad(loss, tuple(process.parameters()))
        process.eval()
        points = draw(7, 2, seed=1).requires_grad_()
        predicted = likelihood(process(points))
        moved = torch.autograd.grad(predicted.mean.sum(), points, retain_graph=True)
        found = [loss, *gradients, predicted.mean, predicted.variance, *moved]
        return [t.detach() for t in found]


@pytest.mark.parametrize(("name", "scaled"), [("RBFKernel", False), ("MaternKernel", True)])
def test_exact_processes(monkeypatch, name, scaled):
    """Trained and evaluated as with gpytorch's kernels, without the matrix of the data."""
    formed, dense = [], ours._dense
    monkeypatch.setattr(
        ours, "_dense", lambda *given, **more: formed.append(dense(*given, **more)) or formed[-1]
    )
    wrapped = gpytorch.kernels.ScaleKernel if scaled else lambda kernel: kernel
    exact = fitted(wrapped(getattr(gpytorch.kernels, name)()))
    found = fitted(wrapped(getattr(ours, name)()))
    for a, b in zip(found, exact, strict=True):
        assert_as_accurate(a, b, plain_error(b.float(), b, torch.float32))
    assert max(matrix.numel() for matrix in formed) < 60 * 60 / 2


def test_errors():
    with pytest.raises(ShapeError, match=r"RBFKernel is called with last_dim_is_batch: .* Move it"):
        ours.RBFKernel()(draw(4, 3), last_dim_is_batch=True).to_dense()
