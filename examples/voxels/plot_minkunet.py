"""MinkUNet: a sparse U-Net that labels every voxel of a scene
===========================================================

The encoder halves the grid four times by strided convolutions. The decoder undoes each of them with
its inverse, found by `indice_key`, so that it returns to the voxels of that level, and reads the
encoder's features beside its own (Choy et al. 2019 for 14 and 18 layers, Tang et al. 2020 for 42).

The network learns to tell floor, boxes and balls of generated rooms apart, and predicts the labels
of a room that it was not trained on. ``python plot_minkunet.py --layers 42 --steps 500`` trains a
larger one.
"""

import argparse

import torch
from torch import nn

from torchweft.voxels import (
    SparseBatchNorm,
    SparseConv3d,
    SparseInverseConv3d,
    SparseModule,
    SparseSequential,
    SubMConv3d,
    cat,
    voxelize,
)

# layers: (channels of the stem, of four levels down and of four up), residual blocks per level,
# kernel sizes of the stem
NETWORKS = {
    14: ((32, 32, 64, 128, 256, 128, 128, 96, 96), 1, (5,)),
    18: ((32, 32, 64, 128, 256, 128, 128, 96, 96), 2, (5,)),
    42: ((32, 32, 64, 128, 256, 256, 128, 96, 96), 2, (3, 3)),
}
CLASSES = ("floor", "box", "ball")


def normalised(convolution):
    """A convolution, then batch norm and ReLU."""
    norm = SparseBatchNorm(convolution.out_channels)
    return SparseSequential(convolution, norm, nn.ReLU())


class ResidualBlock(SparseModule):
    """relu(shortcut(x) + f(x)): f is two convolutions; the shortcut is linear or the identity."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first = normalised(SubMConv3d(in_channels, out_channels, 3, bias=False))
        self.second = SubMConv3d(out_channels, out_channels, 3, bias=False)
        self.norm = SparseBatchNorm(out_channels)
        self.shortcut = SparseSequential()
        if in_channels != out_channels:
            self.shortcut.append(SubMConv3d(in_channels, out_channels, 1, bias=False))
            self.shortcut.append(SparseBatchNorm(out_channels))

    def forward(self, x):
        """Features on the voxels of x."""
        y, skip = self.first(x), self.shortcut(x)
        return self.second(y, norm=self.norm, residual=skip, activation="relu")


def blocks(in_channels, out_channels, count):
    """`count` residual blocks; the first changes the number of channels."""
    rest = [ResidualBlock(out_channels, out_channels) for _ in range(count - 1)]
    return SparseSequential(ResidualBlock(in_channels, out_channels), *rest)


class MinkUNet(SparseModule):
    """Scores of the classes for every voxel; all channels are those of the network times width."""

    def __init__(self, in_channels, classes, layers=18, width=1.0):
        super().__init__()
        channels, count, kernels = NETWORKS[layers]
        channels = [int(width * c) for c in channels]
        stem, down, up = channels[0], channels[:5], channels[4:]
        sizes = (in_channels, *[stem] * len(kernels))
        self.stem = SparseSequential(
            *[
                normalised(SubMConv3d(c, stem, k, bias=False))
                for c, k in zip(sizes[:-1], kernels, strict=True)
            ]
        )
        self.shrink, self.encode = nn.ModuleList(), nn.ModuleList()
        self.grow, self.decode = nn.ModuleList(), nn.ModuleList()
        for level in range(4):
            fine, coarse = down[level], down[level + 1]
            key = f"level {level}"
            self.shrink.append(
                normalised(SparseConv3d(fine, fine, 2, 2, bias=False, indice_key=key))
            )
            self.encode.append(blocks(fine, coarse, count))
        for level in range(4):
            coarse, fine, skip = up[level], up[level + 1], down[3 - level]
            key = f"level {3 - level}"
            self.grow.append(
                normalised(SparseInverseConv3d(coarse, fine, 2, bias=False, indice_key=key))
            )
            self.decode.append(blocks(fine + skip, fine, count))
        self.head = nn.Linear(up[-1], classes)

    def forward(self, x):
        """(N, classes) features on the input's voxels."""
        x = self.stem(x)
        skips = []
        for shrink, encode in zip(self.shrink, self.encode, strict=True):
            skips.append(x)
            x = encode(shrink(x))
        for grow, decode in zip(self.grow, self.decode, strict=True):
            x = decode(cat([grow(x), skips.pop()]))
        return x.replace(self.head(x.feats))


def room(generator, points=3000):
    """Points (P, 3) on a floor, a box and a ball, in metres, and the class of each point (P,)."""
    part = points // 3
    at = torch.rand(2, 2, generator=generator) * 2 + 0.5
    floor = torch.rand(part, 3, generator=generator) * torch.tensor([3.2, 3.2, 0.0])
    box = torch.rand(part, 3, generator=generator)
    side = torch.randint(3, (part, 1), generator=generator)
    box.scatter_(1, side, (box.gather(1, side) > 0.5).float())
    ball = nn.functional.normalize(torch.randn(part, 3, generator=generator))
    box[:, :2] += at[0] - 0.5
    ball = 0.5 * ball + torch.cat([at[1], torch.tensor([0.5])])
    label = torch.arange(3).repeat_interleave(part)
    return torch.cat([floor, box, ball]).clamp(min=0), label


def batch_of_rooms(generator, rooms=2, size=0.1):
    """A SparseTensor of several rooms, (N, 4) features, and the label of each voxel (N,)."""
    drawn = [room(generator) for _ in range(rooms)]
    points, label = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    sample = torch.arange(rooms).repeat_interleave(len(drawn[0][1]))
    votes = nn.functional.one_hot(label, len(CLASSES)).float()
    tensor, _ = voxelize(points, size, torch.cat([points, votes], 1), sample, batch_size=rooms)
    inside = tensor.feats[:, :3] / size - tensor.C[:, 1:]  # mean of its points, from its corner
    height = tensor.feats[:, 2:3]
    return tensor.replace(torch.cat([inside, height], 1)), tensor.feats[:, 3:].argmax(1)


def train(layers, steps, seed=0):
    """The network after some steps of AdamW, each on two new rooms, and the loss of each step."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    network = MinkUNet(4, len(CLASSES), layers)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    losses = []
    for step in range(1, steps + 1):
        tensor, label = batch_of_rooms(generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(tensor).feats, label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 5 == 0:
            print(f"step {step:3d}   loss {loss.item():.3f}")
    return network.eval(), losses


def draw(coords, label, predicted):
    """Voxels of a room in the colours of their true and of their predicted classes."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(9, 4), layout="constrained")
    for place, (title, values) in enumerate((("true", label), ("predicted", predicted)), 1):
        axis = figure.add_subplot(1, 2, place, projection="3d")
        for number, name in enumerate(CLASSES):
            axis.scatter(*coords[values == number, 1:].T, s=6, label=name)
        axis.set_title(title)
        axis.set_box_aspect(coords[:, 1:].amax(0).tolist(), zoom=1.4)
        axis.set_axis_off()
    axis.legend()
    plt.show()


def main():
    """Train, then label a room of another seed."""
    parser = argparse.ArgumentParser(description="MinkUNet on generated rooms")
    parser.add_argument("--layers", type=int, choices=NETWORKS, default=14)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    network, _ = train(options.layers, options.steps)
    count = sum(p.numel() for p in network.parameters())
    tensor, label = batch_of_rooms(torch.Generator().manual_seed(1000), rooms=1)
    with torch.no_grad():
        predicted = network(tensor).feats.argmax(1)
    right = (predicted == label).float().mean()
    print(f"MinkUNet{options.layers}, {count:,} parameters: {right:.1%} of a new room's voxels")
    draw(tensor.C, label, predicted)


if __name__ == "__main__":
    main()
