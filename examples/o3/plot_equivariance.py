r"""An equivariant layer
====================

Features of an equivariant layer are scalars, vectors and tensors of higher degree. When the atoms
are rotated by :math:`R`, the features are rotated too: scalars stay, vectors are multiplied by
:math:`R`, degree l by its matrix :math:`D_l(R)`,

.. math:: f(R\,x) = D(R)\, f(x), \qquad
          f(x)_i = \sum_{j} Y(x_j - x_i) \otimes h_j \; w(|x_j - x_i|).

This holds for any weights; here they are random.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from ase.build import molecule

from torchweft import o3

# %%
# Ethanol; all atoms within 3 Å are neighbours. The input feature of an atom is its atomic number.
atoms = molecule("CH3CH2OH")
position = torch.from_numpy(atoms.positions - atoms.positions.mean(0))
number = torch.from_numpy(atoms.numbers).double().unsqueeze(1)
near = torch.cdist(position, position) < 3
src, dst = near.fill_diagonal_(False).nonzero().T
graph = o3.Graph(src, dst, len(atoms))

# %%
# One tensor product on the edges: scalars times harmonics, one path a degree, with weights from the
# distance.
torch.manual_seed(0)
harmonics = o3.SphericalHarmonics("1x0e+1x1o+1x2e", True, "component")
paths = [(0, k, k, "uvu", True) for k in range(3)]
conv = o3.TensorProductConv("1x0e", harmonics.irreps_out, "1x0e+1x1o+1x2e", paths)
bessel, envelope = o3.BesselBasis(3.0, 4), o3.PolynomialCutoff(3.0)
radial_weight = torch.randn(4, conv.weight_numel, dtype=torch.float64)


def layer(position):
    """(atoms, 1 + 3 + 5): a scalar, a vector and a quadrupole of each atom."""
    across = position[src] - position[dst]
    length = across.norm(dim=1, keepdim=True)
    radial = bessel(length) * envelope(length)
    return conv(number, harmonics(across), None, graph, radial=radial, radial_weight=radial_weight)


# %%
# The atoms are rotated and reflected: their features are the features before, times :math:`D(R)`.
turn = -o3.rand_matrix(dtype=torch.float64)
before, after = layer(position), layer(position @ turn.T)
expected = before @ conv.irreps_out.D_from_matrix(turn).T
print(
    f"largest feature {before.abs().max():.2f}, largest error {(after - expected).abs().max():.0e}"
)

# %%
# The vector feature of each atom, for four rotations in the plane of the picture.
colours = {1: "lightgrey", 6: "dimgrey", 8: "firebrick"}
figure, axes = plt.subplots(1, 4, figsize=(11, 3.2), layout="constrained")
for axis, angle in zip(axes, np.radians([0, 40, 80, 120]), strict=True):
    turned = position @ o3.matrix_z(torch.tensor(angle)).T
    x, y, _ = turned.T
    vectors = layer(turned)[:, 1:4]
    bonds = (torch.cdist(position, position) < 1.6).triu(1).nonzero().T
    axis.plot(x[bonds], y[bonds], color="grey", linewidth=3, zorder=1)
    axis.scatter(x, y, s=130, c=[colours[n] for n in atoms.numbers], edgecolors="black", zorder=2)
    axis.quiver(x, y, vectors[:, 0], vectors[:, 1], color="tab:orange", width=0.012, zorder=3)
    axis.set(title=f"{np.degrees(angle):.0f}°", xlim=(-2.6, 2.6), ylim=(-2.6, 2.6), aspect="equal")
    axis.set_axis_off()
plt.show()
