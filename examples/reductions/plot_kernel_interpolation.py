r"""Kernel ridge regression by conjugate gradients
==============================================

Values :math:`b_i` are measured at points :math:`x_i`, with noise. Kernel ridge regression solves a
linear system whose matrix is a kernel of the points,

.. math:: (\alpha + K) \, a = b, \qquad K_{ij} = e^{-|x_i - x_j|^2 / 2 \sigma^2}.

``solve`` needs products with :math:`K` only, so no matrix of :math:`N^2` numbers is stored. The
solution is differentiable in every input, so :math:`\sigma` and :math:`\alpha` can be learned by
gradient descent.
"""

import matplotlib.pyplot as plt
import torch

from torchweft.reductions import LazyTensor


def kernel(x, y, sigma):
    """The Gaussian kernel as a lazy matrix, (M, N)."""
    x_i, y_j = LazyTensor((x / sigma)[:, None, :]), LazyTensor((y / sigma)[None, :, :])
    return (-((x_i - y_j) ** 2).sum(-1) / 2).exp()


# %%
# Two waves in the plane, measured at 1,200 random points, with noise. The points are split in
# three: predictions are made from the training set, the validation set chooses :math:`\sigma` and
# :math:`\alpha`, and the test set is used once, at the end.
torch.manual_seed(0)
points = torch.rand(1200, 2)


def truth(points):
    """The function to recover, without noise."""
    x, y = points.T
    return torch.sin(9 * x) * torch.cos(6 * y) + torch.sin(14 * (x + y)) / 3


measured = truth(points) + 0.2 * torch.randn(len(points))
train, validation, test = slice(0, 600), slice(600, 900), slice(900, 1200)


def predict(at, sigma, alpha):
    """Predictions at other points, (M,), from the training set."""
    x, b = points[train], measured[train, None]
    a = kernel(x, x, sigma).solve(b, alpha=alpha, eps=1e-4)
    return (kernel(at, x, sigma) @ a).view(-1)


def error(rows, sigma, alpha):
    """Mean squared error of the predictions at the points of a set."""
    return (predict(points[rows], sigma, alpha) - measured[rows]).square().mean()


# %%
# Gradient descent on the validation error. Its gradient goes through the solution of the linear
# system, by another system with the same matrix.
parameters = torch.tensor([0.03, 0.05]).log().requires_grad_()
optimizer = torch.optim.Adam([parameters], lr=0.15)
errors, sigmas = [], []
for _ in range(20):
    optimizer.zero_grad()
    loss = error(validation, *parameters.exp())
    loss.backward()
    errors.append(loss.item())
    sigmas.append(parameters.exp()[0].item())
    optimizer.step()

# %%
# The error on the test set, which took no part in the choice. The noise alone has a mean square of
# 0.04.
sigma, alpha = parameters.detach().exp()
print(f"σ = {sigma:.3f}, α = {alpha:.3f}")
print(f"validation error {errors[0]:.4f} before, {errors[-1]:.4f} after; ", end="")
print(f"test error {error(test, sigma, alpha):.4f}")

# %%
line = torch.linspace(0, 1, 60)
grid = torch.cartesian_prod(line, line)
predicted = predict(grid, sigma, alpha)
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
for axis, values, title in (
    (axes[0], truth(grid), "the function"),
    (axes[1], predicted, "predicted from 600 noisy values"),
):
    axis.imshow(values.view(60, 60).T, origin="lower", extent=(0, 1, 0, 1), vmin=-1.3, vmax=1.3)
    axis.set_title(title)
axes[1].plot(*points[train].T, "k.", markersize=1)
axes[2].plot(errors, label="validation error")
axes[2].plot(sigmas, label="σ")
axes[2].axhline(0.04, color="grey", linewidth=0.8, linestyle="dashed", label="noise")
axes[2].set(xlabel="step", ylim=(0, None))
axes[2].legend()
plt.show()
