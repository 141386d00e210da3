"""Layers of Torch Geometric without stored messages
=================================================

``pip install torch-geometric torchweft``, then ``python pyg_layers.py``

`SegmentAggregation` goes into any layer of Torch Geometric, as its ``aggr=``. `FusedGCNConv` and
`FusedGATConv` are that library's layers with another `propagate`: one call gathers the rows of a
layer's input, weighs and sums them, so that no message of an edge is stored, in the gradients
neither. Sums are repeatable to the bit. Parameters have the original's names: checkpoints load
either way.

A network of the three learns to tell two spirals apart, on the graph of each point's neighbours.
Half of the points have labels; the accuracy is that on the other half.

.. image:: /images/examples/pyg_layers.png
   :alt: two spirals, with the labelled points and the predictions
"""

# sphinx_gallery_thumbnail_path = 'images/examples/pyg_layers.png'
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
        """See `torch_geometric.nn.Aggregation`; with ptr nothing is sorted."""
        table = {"index": index, "num_segments": dim_size} if ptr is None else {"indptr": ptr}
        rows = x.movedim(dim, 0)
        found = REDUCTIONS[self.kind](rows, **table)
        if self.kind in ("max", "min"):  # empty segments are infinite
            count = products.segment_sum(torch.ones_like(rows[:, :1], dtype=torch.int64), **table)
            found = torch.where(count > 0, found, 0.0)
        return found.movedim(0, dim)

    def __repr__(self):
        return f"SegmentAggregation({self.kind!r})"


def ends(layer, edge_index):
    """Where messages come from and where they go, by the flow of a layer."""
    return edge_index if layer.flow == "source_to_target" else edge_index.flip(0)


class FusedGCNConv(GCNConv):
    """z[i] = Σ_{e: dst[e] = i} weight[e] · x[src[e]], in one pass over the edges."""

    def propagate(self, edge_index, size=None, *, x, edge_weight):
        """The sum of all messages to each node."""
        src, dst = ends(self, edge_index)
        if edge_weight is None:
            edge_weight = x.new_ones(len(src))
        return products.indexed_vecsca_scale_gather(
            x, edge_weight, index1=src, index_out=dst, out_size=len(x)
        )


class FusedGATConv(GATConv):
    """z[i, h] = Σ_{e: dst[e] = i} attention[e, h] · x[src[e], h], in one pass over the edges."""

    def edge_update(self, alpha_j, alpha_i, edge_attr, index, dim_size):
        """Attention of each edge; it sums to 1 over the edges into a node."""
        score = alpha_j + alpha_i
        if edge_attr is not None and self.lin_edge is not None:
            edge = self.lin_edge(edge_attr.view(-1, self.edge_dim))
            score = score + (edge.view(-1, *self.att_edge.shape[1:]) * self.att_edge).sum(-1)
        score = nn.functional.leaky_relu(score, self.negative_slope)
        attention = products.segment_softmax(score, index, num_segments=dim_size)
        return nn.functional.dropout(attention, self.dropout, self.training)

    def propagate(self, edge_index, size=None, *, x, alpha):
        """The sum of all messages to each node; the heads are the batch dimension."""
        src, dst = ends(self, edge_index)
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


def spirals(points=400):
    """Points (N, 2) on two spirals, with noise, and the spiral of each, (N,)."""
    radius = torch.rand(points)
    label = torch.arange(points) % 2
    angle = 6 * radius + torch.pi * label
    at = torch.stack([angle.cos(), angle.sin()], 1) * radius[:, None]
    return at + torch.randn_like(at) / 50, label


def draw(points, label, labelled, predicted):
    """The labels that training saw, and the predictions for the other points."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
    for axis, rows, colour, title in (
        (axes[0], labelled, label, "labelled points"),
        (axes[1], ~labelled, predicted, "predictions for the others"),
    ):
        axis.scatter(*points[rows].T, c=colour[rows], s=10, cmap="coolwarm")
        axis.set(title=title, aspect="equal", xticks=[], yticks=[])
    figure.savefig("pyg_layers.png", dpi=80)


def learn(steps=60):
    """Train on half of the points; all points, their labels, which were seen, and predictions."""
    torch.manual_seed(0)
    points, label = spirals()
    labelled = torch.rand(len(points)) < 0.5
    edge_index = torch.stack(products.knn_graph(points, 8))  # from neighbours to points
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        scores = net(points, edge_index)
        loss = nn.functional.cross_entropy(scores[labelled], label[labelled])
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    return points, label, labelled, net(points, edge_index).argmax(1)


def main():
    """Train, print the accuracy on the points without a label, and draw them."""
    points, label, labelled, predicted = learn()
    accuracy = (predicted == label)[~labelled].float().mean()
    print(f"{accuracy:.0%} of the points without a label are predicted right")
    draw(points, label, labelled, predicted)


if __name__ == "__main__":
    main()
