r"""voxels: what each point of a scan belongs to
============================================

A laser scanner gives a cloud of points. Each point is to be labelled: ground, wall, pole or tree.
We make scenes with known labels, cut them into voxels, and train a small U-shaped network of
`torchweft.voxels` that computes on the occupied voxels alone. Ten minutes to read.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from torchweft import voxels

torch.manual_seed(0)
plt.rcParams.update({"figure.figsize": (5, 4.2), "font.size": 12})

# %%
# Data
# ----
# A scene is 12 m by 12 m: uneven ground, two walls, three poles and three trees, at random places.
# Points have noise of 2 cm, and nothing but their positions.
CLASSES = ["ground", "wall", "pole", "tree"]


def ground(count):
    """An uneven plane."""
    x, y = 12 * torch.rand(2, count)
    return torch.stack([x, y, 0.15 * torch.sin(x) * torch.cos(0.7 * y)], 1)


def wall(count):
    """A vertical rectangle, 4 m long and 2.5 m high, in any direction."""
    angle = 6.3 * torch.rand(1)
    along = 4 * torch.rand(count)
    place = 3 + 6 * torch.rand(2)
    return torch.stack(
        [place[0] + along * angle.cos(), place[1] + along * angle.sin(), 2.5 * torch.rand(count)], 1
    )


def pole(count):
    """A cylinder of 10 cm radius, 3 m high."""
    angle, place = 6.3 * torch.rand(count), 1 + 10 * torch.rand(2)
    ring = 0.1 * torch.stack([angle.cos(), angle.sin()], 1)
    return torch.cat([place + ring, 3 * torch.rand(count, 1)], 1)


def tree(count):
    """A trunk of 1.2 m, and leaves in a ball of 0.9 m above it."""
    place = 1 + 10 * torch.rand(2)
    trunk = torch.cat(
        [place + 0.1 * torch.randn(count // 4, 2), 1.2 * torch.rand(count // 4, 1)], 1
    )
    leaves = nn.functional.normalize(torch.randn(count - count // 4, 3), dim=1)
    leaves = leaves * 0.9 * torch.rand(len(leaves), 1) ** 0.5
    return torch.cat([trunk, leaves + torch.cat([place, torch.tensor([1.9])])])


def scene():
    """Points (N, 3) in metres, and the class of each."""
    parts = [ground(4000)] + [wall(700) for _ in "12"] + [pole(150) for _ in "123"]
    parts += [tree(400) for _ in "123"]
    labels = [0] + 2 * [1] + 3 * [2] + 3 * [3]
    label = torch.cat([torch.full((len(p),), k) for p, k in zip(parts, labels, strict=True)])
    points = torch.cat(parts)
    return points + 0.02 * torch.randn_like(points), label


train, held_out = [scene() for _ in range(32)], [scene() for _ in range(8)]
print(f"{len(train)} scenes to train on, {len(held_out)} held out")
print(f"{len(train[0][0])} points each")

# %%
# From points to voxels
# ---------------------
# `voxelize` finds the voxels of 20 cm that hold a point, and the voxel of each point. The features
# of a voxel are the mean of the features of its points: here their place within the voxel and their
# height. `batch` gives the scene of each point, so several scenes are one tensor. All scenes have
# the same box of voxels: 16 m by 16 m, 5.6 m high, from the corner `origin` on.
SIZE = 0.2
BOX = {"origin": -2.0, "spatial_shape": (80, 80, 28)}


def as_voxels(scenes):
    """A sparse tensor, the voxel of each point, and the labels."""
    points = torch.cat([p for p, _ in scenes])
    number = torch.arange(len(scenes)).repeat_interleave(torch.tensor([len(p) for p, _ in scenes]))
    within = (points / SIZE) % 1 - 0.5
    features = torch.cat([torch.ones(len(points), 1), within, points[:, 2:]], 1)
    tensor, voxel_of_point = voxels.voxelize(points, SIZE, features, number, **BOX)
    return tensor, voxel_of_point, torch.cat([label for _, label in scenes])


tensor, voxel_of_point, label = as_voxels(held_out[:1])
print(tensor)
print(f"{len(tensor.F) / (80 * 80 * 28):.1%} of the voxels of the box are occupied")

# %%
# A network
# ---------
# - `SubMConv3d` computes at the occupied voxels alone.
# - `SparseConv3d` with stride 2 goes to voxels of twice the size.
# - `SparseInverseConv3d` goes back to the voxels that the layer with its `indice_key` came from.
#
# Where each kernel meets which voxels is found once for each level, and reused by all layers and by
# the backward pass.


def block(in_channels, out_channels):
    """A submanifold convolution, batch norm and ReLU, twice."""
    layers = []
    for channels in (in_channels, out_channels):
        layers += [voxels.SubMConv3d(channels, out_channels, 3, bias=False)]
        layers += [voxels.SparseBatchNorm(out_channels), nn.ReLU()]
    return voxels.SparseSequential(*layers)


class UNet(nn.Module):
    """Two levels down, two up; features of the way down are joined on the way up."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([block(5, 16), block(32, 32), block(32, 32)])
        self.down = nn.ModuleList(
            voxels.SparseConv3d(c, 32, 2, stride=2, indice_key=f"level{i}")
            for i, c in enumerate((16, 32))
        )
        self.up = nn.ModuleList(
            voxels.SparseInverseConv3d(32, 16, 2, indice_key=f"level{i}") for i in range(2)
        )
        self.joined = nn.ModuleList([block(32, 32), block(48, 32)])
        self.out = nn.Linear(32, len(CLASSES))

    def forward(self, x):
        kept = []
        for level, down in enumerate(self.down):
            x = self.blocks[level](x)
            kept.append(x)
            x = down(x)
        x = self.blocks[2](x)
        for level in (1, 0):
            x = self.joined[level](voxels.cat([self.up[level](x), kept[level]]))
        return self.out(x.F)  # (voxels, classes)


# %%
# Training
# --------
# The loss is taken at the points: each reads the scores of its voxel. Rare classes get a larger
# weight.
model = UNet()
print(f"{sum(p.numel() for p in model.parameters())} parameters")
counts = torch.cat([label for _, label in train]).bincount()
weight = (counts.sum() / counts).sqrt()
EPOCHS, BATCH = 12, 4
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, EPOCHS * len(train) // BATCH)
curve = []
for _ in range(EPOCHS):
    for rows in torch.randperm(len(train)).split(BATCH):
        tensor, voxel_of_point, label = as_voxels([train[row] for row in rows])
        loss = nn.functional.cross_entropy(model(tensor)[voxel_of_point], label, weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        curve.append(loss.item())

# %%
# How good is it?
# ---------------
# On scenes that the network has not seen. The constant guess calls every point ground. The
# *intersection over union* of a class is the share of points that are right among those that are of
# the class or are called so: it counts rare classes as much as frequent ones.
model.eval()
tensor, voxel_of_point, label = as_voxels(held_out)
with torch.no_grad():
    found = model(tensor)[voxel_of_point].argmax(1)


def unions(found):
    """Intersection over union of each class."""
    both = torch.stack([((found == k) & (label == k)).sum() for k in range(len(CLASSES))])
    either = torch.stack([((found == k) | (label == k)).sum() for k in range(len(CLASSES))])
    return both / either


guess = torch.zeros_like(label)
right, frequent = ((x == label).float().mean() for x in (found, guess))
print("             network  guess")
print(f"points right {right:7.3f} {frequent:6.3f}")
for name, ours, constant in zip(CLASSES, unions(found), unions(guess), strict=True):
    print(f"{name:12s} {ours:7.3f} {constant:6.3f}")

# %%
figure, axis = plt.subplots()
axis.plot(curve)
axis.set(xlabel="step", ylabel="loss", ylim=(0, None))
figure.tight_layout()

# %%
# One held-out scene, seen from above and from the side, coloured by the class that was found;
# points that are wrong are black.
points, truth = held_out[0]
shown = found[: len(points)]
colours = torch.tensor([[0.8, 0.8, 0.75], [0.8, 0.4, 0.2], [0.2, 0.4, 0.8], [0.3, 0.65, 0.3]])
figure, axes = plt.subplots(2, 1, figsize=(5, 7), height_ratios=[3, 1], sharex=True)
for axis, rows in zip(axes, ([0, 1], [0, 2]), strict=True):
    x, y = points[:, rows].T
    axis.scatter(x, y, s=2, c=colours[shown].numpy())
    wrong = shown != truth
    axis.scatter(x[wrong], y[wrong], s=4, c="black")
    axis.set_aspect("equal")
for name, colour in zip(CLASSES, colours, strict=True):
    axes[0].scatter([], [], color=colour.tolist(), label=name)
axes[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
axes[0].set(ylabel="y, m")
axes[1].set(xlabel="x, m", ylabel="height, m")
figure.tight_layout()
plt.show()
