"""Torch Geometric with torchweft: its layers, with sums that are repeatable and store no messages
===============================================================================================

``pip install torch-geometric torchweft``, then ``python examples/pyg_layers.py``

`SegmentAggregation` goes into any layer of Torch Geometric, as its ``aggr=``.  `FusedGCNConv` and
`FusedGATConv` are that library's layers with another `propagate`: one call of a product gathers the
rows of a layer's input, weighs and sums them, so that no message of an edge is ever stored, in the
gradients neither.  Parameters have the original's names: checkpoints load either way.

A network of the three learns to tell spirals apart, on the graph of each point's neighbours.
"""

import torch
from torch import nn
from torch_geometric.nn import Aggregation, GATConv, GCNConv, SAGEConv

from torchweft import products

REDUCTIONS = {
    "sum": products.segment_sum,
    "mean": products.segment_mean,
    "max": products.segment_max,
    "min": products.segment_min,
}


class SegmentAggregation(Aggregation):
    """Σ, mean, maximum or minimum of the messages to each node; 0 where there are none.

    Args:
        kind: "sum", "mean", "max" or "min".
    """

    def __init__(self, kind="sum"):
        super().__init__()
        self.kind = kind

    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        """See `torch_geometric.nn.Aggregation`; of index and ptr, ptr needs no sorting."""
        table = {"index": index, "num_segments": dim_size} if ptr is None else {"indptr": ptr}
        rows = x.movedim(dim, 0)
        found = REDUCTIONS[self.kind](rows, **table)
        if self.kind in ("max", "min"):  # of nothing they are infinite
            count = products.segment_sum(torch.ones_like(rows[:, :1], dtype=torch.int64), **table)
            found = torch.where(count > 0, found, 0.0)
        return found.movedim(0, dim)

    def __repr__(self):
        return f"SegmentAggregation({self.kind!r})"


class FusedGCNConv(GCNConv):
    """z[i] = Σ_{e: dst[e] = i} weight[e] · x[src[e]]: one pass over the edges."""

    def propagate(self, edge_index, size=None, *, x, edge_weight):
        """The sum of all messages to each node."""
        src, dst = edge_index
        return products.indexed_vecsca_scale_gather(
            x, edge_weight, index1=src, index_out=dst, out_size=len(x)
        )


class FusedGATConv(GATConv):
    """z[i, h] = Σ_{e: dst[e] = i} attention[e, h] · x[src[e], h]: one pass more over the edges."""

    def edge_update(self, alpha_j, alpha_i, index, dim_size):
        """Attention of each edge, which sums to 1 over those that lead to a node."""
        score = nn.functional.leaky_relu(alpha_j + alpha_i, self.negative_slope)
        attention = products.segment_softmax(score, index, num_segments=dim_size)
        return nn.functional.dropout(attention, self.dropout, self.training)

    def propagate(self, edge_index, size=None, *, x, alpha):
        """The sum of all messages to each node; heads are the batch of the product."""
        src, dst = edge_index
        rows, num_nodes = x[0].transpose(0, 1), len(x[1])
        found = products.indexed_vecsca_scale_gather(
            rows, alpha.T, index1=src, index_out=dst, out_size=num_nodes
        )
        return found.transpose(0, 1).contiguous()


class Net(nn.Module):
    """Three layers of Torch Geometric, with torchweft's sums."""

    def __init__(self, width=16):
        super().__init__()
        self.first = FusedGCNConv(2, width, cached=True)
        self.second = FusedGATConv(width, width // 4, heads=4)
        self.third = SAGEConv(width, 2, aggr=SegmentAggregation("max"))

    def forward(self, x, edge_index):
        """(N, 2) scores of the two spirals."""
        x = self.first(x, edge_index).relu()
        x = self.second(x, edge_index).relu()
        return self.third(x, edge_index)


def main(steps=60):
    """The accuracy of the trained network."""
    torch.manual_seed(0)
    turn = torch.rand(400) * 6
    label = torch.arange(400) % 2
    angle = turn + torch.pi * label
    points = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None] / 6
    points += torch.randn_like(points) / 50
    edge_index = torch.stack(products.knn_graph(points, 8))  # from neighbours to points
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(points, edge_index), label)
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    accuracy = (net(points, edge_index).argmax(1) == label).float().mean().item()
    print(f"{accuracy:.0%} of the points are told apart")
    return accuracy


if __name__ == "__main__":
    main()
