"""A Gaussian process of gpytorch whose matrix is not stored
=========================================================

``pip install gpytorch matplotlib torchweft``, then ``python gpytorch_process.py 4000``

gpytorch trains an exact Gaussian process by conjugate gradients; with torchweft's kernel the
products with the matrix are reductions, and memory grows as the number of points. The process with
gpytorch's own kernel, which stores a dense matrix, has fewer points. Errors are those at 500
held-out points.

.. image:: /images/examples/gpytorch_process.png
   :alt: predictions of both processes against the true values
"""

# sphinx_gallery_thumbnail_path = 'images/examples/gpytorch_process.png'
import sys
import time

import gpytorch
import matplotlib.pyplot as plt
import torch

from torchweft.reductions.gpytorch import MaternKernel

NOISE = 0.1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Process(gpytorch.models.ExactGP):
    """A process of mean 0 with a scaled kernel."""

    def __init__(self, x, y, kernel):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean, self.kernel = gpytorch.means.ZeroMean(), gpytorch.kernels.ScaleKernel(kernel)

    def forward(self, x):
        """The distribution of the values at points x."""
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


def measured(points):
    """Points in the unit cube, waves at them, and these with noise."""
    x = torch.rand(points, 3, device=DEVICE)
    truth = (6 * x).sin().sum(1)
    return x, truth, truth + NOISE * torch.randn_like(truth)


def fit(kernel, x, y, steps):
    """The process after some steps of Adam on the marginal likelihood."""
    process = Process(x, y, kernel).to(DEVICE)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(process.likelihood, process)
    optimizer = torch.optim.Adam(process.parameters(), lr=0.2)
    for _ in range(steps):
        optimizer.zero_grad()
        (-objective(process(x), y)).backward()
        optimizer.step()
    return process.eval()


def main(points=4000, dense=800, steps=10):
    """Train both processes, and compare them at held-out points."""
    torch.manual_seed(0)
    x, _, y = measured(points)
    held_out, truth, _ = measured(500)
    figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
    for axis, name, kernel, count in (
        (axes[0], "not stored", MaternKernel(nu=2.5), points),
        (axes[1], "dense", gpytorch.kernels.MaternKernel(nu=2.5), min(points, dense)),
    ):
        start = time.perf_counter()
        process = fit(kernel, x[:count], y[:count], steps)
        with torch.no_grad(), gpytorch.settings.skip_posterior_variances():
            predicted = process(held_out).mean
        error = (predicted - truth).square().mean().sqrt()
        seconds = time.perf_counter() - start
        print(f"{name}: {count} points, error {float(error):.4f}, {seconds:.1f} s")
        axis.scatter(truth.cpu(), predicted.cpu(), s=3)
        axis.set(title=f"{name}, {count} points", xlabel="true", ylabel="predicted")
    figure.savefig("gpytorch_process.png", dpi=80)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
