"""`prepare` builds the maps that a network will ask for, and leaves no trace in the network."""

import copy
import gc
import weakref

import pytest
import torch

from torchweft import voxels
from torchweft.errors import DTypeError
from torchweft.testing.contract import assert_same_bits
from torchweft.voxels.maps import kernel_map


class Branching(voxels.SparseModule):
    """A network with a forward of its own, dropout, norms, pools, and layers by key."""

    def __init__(self):
        super().__init__()
        self.stem = voxels.SubMConv3d(2, 4, 3)
        self.norm = voxels.SparseBatchNorm(4)
        self.down = voxels.SparseConv3d(4, 4, 2, 2, indice_key="down")
        self.pool = voxels.SparseMaxPool(2, outputs="floor")
        self.deep = voxels.SubMConv3d(4, 4, (1, 3, 3))
        self.up = voxels.SparseInverseConv3d(4, 4, 2, indice_key="down")
        self.onto = voxels.SparseConv3d(4, 4, 3, padding=1)

    def forward(self, x):
        y = self.norm(self.stem(x))
        y = y.replace(torch.nn.functional.dropout(y.F, training=self.training))
        y = self.down(y)
        self.pool(self.deep(y))
        y = self.up(y)
        return self.onto(y, x.coordinates)


def cloud(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(n, (count, 1), generator=generator) for n in (2, 8, 8, 8)]
    coords = torch.unique(torch.cat(columns, 1), dim=0)
    feats = torch.randn(len(coords), 2, generator=generator)
    return voxels.SparseTensor(feats, coords, (8, 8, 8), 2)


@pytest.fixture
def built(monkeypatch):
    """The geometries whose maps are built."""
    found = []
    plain = kernel_map.build_map

    def build(inputs, shape):
        found.append(shape)
        return plain(inputs, shape)

    monkeypatch.setattr(kernel_map, "build_map", build)
    return found


def test_the_network_builds_no_map_that_is_not_given_its_voxels(built):
    network = Branching()
    for count in (50, 80):
        tensor = cloud(count)
        assert voxels.prepare(network, tensor) is tensor
        assert len(built) == 4
        network(tensor)
        assert len(built) == 4
        del built[:]


def test_it_runs_the_network_for_the_first_cloud_alone():
    network, runs = Branching(), []
    network.register_forward_hook(lambda *_: runs.append(1))
    for count in (50, 80, 30):
        voxels.prepare(network, cloud(count))
    assert len(runs) == 1


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_network_moves(training):
    """Neither buffers nor gradients, random state, mode and results."""
    network = Branching().train(training)
    before, state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    tensor = voxels.prepare(network, cloud(50))
    assert_same_bits(torch.get_rng_state(), state, "random state")
    for name, value in network.state_dict().items():
        assert_same_bits(value, before[name], name)
    assert network.training is training
    assert all(p.grad is None for p in network.parameters())
    found = network(tensor).F
    torch.set_rng_state(state)
    network.load_state_dict(before)
    assert_same_bits(found, network(cloud(50)).F, "features")


def test_it_keeps_no_network_and_no_cloud():
    network, tensor = Branching(), cloud(50)
    voxels.prepare(network, tensor)
    kept = weakref.ref(network), weakref.ref(tensor.coordinates)
    del network, tensor
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_voxels_of_a_lower_level():
    """Recipes begin at the cloud: for a level below, the network runs."""
    down, network = voxels.SparseConv3d(2, 2, 2, 2), voxels.SubMConv3d(2, 2, 3)
    for count in (50, 80):
        tensor = down(cloud(count))
        assert network.geometry in voxels.prepare(network, tensor).coordinates.tables


def test_prepared_maps_are_traced_whole():
    torch.compiler.reset()
    network, tensor = voxels.SubMConv3d(2, 2, 3), cloud(50)
    for count in (40, 50):
        tensor = voxels.prepare(network, cloud(count))
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_same_bits(compiled(tensor).F, network(tensor).F, "features")
    torch.compiler.reset()


def test_what_is_no_network():
    with pytest.raises(DTypeError, match=r"network is a function: .*Wrap a function in a Sparse"):
        voxels.prepare(lambda x: x, cloud(5))
    with pytest.raises(DTypeError, match="tensor is a Tensor: it must be a torchweft"):
        voxels.prepare(Branching(), torch.zeros(1))


def test_a_level_without_voxels():
    """It is a level as others: its maps are its own.

    Seen red with: the voxels of the level above, where outputs are empty.
    """
    net = voxels.SparseSequential(voxels.SparseConv3d(1, 2, 1, 2), voxels.SubMConv3d(2, 2, 3))
    even = torch.tensor([[0, 2, 2, 2], [0, 4, 2, 2]])
    for coords in (even, even + torch.tensor([0, 1, 0, 0]), even):
        x = voxels.SparseTensor(torch.ones(2, 1), coords, (8, 8, 8), 1)
        fine = voxels.prepare(net, x).coordinates
        ((_, _, coarse),) = fine.tables.values()
        assert len(coarse) == (2 if coords is even else 0)
        assert [shape.mode for shape in coarse.tables] == ["submanifold"]
