"""A small sparse network of MinkowskiEngine."""

import MinkowskiEngine as ME
import torch

torch.manual_seed(0)
clouds = [10 * torch.rand(300, 3), 10 * torch.rand(200, 3)]  # two clouds of points
coordinates, features = ME.utils.sparse_collate(clouds, [torch.randn(len(p), 4) for p in clouds])
x = ME.SparseTensor(features, coordinates)

net = torch.nn.Sequential(
    ME.MinkowskiConvolution(4, 16, kernel_size=3, stride=2, dimension=3),
    ME.MinkowskiBatchNorm(16),
    ME.MinkowskiReLU(),
    ME.MinkowskiConvolutionTranspose(16, 8, kernel_size=2, stride=2, dimension=3),
    ME.MinkowskiGlobalAvgPooling(),
)
result = net(x).F
print(result.shape)
