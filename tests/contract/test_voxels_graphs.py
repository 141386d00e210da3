"""Voxel networks in compiled graphs: maps of fresh clouds are built inside, by operators.

Seen red with: maps built outside of graphs (`fullgraph=True` raised), voxels that are sorted again
for each map, half tables where whole ones were promised, boxes that are constants of a graph.
"""

import gc

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounter

from tests.conftest import INTERPRETED
from torchweft import voxels
from torchweft.errors import IndexRangeError, ShapeError
from torchweft.testing.contract import assert_same_bits
from torchweft.voxels.maps import operator
from torchweft.voxels.maps.coordinates import Coordinates

if INTERPRETED:
    pytest.skip("torch.compile is checked without TRITON_INTERPRET", allow_module_level=True)

FRAMES = 5
SHAPE = (20, 20, 20)
CHECKS = "test_schema", "test_faketensor"


@pytest.fixture(autouse=True)
def _no_graphs():
    torch.compiler.reset()


def network():
    torch.manual_seed(0)
    return voxels.SparseSequential(
        voxels.SubMConv3d(4, 8, 3),
        voxels.SparseBatchNorm(8),
        nn.ReLU(),
        voxels.SparseConv3d(8, 16, 2, stride=2, indice_key="down"),
        voxels.SubMConv3d(16, 16, 3),
        nn.BatchNorm1d(16),
        voxels.SparseInverseConv3d(16, 8, 2, indice_key="down"),
        voxels.SparseConv3d(8, 8, 3, stride=2, outputs="floor"),
        voxels.SparseMaxPool(2, 1),
    ).double()


def rows_and_feats(count, seed, shuffled=True):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, SHAPE[0] - seed, (count, 4), generator=generator)
    rows[:, 0] %= 2
    rows = torch.unique(rows, dim=0)
    if shuffled:
        rows = rows[torch.randperm(len(rows), generator=generator)]
    return rows, torch.randn(len(rows), 4, generator=generator, dtype=torch.float64)


def cloud(count=300, seed=0, boxed=True, shuffled=True):
    rows, feats = rows_and_feats(count, seed, shuffled)
    return voxels.SparseTensor(feats, rows, *((SHAPE, 2) if boxed else ()))


@pytest.mark.parametrize("boxed", [True, False])
@pytest.mark.parametrize("shuffled", [True, False])
def test_fresh_clouds_share_two_graphs(boxed, shuffled, monkeypatch):
    """One for the first size and one for all others; values, gradients and voxels are equal."""
    counter, sorts = CompileCounter(), []
    order = Coordinates._in_order
    monkeypatch.setattr(
        Coordinates, "_in_order", lambda self, keys: sorts.append(1) or order(self, keys)
    )
    eager, module = network(), network()
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for seed in range(FRAMES):
        given = 300 + 100 * seed, seed, boxed, shuffled
        found, exact = compiled(cloud(*given)), eager(cloud(*given))
        assert_same_bits(found.F.detach(), exact.F.detach(), "features")
        assert_same_bits(found.C, exact.C, "voxels")
        assert (found.spatial_shape, found.batch_size) == (exact.spatial_shape, exact.batch_size)
        assert found.stride == exact.stride
        for one, other in zip(
            torch.autograd.grad(found.F.square().sum(), module.parameters()),
            torch.autograd.grad(exact.F.square().sum(), eager.parameters()),
            strict=True,
        ):
            assert_same_bits(one, other, "gradient")
    assert counter.frame_count <= 2
    assert len(sorts) == 2 * FRAMES * shuffled  # as often as without


def test_voxels_are_freed_with_their_graph_tensors():
    compiled = torch.compile(network(), fullgraph=True, backend="eager")
    gc.collect()
    before = len(operator._known)
    out = compiled(cloud())
    assert len(operator._known) > before
    del out
    gc.collect()
    assert len(operator._known) == before


KERNELS = [
    {"kernel_size": 3},
    {"kernel_size": 2},
    {"kernel_size": (3, 2, 1), "dilation": 2},
    {"kernel_size": 2, "stride": 2, "submanifold": False},
    {"kernel_size": 3, "stride": 2, "padding": 1, "submanifold": False},
    {"kernel_size": 3, "stride": 2, "submanifold": False, "transposed": True},
    {"kernel_size": 3, "stride": 2, "submanifold": False, "outputs": "floor"},
    {"kernel_size": 3, "submanifold": False, "outputs": "floor"},
]


def tables_of(tensor, options):
    found = voxels.kernel_map(tensor, **options)
    return found.sources, found.targets, found.outputs.rows


@pytest.mark.parametrize("options", KERNELS, ids=str)
@pytest.mark.parametrize("shuffled", [True, False])
def test_maps_are_those_of_eager_calls(options, shuffled):
    compiled = torch.compile(tables_of, fullgraph=True, backend="eager")
    exact = tables_of(cloud(shuffled=shuffled), options)
    for one, other in zip(compiled(cloud(shuffled=shuffled), options), exact, strict=True):
        assert_same_bits(one, other, "table")


@pytest.mark.parametrize("as_rows", [True, False])
def test_maps_onto_given_voxels(as_rows):
    def function(tensor, target):
        onto = target.C if as_rows else target.coordinates
        return tables_of(tensor, {"kernel_size": 3, "coordinates": onto})

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    exact = function(cloud(), cloud(seed=1))
    if as_rows:
        with pytest.raises(Unsupported, match=r"spatial_shape None and batch_size 2.*Pass them"):
            compiled(cloud(), cloud(seed=1))
        return
    for one, other in zip(compiled(cloud(), cloud(seed=1)), exact, strict=True):
        assert_same_bits(one, other, "table")


def built_inside(feats, rows):
    return network_of_one(voxels.SparseTensor(feats, rows, SHAPE, 2)).F


network_of_one = voxels.SubMConv3d(4, 2, 3).double()


def test_tensors_that_a_graph_builds():
    compiled = torch.compile(built_inside, fullgraph=True, backend="eager")
    rows, feats = rows_and_feats(200, 0)
    assert_same_bits(compiled(feats, rows).detach(), built_inside(feats, rows).detach(), "features")
    with pytest.raises(IndexRangeError, match=r"value 39 but spatial_shape\[1\] is 20"):
        compiled(feats, rows + torch.tensor([0, 0, 20, 0]) * (rows == rows.max(0).values))
    with pytest.raises(ShapeError, match=r"stands in rows 0 and 1 of coords.*distinct"):
        compiled(feats, rows[:1].expand(len(rows), 4))


def test_tensors_that_a_graph_builds_have_a_box():
    def boxless(feats, rows):
        return voxels.SparseTensor(feats, rows).F

    rows, feats = rows_and_feats(200, 0)
    compiled = torch.compile(boxless, fullgraph=True, backend="eager")
    with pytest.raises(Unsupported, match=r"spatial_shape None and batch_size None.*Pass them"):
        compiled(feats, rows)


def test_a_level_of_one_voxel():
    layer = voxels.SparseConv3d(4, 2, 2, stride=20, outputs="floor").double()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    rows, feats = rows_and_feats(200, 0)
    one = voxels.SparseTensor(feats, rows, SHAPE, 2).prune(rows[:, 0] == 0)
    with pytest.raises(ShapeError, match=r"floor layer .* has 1 voxels to write.*without"):
        compiled(one)


def test_operators_are_what_torch_expects():
    rows, _ = rows_and_feats(100, 0)
    rows = rows.int()
    ops, grid = torch.ops.torchweft, (SHAPE, 2)
    geometry = "strided", [3] * 3, [2] * 3, [1] * 3, [1] * 3
    torch.library.opcheck(ops.voxel_rows.default, (rows, *grid), test_utils=CHECKS)
    torch.library.opcheck(ops.voxel_order.default, (rows, *grid), test_utils=CHECKS)
    torch.library.opcheck(ops.voxel_onto.default, (rows, *grid, rows, *grid, *geometry))
