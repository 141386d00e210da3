"""A training step of exact Gaussian processes that failed with KeOps kernels by their size.

gpytorch's issues 2286 (backward fails from 524,266 points on) and 2453 (a million points in ten
dimensions). Their sizes need a GPU; on the CPU the same steps are held to gpytorch's own kernels.
Seen red with a lengthscale, and with products, that are others by a part in 10⁵.
"""

import pytest
import torch

pytest.importorskip("gpytorch")
import gpytorch

from torchweft.reductions import gpytorch as ours
from torchweft.testing import assert_as_accurate, plain_error

pytestmark = pytest.mark.filterwarnings("ignore")

ISSUES = {2286: (524_266, 1, {"ard_num_dims": 1}), 2453: (1_000_000, 10, {})}
"""Points, dimensions, and options of the kernel."""

FEW = 1000
"""Points that are more than gpytorch takes to its Cholesky factors."""


class Process(gpytorch.models.ExactGP):
    """A constant mean, and a kernel with a scale."""

    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(kernel)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


def step(kernel, x, y):
    """The loss and its gradients, and the parameters after Adam's step."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Process(x, y, likelihood, kernel).to(x)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    torch.manual_seed(0)  # of the probe vectors
    loss = -objective(model(x), y)
    loss.backward()
    adam.step()
    parameters = list(model.parameters())
    return [t.detach() for t in (loss, *(p.grad for p in parameters), *parameters)]


def data(number, dimensions, **options):
    generator = torch.Generator(options.get("device", "cpu")).manual_seed(0)
    x = torch.randn(number, dimensions, generator=generator, **options)
    return x, torch.randn(number, generator=generator, **options)


@pytest.mark.parametrize("issue", ISSUES)
def test_steps_are_those_of_gpytorch(issue):
    """In float64, so that probe vectors are the same; errors by data that float32 rounds."""
    _, dimensions, options = ISSUES[issue]
    given = data(FEW, dimensions, dtype=torch.float64)
    exact = step(gpytorch.kernels.RBFKernel(**options), *given)
    near = [
        step(gpytorch.kernels.RBFKernel(**options), *((t * f).float().double() / f for t in given))
        for f in (1.0, 1.1, 1.2, 1.3)
    ]
    found = step(ours.RBFKernel(**options), *given)
    for a, b, *errors in zip(found, exact, *near, strict=True):
        noise = torch.stack([plain_error(c, b, torch.float32) for c in errors])
        assert_as_accurate(a, b, noise)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("issue", ISSUES)
def test_steps_of_that_size(issue):
    number, dimensions, options = ISSUES[issue]
    found = step(ours.RBFKernel(**options), *data(number, dimensions, device="cuda"))
    for tensor in found:
        assert bool(tensor.isfinite().all())
        assert bool((tensor != 0).all())
