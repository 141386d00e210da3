"""Tensors, fields, norms, utilities and errors of the stand-in for MinkowskiEngine.

Seen red with: repeated rows merged in sorted order, rows of an absent sample left out of a list.
"""

import re

import numpy as np
import pytest
import torch
from torch import nn

from tests import minkowskis
from tests.clouds import same
from torchweft.compat import MinkowskiEngine as ME  # noqa: N817 - its users' own habit
from torchweft.errors import DeviceError, DTypeError, IndexRangeError, ShapeError
from torchweft.testing import assert_as_accurate, plain_error

MODES = ME.SparseTensorQuantizationMode
ROWS = torch.tensor([[0, 7, 0], [1, 3, 4], [0, 7, 0], [0, -2, 5], [0, 7, 0]]).int()
FEATURES = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, -6.0], [7.0, 8.0], [0.0, 1.0]])
FIRST = [[0, 7, 0], [1, 3, 4], [0, -2, 5]]
COMBINED = {
    MODES.RANDOM_SUBSAMPLE: [[1, 2], [3, 4], [7, 8]],
    MODES.UNWEIGHTED_AVERAGE: [[2, -1], [3, 4], [7, 8]],
    MODES.UNWEIGHTED_SUM: [[6, -3], [3, 4], [7, 8]],
    MODES.MAX_POOL: [[5, 2], [3, 4], [7, 8]],
}


def pair(**options):
    return ME.SparseTensor(FEATURES, ROWS, **options)


@pytest.mark.parametrize("mode", COMBINED)
def test_rows_with_one_voxel(mode):
    x = pair(quantization_mode=mode)
    assert x.C.tolist() == x.coordinates.tolist() == FIRST
    assert x.F.tolist() == x.features.tolist() == COMBINED[mode]
    assert x.unique_index.tolist() == [0, 1, 3]
    assert x.inverse_mapping.tolist() == [0, 1, 0, 2, 0]
    assert x.slice(x).F.tolist() == [COMBINED[mode][n] for n in (0, 1, 0, 2, 0)]
    field = ME.TensorField(FEATURES, ROWS + torch.tensor([0.0, 0.5, 0.25]), quantization_mode=mode)
    y = field.sparse()
    assert y.C.tolist() == FIRST
    assert y.F.tolist() == COMBINED[mode]
    assert y.slice(field).F.tolist() == x.slice(x).F.tolist()
    assert y.cat_slice(field).shape == (5, 4)
    again = field.sparse(coordinate_map_key=y.coordinate_map_key)
    assert again.F.tolist() == COMBINED[mode]


def test_members_of_a_tensor():
    x = ME.SparseTensor(FEATURES[:3], ROWS[[1, 3, 4]] * torch.tensor([3, 1, 1]).int())
    assert [rows.tolist() for rows in x.decomposition_permutations] == [[1, 2], [], [], [0]]
    assert [len(c) for c in x.decomposed_coordinates] == [2, 0, 0, 1]
    assert x.coordinates_at(3).tolist() == [[3, 4]]
    assert x.features_at(0).tolist() == [[3.0, 4.0], [5.0, -6.0]]
    coordinates, features = x.coordinates_and_features_at(0)
    assert coordinates.tolist() == x.decomposed_coordinates_and_features[0][0].tolist()
    same(features, x.decomposed_features[0])
    assert (x.D, x.dimension, len(x), x.shape, x.size()) == (2, 2, 3, (3, 2), (3, 2))
    assert x.double().dtype == torch.float64
    assert x.float().device.type == "cpu"
    assert x.get_device() == -1
    x.requires_grad_()
    assert x.requires_grad
    assert not x.detach().requires_grad
    assert "coordinate_map_key=coordinate map key:[1, 1]" in repr(x)
    assert x.tensor_stride == x.coordinate_key.get_tensor_stride() == [1, 1]
    pooled = ME.MinkowskiGlobalSumPooling()(x)
    assert pooled.C.tolist() == [[0, 0, 0], [3, 0, 0]]
    assert pooled.tensor_stride == [0, 0]
    assert x.coordinate_manager.number_of_unique_batch_indices() == 2


def test_the_coordinates_may_be_written_to():
    x = minkowskis.sample(ME)
    layer = ME.MinkowskiConvolution(3, 2, kernel_size=3, dimension=3).double()
    before = layer(x).F
    x.C.mul_(2)
    same(layer(x).F, before)
    assert x.coordinate_manager.get_coordinates(1).tolist() == (x.C // 2).tolist()


def test_sums_in_place_leave_other_tensors():
    x = pair()
    y = x.with_features(x.F)
    y += x
    y -= x
    y *= x
    y /= x
    same(y.F, x.F)
    assert y.F is not x.F
    y += 1
    same(y.F, x.F + 1)


@pytest.mark.parametrize("stride", [1, 2])
def test_dense_and_back(stride):
    dense = torch.randn(2, 3, 4, 5) * (torch.rand(2, 1, 4, 5) < 0.5)
    x = ME.to_sparse(dense)
    same(x.dense(shape=dense.shape)[0], dense)
    same(ME.MinkowskiToDenseTensor(dense.shape)(x), dense)
    everywhere = ME.MinkowskiToSparseTensor()(dense)
    assert len(everywhere) == 40
    same(everywhere.dense()[0], dense)
    coordinates = ME.dense_coordinates(dense.shape)
    assert len(ME.MinkowskiToSparseTensor(coordinates=coordinates)(dense)) == len(x)
    same(ME.MinkowskiToSparseTensor(False, coordinates)(dense).dense()[0], dense)
    last = ME.to_sparse(dense.movedim(1, -1), format="BXXC")
    same(last.F, x.F)
    y = ME.SparseTensor(x.F, x.C * torch.tensor([1, stride, stride]).int(), tensor_stride=stride)
    low = torch.tensor([-stride, 0]).int()
    moved, first, steps = y.dense(torch.Size([2, 3, 5, 5]), min_coordinate=low)
    same(moved[:, :, 1:], dense)
    assert (first.tolist(), steps.tolist()) == ([[-stride, 0]], [stride, stride])
    sparse, first, _ = y.sparse(low, torch.tensor([3 * stride, 4 * stride]))
    same(sparse.to_dense().movedim(-1, 1), moved)
    assert first.tolist() == [[-1, 0]]
    assert y.sparse()[0].shape[-1] == 3
    assert y.dense(contract_stride=False)[0].shape[2] == y.C[:, 1].max() + 1


def test_points_between_voxels():
    """Interpolated as by the definition; splatting is the adjoint of interpolation."""
    x = minkowskis.sample(ME, length=5)
    points = torch.rand(30, 4, dtype=torch.float64) * torch.tensor([0.0, 5, 5, 5]) - 2.5
    points[:, 0] = torch.arange(30) % 2
    reference = minkowskis.sample(minkowskis.REFERENCE, length=5)
    exact = reference.features_at_coordinates(points)
    y = x.features_at_coordinates(points)
    rough = reference.on(reference.F.float()).features_at_coordinates(points)
    assert_as_accurate(y, exact, plain_error(rough, exact, torch.float64))
    layer = ME.MinkowskiInterpolation(return_kernel_map=True, return_weights=True)
    found, (rows, outs), weights = layer(x, points)
    same(found, y)
    assert len(rows) == len(outs) == len(weights)
    same(ME.MinkowskiInterpolation()(x, points), y)
    field = ME.TensorField(torch.randn(30, 3, dtype=torch.float64), points)
    splat = field.splat()
    z = splat.with_features(torch.randn_like(splat.F))
    one, other = (splat.F * z.F).sum(), (z.interpolate(field).F * field.F).sum()
    scale = (splat.F * z.F).abs().sum()
    assert abs(one - other) <= 64 * torch.finfo(torch.float64).eps * scale


def test_fields():
    points = torch.tensor([[0, 0.5, -0.5], [1, 2.5, 3.0], [0, 0.75, -0.25], [1, 7.0, 3.5]])
    field = ME.TensorField(FEATURES[:4], points)
    assert field.C is points
    assert [rows.tolist() for rows in field.decomposition_permutations] == [[0, 2], [1, 3]]
    coarse = field.sparse(tensor_stride=2)
    assert coarse.C.tolist() == [[0, 0, -2], [1, 2, 2], [1, 6, 2]]
    assert coarse.tensor_stride == [2, 2]
    fine = field.sparse()
    down = ME.MinkowskiConvolution(2, 2, kernel_size=3, stride=2, dimension=2)(fine)
    mapping = field.inverse_mapping(down.coordinate_map_key)
    assert down.C[mapping].tolist() == [[0, 0, -2], [1, 2, 2], [0, 0, -2], [1, 6, 2]]
    normed = ME.MinkowskiReLU()(ME.MinkowskiBatchNorm(2)(ME.MinkowskiLinear(2, 2)(field)))
    assert isinstance(normed, ME.TensorField)
    assert normed.coordinate_key == field.coordinate_key
    same(ME.MinkowskiGlobalMaxPooling()(field).F, torch.tensor([[5.0, 2.0], [7.0, 8.0]]))
    same((field + field).F, 2 * field.F)
    assert ME.MinkowskiToSparseTensor()(field).C.tolist() == fine.C.tolist()
    key = field.coordinate_key
    again = ME.TensorField(
        field.F, coordinate_field_map_key=key, coordinate_manager=field.coordinate_manager
    )
    same(again.C, points)
    with pytest.raises(ShapeError, match=r"3 of 4 points have no voxel in .* was not pruned"):
        field.inverse_mapping(fine.coordinate_manager.prune(fine.coordinate_key, fine.F[:, 0] > 3))


def test_tensors_that_share_a_manager():
    with pytest.raises(AssertionError, match=r"of two coordinate managers.*SHARE_COORDINATE"):
        pair() + pair()
    shared = ME.SparseTensorOperationMode.SHARE_COORDINATE_MANAGER
    ME.set_sparse_tensor_operation_mode(shared)
    try:
        assert ME.sparse_tensor_operation_mode() == shared
        a, b = pair(), ME.SparseTensor(FEATURES, ROWS + torch.tensor([0, 1, 0]).int())
        assert a.coordinate_manager is b.coordinate_manager is ME.global_coordinate_manager()
        assert a.coordinate_map_key != b.coordinate_map_key
        assert len(a + b) == 6
        ME.clear_global_coordinate_manager()
        assert pair().coordinate_manager is not a.coordinate_manager
        ME.set_global_coordinate_manager(a.coordinate_manager)
        assert pair().coordinate_manager is a.coordinate_manager
    finally:
        ME.clear_global_coordinate_manager()
        separate = ME.SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER
        ME.set_sparse_tensor_operation_mode(separate)


def test_joined_tensors():
    x = pair()
    y = x.with_features(x.F + 1)
    same(ME.cat(x, y).F, torch.cat((x.F, y.F), 1))
    same(ME.cat([x, y]).F, ME.MinkowskiStackCat(nn.Identity(), nn.Identity())(x).F * 1 + _one(x))
    same(ME.sum(x, y, x).F, x.F + y.F + x.F)
    same(ME.mean(x, y).F, torch.stack((x.F, y.F)).mean(0))
    same(ME.var([x, y]).F, torch.full_like(x.F, 0.25))
    same(ME.MinkowskiStackSum(nn.Identity(), nn.Identity())(x).F, 2 * x.F)
    assert ME.MinkowskiStackMean(nn.Identity(), nn.Identity())(x).F.tolist() == x.F.tolist()
    assert not ME.MinkowskiStackVar(nn.Identity(), nn.Identity())(x).F.any()
    same(ME.MinkowskiToFeature()(x), x.F)


def _one(x):
    return torch.cat((torch.zeros_like(x.F), torch.ones_like(x.F)), 1)


def test_pruning_keeps_the_order():
    x = pair()
    y = ME.MinkowskiPruning()(x, torch.tensor([False, True, True]))
    assert y.C.tolist() == FIRST[1:]
    same(y.F, x.F[1:])
    assert y.coordinate_map_key.get_key() == ([1, 1], "pruned")
    assert [len(f) for f in y.decomposed_features] == [1, 1]
    none = ME.MinkowskiPruning()(x, torch.zeros(3, dtype=torch.bool))
    assert [len(f) for f in none.decomposed_features] == [0, 0]
    layer = ME.MinkowskiConvolution(2, 3, kernel_size=3, stride=2, dimension=2)
    assert layer(none).shape == (0, 3)


def test_norms():
    torch.manual_seed(0)
    x = minkowskis.sample(ME)
    net = nn.Sequential(ME.MinkowskiBatchNorm(3, momentum=0.3), ME.MinkowskiReLU()).double()
    assert sorted(net.state_dict())[0] == "0.bn.bias"
    y = net(x)
    converted = ME.MinkowskiSyncBatchNorm.convert_sync_batchnorm(net)
    assert isinstance(converted[0].bn, nn.SyncBatchNorm)
    assert converted[0].bn.weight is net[0].bn.weight
    same(converted[0].bn.running_mean, y.F.new_tensor(net[0].bn.running_mean.tolist()))
    for build, eps in ((ME.MinkowskiInstanceNorm, 1e-8), (ME.MinkowskiStableInstanceNorm, 1e-6)):
        layer = build(3).double()
        layer.reset_parameters()
        rows = x.features_at(1)
        exact = (rows - rows.mean(0)) / (rows.var(0, correction=0) + eps).sqrt()
        short = rows.float()
        rough = (short - short.mean(0)) / (short.var(0, correction=0) + eps).sqrt()
        noise = plain_error(rough, exact, torch.float64)
        assert_as_accurate(layer(x).features_at(1), exact, noise)


def test_activations_and_functions():
    x = pair()
    same(ME.MinkowskiLeakyReLU(0.5)(x).F, nn.functional.leaky_relu(x.F, 0.5))
    same(ME.MinkowskiFunctional.relu(x).F, x.F.relu())
    target = torch.tensor([0, 1, 0])
    loss = ME.MinkowskiFunctional.cross_entropy(x, target)
    same(loss, nn.functional.cross_entropy(x.F, target))
    layer = ME.MinkowskiSinusoidal(2, 4)
    same(layer(x).F, torch.sin(x.F @ layer.kernel + layer.bias) * layer.coef)
    assert list(ME.MinkowskiPReLU().state_dict()) == ["module.weight"]


def test_quantized_points():
    points = np.array([[0.2, 1.9], [-0.1, 3.0], [0.9, 1.1], [0.2, 1.9]])
    voxels = ME.utils.sparse_quantize(points)
    assert voxels.tolist() == [[0, 1], [-1, 3]]
    halves = ME.utils.sparse_quantize(torch.tensor(points), quantization_size=[0.5, 1])
    assert halves.tolist() == [[0, 1], [-1, 3], [1, 1]]
    labels = np.array([4, 5, 6, 4], dtype=np.int32)
    found = ME.utils.sparse_quantize(
        points, points, labels, ignore_label=-1, return_index=True, return_inverse=True
    )
    assert [part.tolist() for part in found] == [
        [[0, 1], [-1, 3]],
        points[:2].tolist(),
        [-1, 5],
        [0, 1],
        [0, 1, 0, 0],
    ]
    maps = ME.utils.sparse_quantize(
        torch.tensor(points), return_index=True, return_inverse=True, return_maps_only=True
    )
    assert [m.tolist() for m in maps] == [[0, 1], [0, 1, 0, 0]]
    assert ME.utils.unique_coordinate_map(ROWS)[0].tolist() == [0, 1, 3]
    with pytest.raises(ShapeError, match="return_inverse was given without return_index"):
        ME.utils.sparse_quantize(points, return_inverse=True)
    with pytest.raises(ShapeError, match="quantization_size has 3 numbers but coordinates 2"):
        ME.utils.sparse_quantize(points, quantization_size=[1, 2, 3])
    with pytest.raises(ShapeError, match=r"coordinates, features and labels \[4, 3\]"):
        ME.utils.sparse_quantize(points, points[:3])


def test_collated_samples():
    coords = [np.array([[1, 2]]), torch.tensor([[3.5, -0.5], [0.0, 1.0]])]
    feats = [torch.ones(1, 3), torch.zeros(2, 3)]
    rows, features, labels = ME.utils.sparse_collate(coords, feats, [[1], [2, 3]])
    assert rows.tolist() == [[0, 1, 2], [1, 3, -1], [1, 0, 1]]
    assert features.shape == (3, 3)
    assert labels == [[1], [2, 3]]
    assert len(ME.utils.sparse_collate(coords, feats)) == 2
    data = list(zip(coords, feats, [torch.tensor([1]), torch.tensor([2, 3])], strict=True))
    assert ME.utils.batch_sparse_collate(data)[2].tolist() == [1, 2, 3]
    assert len(ME.utils.SparseCollation()(data)[0]) == 3
    assert len(ME.utils.SparseCollation(limit_numpoints=2)(data)[0]) == 1
    points = ME.utils.batched_coordinates(coords, dtype=torch.float32)
    assert points[1].tolist() == [1.0, 3.5, -0.5]
    with pytest.raises(ShapeError, match=r"one or more \(N, D\) with one D"):
        ME.utils.batched_coordinates([torch.ones(2, 2), torch.ones(2, 3)])
    with pytest.raises(ShapeError, match=r"samples have \[1, 2\] coordinates and \[1\] features"):
        ME.utils.sparse_collate(coords, feats[:1])


def test_initial_values():
    layer = ME.MinkowskiConvolution(40, 30, kernel_size=3, dimension=3)
    assert layer.kernel.abs().max() <= 1 / (27 * 40) ** 0.5
    up = ME.MinkowskiConvolutionTranspose(40, 30, kernel_size=3, stride=2, dimension=3)
    bound = 1 / (27 * 30) ** 0.5
    assert 1 / (27 * 40) ** 0.5 < up.kernel.abs().max() <= bound
    deviations = {}
    for mode, channels in (("fan_in", 40), ("fan_out", 30)):
        ME.utils.kaiming_normal_(layer.kernel, mode=mode, nonlinearity="relu")
        deviations[mode] = layer.kernel.std() / (2 / (27 * channels)) ** 0.5
    assert all(0.97 < ratio < 1.03 for ratio in deviations.values())
    with pytest.raises(ShapeError, match="mode is 'fan' and the kernel"):
        ME.utils.kaiming_normal_(layer.kernel, mode="fan")


def test_blocks():
    from torchweft.compat.MinkowskiEngine.modules.resnet_block import BasicBlock, Bottleneck
    from torchweft.compat.MinkowskiEngine.modules.senet_block import SEBasicBlock, SEBottleneck

    x = minkowskis.sample(ME, channels=32)
    for build in (BasicBlock, Bottleneck):
        width = 32 // build.expansion
        block = build(32, width, dimension=3).double()
        names = [f"{kind}{n}" for n in range(1, len(block.sizes) + 1) for kind in ("conv", "norm")]
        assert {name.split(".")[0] for name in block.state_dict()} == set(names)
        assert block(x).shape == x.shape
    for build in (SEBasicBlock, SEBottleneck):
        block = build(32, 32 // build.expansion, D=3).double()
        assert block.se.fc[0].linear.out_features == 2
        assert block(x).shape == x.shape


def test_a_network_is_a_base_class():
    class Net(ME.MinkowskiNetwork):
        def __init__(self):
            super().__init__(3)

        def forward(self, x):
            return x

    assert Net().D == 3
    with pytest.raises(TypeError, match="abstract"):
        ME.MinkowskiNetwork(3)


def convolution(**options):
    return ME.MinkowskiConvolution(2, 2, **{"kernel_size": 3, "dimension": 2, **options})


def key(*stride):
    return ME.CoordinateMapKey(list(stride))


ERRORS = [
    (lambda: ME.SparseTensor(FEATURES), ShapeError, "coordinates alone are needed, or the key"),
    (lambda: ME.SparseTensor(FEATURES[0], ROWS), ShapeError, "features are (2,): they must be"),
    (lambda: ME.SparseTensor([1], ROWS), ShapeError, "features are list: they must be a tensor"),
    (lambda: ME.SparseTensor(FEATURES[:2], ROWS), ShapeError, "Pass one row of coordinates a"),
    (lambda: ME.SparseTensor(FEATURES, ROWS.bool()), DTypeError, "coordinates are torch.bool"),
    (
        lambda: ME.SparseTensor(FEATURES, ROWS.to("meta")),
        DeviceError,
        "features are on cpu, coordinates on meta",
    ),
    (
        lambda: ME.SparseTensor(FEATURES, ROWS, coordinate_manager=ME.CoordinateManager(D=3)),
        ShapeError,
        "the coordinate manager has 3 axes: they must be (N, 4)",
    ),
    (
        lambda: pair(quantization_mode=MODES.NO_QUANTIZATION),
        ShapeError,
        "NO_QUANTIZATION but 5 rows lie in 3 voxels",
    ),
    (lambda: pair().with_features(FEATURES), ShapeError, "has 3 voxels: they must be (3, C)"),
    (lambda: convolution()(FEATURES), DTypeError, "was given a Tensor: it takes a SparseTensor"),
    (lambda: convolution(dimension=3)(pair()), ShapeError, "has dimension=3 but the tensor has 2"),
    (
        lambda: ME.MinkowskiConvolution(3, 2, kernel_size=3, dimension=2)(pair()),
        ShapeError,
        "features are (3, 2) but MinkowskiConvolution was built for 3 channels",
    ),
    (lambda: convolution(dimension=None), ShapeError, "dimension is None: a kernel has 1 to 4"),
    (lambda: convolution(stride=0), ShapeError, "stride is [0, 0]: every number must be at least"),
    (lambda: convolution(kernel_size=[3, 3, 3]), ShapeError, "3 numbers for 2 axes"),
    (lambda: convolution(kernel_size="3x3"), DTypeError, "one integer, or 2 of them, are needed"),
    (
        lambda: ME.KernelGenerator(2, region_type=1, dimension=2),
        ShapeError,
        "kernel_size is [2, 2] of a HYPER_CROSS: it must be odd",
    ),
    (
        lambda: ME.KernelGenerator(3, region_type=ME.RegionType.CUSTOM, dimension=2),
        NotImplementedError,
        "region_type=CUSTOM and axis_types=None were given",
    ),
    (
        lambda: ME.KernelGenerator(3, region_offsets=ROWS, dimension=2),
        NotImplementedError,
        "region_offsets were given: they follow from region_type",
    ),
    (
        lambda: ME.MinkowskiConvolutionTranspose(2, 2, 2, 2, dimension=2)(pair()),
        ShapeError,
        "stride is [2, 2] in a transposed layer on a tensor of tensor stride [1, 1]",
    ),
    (lambda: convolution()(pair(), ROWS), ShapeError, "5 rows with 3 different voxels"),
    (lambda: convolution()(pair(), "rows"), DTypeError, "coordinates are a str: they must be"),
    (lambda: convolution()(pair(), pair()), ShapeError, "a layer was given tensors of two"),
    (lambda: convolution()(pair(), key(4, 4)), ShapeError, "[4, 4] names no map of this"),
    (lambda: convolution()(pair(), ROWS[:, :2]), ShapeError, "they must be (N, 3), the batch"),
    (lambda: convolution()(pair(), ROWS.float()), DTypeError, "a map has integers"),
    (
        lambda: convolution()(ME.MinkowskiGlobalSumPooling()(pair())),
        ShapeError,
        "on a tensor of tensor stride 0, as global pools leave it",
    ),
    (lambda: ME.CoordinateManager(), ShapeError, "D is 0: a manager has 1 to 4 axes"),
    (lambda: ME.CoordinateMapKey(3).get_key(), ShapeError, "a CoordinateMapKey that is not set"),
    (lambda: ME.MinkowskiPruning()(pair(), FEATURES[:3, 0]), DTypeError, "it must be torch.bool"),
    (lambda: ME.MinkowskiPruning()(pair(), FEATURES > 0), ShapeError, "it must be (3,)"),
    (lambda: ME.MinkowskiUnion()(pair()), ShapeError, "was given 1 tensors: it needs two"),
    (lambda: ME.cat(pair()), ShapeError, "cat was given 1 tensor: it needs two or more"),
    (lambda: pair().cat_slice(pair()), DTypeError, "cat_slice was given a SparseTensor"),
    (lambda: pair().dense(), IndexRangeError, "voxels lie outside of the dense shape (2, 2, 8, 6)"),
    (
        lambda: ME.MinkowskiPruning()(pair(), torch.zeros(3, dtype=torch.bool)).dense(),
        ShapeError,
        "dense() was called on a tensor without voxels",
    ),
    (lambda: ME.dense_coordinates((2, 3)), ShapeError, "shape is (2, 3): it must be (batch, C"),
    (lambda: ME.to_sparse(FEATURES), ShapeError, "x is (5, 2) and format 'BC'"),
    (lambda: ME.spmm(), NotImplementedError, "MinkowskiEngine.spmm was called"),
    (
        lambda: ME.MinkowskiConvolutionFunction.apply(1),
        NotImplementedError,
        "MinkowskiConvolutionFunction was called: torchweft's stand-in does not have it",
    ),
    (lambda: ME.utils.summary, NotImplementedError, "Use print(model)"),
]


@pytest.mark.parametrize(("call", "error", "text"), ERRORS, ids=[text for *_, text in ERRORS])
def test_errors_teach(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call()


def test_errors_of_pairs_of_tensors():
    x = pair()
    down = convolution(stride=2)(x)
    with pytest.raises(ShapeError, match=r"cat was given tensors on .* they must have one key"):
        ME.cat(x, down)
    strided = ME.SparseTensor(
        FEATURES[:1], ROWS[:1] * 2, 2, coordinate_manager=x.coordinate_manager
    )
    with pytest.raises(ShapeError, match="rows have no voxel in"):
        ME.MinkowskiMaxPooling(2, 2, dimension=2)(x, strided)
    with pytest.raises(ShapeError, match="it must hold multiples of the tensor stride"):
        down.dense(min_coordinate=torch.tensor([-3, 0]).int())


def test_fractions_of_a_sparse_tensor_warn():
    with pytest.warns(UserWarning, match="coordinates are rounded down to integers"):
        x = ME.SparseTensor(FEATURES[:1], torch.tensor([[0, 1.5, -0.5]]))
    assert x.C.tolist() == [[0, 1, -1]]
