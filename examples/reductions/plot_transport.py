r"""Optimal transport between two clouds
====================================

The Sinkhorn divergence is the cost of moving one cloud of points onto another, smoothed over
lengths below the blur, :math:`\varepsilon = \text{blur}^2`. Its gradient gives the goal
:math:`T(x_i)` of each point:

.. math:: -\frac{1}{a_i} \frac{\partial\,\text{loss}}{\partial x_i} \approx T(x_i) - x_i .

A few steps of gradient descent move a ring onto two discs.
"""

import matplotlib.pyplot as plt
import torch

from torchweft.reductions import SamplesLoss

# %%
# The clouds have 500 points each, of equal weights.
torch.manual_seed(0)
count = 500
angle, radius = 2 * torch.pi * torch.rand(count), 0.25 * torch.rand(count).sqrt()
disc = torch.stack([angle.cos(), angle.sin()], 1) * radius[:, None]
target = disc + torch.tensor([[0.75, 0.8]]).where(torch.arange(count)[:, None] % 2 == 0, 0.25)
angle = 2 * torch.pi * torch.rand(count)
ring = 0.5 + torch.stack([angle.cos(), angle.sin()], 1) * (0.35 + 0.1 * torch.rand(count, 1))

# %%
# With ``debias`` the loss between a cloud and itself is 0. Without it the loss is not 0, and its
# minimum is a cloud that has shrunk.
for debias in (True, False):
    loss = SamplesLoss(blur=0.1, debias=debias)
    print(f"debias={debias}: to itself {float(loss(ring, ring)):.5f}", end=", ")
    print(f"to the target {float(loss(ring, target)):.5f}")

# %%
# Each step goes half of the way to the goals.
loss = SamplesLoss(blur=0.03)
points, losses, views = ring.clone().requires_grad_(), [], [ring]
for step in range(8):
    value = loss(points, target)
    (gradient,) = torch.autograd.grad(value, points)
    points = (points - 0.5 * count * gradient).detach().requires_grad_()
    losses.append(value.item())
    if step in (1, 7):
        views.append(points.detach())

# %%
figure, axes = plt.subplots(1, 4, figsize=(11, 3.1), layout="constrained")
colours = torch.atan2(*(ring - 0.5).T)
for axis, view, title in zip(axes, views, ("the ring", "2 steps", "8 steps"), strict=False):
    axis.scatter(*target.T, s=2, color="silver")
    axis.scatter(*view.T, s=3, c=colours, cmap="twilight")
    axis.set(title=title, aspect="equal", xlim=(-0.05, 1.1), ylim=(-0.05, 1.1))
    axis.set_axis_off()
axes[3].semilogy(losses, "o-", markersize=3)
axes[3].set(title="loss", xlabel="step")
plt.show()
