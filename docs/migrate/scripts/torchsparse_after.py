"""A small sparse network of torchweft, with the names of torchsparse."""

import torch

from torchweft.compat import torchsparse
from torchweft.compat.torchsparse import nn as spnn

torch.manual_seed(0)
voxels = torch.cartesian_prod(*map(torch.arange, (2, 16, 16, 16)))  # (batch, x, y, z)
x = torchsparse.SparseTensor(torch.randn(500, 4), voxels[torch.randperm(8192)[:500]].int())

net = torch.nn.Sequential(
    spnn.Conv3d(4, 16, 3),
    spnn.BatchNorm(16),
    spnn.ReLU(True),
    spnn.Conv3d(16, 32, 2, stride=2),
    spnn.Conv3d(32, 8, 2, stride=2, transposed=True),
)
result = net(x).F
print(result.shape)
