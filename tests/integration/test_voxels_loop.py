"""Clouds of changing size: two graphs in all, and nothing that grows.

Seen red with maps kept by the id of their coordinates (a graph a cloud), and with maps that hold
their input's coordinates (which then wait for the garbage collector).
"""

import copy
import gc
import weakref

import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft import voxels
from torchweft.testing.bounds import assert_as_accurate, plain_error

pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETED, reason="whole networks, natively")]


def network():
    return voxels.SparseSequential(
        voxels.SubMConv3d(4, 8, 3),
        voxels.SparseBatchNorm(8),
        torch.nn.ReLU(),
        voxels.SparseConv3d(8, 8, 2, stride=2, indice_key="down"),
        voxels.SparseInverseConv3d(8, 4, 2, indice_key="down"),
    )


def cloud(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    box = torch.randint(0, 8, (count, 3), generator=generator)
    batch = torch.randint(0, 2, (count, 1), generator=generator)
    coords = torch.unique(torch.cat([batch, box], 1), dim=0)
    return voxels.SparseTensor(torch.randn(len(coords), 4), coords, (8, 8, 8), 2)


def assert_agrees(found, model, tensor):
    """As accurate as an eager call, whose convolutions have the norms inside."""
    plain = model(tensor).feats
    exact = copy.deepcopy(model).double()(tensor.replace(tensor.feats.double())).feats
    assert_as_accurate(found, exact, plain_error(plain, exact, plain.dtype))


def test_one_graph_serves_all_sizes():
    """The first is for its own size, the second for all."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, graphs = network().eval(), []

    def count(module, example):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(model, fullgraph=True, backend=count)
    for size in range(50, 250, 40):
        tensor = cloud(size)
        with torch.no_grad():
            model(tensor)  # builds the maps
            assert_agrees(compiled(tensor).feats, model, tensor)
    assert len(graphs) == 2


def test_maps_are_built_beside_the_graphs():
    """Of new clouds only layers are traced, however maps are made of them.

    Seen red without: 46 graphs instead of 15, of searches for neighbours at each offset.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    model, graphs = network().eval(), []

    def count(module, example):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(model, backend=count)
    for size in range(50, 250, 40):
        tensor = cloud(size)
        again = voxels.SparseTensor(tensor.F, tensor.C, (8, 8, 8), 2)  # without its maps
        with torch.no_grad():
            assert_agrees(compiled(tensor).feats, model, again)
    assert graphs
    assert not any("searchsorted" in module.code for module in graphs)
    torch.compiler.reset()  # of the frames of every layer, which others compile whole


def test_nothing_outlives_its_cloud():
    """Tensors, coordinates and tables go with their last user, without the garbage collector."""
    model = network()
    gc.collect()
    gc.disable()
    try:
        for seed in range(3):
            tensor = cloud(100, seed)
            coordinates = weakref.ref(tensor.coordinates)
            table = weakref.ref(voxels.kernel_map(tensor, 3).sources)
            model(tensor).feats.sum().backward()
            del tensor
            assert coordinates() is None
            assert table() is None
    finally:
        gc.enable()
