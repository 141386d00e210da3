"""Attention over the edges of a graph, with torch_scatter."""

import torch
from torch_scatter import scatter_add, scatter_max, scatter_softmax

torch.manual_seed(0)
x = torch.randn(100, 16)  # features of 100 nodes
src, dst = torch.randint(100, (2, 1000))  # 1000 edges

score = (x[src] * x[dst]).sum(1) / 4
weight = scatter_softmax(score, dst, dim=0)
attention = scatter_add(weight[:, None] * x[src], dst, dim=0, dim_size=100)
largest, _ = scatter_max(x[src], dst, dim=0, dim_size=100)
result = torch.cat([attention, largest], 1)
print(result.shape)
