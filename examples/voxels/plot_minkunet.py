"""MinkUNet: a sparse U-Net with residual blocks that labels every voxel of a scene
=================================================================================

``python examples/minkunet.py --layers 14 --steps 30``

Choy et al. 2019 (14 and 18 layers); Tang et al. 2020 (42).  The encoder halves the grid four times
by strided convolutions; the decoder undoes each of them with its inverse, found by `indice_key`, so
that it returns to the very voxels of that level, and reads the encoder's features beside its own.
Here it learns to tell floor, boxes and balls of generated rooms apart.
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
    SparseTensor,
    SubMConv3d,
    cat,
    voxelize,
)

# channels of the stem, of four levels down and of four up; residual blocks a level; stem kernels
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
    """y = relu(x' + f(x)): f two convolutions, x' = x, or its linear map where channels change."""

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
        """On the same voxels."""
        y, skip = self.first(x), self.shortcut(x)
        return self.second(y, norm=self.norm, residual=skip, activation="relu")


def blocks(in_channels, out_channels, count):
    """So many residual blocks; the first changes the channels."""
    rest = [ResidualBlock(out_channels, out_channels) for _ in range(count - 1)]
    return SparseSequential(ResidualBlock(in_channels, out_channels), *rest)


class MinkUNet(SparseModule):
    """Scores of the classes for every voxel."""

    def __init__(self, in_channels, classes, layers=18):
        super().__init__()
        channels, count, kernels = NETWORKS[layers]
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
    """Points (x, y, z) on a floor, a box and a ball, and which of the three each is on."""
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
    """Rooms as one SparseTensor of centres of points, and a label for every voxel."""
    drawn = [room(generator) for _ in range(rooms)]
    points, label = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    sample = torch.arange(rooms).repeat_interleave(len(drawn[0][1]))
    votes = nn.functional.one_hot(label, len(CLASSES)).float()
    tensor, _ = voxelize(points, size, torch.cat([points, votes], 1), sample, batch_size=rooms)
    inside = tensor.feats[:, :3] / size - tensor.C[:, 1:]  # where in its voxel the centre is
    height = tensor.feats[:, 2:3]
    return tensor.replace(torch.cat([inside, height], 1)), tensor.feats[:, 3:].argmax(1)


def train(layers, steps, seed=0):
    """The network, and for each step its loss and the share of voxels that it labels right."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    network = MinkUNet(4, len(CLASSES), layers)
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    history = []
    for _ in range(steps):
        tensor, label = batch_of_rooms(generator)
        scores: SparseTensor = network(tensor)
        loss = nn.functional.cross_entropy(scores.feats, label)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        right = (scores.feats.argmax(1) == label).float().mean()
        history.append((float(loss.detach()), float(right)))
    return network, history


def main():
    """Train, and print each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, choices=NETWORKS, default=14)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    network, history = train(options.layers, options.steps)
    count = sum(p.numel() for p in network.parameters())
    print(f"MinkUNet{options.layers}: {count:,} parameters")
    for step, (loss, right) in enumerate(history, 1):
        print(f"step {step:3d}   loss {loss:.3f}   right {right:.1%}")


if __name__ == "__main__":
    main()
