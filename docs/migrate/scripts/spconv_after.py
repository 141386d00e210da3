"""A small sparse network of torchweft, with the names of spconv, on the voxels of two clouds."""

import torch

import torchweft.compat.spconv.pytorch as spconv

torch.manual_seed(0)
voxels = torch.cartesian_prod(*map(torch.arange, (2, 16, 16, 16)))  # (batch, z, y, x)
indices = voxels[torch.randperm(len(voxels))[:500]].int()
x = spconv.SparseConvTensor(torch.randn(500, 4), indices, [16, 16, 16], batch_size=2)

net = spconv.SparseSequential(
    spconv.SubMConv3d(4, 16, 3, bias=False, indice_key="a"),
    torch.nn.ReLU(),
    spconv.SparseConv3d(16, 32, 3, stride=2, padding=1, bias=False, indice_key="b"),
    spconv.SparseInverseConv3d(32, 8, 3, indice_key="b", bias=False),
)
result = net(x).dense()
print(result.shape)
