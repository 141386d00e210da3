"""A Sinkhorn divergence of two weighted clouds and its gradient, with geomloss."""

import torch
from geomloss import SamplesLoss

torch.manual_seed(0)
x, y = torch.rand(200, 3), torch.rand(300, 3) + 0.2
a, b = torch.rand(200), torch.rand(300)
a, b = a / a.sum(), b / b.sum()
x.requires_grad_()

loss = SamplesLoss("sinkhorn", p=2, blur=0.05, scaling=0.9)
value = loss(a, x, b, y)
(slope,) = torch.autograd.grad(value, x)
result = torch.cat([value.view(1), slope.flatten()])
print(value.shape, slope.shape)
