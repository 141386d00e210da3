r"""A graph cut into parts for several GPUs
=======================================

A graph that is too large for one GPU is cut: each rank owns some of the nodes and the edges that
lead to them, and reads rows of other ranks, its *halo*. ``shard`` computes the part of a rank from
the whole graph, and sends nothing, so this page runs in one process. In a program under
``torchrun``, ``Halo`` brings the rows of the others before each layer.
"""

import matplotlib.pyplot as plt
import torch

from torchweft import products
from torchweft.distributed import shard

# %%
# Points of the plane, denser on the left, each with edges from its eight nearest neighbours.
torch.manual_seed(0)
points = torch.rand(1500, 2) ** torch.tensor([1.8, 1.0])
src, dst = products.knn_graph(points, 8)

# %%
# The parts of four ranks: even numbers of nodes and of edges, and halos that are short since the
# cuts follow the positions.
ranks = 4
parts = [shard(src, dst, len(points), rank, ranks, positions=points) for rank in range(ranks)]
for rank, part in enumerate(parts):
    print(f"rank {rank}: {len(part.global_ids)} nodes, {len(part.edges)} edges, ", end="")
    print(f"{len(part.needed)} rows of other ranks")

# %%
# A part's ``src`` and ``dst`` number its own rows first and then the halo, so a layer runs on it as
# on any graph. Here the sums over neighbours, part by part, are those of the whole graph.
x = torch.randn(len(points), 16)
whole = products.segment_sum(x[src], dst, num_segments=len(points))
largest = 0.0
for part in parts:
    rows = torch.cat([x[part.global_ids], x[part.needed]])  # Halo(...)(x) under torchrun
    sums = products.segment_sum(rows[part.src], part.dst, num_segments=len(part.global_ids))
    largest = max(largest, float((sums - whole[part.global_ids]).abs().max()))
print(f"largest difference from the sums over the whole graph: {largest:.1e}")

# %%
# The nodes in the colours of their owners, and one part with its halo.
owner = torch.empty(len(points), dtype=torch.int64)
for rank, part in enumerate(parts):
    owner[part.global_ids] = rank
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4), layout="constrained")
left.scatter(*points.T, c=owner, s=6, cmap="tab10", vmax=9)
left.set(title="the rank of each node", xticks=[], yticks=[])
own, halo = points[parts[0].global_ids], points[parts[0].needed]
right.scatter(*points.T, s=3, color="gainsboro")
right.scatter(*own.T, s=6, color="tab:blue", label="rows of rank 0")
right.scatter(*halo.T, s=12, facecolors="none", edgecolors="tab:red", label="rows that it reads")
right.set(title="rank 0", xticks=[], yticks=[])
right.legend()
plt.show()
