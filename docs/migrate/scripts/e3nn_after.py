"""The same convolution: product and sum are one operation, and no message is stored."""

import torch

from torchweft import o3

torch.manual_seed(0)
x = torch.randn(100, 64)  # features of 100 nodes, 16x0e + 16x1o
src, dst = torch.randint(100, (2, 1000))  # 1000 edges
vectors, weight = torch.randn(1000, 3), torch.randn(1000, 48)

sh = o3.spherical_harmonics("1x0e + 1x1o", vectors, True, "component")
nodes, edges, out = "16x0e + 16x1o", "1x0e + 1x1o", "16x0e + 16x1o + 16x1o"
paths = [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True), (1, 0, 2, "uvu", True)]
conv = o3.TensorProductConv(nodes, edges, out, paths)
summed = conv(x, sh, weight, src, dst, num_nodes=100)
linear = o3.Linear(out, nodes)
result = linear(summed)
print(result.shape)
