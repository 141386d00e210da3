"""The same with torchweft: the weighted sum reads rows of nodes, and stores no messages."""

import torch

from torchweft import products

torch.manual_seed(0)
x = torch.randn(100, 16)  # features of 100 nodes
src, dst = torch.randint(100, (2, 1000))  # 1000 edges

score = products.indexed_inner(x, x, src, dst) / 4
weight = products.segment_softmax(score, dst, num_segments=100)
edges = products.sparse_product_info(index1=src, index=dst, out_size=100)
attention = products.sparse_vecsca(x, weight, edges)
largest = products.segment_max(x[src], dst, num_segments=100)
result = torch.cat([attention, largest], 1)
print(result.shape)
