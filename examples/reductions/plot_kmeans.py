r"""K-means without a matrix of distances
=====================================

A lazy tensor is a formula of points :math:`x_i` and :math:`y_j`; nothing is computed before it is
reduced, and the matrix of all pairs never exists. K-means is one such reduction,

.. math:: l_i = \operatorname{argmin}_j |x_i - c_j|^2,

followed by the mean of each cluster.
"""

import matplotlib.pyplot as plt
import torch

from torchweft.reductions import LazyTensor
from torchweft.reductions.cluster import cluster_centroids

# %%
# Points along a spiral, as many on each part of its length.
torch.manual_seed(0)
angle = 4 * torch.pi * torch.rand(20_000).sqrt()
points = torch.stack([angle.cos(), angle.sin()], 1) * angle[:, None] / 10
points += 0.06 * torch.randn_like(points)


# %%
# The formula is written as if both clouds were broadcast: ``x`` has shape (M, 1, 2), ``c`` has
# (1, K, 2). ``argmin(dim=1)`` reduces over the clusters.
def nearest(points, centres):
    """(M,) the nearest centre of each point."""
    x, c = LazyTensor(points[:, None, :]), LazyTensor(centres[None, :, :])
    return ((x - c) ** 2).sum(-1).argmin(dim=1).view(-1)


def cost(points, centres):
    """Mean squared distance to the nearest centre."""
    return float((points - centres[nearest(points, centres)]).square().sum(1).mean())


# %%
# Lloyd's iterations: each point is assigned to its nearest centre, each centre moves to the mean of
# its points. ``cluster_centroids`` gives NaN for an empty cluster; here none is empty.
count = 40
centres = points[torch.randperm(len(points))[:count]].clone()
path = [cost(points, centres)]
for _ in range(25):
    labels = nearest(points, centres)
    centres = cluster_centroids(points, labels)
    path.append(cost(points, centres))
print(f"mean squared distance {path[0]:.4f} before, {path[-1]:.4f} after")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
left.scatter(*points.T, c=labels % 20, s=1, cmap="tab20")
left.plot(*centres.T, "k.", markersize=6)
left.set(title="clusters and their centres", aspect="equal")
left.set_axis_off()
right.plot(path, "o-", markersize=3)
right.set(title="mean squared distance", xlabel="iteration", ylim=(0, None))
plt.show()
