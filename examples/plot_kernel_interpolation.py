r"""Kernel interpolation by conjugate gradients
===========================================

Values :math:`b_i` were measured at points :math:`x_i`, with noise. Kernel ridge regression (the
mean of a Gaussian process) is a linear system whose matrix is a kernel of the points,

.. math:: (\alpha + K) \, a = b, \qquad K_{ij} = e^{-|x_i - x_j|^2 / 2 \sigma^2}.

``solve`` needs products with :math:`K` only, so nothing of size :math:`N^2` is stored. The solution
is differentiable in everything, so :math:`\sigma` and :math:`\alpha` can be learned.
"""

import matplotlib.pyplot as plt
import torch

from torchweft.reductions import LazyTensor


def kernel(x, y, sigma):
    """The Gaussian kernel as a lazy matrix, (M, N)."""
    x_i, y_j = LazyTensor((x / sigma)[:, None, :]), LazyTensor((y / sigma)[None, :, :])
    return (-((x_i - y_j) ** 2).sum(-1) / 2).exp()


# %%
# Two waves in the plane, seen at 900 random points, with noise; 300 of these are held out.
torch.manual_seed(0)
points = torch.rand(900, 2)


def truth(points):
    """What there is to find."""
    x, y = points.T
    return torch.sin(9 * x) * torch.cos(6 * y) + torch.sin(14 * (x + y)) / 3


measured = truth(points) + 0.2 * torch.randn(len(points))
seen, held_out = slice(0, 600), slice(600, 900)


def predicted(at, sigma, alpha):
    """The regression at other points."""
    x, b = points[seen], measured[seen, None]
    a = kernel(x, x, sigma).solve(b, alpha=alpha, eps=1e-4)
    return (kernel(at, x, sigma) @ a).view(-1)


# %%
# The width and the ridge, learned from the held-out points: the gradient goes through the solution
# of the system, by another system with the same matrix.
parameters = torch.tensor([0.03, 0.05]).log().requires_grad_()
optimizer = torch.optim.Adam([parameters], lr=0.15)
path = []
for _ in range(20):
    optimizer.zero_grad()
    error = (predicted(points[held_out], *parameters.exp()) - measured[held_out]).square().mean()
    error.backward()
    optimizer.step()
    path.append([error.item(), *parameters.detach().exp().tolist()])
sigma, alpha = parameters.detach().exp()
print(f"σ = {sigma:.3f}, α = {alpha:.3f}; error {path[0][0]:.3f} before, {path[-1][0]:.3f} after")

# %%
# The map, and how the parameters went. The noise alone has a mean square of 0.04.
line = torch.linspace(0, 1, 60)
grid = torch.cartesian_prod(line, line)
found = predicted(grid, sigma, alpha)
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
for axis, values, title in zip(
    axes, (truth(grid), found), ("the truth", "from 600 noisy values"), strict=False
):
    axis.imshow(values.view(60, 60).T, origin="lower", extent=(0, 1, 0, 1), vmin=-1.3, vmax=1.3)
    axis.set_title(title)
axes[1].plot(*points[seen].T, "k.", markersize=1)
errors, sigmas, _ = zip(*path, strict=True)
axes[2].plot(errors, label="error on the held-out points")
axes[2].plot(sigmas, label="σ")
axes[2].axhline(0.04, color="grey", linewidth=0.8, linestyle="dashed")
axes[2].set(xlabel="step", ylim=(0, None))
axes[2].legend()
plt.show()
