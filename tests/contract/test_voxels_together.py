"""All maps of a network at once are those built one by one, for one wait of the host.

Clouds are of changing size, so that what the last one lets expect is never exact.

Seen red with: lists of pairs that wait for the backward pass, or of layers whose weights are not
trained; tiles for gradients in inference mode; what the last cloud's layers read forgotten by a
cloud that was prepared alone.
"""

import copy
import importlib
from typing import Any

import pytest
import torch

from tests.contract.test_voxels_jobs import reach
from torchweft import voxels
from torchweft.core.backend import interpreted
from torchweft.core.gpu.launcher import Kernel
from torchweft.errors import ShapeError
from torchweft.testing.contract import assert_same_bits
from torchweft.testing.sanitizer import reaching
from torchweft.voxels.convolution.launch import prepare
from torchweft.voxels.grid import whole
from torchweft.voxels.maps import together
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.gpu import jobs, tiles
from torchweft.voxels.maps.gpu import launch as map_launch
from torchweft.voxels.maps.gpu.tiles import Flags

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not interpreted(), reason="in the interpreter kernels serve the CPU too"),
]


MODULES = [
    importlib.import_module(f"torchweft.voxels.maps.{name}")
    for name in ("coordinates", "kernel_map", "together")
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """In the interpreter the kernels serve CPU tensors, as they serve a GPU's."""
    serve(monkeypatch, True)
    with reaching() as tensors:
        reach(monkeypatch, tensors)
        yield


def serve(monkeypatch, kernels):
    for module in MODULES:
        monkeypatch.setattr(module, "kernels_serve", lambda device: kernels)


class Block(voxels.SparseModule):
    """Convolutions of two kernels side by side, in a forward of its own."""

    def __init__(self, channels):
        super().__init__()
        self.body = voxels.SubMConv3d(channels, channels, 3)
        self.shortcut = voxels.SubMConv3d(channels, channels, 1)

    def forward(self, x):
        return self.body(x) + self.shortcut(x)


def unet():
    """Strided and inverse layers, kernels of 3, 2 and 1, overlapping windows below."""
    return voxels.SparseSequential(
        voxels.SubMConv3d(2, 2, (3, 2, 1)),
        voxels.SparseConv3d(2, 2, 2, 2, indice_key="one"),
        Block(2),
        voxels.SparseConv3d(2, 2, 3, 2, 1, indice_key="two"),
        Block(2),
        voxels.SparseInverseConv3d(2, 2, 3, indice_key="two"),
        voxels.SparseInverseConv3d(2, 2, 2, indice_key="one"),
    )


def transposed():
    """A strided layer, and torch's transposed one after it."""
    return voxels.SparseSequential(
        voxels.SparseConv3d(2, 2, 3, 3),
        voxels.SparseConvTranspose3d(2, 2, 2, 2),
        voxels.SubMConv3d(2, 2, 3),
    )


def floors():
    """Outputs at floors, of layers and of a pool; one layer's are its inputs."""
    return voxels.SparseSequential(
        voxels.SubMConv3d(2, 2, 3),
        voxels.SparseConv3d(2, 2, 3, 2, outputs="floor"),
        voxels.SubMConv3d(2, 2, 3),
        voxels.SparseConv3d(2, 2, 2, outputs="floor"),
        voxels.SparseMaxPool(2, outputs="floor"),
        voxels.SubMConv3d(2, 2, 3),
    )


def cloud(count, seed, *, shape=(24, 20, 16), low=0, shuffled=False):
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(n, (count, 1), generator=generator) for n in (2, 4, 6, 5)]
    coords = torch.unique(torch.cat(columns, 1).int(), dim=0)
    coords[:, 1:] += low
    if shuffled:
        coords = coords[torch.randperm(len(coords), generator=generator)]
    feats = torch.randn(len(coords), 2, generator=generator)
    return voxels.SparseTensor(feats, coords, shape, None if shape is None else 2)


def maps_of(coordinates: Coordinates) -> dict[Any, Any]:
    """The tables of voxels and of those that derive from them, by the way to them."""
    found: dict[Any, Any] = {}
    for shape, tables in coordinates.tables.items():
        if isinstance(tables, Coordinates):
            continue
        table, back, outputs = tables
        written = outputs or coordinates
        found[shape,] = whole(table, written.order, shape.num_offsets), back, written.rows
        if outputs is not None:
            found |= {(shape, *way): of for way, of in maps_of(outputs).items()}
    return found


def assert_same_maps(found: dict[Any, Any], exact: dict[Any, Any]) -> None:
    assert list(found) == list(exact)
    for way, tables in found.items():
        for one, other in zip(tables, exact[way], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert_same_bits(one, other, str(way))


@pytest.fixture
def waits(monkeypatch):
    """What the host waits for: flags and numbers that kernels wrote, voxels of a level."""
    counted = []

    def count(owner, name):
        plain = getattr(owner, name)

        def call(*args):
            if not (isinstance(args[0], Flags) and args[0]._waited):
                counted.append(name)
            return plain(*args)

        monkeypatch.setattr(owner, name, call)

    count(Flags, "read")
    count(map_launch, "resample")
    count(map_launch, "floors")
    return counted


CLOUDS = {
    "boxed": {},
    "shuffled": {"shuffled": True},
    "unboxed": {"shape": None},
    "negative": {"shape": None, "low": -5},
}


CASES = [(unet, kind) for kind in CLOUDS if kind != "negative"]
CASES += [(transposed, "boxed"), (floors, "shuffled"), (floors, "negative")]


@pytest.mark.parametrize(("build", "kind"), CASES)
def test_the_maps_are_those_built_one_by_one(build, kind, monkeypatch):
    """By torch's operations, of another network that knows no cloud."""
    torch.manual_seed(0)
    network, fresh = build(), build()
    fresh.load_state_dict(network.state_dict())
    for count, seed in ((20, 0), (30, 1)):
        tensor = cloud(count, seed, **CLOUDS[kind])
        with torch.no_grad():
            found = network(tensor)
            with monkeypatch.context() as patch:
                serve(patch, False)
                exact = fresh(other := cloud(count, seed, **CLOUDS[kind]))
                expected = maps_of(other.coordinates)
        assert_same_bits(found.F, exact.F, "features")
        assert_same_maps(maps_of(tensor.coordinates), expected)


def test_a_known_network_waits_once_for_all_levels(waits):
    """And once for what was assumed of the rows."""
    torch.manual_seed(0)
    network = unet()
    with torch.no_grad():
        network(cloud(20, 0))
        first = sorted(waits)
        del waits[:]
        network(cloud(30, 1))
    assert first == ["read", "resample", "resample"]
    assert waits == ["read", "read"]


@pytest.fixture
def launched(monkeypatch):
    """The names of kernels that are launched."""
    found, plain = [], Kernel.__call__

    def call(kernel, *args):
        found.append(kernel._kernel.__name__)
        return plain(kernel, *args)

    monkeypatch.setattr(Kernel, "__call__", call)
    return found


def test_floors_are_known_too(waits):
    """What only a pool reads needs no tiles."""
    network = floors()
    with torch.no_grad():
        network(cloud(20, 0, low=-3, shape=None))
        assert waits.count("floors") == 2
        del waits[:]
        network(tensor := cloud(30, 1, low=-3, shape=None))
    assert waits == ["read"]  # without a box nothing is assumed of the rows
    level, found = tensor.coordinates, []
    while level is not None:
        assert not level.foreseen
        maps = [of for of in level.tables.values() if not isinstance(of, Coordinates)]
        tiled = [tiles._tile_cache.keeps((kept, (to or level).order), None) for kept, _, to in maps]
        found.append((len(maps), sum(tiled)))
        level = maps[-1][2]
    assert found == [(2, 2), (3, 2), (1, 1)]


def test_a_known_network_needs_few_launches(launched):
    """Its tiles share launches; what a layer of the first cloud launches is not counted."""
    torch.manual_seed(0)
    network, numbers = unet(), []
    with torch.no_grad():
        for seed in range(2):
            del launched[:]
            tensor = cloud(20, seed)
            network(tensor)
            for name in ("one", "two"):  # as convolutions of a GPU do, of both sides
                for found in (tensor.maps.named(name), tensor.maps.named(name).transpose()):
                    prepare(found, gradient=False)
            numbers.append(len(launched))
    assert numbers[1] <= numbers[0] * 2 // 3


def trained(network, tensor):
    """Result and gradients of a training step by kernels; what is done before the backward pass."""
    for module in network.modules():
        module.backend = "triton"
    tensor.feats.requires_grad_()
    y = network(tensor).F
    weights = [p for p in network.parameters() if p.requires_grad]
    return y, lambda: torch.autograd.grad(y.square().sum(), [tensor.feats, *weights])


def test_the_backward_pass_of_a_known_network_builds_nothing(waits, launched, monkeypatch):
    """The host waits once for the numbers of all pairs: eight lists of five kinds."""
    for module in (tiles, jobs):
        monkeypatch.setattr(module, "MOST_RANKED", 4)
    torch.manual_seed(0)
    network = unet()
    network[2].body.weight.requires_grad_(False)
    for seed in range(2):
        fresh = copy.deepcopy(network)  # knows no cloud
        del waits[:], launched[:]
        y, backward = trained(network, cloud(12, seed))
        forward = sorted(waits), launched.count("pair_kernel")
        del waits[:], launched[:]
        gradients = backward()
    assert forward == (["read"] * 3, 5)
    assert not waits
    assert not {"mask_kernel", "key_kernel", "list_kernel", "pair_kernel"} & set(launched)
    exact, backward = trained(fresh, cloud(12, 1))
    for one, other in zip((y, *gradients), (exact, *backward()), strict=True):
        assert_same_bits(one, other, "gradients")


def test_pairs_are_listed_for_weights_that_are_trained():
    """Whatever was recorded of the last cloud: it may have been one of a validation."""
    torch.manual_seed(0)
    network = voxels.SparseSequential(
        voxels.SubMConv3d(2, 2, 3),
        voxels.SparseConv3d(2, 2, 2, 2, indice_key="down"),
        voxels.SubMConv3d(2, 2, 1),
        voxels.SparseInverseConv3d(2, 2, 2, indice_key="down"),
    )
    for number in (0, 3):
        network[number].requires_grad_(False)
    for seed, recorded in enumerate((False, True, False)):
        with torch.set_grad_enabled(recorded):
            network(tensor := cloud(20, seed))
        level, listed = tensor.coordinates, []
        while level is not None:
            *_, following = level.tables.values()
            for table, back, outputs in level.tables.values():
                sides = (table, (outputs or level).order), (back, level.order)
                listed += [
                    tiles._pair_cache.keeps(of, back is None) for of in sides if of[0] is not None
                ]
            level = following[2]
        assert listed == [False, recorded, False, recorded]


def test_prepared_maps_have_the_tiles_of_the_sides_that_are_read(waits):
    """Of both sides for an inverse layer, and where gradients are recorded."""
    network = voxels.SparseSequential(
        voxels.SparseConv3d(2, 2, 2, 2, indice_key="one"),
        voxels.SparseConv3d(2, 2, 2, 2),
        voxels.SparseConv3d(2, 2, (1, 1, 2), (1, 1, 2), indice_key="three"),
        voxels.SparseInverseConv3d(2, 2, (1, 1, 2), indice_key="three"),
    )
    voxels.prepare(network, cloud(20, 0))
    for recorded in (False, True):
        del waits[:]
        with torch.set_grad_enabled(recorded):
            level = voxels.prepare(network, cloud(30, 1)).coordinates
        assert waits == ["read", "read"]
        for inverse in (False, False, True):
            ((table, back, outputs),) = level.tables.values()
            assert not level.foreseen
            assert tiles._tile_cache.keeps((table, None), None)
            assert tiles._tile_cache.keeps((back, level.order), None) == (inverse or recorded)
            level = outputs


def test_what_was_prepared_alone_is_prepared_like_the_last(waits):
    """Who reads a map is known from the cloud that the network ran on last."""
    network = voxels.SparseSequential(
        voxels.SparseConv3d(2, 2, 2, 2, indice_key="one"),
        voxels.SparseInverseConv3d(2, 2, 2, indice_key="one"),
    )
    for seed in range(4):
        with torch.set_grad_enabled(seed == 3):
            level = voxels.prepare(network, cloud(20, seed)).coordinates
        ((table, back, _),) = level.tables.values()
        assert tiles._tile_cache.keeps((back, level.order), None) == (seed > 0)
        assert tiles._pair_cache.keeps((table, None), False) == (seed == 3)
        assert tiles._pair_cache.keeps((back, level.order), False) == (seed == 3)


def test_inference_mode_builds_nothing_for_gradients():
    network = voxels.SparseConv3d(2, 2, 2, 2)
    for seed in range(2):
        with torch.inference_mode():
            network(tensor := cloud(20, seed))
    ((_, back, _),) = tensor.coordinates.tables.values()
    assert not tiles._tile_cache.keeps((back, tensor.coordinates.order), None)


def test_inference_mode_keeps_tables_and_tiles():
    """Of its tensors nothing can be cached."""
    network = unet()
    for seed in range(2):
        with torch.inference_mode():
            tensor = cloud(20, seed, shuffled=True)
            network(tensor)
        for table, back, outputs in tensor.coordinates.tables.values():
            order = (outputs or tensor.coordinates).order
            assert not any(t.is_inference() for t in (table, back, order) if t is not None)


def test_more_voxels_than_expected_are_found_when_they_are_asked_for(waits, monkeypatch):
    """The level that has no room, and what derives from it."""
    monkeypatch.setattr(together, "LEAST_SPARE", 0)
    torch.manual_seed(0)
    network = unet()
    with torch.no_grad():
        network(cloud(20, 0))
        monkeypatch.setattr(together, "SPARE", 0.5)
        del waits[:]
        network(tensor := cloud(30, 1))
        with monkeypatch.context() as patch:
            serve(patch, False)
            network(other := cloud(30, 1))
    assert waits.count("resample") == 2
    assert_same_maps(maps_of(tensor.coordinates), maps_of(other.coordinates))


def test_a_cloud_without_voxels_and_one_after_it():
    network = unet()
    with torch.no_grad():
        for count in (20, 0, 20):
            tensor = cloud(max(count, 1), 0)
            network(tensor.prune(tensor.F[:, 0] > torch.inf) if not count else tensor)


def test_what_is_not_asked_for_is_forgotten():
    """Maps of another branch are built once more for nothing, then no longer."""
    torch.manual_seed(0)
    stem, one, other = (voxels.SubMConv3d(2, 2, k) for k in (1, (1, 1, 3), (3, 1, 1)))
    clouds = [cloud(20, seed) for seed in range(4)]
    with torch.no_grad():
        for tensor, branch in zip(clouds, (one, one, other, other), strict=True):
            branch(stem(tensor))
    left = [list(tensor.coordinates.foreseen) for tensor in clouds]
    assert left == [[], [], [one.geometry], []]
    assert [len(tensor.coordinates.tables) for tensor in clouds] == [2] * 4


def test_voxels_that_occur_twice_are_an_error_of_the_first_layer():
    network = unet()
    tensor = cloud(20, 0)
    with torch.no_grad():
        network(tensor)
        rows = torch.cat([tensor.C, tensor.C[3:4]])
        twice = voxels.SparseTensor(torch.zeros(len(rows), 2), rows, (24, 20, 16), 2)
        with pytest.raises(ShapeError, match="stands in rows 3 and"):
            network(twice)
