"""SECOND's middle encoder: from a LiDAR cloud to an image from above
==================================================================

Submanifold convolutions keep the voxels, strided ones halve the grid three times. The last layer
reduces the height, and the remaining heights join the channels: the result is a dense tensor
(batch, C, y, x) for a detector of images (Yan et al. 2018). Columns of coordinates are
(batch, z, y, x), as are the axes of kernels.

The cloud is generated: ground, cars and poles around the sensor. The encoder is not trained here.
"""

import time

import torch
from torch import nn

from torchweft.voxels import (
    SparseBatchNorm,
    SparseConv3d,
    SparseModule,
    SparseSequential,
    SubMConv3d,
    voxelize,
)

VOXEL = (0.1, 0.2, 0.2)  # metres along z, y, x
ORIGIN = (-3.0, -25.6, -25.6)
SHAPE = (41, 256, 256)


def stage(in_channels, out_channels, padding=1):
    """A strided convolution that halves the grid, and two submanifold convolutions."""
    return [
        SparseConv3d(in_channels, out_channels, 3, 2, padding, bias=False),
        *[SubMConv3d(out_channels, out_channels, 3, bias=False) for _ in range(2)],
    ]


class MiddleEncoder(SparseModule):
    """(batch, C, y / 8, x / 8) from voxels (z, y, x) of `in_channels` features."""

    def __init__(self, in_channels):
        super().__init__()
        convolutions = [
            *[SubMConv3d(c, 16, 3, bias=False) for c in (in_channels, 16)],
            *stage(16, 32),
            *stage(32, 64),
            *stage(64, 64, (0, 1, 1)),
            SparseConv3d(64, 128, (3, 1, 1), (2, 1, 1), bias=False),
        ]
        layers = [
            layer
            for conv in convolutions
            for layer in (conv, SparseBatchNorm(conv.out_channels, 1e-3, 0.01), nn.ReLU())
        ]
        self.layers = SparseSequential(*layers)

    def forward(self, x):
        """(batch, 2 · 128, y / 8, x / 8): the two remaining heights join the channels."""
        return self.layers(x).dense().flatten(1, 2)


def street(generator, points=20000):
    """(P, 4): z, y, x and reflectance of ground, cars and poles."""
    count = points // 4
    ground = torch.rand(2 * count, 3, generator=generator) * torch.tensor([0.1, 50.0, 50.0])
    cars = torch.rand(count, 3, generator=generator) * torch.tensor([1.5, 1.8, 4.2])
    poles = torch.rand(count, 3, generator=generator) * torch.tensor([2.5, 0.2, 0.2])
    for shapes in (cars, poles):
        place = torch.rand(8, 2, generator=generator) * 44
        shapes[:, 1:] += place[torch.randint(8, (count,), generator=generator)]
    cloud = torch.cat([ground, cars, poles]) + torch.tensor([-2.0, -25.0, -25.0])
    return torch.cat([cloud, torch.rand(len(cloud), 1, generator=generator)], 1)


def voxels(clouds):
    """Clouds (P, 4) as one SparseTensor; the features of a voxel are the mean of its points."""
    points = torch.cat(clouds)
    sample = torch.arange(len(clouds)).repeat_interleave(torch.tensor([len(c) for c in clouds]))
    tensor, _ = voxelize(
        points[:, :3],
        VOXEL,
        points,
        sample,
        origin=ORIGIN,
        spatial_shape=SHAPE,
        batch_size=len(clouds),
    )
    return tensor


def draw(cloud, image):
    """Points from above, and the mean size of the image's channels."""
    import matplotlib.pyplot as plt

    _, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    z, y, x, _ = cloud.T
    left.scatter(x, y, s=0.5, c=z, cmap="viridis")
    left.set(title="points, coloured by height", aspect="equal", xlabel="x [m]", ylabel="y [m]")
    right.imshow(image.abs().mean(0), origin="lower", extent=(-25.6, 25.6, -25.6, 25.6))
    right.set(title="mean size of the channels", xlabel="x [m]")
    plt.show()


def main(clouds=2):
    """One forward and backward pass on generated clouds, timed."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    streets = [street(generator) for _ in range(clouds)]
    tensor = voxels(streets)
    encoder = MiddleEncoder(4)
    start = time.perf_counter()
    image = encoder(tensor)
    image.square().mean().backward()
    seconds = time.perf_counter() - start
    print(f"{tensor} in a grid of {SHAPE}")
    print(f"image {tuple(image.shape)}")
    print(f"forward and backward in {seconds:.2f} s")
    draw(streets[0], image[0].detach())


if __name__ == "__main__":
    main()
