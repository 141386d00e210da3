r"""A tensor product given by a table, trained on forces
====================================================

A product of representations is a short table of terms,

.. math:: z_M = \sum_{t \to M} s_t \, x_{i(t)} \, y_{j(t)},

which is stored as an *info*. Here the table gives quadrupoles of the directions to neighbours; an
energy is computed from these, and its parameters are learned from **forces**. Forces are gradients,
so learning takes second derivatives: products are differentiable to any order.
"""

import math

import matplotlib.pyplot as plt
import torch

from torchweft import products

# %%
# The five quadrupole components of a vector (x, y, z): xy, yz, xz, (x²−y²)/2 and (2z²−x²−y²)/(2√3).
# A row of the table reads: factor, component of the first vector, of the second, of the result.
ROOT = 2 * math.sqrt(3)
terms = [
    (1.0, 0, 1, 0), (1.0, 1, 2, 1), (1.0, 0, 2, 2), (0.5, 0, 0, 3), (-0.5, 1, 1, 3),
    (2 / ROOT, 2, 2, 4), (-1 / ROOT, 0, 0, 4), (-1 / ROOT, 1, 1, 4),
]  # fmt: skip
scale, first, second, component = zip(*terms, strict=True)
info = products.sparse_product_info(first, second, component, scale)
print(info.seg_out.tolist())

# %%
# Twenty atoms, each with all others as neighbours; edges sorted by the atom they lead to.
torch.manual_seed(0)
atoms = 2.5 * torch.rand(20, 3, dtype=torch.float64)
dst, src = (~torch.eye(len(atoms), dtype=torch.bool)).nonzero().T
seg = torch.arange(len(atoms) + 1) * (len(atoms) - 1)


# %%
# The quadrupole of an atom's neighbourhood, weighted by distance in channels c, and the energy:
#
# .. math:: Q_{i} = \sum_{j} e^{-\alpha_c r_{ij}^2} \, (r_{ij} \otimes r_{ij})_{l=2}, \qquad
#           E = \sum_{i,c} a_c \, |Q_{ic}|^2
#
# The lengths of quadrupoles are invariant under rotations of the atoms, and so is the energy.
def energy(positions, a, alpha):
    """The energy E, a scalar."""
    r = positions[src] - positions[dst]
    quadrupoles = products.sparse_mul(r.unsqueeze(2), r.unsqueeze(2), info)  # (edges, 5, 1)
    weights = torch.exp(-alpha * r.square().sum(1, keepdim=True))  # (edges, channels)
    around = products.outer_segment(quadrupoles.squeeze(2), weights, seg)  # (atoms, 5, channels)
    return (a * around.square().sum((0, 1))).sum()


def forces(positions, a, alpha):
    """−∂E/∂positions, which can be differentiated again."""
    positions = positions.requires_grad_()
    (gradient,) = torch.autograd.grad(energy(positions, a, alpha), positions, create_graph=True)
    return -gradient


turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
a, alpha = torch.tensor([[1.0, -0.5], [0.8, 2.0]], dtype=torch.float64)
print(f"energy {energy(atoms, a, alpha):.12f}, turned {energy(atoms @ turn, a, alpha):.12f}")

# %%
# Force matching: the parameters start from wrong values, and the loss is that of the forces alone.
seen = forces(atoms.clone(), a, alpha).detach()
guess_a = torch.tensor([0.6, -0.3], dtype=torch.float64, requires_grad=True)
guess_alpha = torch.tensor([0.6, 1.6], dtype=torch.float64, requires_grad=True)
optimizer = torch.optim.LBFGS([guess_a, guess_alpha], max_iter=60, line_search_fn="strong_wolfe")
before = forces(atoms.clone(), guess_a, guess_alpha).detach()
path = []


def error():
    """Mean square error of the forces, and its gradient: a gradient of a gradient."""
    path.append([*guess_a.tolist(), *guess_alpha.tolist()])
    optimizer.zero_grad()
    wrong = (forces(atoms.clone(), guess_a, guess_alpha) - seen).square().mean()
    wrong.backward()
    return wrong.detach()


optimizer.step(error)
after = forces(atoms.clone(), guess_a, guess_alpha).detach()

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
for values, true, name in zip(
    zip(*path, strict=True), [*a, *alpha], ["a₁", "a₂", "α₁", "α₂"], strict=True
):
    (line,) = left.plot(values, label=name)
    left.axhline(float(true), color=line.get_color(), linewidth=0.8, linestyle="dashed")
left.set(title="parameters; dashed: the true ones", xlabel="evaluation")
left.legend(ncols=2)
right.scatter(seen.flatten(), before.flatten(), s=8, label="before", color="silver")
right.scatter(seen.flatten(), after.flatten(), s=8, label="learned")
right.set(title="force components", xlabel="true", ylabel="of the model")
right.legend()
plt.show()
