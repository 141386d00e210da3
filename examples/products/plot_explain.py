"""What a call launches, and the bytes it must move
================================================

Every function has ``explain``, which runs a call once and reports its kernels, and the bytes and
operations that no implementation can avoid. A weighted sum over edges takes three passes in plain
torch: gather, multiply, add. Each writes or reads a row for every edge; the fused sum does not.
"""

import time

import matplotlib.pyplot as plt
import torch

from torchweft import products

# %%
# A graph of 4,000 nodes with 32 edges into each, and a weight for each edge.
torch.manual_seed(0)
nodes, degree = 4000, 32
src = torch.randint(nodes, (nodes * degree,))
dst = torch.arange(nodes).repeat_interleave(degree)
seg = torch.arange(nodes + 1) * degree
weight = torch.randn(nodes * degree)


def fused(x):
    """Σ over the edges into a node, in one call."""
    return products.indexed_vecsca_segment(x, weight, src, None, seg)


def three_passes(x):
    """The same in plain torch."""
    messages = x.index_select(0, src) * weight.unsqueeze(1)
    return torch.zeros_like(x).index_add(0, dst, messages)


# %%
# The report of one call. The bytes are those of the inputs and the output, each counted once.
x = torch.randn(nodes, 64)
print(products.indexed_vecsca_segment.explain(x, weight, src, None, seg))

# %%
# ``torchweft.explain`` takes any function and reports all its calls: here those of a gradient.
import torchweft  # noqa: E402


def gradient(x):
    """Of |fused(x)|²: a forward and a backward pass."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(fused(x).square().sum(), x)


print(torchweft.explain(gradient, x))


# %%
# Bytes and times over the width of the rows. The three passes write and read the messages:
# gather (write), multiply (read, write), add (read), 4 · edges · width numbers in all.
def milliseconds(function, x, rounds=7):
    """The median of a few calls."""
    function(x)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        function(x)
        times.append(time.perf_counter() - begin)
    return 1e3 * sorted(times)[rounds // 2]


widths = [4, 8, 16, 32, 64, 128]
inputs = [torch.randn(nodes, width) for width in widths]
least = [torchweft.explain(fused, x).bytes_min / 1e6 for x in inputs]
passes = [low + 4 * 4 * len(src) * width / 1e6 for low, width in zip(least, widths, strict=True)]
times = {
    name: [milliseconds(f, x) for x in inputs]
    for name, f in (("torchweft", fused), ("three passes of torch", three_passes))
}

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
left.loglog(widths, least, "o-", label="torchweft")
left.loglog(widths, passes, "o-", label="three passes of torch")
left.set(title="bytes that must move", xlabel="width of a row", ylabel="MB")
left.legend()
for name, values in times.items():
    right.loglog(widths, values, "o-", label=name)
right.set(title="time on this machine", xlabel="width of a row", ylabel="ms")
plt.show()
