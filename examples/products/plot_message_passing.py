r"""Learn the weights of a graph's edges
====================================

A layer of a graph network sums weighted messages,

.. math:: z_m = \sum_{e \to m} w_e \, x_{\mathrm{src}(e)},

in one call: ``indexed_vecsca_segment``. Here heat spreads over a network of pipes, and the
conductance of each pipe is learned from temperatures, by gradient descent.
"""

import matplotlib.pyplot as plt
import torch

from torchweft import products

# %%
# A network: points of the plane, and pipes in both directions between those that are close.
# Edges are sorted by the node they lead to, and ``seg`` says where each node's edges begin.
torch.manual_seed(0)
places = torch.rand(150, 2)
close = torch.cdist(places, places) < 0.13
close.fill_diagonal_(False)
dst, src = close.nonzero().T  # sorted by dst
seg = torch.cat([torch.zeros(1, dtype=torch.int64), close.sum(1).cumsum(0)])


# %%
# A step of diffusion: heat flows into each node in proportion to the differences of temperature.
# ``x`` has a row of temperatures for each node, one column for each experiment.
def spread(x, conductance, steps=6):
    """x_m ← x_m + 0.08 Σ_{e → m} c_e (x_src(e) − x_m), `steps` times."""
    ones = torch.ones_like(x[:, :1])
    total = products.indexed_vecsca_segment(ones, conductance, src, None, seg)
    for _ in range(steps):
        inflow = products.indexed_vecsca_segment(x, conductance, src, None, seg)
        x = x + 0.08 * (inflow - total * x)
    return x


# %%
# The true conductances are larger on the right. Forty experiments start from random temperatures.
middle = (places[src] + places[dst]) / 2
true = 0.2 + 0.8 * torch.sigmoid(12 * (middle[:, 0] - 0.5))
start = torch.randn(len(places), 40)
seen = spread(start, true)

# %%
# Learning: the gradient of the error with respect to all conductances is again such a sum, over the
# same tables sorted another way. They are sorted once, at the first call.
learned = torch.full((len(src),), 0.5, requires_grad=True)
optimizer = torch.optim.Adam([learned], lr=0.03)
errors = []
for _ in range(150):
    optimizer.zero_grad()
    error = (spread(start, learned) - seen).square().mean()
    error.backward()
    optimizer.step()
    errors.append(error.item())
print(f"error: {errors[0]:.1e} at first, {errors[-1]:.1e} at last")

# %%
# The learned conductances are close to the true ones; the largest converge last.
learned = learned.detach()
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
left.quiver(
    *places[src].T, *(places[dst] - places[src]).T, learned,
    angles="xy", scale_units="xy", scale=1, width=0.003, headwidth=1, cmap="viridis", clim=(0, 1),
)  # fmt: skip
left.set(title="learned conductance of each pipe", aspect="equal", xticks=[], yticks=[])
right.plot([0.2, 1], [0.2, 1], color="grey", linewidth=1)
right.scatter(true, learned, s=6)
right.set(title="each pipe", xlabel="true conductance", ylabel="learned from temperatures")
plt.show()
