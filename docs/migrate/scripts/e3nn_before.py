"""A convolution of e3nn: a product for each edge, summed over the edges that arrive at a node."""

import torch
from e3nn import o3

torch.manual_seed(0)
x = torch.randn(100, 64)  # features of 100 nodes, 16x0e + 16x1o
src, dst = torch.randint(100, (2, 1000))  # 1000 edges
vectors, weight = torch.randn(1000, 3), torch.randn(1000, 48)

sh = o3.spherical_harmonics("1x0e + 1x1o", vectors, True, "component")
nodes, edges, out = "16x0e + 16x1o", "1x0e + 1x1o", "16x0e + 16x1o + 16x1o"
paths = [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True), (1, 0, 2, "uvu", True)]
tp = o3.TensorProduct(nodes, edges, out, paths, shared_weights=False)
messages = tp(x[src], sh, weight)  # (1000, 112)
summed = torch.zeros(100, 112).index_add(0, dst, messages)
linear = o3.Linear(out, nodes)
result = linear(summed)
print(result.shape)
