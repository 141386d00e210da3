r"""A Gaussian process, up to a million points
==========================================

The mean of a Gaussian process at points :math:`x_*`, given noisy values :math:`y` at points
:math:`x`, and its variance are

.. math:: m = k_* (K + \sigma^2)^{-1} y, \qquad v = s - k_* (K + \sigma^2)^{-1} k_*^T .

Conjugate gradients need products with :math:`K` only, and no matrix of :math:`N^2` numbers is
stored: memory grows as :math:`N`. Nyström's preconditioner keeps the iterations few.

``python plot_gaussian_process.py 1000000`` takes a million points; it is meant for a GPU. Without
an argument there are 5,000, for a CPU.
"""

import sys
import time

import matplotlib.pyplot as plt
import torch

from torchweft.reductions import Vi, Vj

points = int(sys.argv[1]) if len(sys.argv) > 1 else 5_000
device = "cuda" if torch.cuda.is_available() else "cpu"
NOISE = 0.2

# %%
# Noisy values of a wave on the unit square, with none in a disc in the middle.
torch.manual_seed(0)


def truth(x):
    """The function to recover, without noise."""
    return torch.sin(10 * x[:, 0]) * torch.cos(7 * x[:, 1]) + torch.sin(25 * x[:, 0] * x[:, 1]) / 2


x = torch.rand(points, 2, device=device)
x = x[(x - 0.5).norm(dim=1) > 0.2]
y = truth(x) + NOISE * torch.randn(len(x), device=device)


# %%
# The kernel's length and size are those of the largest marginal likelihood of 500 of the points,
# computed with a dense matrix.
def kernel(a, b, length, size):
    """size · exp(−|a_i − b_j|² / 2 length²), (M, N), of which nothing is stored."""
    return size * (-Vi(a / length).sqdist(Vj(b / length)) / 2).exp()


def negative_log_likelihood(parameters, a, b):
    """−log p(b | a), without its constant."""
    length, size = parameters.exp()
    squared = torch.cdist(a, a, compute_mode="donot_use_mm_for_euclid_dist").square()
    covariance = size * (-squared / (2 * length**2)).exp() + NOISE**2 * torch.eye(len(a)).to(a)
    factor = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(factor, b[:, None], upper=False)
    return white.square().sum() / 2 + factor.diagonal().log().sum()


some = torch.randperm(len(x), device=device)[:500]
parameters = torch.tensor([0.3, 1.0], dtype=torch.float64, device=device).log().requires_grad_()
optimizer = torch.optim.LBFGS([parameters], max_iter=30, line_search_fn="strong_wolfe")


def closure():
    """The negative log likelihood and its gradient."""
    optimizer.zero_grad()
    value = negative_log_likelihood(parameters, x[some].double(), y[some].double())
    value.backward()
    return value


optimizer.step(closure)
length, size = parameters.detach().exp().tolist()
print(f"length {length:.3f}, size {size:.2f}")

# %%
# The mean on a grid and at held-out points, from all points: one linear system.
begin = time.perf_counter()
K = kernel(x, x, length, size)
options = {"alpha": NOISE**2, "eps": 1e-3, "preconditioner": "nystrom", "rank": 200}
weights = K.solve(y[:, None], **options)
held_out = torch.rand(1000, 2, device=device)
held_out = held_out[(held_out - 0.5).norm(dim=1) > 0.2]
error = ((kernel(held_out, x, length, size) @ weights).view(-1) - truth(held_out)).square().mean()
print(f"{len(x)} points, {time.perf_counter() - begin:.1f} s; ", end="")
print(f"error at held-out points {error.sqrt():.4f}, noise {NOISE}")

line = torch.linspace(0, 1, 60, device=device)
grid = torch.cartesian_prod(line, line)
mean = (kernel(grid, x, length, size) @ weights).view(60, 60)

# %%
# The standard deviation along the horizontal line through the middle: one linear system with a
# right-hand side for each of 60 points. The columns of the right-hand sides are rows of the kernel.
across = torch.stack([line, torch.full_like(line, 0.5)], 1)
squared = torch.cdist(x, across, compute_mode="donot_use_mm_for_euclid_dist").square()
columns = size * (-squared / (2 * length**2)).exp()  # (N, 60)
explained = (columns * K.solve(columns, **options)).sum(0)
deviation = (size - explained).clamp(min=0).sqrt()
middle = (kernel(across, x, length, size) @ weights).view(-1)

# %%
# Where there are no points the mean is uncertain, and the standard deviation says so.
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
left.imshow(mean.T.cpu(), origin="lower", extent=(0, 1, 0, 1))
left.scatter(*x[:2000].T.cpu(), s=1, color="black")
left.axhline(0.5, color="white", linestyle="dashed")
left.set_title("mean; points; dashed: the line of the right picture")
right.plot(line.cpu(), truth(across).cpu(), color="grey", linestyle="dashed", label="the function")
right.plot(line.cpu(), middle.cpu(), label="mean")
band = [(middle + sign * 2 * deviation).cpu() for sign in (-1, 1)]
right.fill_between(line.cpu(), *band, alpha=0.3, label="two standard deviations")
right.legend()
plt.show()
