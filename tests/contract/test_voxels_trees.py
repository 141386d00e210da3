"""A SparseTensor as a tree of torch: exported with its maps as inputs, captured for its voxels.

Seen red with: maps that are lost or built again, levels that two layers share apart, names of
earlier levels lost, sizes that become constants of the program, tables copied at each replay.
"""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.conftest import INTERPRETED
from tests.contract.test_voxels_graphs import SHAPE, cloud, network, rows_and_feats
from tests.recorders import captured
from torchweft import voxels
from torchweft.testing.contract import assert_same_bits
from torchweft.voxels.maps import kernel_map

if INTERPRETED:
    pytest.skip("export is checked without TRITON_INTERPRET", allow_module_level=True)

BUILDS = "voxel_rows", "voxel_order", "voxel_map", "voxel_onto"


class Features(nn.Module):
    """The features of a network's result alone."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, tensor):
        return self.module(tensor).F


def mapped(module, seed=0, **options):
    tensor = cloud(300 + 100 * seed, seed, **options)
    module(tensor)
    return tensor


@pytest.fixture
def no_map(monkeypatch):
    """Called once all maps are there: another one is an error."""

    def refuse(*_):
        raise AssertionError("a map was built")

    def start():
        monkeypatch.setattr(kernel_map, "build_map", refuse)
        monkeypatch.setattr(kernel_map, "meet", refuse)

    return start


@pytest.mark.parametrize("boxed", [True, False])
@pytest.mark.parametrize("shuffled", [True, False])
def test_a_tree_holds_all_maps(boxed, shuffled, no_map):
    module = network()
    tensor = mapped(module, boxed=boxed, shuffled=shuffled)
    exact = module(tensor)
    leaves, structure = pytree.tree_flatten(tensor)
    no_map()
    again = pytree.tree_unflatten(leaves, structure)
    assert_same_bits(module(again).F.detach(), exact.F.detach(), "features")
    assert_same_bits(again.C, tensor.C, "voxels")
    assert again.spatial_shape == tensor.spatial_shape
    assert again.batch_size == tensor.batch_size
    text = pytree.treespec_dumps(structure)
    assert pytree.treespec_loads(text) == structure
    for one, other in zip(pytree.tree_leaves(again), leaves, strict=True):
        assert one is other


def test_levels_of_given_voxels_and_of_floors(no_map):
    down = voxels.SparseConv3d(4, 2, 3, stride=2, outputs="floor").double()
    short = voxels.SparseConv3d(4, 2, 1, stride=2, outputs="floor").double()
    up = voxels.SparseConvTranspose3d(2, 4, 3, stride=2, outputs="floor").double()

    def function(tensor):
        coarse = down(tensor) + short(tensor)
        return up(coarse, tensor.coordinates).F

    tensor = cloud()
    exact = function(tensor)
    no_map()
    again = pytree.tree_map(lambda leaf: leaf, tensor)
    assert_same_bits(function(again).detach(), exact.detach(), "features")
    assert down(again).coordinates is short(again).coordinates


def test_a_tensor_between_two_networks(no_map):
    """The names of maps of earlier levels lead an inverse layer back."""
    down = voxels.SparseConv3d(4, 2, 2, stride=2, indice_key="down").double()
    up = voxels.SparseInverseConv3d(2, 4, 2, indice_key="down").double()
    tensor = cloud()
    coarse = down(tensor)
    exact = up(coarse)
    no_map()
    found = up(pytree.tree_map(lambda leaf: leaf, coarse))
    assert_same_bits(found.F.detach(), exact.F.detach(), "features")
    assert_same_bits(found.C, tensor.C, "voxels")


def test_the_structure_of_clouds_with_a_box_is_one():
    module = network()
    structures = {pytree.tree_structure(mapped(module, seed)) for seed in range(3)}
    assert len(structures) == 1
    assert pytree.tree_structure(cloud(boxed=False)) not in structures


def ops_of(program):
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return [op._schema.name.removeprefix("torchweft::") for op in calls if hasattr(op, "_schema")]


def test_a_program_whose_maps_are_inputs():
    module = network().eval()
    shapes = torch.export.AdditionalInputs()
    for seed in range(2):
        shapes.add((mapped(module, seed),))
    program = torch.export.export(Features(module), (mapped(module),), dynamic_shapes=shapes)
    assert not set(ops_of(program)) & set(BUILDS)
    for seed in range(4):
        tensor = mapped(module, seed)
        found, exact = program.module()(tensor), module(tensor).F
        assert_same_bits(found.detach(), exact.detach(), "features")


def test_a_program_that_builds_its_maps():
    module = network().eval()

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, feats, rows):
            out = self.module(voxels.SparseTensor(feats, rows, SHAPE, 2))
            return out.F, out.C

    count = torch.export.Dim("count", min=2)
    rows, feats = rows_and_feats(300, 0)
    shapes = {"feats": {0: count}, "rows": {0: count}}
    program = torch.export.export(Whole(), (feats, rows), dynamic_shapes=shapes)
    for seed in range(4):
        rows, feats = rows_and_feats(300 + 100 * seed, seed)
        found, exact = program.module()(feats, rows), Whole()(feats, rows)
        for one, other in zip(found, exact, strict=True):
            assert_same_bits(one.detach(), other.detach(), "result")


@pytest.mark.parametrize("whole", [True, False])
def test_a_record_for_other_features(whole, no_map):
    """The network's result may be a tensor or a SparseTensor; tables are not copied."""
    module = network().eval()
    tensor = mapped(module)
    exact = [module(tensor.replace(tensor.F * n)).F.detach() for n in range(6)]
    read = []
    module.register_forward_pre_hook(lambda _, given: read.extend(pytree.tree_leaves(given)[1:]))
    run, recorder = captured(module if whole else Features(module), tensor)
    no_map()
    for n, expected in enumerate(exact):
        found = run(tensor.replace(tensor.F * n))
        assert_same_bits(found.F if whole else found, expected, "features")
    assert (recorder.records, recorder.replays) == (1, 4)
    assert {id(table) for table in read} == {id(table) for table in pytree.tree_leaves(tensor)[1:]}


def test_other_voxels_are_another_record():
    module = network().eval()
    tensors = [mapped(module, seed) for seed in range(2)]
    run, recorder = captured(Features(module), tensors[0])
    for _ in range(4):
        for tensor in tensors:
            assert_same_bits(run(tensor), module(tensor).F.detach(), "features")
    assert (recorder.records, recorder.replays) == (2, 4)
