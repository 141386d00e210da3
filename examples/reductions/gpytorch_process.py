"""An exact Gaussian process whose matrix is not stored
====================================================

``python examples/gaussian_process.py 4000``

gpytorch trains it by conjugate gradients; the products with the kernel's matrix are reductions.
Beside it stands the same process with gpytorch's own kernel, of as many points as its dense matrix
is quick for.  Needs gpytorch: pip install gpytorch.
"""

import sys
import time

import gpytorch
import torch

from torchweft.reductions.gpytorch import MaternKernel

NOISE = 0.1


class Process(gpytorch.models.ExactGP):
    """A process of mean 0 with a scaled kernel."""

    def __init__(self, x, y, kernel):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean, self.kernel = gpytorch.means.ZeroMean(), gpytorch.kernels.ScaleKernel(kernel)

    def forward(self, x):
        """The process at some points."""
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


def measured(points):
    """Points in a cube, waves at them, and these with noise."""
    x = torch.rand(points, 3)
    truth = (6 * x).sin().sum(1)
    return x, truth, truth + NOISE * torch.randn(points)


def trained(kernel, x, y, steps):
    """The process after some steps of Adam."""
    process = Process(x, y, kernel)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(process.likelihood, process)
    optimizer = torch.optim.Adam(process.parameters(), lr=0.2)
    for _ in range(steps):
        optimizer.zero_grad()
        (-objective(process(x), y)).backward()
        optimizer.step()
    return process.eval()


def main(points=4000, dense=800, steps=10):
    """Points of the process, of the dense one, and steps of training."""
    torch.manual_seed(0)
    x, _, y = measured(points)
    held_out, truth, _ = measured(500)
    for name, kernel, count in (
        ("not stored", MaternKernel(nu=2.5), points),
        ("dense", gpytorch.kernels.MaternKernel(nu=2.5), dense),
    ):
        start = time.perf_counter()
        process = trained(kernel, x[:count], y[:count], steps)
        with torch.no_grad(), gpytorch.settings.skip_posterior_variances():
            error = (process(held_out).mean - truth).square().mean().sqrt()
        seconds = time.perf_counter() - start
        print(f"{name}: {count} points, error {float(error):.4f}, {seconds:.1f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
