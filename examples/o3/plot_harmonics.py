r"""Spherical harmonics and their products
======================================

Spherical harmonics :math:`Y_l` are 2l + 1 functions of a direction; a rotation of space maps them
to linear combinations of each other. The product of degrees :math:`l_1` and :math:`l_2` contains
each degree from :math:`|l_1 - l_2|` to :math:`l_1 + l_2` once, and 3j symbols extract it:

.. math:: \sum_{ab} C^{l_1 l_2 l_3}_{abm}\, Y_{l_1 a}(r)\, Y_{l_2 b}(r) \;\propto\; Y_{l_3 m}(r).
"""

import matplotlib.pyplot as plt
import torch

from torchweft import o3

# %%
# Every direction, on a grid. The polar axis is y.
beta, alpha = torch.meshgrid(
    torch.linspace(0, torch.pi, 60), torch.linspace(0, 2 * torch.pi, 120), indexing="ij"
)
directions = o3.angles_to_xyz(alpha, beta)
y = o3.spherical_harmonics([0, 1, 2], directions, True, "component")

# %%
# Degrees 0, 1 and 2. The distance of the surface from the centre is the absolute value of the
# function in that direction, the colour is its sign.
figure = plt.figure(figsize=(9, 5.4), layout="constrained")
for number, values in enumerate(y.unbind(-1)):
    degree = int(number**0.5)
    place = 5 * degree + 3 + number - degree**2 - degree
    axis = figure.add_subplot(3, 5, place, projection="3d")
    x_, y_, z_ = (directions * values.abs().unsqueeze(-1)).unbind(-1)
    colours = plt.cm.coolwarm((values.sign().numpy() + 1) / 2)
    axis.plot_surface(
        z_.numpy(), x_.numpy(), y_.numpy(), facecolors=colours,
        rcount=60, ccount=60, linewidth=0, shade=True,
    )  # fmt: skip
    size = float(values.abs().max())
    axis.set(xlim=(-size, size), ylim=(-size, size), zlim=(-size, size))
    axis.set_title(f"l={degree}, m={number - degree**2 - degree}", fontsize=9, y=0.95)
    axis.set_box_aspect((1, 1, 1), zoom=1.4)
    axis.set_axis_off()
plt.show()

# %%
# The product 1 ⊗ 1 → 2 of a direction with itself is :math:`Y_2` of the direction, up to a factor.
# The product 1 ⊗ 1 → 1 is the cross product, which is zero for equal vectors.
one, two = y[..., 1:4], y[..., 4:9]
for degree in (0, 1, 2):
    found = torch.einsum("abm,...a,...b->...m", o3.wigner_3j(1, 1, degree), one, one)
    print(f"1 ⊗ 1 → {degree}: length {found.norm(dim=-1).max():.4f}")
ratio = found / two
print(f"1 ⊗ 1 → 2 over Y₂: {ratio[30, 17, 0]:.4f} everywhere")

# %%
# Gradients are finite everywhere, also at the pole and at the zero vector.
there = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
o3.spherical_harmonics([1, 2, 3], there, True, "component").sum().backward()
print(there.grad.tolist())
