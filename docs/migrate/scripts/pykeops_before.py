"""A Gaussian sum over all pairs, the nearest neighbours, and a gradient, with pykeops."""

import torch
from pykeops.torch import LazyTensor

torch.manual_seed(0)
x, y, b = torch.rand(1000, 3), torch.rand(2000, 3), torch.rand(2000, 2)
x.requires_grad_()

x_i, y_j = LazyTensor(x[:, None, :]), LazyTensor(y[None, :, :])
squared = ((x_i - y_j) ** 2).sum(-1)  # 1000 x 2000 pairs, never stored
kernel = (-squared / 0.02).exp()
sums = kernel @ b
nearest = squared.argKmin(5, dim=1)
(slope,) = torch.autograd.grad(sums.square().sum(), x)
result = torch.cat([sums, slope], 1)
print(result.shape, nearest.shape)
