"""Networks written for torchsparse and MinkowskiEngine in a record with room for other clouds.

Replays are those of tests/recorders.py.  Losses, gradients and running statistics are held against
eager calls of the same network on the same cloud, in float64.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import torchweft
from tests import training_steps as steps
from tests.recorders import captured
from torchweft import voxels
from torchweft.compat import MinkowskiEngine as ME  # noqa: N817 - its users' own habit
from torchweft.compat import torchsparse
from torchweft.compat.torchsparse import nn as spnn

COUNTS = (90, 100, 80, 104, 95)
SHAPE = (10, 10, 10)


def rows_of(seed, device="cpu"):
    made = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 20, (COUNTS[seed], 4), generator=made) % torch.tensor([2, *SHAPE])
    coords = torch.unique(drawn, dim=0).int()
    coords = coords[torch.randperm(len(coords), generator=made)]
    feats = torch.randn(len(coords), 4, generator=made, dtype=torch.float64)
    return feats.to(device), coords.to(device)


class SparseBlock(nn.Module):
    """As SPVNAS writes it."""

    def __init__(self, channels):
        super().__init__()
        self.net = nn.Sequential(
            spnn.Conv3d(channels, channels, 3),
            spnn.BatchNorm(channels),
            spnn.ReLU(True),
            spnn.Conv3d(channels, channels, 3),
            spnn.BatchNorm(channels),
        )
        self.relu = spnn.ReLU(True)

    def forward(self, x):
        return self.relu(self.net(x) + x)


class SparseNetwork(nn.Module):
    """Two levels down and up again."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(spnn.Conv3d(4, 8, 3), spnn.BatchNorm(8), spnn.LeakyReLU())
        self.down = nn.Sequential(spnn.Conv3d(8, 8, 2, stride=2), spnn.BatchNorm(8), spnn.ReLU())
        self.deep = spnn.Conv3d(8, 8, 3, stride=2, padding=1)
        self.block = SparseBlock(8)
        self.rise = spnn.Conv3d(8, 8, 3, stride=2, transposed=True)
        self.up = spnn.Conv3d(8, 6, 2, stride=2, transposed=True)
        self.head = spnn.Conv3d(14, 3, 1, bias=True)

    def forward(self, x):
        x = self.stem(x)
        y = self.down(x)
        y = self.rise(self.block(self.deep(y))) + y
        return self.head(torchsparse.cat([self.up(y), x]))


def sparse_cloud(seed, device="cpu"):
    return torchsparse.SparseTensor(*rows_of(seed, device), spatial_range=(2, *SHAPE))


class Block(nn.Module):
    """As MinkowskiEngine's examples write it."""

    def __init__(self, channels):
        super().__init__()
        options = {"kernel_size": 3, "dimension": 3}
        self.conv1 = ME.MinkowskiConvolution(channels, channels, **options)
        self.norm1 = ME.MinkowskiBatchNorm(channels)
        self.conv2 = ME.MinkowskiConvolution(channels, channels, **options)
        self.norm2 = ME.MinkowskiBatchNorm(channels)
        self.relu = ME.MinkowskiReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        return self.relu(y)


class Network(ME.MinkowskiNetwork):
    """Two levels down and up again, the deeper one by a pool."""

    def __init__(self):
        super().__init__(3)
        conv, up = ME.MinkowskiConvolution, ME.MinkowskiConvolutionTranspose
        self.stem = conv(4, 8, kernel_size=3, dimension=3)
        self.norm = ME.MinkowskiBatchNorm(8)
        self.down = conv(8, 8, kernel_size=2, stride=2, dimension=3)
        self.pool = ME.MinkowskiMaxPooling(kernel_size=2, stride=2, dimension=3)
        cross = ME.KernelGenerator(3, region_type=ME.RegionType.HYPER_CROSS, dimension=3)
        self.mean = ME.MinkowskiAvgPooling(3, kernel_generator=cross, dimension=3)
        self.cross = conv(8, 8, kernel_generator=cross, dimension=3)
        self.block = Block(8)
        self.rise = up(8, 8, kernel_size=3, stride=2, dimension=3)
        self.up = up(8, 6, kernel_size=2, stride=2, bias=True, dimension=3)
        self.head = conv(14, 3, kernel_size=1, bias=True, dimension=3)

    def forward(self, x):
        x = ME.MinkowskiFunctional.relu(self.norm(self.stem(x)))
        y = self.down(x)
        y = self.rise(self.cross(self.block(self.mean(self.pool(y))))) + y
        return self.head(ME.cat(self.up(y), x))


def minkowski_cloud(seed, device="cpu"):
    """Some voxels are negative; each cloud has bounds of its own."""
    feats, coords = rows_of(seed)
    coords -= torch.tensor([0, 4 + seed, 0, 1], dtype=torch.int32)
    return ME.SparseTensor(feats, coords, device=device)


class Library(NamedTuple):
    """A network, a cloud, and what cannot be read in a record."""

    network: Callable[[], nn.Module]
    cloud: Callable[..., Any]
    conv: Callable[..., nn.Module]
    voxels_of: Callable[[Any], Any]
    reads: tuple[Callable[[Any], Any], ...]


TORCHSPARSE = Library(
    SparseNetwork,
    sparse_cloud,
    lambda *sizes, **options: spnn.Conv3d(*sizes, **options),
    lambda x: x.sparse().coordinates,
    (
        lambda x: x.C[:, 1:],
        lambda x: x.coords.float(),
        lambda x: x.dense(),
        lambda x: spnn.GlobalAvgPool()(x),
        lambda x: spnn.GroupNorm(2, 4).double()(x),
        lambda x: x.sparse().find(torch.zeros(1, 4, dtype=torch.int32)),
        lambda x: x.sparse().prune(x.F[:, 0] > 0),
        lambda x: torchsparse.generative_add(x, x),
        lambda x: spnn.Conv3d(4, 4, 2, stride=2).double()(x),
    ),
)
MINKOWSKI = Library(
    Network,
    minkowski_cloud,
    lambda *sizes, **options: ME.MinkowskiConvolution(*sizes, dimension=3, **options),
    lambda x: x.coordinate_manager.map_of(x.coordinate_map_key).level,
    (
        lambda x: x.C,
        lambda x: x.decomposed_coordinates,
        lambda x: x.decomposed_features,
        lambda x: x.coordinates_at(0),
        lambda x: x.coordinate_manager.number_of_unique_batch_indices(),
        lambda x: x.dense(torch.Size((2, 4, 20, 20, 20)), torch.tensor([-8, -8, -8])),
        lambda x: x.sparse(),
        lambda x: x.features_at_coordinates(torch.zeros(1, 4, dtype=torch.float64)),
        lambda x: ME.MinkowskiGlobalAvgPooling()(x),
        lambda x: ME.MinkowskiMaxPooling(3, 3, dimension=3)(x),
        lambda x: ME.MinkowskiPruning()(x, x.F[:, 0] > 0),
        lambda x: ME.MinkowskiInstanceNorm(4).double()(x),
        lambda x: ME.MinkowskiConvolution(4, 4, 3, stride=2, dimension=3).double()(x),
        lambda x: ME.MinkowskiConvolution(4, 4, 3, dilation=3, dimension=3).double()(x),
        lambda x: ME.MinkowskiGenerativeConvolutionTranspose(4, 4, 2, 1, dimension=3).double()(x),
    ),
)
both = pytest.mark.parametrize("library", [TORCHSPARSE, MINKOWSKI], ids=["torchsparse", "ME"])


def network(library):
    torch.manual_seed(0)
    return library.network().double()


def training(net):
    return steps.training(net, lambda tensor: tensor.F)


@both
def test_training(library):
    """Seen red with: norms that count padding; bounds of each cloud in its structure."""
    net = network(library)
    plain = copy.deepcopy(net)
    first = voxels.prepare(net, library.cloud(0))
    sizes = voxels.padded_sizes(first, 1.3, labels=-100)
    run, recorder = captured(training(net), first, steps.labels_of(first.F), sizes=sizes)
    for seed in range(len(COUNTS)):
        cloud = library.cloud(seed)
        labels = steps.labels_of(cloud.F)
        found = steps.state(net, run(voxels.prepare(net, library.cloud(seed)), labels))
        right = steps.state(plain, training(plain)(cloud, labels))
        assert len(found) == len(right) > len(list(net.buffers()))
        for own, other in zip(found, right, strict=True):
            steps.assert_near(own, other)
    assert (recorder.records, recorder.replays) == (1, len(COUNTS) - 2)


@both
def test_inference(library):
    """The result is a tensor of the library, on the voxels of the argument."""
    net = network(library).eval()
    first = voxels.prepare(net, library.cloud(0))
    run, recorder = captured(net, first, sizes=voxels.padded_sizes(first, 1.3))
    with torch.no_grad():
        for seed in range(len(COUNTS)):
            found = run(voxels.prepare(net, library.cloud(seed), tables_only=True))
            right = net(library.cloud(seed))
            torch.testing.assert_close(found.F, right.F, rtol=0, atol=0)
            torch.testing.assert_close(found.C, right.C, rtol=0, atol=0)
            assert type(found) is type(right)
    assert recorder.replays == len(COUNTS) - 2


@both
def test_a_tensor_keeps_what_was_prepared(library):
    """Seen red with: maps of voxels that nobody keeps."""
    net, tensor = network(library), library.cloud(0)
    voxels.prepare(net, library.cloud(1))  # the network runs, and leaves maps in its layers' caches
    assert voxels.prepare(net, tensor) is tensor
    known = library.voxels_of(tensor)
    tables = dict(known.tables)
    assert tables
    with torch.no_grad():
        net(tensor)
    assert library.voxels_of(tensor) is known
    assert known.tables == tables


READS = [(lib, read) for lib in (TORCHSPARSE, MINKOWSKI) for read in lib.reads]


@pytest.mark.parametrize(("library", "read"), READS)
def test_voxels_are_not_read(library, read):
    """Their last rows are padding, in a record with room; in one without they may be read."""
    net = library.conv(4, 4, 3).double()
    first = voxels.prepare(net, library.cloud(0))

    def reading(tensor):
        read(tensor)
        return net(tensor).F

    run, _ = captured(reading, first, sizes=voxels.padded_sizes(first, 1.3))
    with pytest.raises(torchweft.CaptureError, match="read in a function that is recorded with"):
        run(first)
    alone, _ = captured(reading, first)
    alone(first)


def test_a_box_that_strided_layers_need():
    net = spnn.Conv3d(4, 4, 2, stride=2).double()
    tensor = torchsparse.SparseTensor(*rows_of(0))
    with pytest.raises(torchweft.ShapeError, match=r"spatial_range=\(batch, x, y, z\)"):
        voxels.padded_sizes(voxels.prepare(net, tensor))


def test_slices():
    """A record knows no rows that its argument was built from, and no field."""
    net, field = network(MINKOWSKI).eval(), ME.TensorField(*rows_of(0))
    first = voxels.prepare(net, field.sparse())
    for function, message in (
        (lambda x: net(x).slice(x).F, "slice outside of the function"),
        (lambda x: net(x).slice(field).F, "of two coordinate managers"),
    ):
        run, _ = captured(function, first, sizes=voxels.padded_sizes(first))
        with pytest.raises(torchweft.ShapeError, match=message):
            run(first)


def test_a_decoder_alone():
    """Its input is on a level whose finer one the record does not know."""
    net = network(MINKOWSKI).eval()
    coarse = net.down(net.stem(minkowski_cloud(0)))
    with pytest.raises(torchweft.ShapeError, match=r"\[2, 2, 2\] was passed to .*Return x\.F"):
        captured(net.up, coarse)
    run, _ = captured(nn.Sequential(net.stem, net.down), minkowski_cloud(0))
    with pytest.raises(torchweft.ShapeError, match=r"is a result there.*Return x\.F"):
        run(minkowski_cloud(0))
    net = network(TORCHSPARSE).eval()
    run, _ = captured(net.up, net.down(net.stem(sparse_cloud(0))))
    with pytest.raises(torchweft.ShapeError, match="knows no such layer"):
        run(net.down(net.stem(sparse_cloud(0))))
