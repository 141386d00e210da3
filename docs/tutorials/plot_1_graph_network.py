"""Products: a graph network, from one layer to a trained model
============================================================

Papers cite papers, mostly of their own topic. Of 3000 papers we know noisy features, the
citations, and the topics of 150; we want the topics of the others. On the way we build an
attention layer from three functions of `torchweft.products`. Ten minutes to read.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from torchweft import explain, products

torch.manual_seed(0)
plt.rcParams.update({"figure.figsize": (5, 3.6), "font.size": 12})

# %%
# Data
# ----
# Each paper has one of five topics and cites six others: four times in five one of its own topic.
# Its 32 features are the mean of its topic and much noise.
PAPERS, TOPICS, CITED = 3000, 5, 6
topic = torch.randint(TOPICS, (PAPERS,))
features = torch.randn(TOPICS, 32)[topic] + 4 * torch.randn(PAPERS, 32)

papers_of = [(topic == t).nonzero().flatten() for t in range(TOPICS)]
same = torch.stack([papers_of[t][torch.randint(len(papers_of[t]), (CITED,))] for t in topic])
other = torch.randint(PAPERS, (PAPERS, CITED))
cited = torch.where(torch.rand(PAPERS, CITED) < 0.8, same, other).flatten()
citing = torch.arange(PAPERS).repeat_interleave(CITED)

# %%
# Messages go both ways, and from each paper to itself. `src` and `dst` are the two ends of an edge.
itself = torch.arange(PAPERS)
src, dst = torch.cat([cited, citing, itself]), torch.cat([citing, cited, itself])
print(f"{PAPERS} papers, {len(src)} edges")

# %%
# Topics of 150 papers are known, 300 others serve for choosing, and 2550 are held out: nothing
# below looks at the topics of these before the last step.
order = torch.randperm(PAPERS)
known, choosing, held_out = order[:150], order[150:450], order[450:]

# %%
# A sum over edges
# ----------------
# The simplest layer adds up what the neighbours have, times a weight of the edge:
#
# .. math:: z_d = \sum_{e \to d} w_e\, x_{\text{src}(e)}
#
# `sparse_product_info` checks the edges and sorts them once, by the node they lead to.
# `sparse_vecsca` multiplies a row of x by the weight of an edge and sums, in one pass: there is no
# array of edges times features.
edges = products.sparse_product_info(index1=src, index=dst, out_size=PAPERS)
ones = torch.ones(len(src))
sums = products.sparse_vecsca(features, ones, edges)
print(sums.shape)

# %%
# The same in plain PyTorch gathers a row for each edge first, and adds them up afterwards.
gathered = features[src] * ones[:, None]
plain = torch.zeros_like(features).index_add(0, dst, gathered)
print(f"largest difference {(sums - plain).abs().max():.1e}; {gathered.numel()} numbers between")

# %%
# Attention
# ---------
# A paper should listen to neighbours that resemble it. The score of an edge is the inner product of
# a *query* of its target and a *key* of its source; a softmax over the edges that arrive at a node
# makes the scores weights. Each step is one function:
#
# - `indexed_inner(query, key, dst, src)`: a number for each edge;
# - `segment_softmax(score, dst)`: weights that sum to 1 for each node;
# - `sparse_vecsca(value, weight, edges)`: the weighted sum.


class Attention(nn.Module):
    """z_d = Σ_{e → d} softmax_e(⟨query_d, key_src⟩ / √C) · value_src, and a linear map of x_d."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.query, self.key, self.value, self.own = (
            nn.Linear(in_features, out_features) for _ in range(4)
        )

    def forward(self, x, src, dst, edges):
        query, key = self.query(x), self.key(x)
        score = products.indexed_inner(query, key, dst, src) / query.shape[1] ** 0.5
        weight = products.segment_softmax(score, dst, num_segments=len(x))
        return self.own(x) + products.sparse_vecsca(self.value(x), weight, edges)


# %%
# Every function is differentiable, to any order, and gives the same bits at every call. The weights
# of edges that arrive at a node sum to 1:
score = torch.randn(len(src))
total = products.segment_sum(products.segment_softmax(score, dst), dst)
print(f"sums of weights between {total.min():.6f} and {total.max():.6f}")

# %%
# A network and its training
# --------------------------
# Two layers. For comparison, the same training of a network that does not see the citations.


class GraphNetwork(nn.Module):
    """Scores of the topics, (papers, topics)."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(32, 32), Attention(32, TOPICS)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        x = torch.relu(self.first(self.dropout(x), src, dst, edges))
        return self.second(self.dropout(x), src, dst, edges)


def share_right(model, papers):
    """The share of papers whose topic is right."""
    model.eval()
    with torch.no_grad():
        return (model(features)[papers].argmax(1) == topic[papers]).float().mean().item()


def train(model, steps=100):
    """The model at the step that is best on the papers for choosing, and how that share grew."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-3)
    curve, best = [], {}
    for _ in range(steps):
        model.train()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features)[known], topic[known]).backward()
        optimizer.step()
        curve.append(share_right(model, choosing))
        if curve[-1] == max(curve):
            best = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best)
    return curve


graph_network = GraphNetwork()
alone = nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, TOPICS))
curves = {"with citations": train(graph_network), "without": train(alone)}

# %%
# How good is it?
# ---------------
# On the held-out papers, beside the constant guess: the most frequent topic of the known ones.
guess = (topic[held_out] == topic[known].mode().values).float().mean().item()
print(f"with citations {share_right(graph_network, held_out):.3f}")
print(f"without        {share_right(alone, held_out):.3f}")
print(f"constant guess {guess:.3f}")

for name, curve in curves.items():
    plt.plot(curve, label=name)
plt.axhline(guess, color="grey", linestyle="dashed", label="constant guess")
plt.xlabel("step")
plt.ylabel("share of right topics")
plt.ylim(0, 1)
plt.legend()
plt.tight_layout()
plt.show()

# %%
# What a call does
# ----------------
# `explain` runs a call and says which kernel served it, and the bytes and operations that it cannot
# avoid. On a GPU the same lines run Triton's kernels: move the model and the tensors there.
print(explain(products.sparse_vecsca, features, ones, edges))
