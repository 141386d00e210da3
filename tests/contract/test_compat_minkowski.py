"""The stand-in for MinkowskiEngine against its rules with dictionaries, in float64.

Seen red with: offsets whose last axis is fastest, a transposed layer onto all voxels in reach
though the level is known, a pool of window = stride centred, a strided map that ignores the
tensor stride of given coordinates, coordinates off the grid of their tensor stride refused.
"""

import gc
import weakref

import pytest
import torch
from torch import nn

from tests import minkowskis
from tests.clients.agreement import assert_agree
from torchweft import voxels
from torchweft.compat import MinkowskiEngine as ME  # noqa: N817 - its users' own habit
from torchweft.voxels.grid import Geometry


def agree(build, **options):
    """A network of both modules: the same places, strides, outputs and gradients."""
    found = minkowskis.Run(ME, build, **options)
    exact = minkowskis.Run(minkowskis.REFERENCE, build, found.network, **options)
    rounded = minkowskis.Run(minkowskis.REFERENCE, build, found.network, torch.float32, **options)
    assert found.places == exact.places
    assert found.strides == exact.strides
    if rounded.places != exact.places:  # a score near its threshold, rounded
        rounded = exact
    assert_agree(found.found, exact.found, rounded.found)
    return found


NETWORKS = [minkowskis.resnet, minkowskis.unet, minkowskis.completion, minkowskis.detector]


@pytest.mark.parametrize("build", NETWORKS, ids=lambda b: b.__name__)
def test_networks(build):
    agree(build)


WINDOWS = {
    "submanifold": {"kernel_size": 3},
    "strided": {"kernel_size": 3, "stride": 2},
    "partition": {"kernel_size": 2, "stride": 2},
    "pointwise": {"kernel_size": 1, "bias": True},
    "shortcut": {"kernel_size": 1, "stride": 2},
    "even": {"kernel_size": 2, "bias": True},
    "even and strided": {"kernel_size": 4, "stride": 2},
    "dilated": {"kernel_size": 3, "dilation": 2},
    "dilated and strided": {"kernel_size": 3, "stride": 3, "dilation": 2},
    "expanded": {"kernel_size": 3, "expand_coordinates": True},
    "expanded and strided": {"kernel_size": 2, "stride": 2, "expand_coordinates": True},
}
SIZES = {1: 40, 2: 12, 3: 6, 4: 3}


def on_level(build, dim, stride=1):
    length = {"length": SIZES[dim], "share": 0.25 if dim < 4 else 0.1}
    return agree(build, dim=dim, stride=stride, **length)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("window", WINDOWS)
def test_convolutions(window, stride):
    on_level(lambda e: e.MinkowskiConvolution(3, 4, dimension=3, **WINDOWS[window]), 3, stride)


@pytest.mark.parametrize("dim", [1, 2, 4])
@pytest.mark.parametrize("window", ["submanifold", "strided", "even and strided"])
def test_axes(window, dim):
    on_level(lambda e: e.MinkowskiConvolution(3, 4, dimension=dim, **WINDOWS[window]), dim)


def test_the_first_axis_of_offsets_is_fastest():
    sizes = {"kernel_size": [3, 1, 2], "stride": [1, 2, 2], "dilation": [2, 1, 1]}
    on_level(lambda e: e.MinkowskiConvolution(3, 4, dimension=3, **sizes), 3)


@pytest.mark.parametrize("kind", ["", "Channelwise"])
@pytest.mark.parametrize("stride", [1, 2])
def test_crosses_and_channelwise_layers(kind, stride):
    def build(engine):
        generator = engine.KernelGenerator(
            kernel_size=[3, 5, 1], stride=stride, region_type=1, dimension=3
        )
        layer = getattr(engine, f"Minkowski{kind}Convolution")
        channels = (3,) if kind else (3, 4)
        return layer(*channels, bias=True, kernel_generator=generator, dimension=3)

    on_level(build, 3)


TRANSPOSED = [("ConvolutionTranspose", 3, 2), ("ConvolutionTranspose", 2, 2)]
TRANSPOSED += [("GenerativeConvolutionTranspose", 3, 2), ("GenerativeConvolutionTranspose", 4, 2)]


@pytest.mark.parametrize(("kind", "size", "stride"), TRANSPOSED)
def test_transposed_layers(kind, size, stride):
    """Onto the level that is known, and from the coarsest level that is, onto all in reach."""

    def back(engine):
        layer = getattr(engine, f"Minkowski{kind}")
        return nn.Sequential(
            engine.MinkowskiConvolution(3, 4, kernel_size=3, stride=stride, dimension=3),
            layer(4, 3, kernel_size=size, stride=stride, bias=True, dimension=3),
        )

    on_level(back, 3)
    on_level(lambda e: _from_coarse(e, kind, size, stride), 3, 4)


def _from_coarse(engine, kind, size, stride):
    layer = getattr(engine, f"Minkowski{kind}")
    return layer(3, 4, kernel_size=size, stride=stride, dimension=3)


@pytest.mark.parametrize("kind", ["Sum", "Avg", "Max"])
@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 3), (3, 2), (3, 1), (2, 1)])
def test_pools(kind, size, stride):
    def build(engine):
        layer = getattr(engine, f"Minkowski{kind}Pooling")
        return _Affine(layer(kernel_size=size, stride=stride, dimension=3))

    on_level(build, 3)


class _Affine(nn.Module):
    """A layer without parameters, behind a weight of each channel."""

    def __init__(self, *layers):
        super().__init__()
        self.layers, self.weight = nn.ModuleList(layers), nn.Parameter(torch.randn(3))

    def forward(self, x):
        x = x * self.weight
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 3), (3, 2)])
def test_transposed_pools(size, stride):
    def build(engine):
        window = {"kernel_size": size, "stride": stride, "dimension": 3}
        up = engine.MinkowskiPoolingTranspose(**window)
        return _Affine(engine.MinkowskiAvgPooling(**window), up)

    on_level(build, 3)


@pytest.mark.parametrize("kind", ["Sum", "Avg", "Max"])
@pytest.mark.parametrize("join", ["Addition", "Multiplication", "Concatenation", ""])
def test_samples(kind, join):
    class Joined(nn.Module):
        def __init__(self, engine):
            super().__init__()
            self.pool = getattr(engine, f"MinkowskiGlobal{kind}Pooling")()
            self.join = getattr(engine, f"MinkowskiBroadcast{join}")()

        def forward(self, x):
            return self.join(x, self.pool(x))

    on_level(lambda e: _Affine(Joined(e)), 3)


class _Pair(nn.Module):
    """Two branches on different voxels and strides, and what joins them."""

    def __init__(self, engine, join):
        super().__init__()
        self.down = engine.MinkowskiConvolution(3, 3, kernel_size=3, stride=2, dimension=3)
        self.up = engine.MinkowskiGenerativeConvolutionTranspose(
            3, 3, kernel_size=2, stride=2, dimension=3
        )
        self.join = join

    def forward(self, x):
        coarse = self.down(x)
        return self.join(x, self.up(coarse)), self.join(coarse, x), self.join(x, x)


OPERATORS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    on_level(lambda e: _Pair(e, OPERATORS[name]), 3)


def test_unions():
    on_level(lambda e: _Pair(e, e.MinkowskiUnion()), 3)


class _Onto(nn.Module):
    """Layers onto given voxels: those of the input's level, and of a finer and a coarser one."""

    def __init__(self, engine, layer):
        super().__init__()
        self.engine, self.layer = engine, layer

    def forward(self, x):
        outputs = []
        for step in (1, 2, 4):
            rows = torch.tensor([[0, 0, 2, 4], [1, 2, 0, -2], [0, 8, 8, 8], [1, -4, 2, 0]])
            rows[:, 1:] *= step
            zeros = x.F.new_zeros(4, 1)
            target = self.engine.SparseTensor(
                zeros, rows.int(), tensor_stride=step, coordinate_manager=x.coordinate_manager
            )
            outputs.append(self.layer(x, target))
        return outputs


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_convolutions_onto_given_voxels(size, stride):
    def build(engine):
        window = {"kernel_size": size, "stride": stride, "bias": True, "dimension": 3}
        return _Onto(engine, engine.MinkowskiConvolution(3, 4, **window))

    on_level(build, 3, 2)


OFF_GRID = [
    lambda e: e.MinkowskiConvolution(3, 4, kernel_size=3, bias=True, dimension=3),
    lambda e: e.MinkowskiConvolution(3, 4, kernel_size=3, stride=2, dimension=3),
    lambda e: e.MinkowskiConvolution(3, 4, kernel_size=2, expand_coordinates=True, dimension=3),
    lambda e: e.MinkowskiConvolutionTranspose(3, 4, kernel_size=3, stride=2, dimension=3),
    lambda e: _Affine(e.MinkowskiMaxPooling(kernel_size=2, stride=2, dimension=3)),
    lambda e: _Affine(e.MinkowskiGlobalAvgPooling()),
    lambda e: _Pair(e, lambda a, b: a + b),
]


@pytest.mark.parametrize("number", range(len(OFF_GRID)))
def test_voxels_that_are_no_multiples_of_their_tensor_stride(number):
    """As in the original's examples/convolution.py."""
    on_level(lambda e: nn.Sequential(_OffGrid(e), OFF_GRID[number](e)), 3)


class _OffGrid(nn.Module):
    """The features of a tensor on its own voxels, at tensor stride 4."""

    def __init__(self, engine):
        super().__init__()
        self.engine = engine

    def forward(self, x):
        return self.engine.SparseTensor(x.F, x.C.contiguous(), tensor_stride=4)


def test_given_voxels_as_rows_and_as_a_key():
    x = minkowskis.sample(ME)
    layer = ME.MinkowskiConvolution(3, 2, kernel_size=3, stride=2, dimension=3).double()
    rows = layer(x).C.flip(0)
    by_rows = layer(x, rows)
    assert by_rows.tensor_stride == [2, 2, 2]
    assert by_rows.C.tolist() == rows.tolist()
    by_key = layer(x, by_rows.coordinate_map_key)
    assert by_key.coordinate_map_key == by_rows.coordinate_map_key
    assert by_key.F.tolist() == by_rows.F.tolist() == layer(x).F.flip(0).tolist()


@pytest.mark.parametrize("region_type", [0, 1])
def test_kernel_maps(region_type):
    def pairs(engine):
        x = minkowskis.sample(engine, length=6)
        manager, key = x.coordinate_manager, x.coordinate_map_key
        coarse = manager.stride(key, 2)
        places = (x.C.tolist(), manager_rows(manager, coarse))
        found = manager.kernel_map(key, coarse, kernel_size=3, region_type=region_type)
        return {
            k: sorted((places[0][i], places[1][o]) for i, o in table.T.tolist())
            for k, table in found.items()
            if table.shape[1]
        }

    assert pairs(ME) == pairs(minkowskis.REFERENCE)


def manager_rows(manager, key):
    rows = manager.maps[key] if hasattr(manager, "maps") else manager.get_coordinates(key).tolist()
    return [list(row) for row in rows]


def test_the_loader_of_checkpoints_agrees():
    """A layer of torchweft.voxels with the stand-in's weights, by `from_minkowski`."""
    x = minkowskis.sample(ME)
    layer = ME.MinkowskiConvolution(3, 2, kernel_size=3, stride=2, bias=True, dimension=3).double()
    own = voxels.SparseConv3d(3, 2, 3, 2, outputs="floor").double()
    own.load_state_dict(voxels.from_minkowski(layer.state_dict(), own))
    y, z = layer(x), own(voxels.SparseTensor(x.F, x.C))
    rows = y.C // torch.tensor([1, 2, 2, 2])
    assert_agree(
        {"y": y.F.detach()},
        {"y": z.F.detach()[z.find(rows).long()]},
        {"y": z.F.detach()[z.find(rows).long()].float().double()},
    )


def test_maps_are_shared_by_the_layers_of_a_cloud():
    """A strided layer, its transpose and a second pair of both: one table of pairs."""
    x = minkowskis.sample(ME)
    window = {"kernel_size": 3, "stride": 2, "dimension": 3}
    down = ME.MinkowskiConvolution(3, 3, **window).double()
    up = ME.MinkowskiConvolutionTranspose(3, 3, **window).double()
    y = up(down(up(down(x))))
    assert y.coordinate_map_key == x.coordinate_map_key
    level = x.coordinate_manager.map_of(x.coordinate_map_key).level
    assert sum(isinstance(key, Geometry) for key in level.tables) == 1
    assert not level.onto


def test_reference_counts_free_a_cloud():
    """Its maps too, without the garbage collector."""
    network = minkowskis.seeded(ME, minkowskis.unet)
    x = minkowskis.sample(ME)
    y = network(x)
    manager = x.coordinate_manager
    kept = [weakref.ref(manager.map_of(key).level) for key in (x.coordinate_key, y.coordinate_key)]
    kept.append(weakref.ref(manager.map_of(manager.stride(x.coordinate_key, 2)).level))
    gc.disable()
    try:
        del x, y, manager
        assert [found() for found in kept] == [None] * 3
    finally:
        gc.enable()
