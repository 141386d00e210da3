"""The stand-in for spconv: networks as they are written for it, against dense tensors.

Seen red with: a kernel of one position read as (C_out, C_in), a map kept after indices were
written to, an inverse layer on the voxels of its input, the dense tensor not contiguous.
"""

import copy
import io
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from tests import spconvs
from tests.clients.agreement import assert_agree
from tests.clouds import DEVICE, same
from tests.spconvs import dense_weight
from torchweft.compat.cumm import tensorview
from torchweft.compat.spconv import constants
from torchweft.compat.spconv import pytorch as spconv
from torchweft.compat.spconv.core import ConvAlgo
from torchweft.compat.spconv.pytorch import modules
from torchweft.compat.spconv.utils import Point2VoxelCPU3d
from torchweft.errors import DeviceError, DTypeError, IndexRangeError, ShapeError
from torchweft.testing import assert_as_accurate, plain_error
from torchweft.voxels.norms.functions import batch_norm


def sample(**options):
    return spconvs.sample(spconv, device=DEVICE, **options)


def seeded(build):
    torch.manual_seed(0)
    return build(spconv).double().to(DEVICE)


def occupied(x):
    return x.replace_feature(torch.ones_like(x.features[:, :1])).dense() > 0


def at(dense, x):
    return dense.movedim(1, -1)[tuple(x.indices.long().T)]


def results(loss, inputs):
    return [loss, *torch.autograd.grad(loss, inputs, allow_unused=True)]


def test_a_unet_is_its_dense_oracle():
    net, x = seeded(spconvs.unet), sample()
    y = net(x)
    same(y.indices, x.indices)
    direction = torch.randn_like(y.features)
    found = results((y.features * direction).sum(), [x.features, *net.parameters()])

    def dense(dtype):
        model = copy.deepcopy(net).to(dtype)
        features = x.features.detach().to(dtype).requires_grad_()
        out = spconvs.dense_unet(model, x.replace_feature(features).dense(), occupied(x))
        out = at(out, x)
        loss = (out * direction.to(dtype)).sum()
        return [out, *results(loss, [features, *model.parameters()])]

    assert_agree(
        named([y.features, *found]), *map(named, (dense(torch.float64), dense(torch.float32)))
    )


def named(tensors):
    return {i: t.detach().double() for i, t in enumerate(tensors)}


def test_a_detectors_map_is_dense_and_contiguous():
    net, x = seeded(spconvs.detector).eval(), sample()
    y = net(x)
    assert y.is_contiguous()
    assert y.view(y.shape[0], y.shape[1] * y.shape[2], *y.shape[3:]).shape[0] == x.batch_size
    first = net[0](x)
    expected = F.conv3d(x.dense(), dense_weight(net[0]), padding=1)
    rough = F.conv3d(x.dense().float(), dense_weight(net[0]).float(), padding=1)
    noise = plain_error(at(rough, x), at(expected, x), torch.float64)
    assert_as_accurate(first.features, at(expected, x), noise)


LAYERS = [
    ("SubMConv", {"kernel_size": 3, "padding": 1}),
    ("SubMConv", {"kernel_size": 3, "dilation": 2}),
    ("SparseConv", {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("SparseConv", {"kernel_size": np.int64(3), "dilation": [2], "padding": np.array([2])}),
    ("SparseConv", {"kernel_size": 1, "stride": 2}),
    ("SparseConvTranspose", {"kernel_size": 3, "stride": 2, "padding": 1}),
]
DENSE = {1: (F.conv1d, F.conv_transpose1d), 2: (F.conv2d, F.conv_transpose2d)}
DENSE[3] = F.conv3d, F.conv_transpose3d


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize(("kind", "options"), LAYERS, ids=str)
def test_layers_are_torchs(kind, options, dim):
    options = {n: v if np.size(v) == 1 else v * dim for n, v in options.items()}
    options = {n: [int(v[0])] * dim if np.ndim(v) else v for n, v in options.items()}
    x = sample(shape=(7, 6, 5)[:dim])
    torch.manual_seed(0)
    layer = getattr(spconv, f"{kind}{dim}d")(3, 4, **options).double().to(DEVICE)
    y = layer(x)

    def dense(dtype):
        weight, bias = dense_weight(layer).to(dtype), layer.bias.to(dtype)
        d = {"dilation": layer.dilation}
        inputs = x.dense().to(dtype)
        if layer.transposed:
            weight = weight.transpose(0, 1)
            return DENSE[dim][1](inputs, weight, bias, layer.stride, layer.padding, **d)
        centred = [(k - 1) * n // 2 for k, n in zip(layer.kernel_size, layer.dilation, strict=True)]
        padding = centred if layer.subm else layer.padding
        return DENSE[dim][0](inputs, weight, bias, layer.stride, padding, **d)

    expected = dense(torch.float64)
    assert list(expected.shape[2:]) == y.spatial_shape
    exact, rough = at(expected, y), at(dense(torch.float32), y)
    assert_as_accurate(y.features, exact, plain_error(rough, exact, torch.float64))


def test_four_axes():
    x = sample(shape=(3, 4, 3, 2))
    y = spconv.SubMConv4d(3, 2, 3).double().to(DEVICE)(x)
    assert spconv.SparseConv4d(2, 3, 2, 2).double().to(DEVICE)(y).dense().dim() == 6


def test_indices_may_be_written_in_place():
    """As VoxelNeXt does between levels: maps of the old voxels must not be used."""
    layer = spconv.SubMConv3d(3, 2, 3, indice_key="subm").double().to(DEVICE)
    x = sample()
    layer(x)
    x.indices[:, 1:] *= 2
    x.spatial_shape = [2 * n for n in x.spatial_shape]
    fresh = spconv.SparseConvTensor(x.features, x.indices.clone(), x.spatial_shape, 2)
    same(layer(x).features, layer(fresh).features)
    assert int((layer(x).find_indice_pair("subm").indice_pair_num > 0).sum()) == 1  # the centre


def test_indices_written_after_a_call_leave_its_output():
    down = spconv.SparseConv3d(3, 2, 2, 2, indice_key="down").double().to(DEVICE)
    x = sample()
    y = down(x)
    before = y.dense()
    x.indices[:, 1:] += 1
    same(y.dense(), before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_indices_may_be_assigned(mode):
    layer = spconv.SubMConv3d(3, 2, 3, indice_key="subm").double().to(DEVICE)
    with mode():
        x = sample()
        y = layer(x)
        x.indices = x.indices.clone()
        same(layer(x).features, y.features)
        x.indices.copy_(x.indices.flip(0))
        fresh = spconv.SparseConvTensor(x.features, x.indices.clone(), x.spatial_shape, 2)
        same(layer(x).features, layer(fresh).features)
        x.indices = x.indices[:10]
        x = x.replace_feature(x.features[:10])
        x.indice_dict.clear()
        assert len(layer(x).features) == 10


def test_levels_count_their_versions_in_inference_mode():
    """Else the host would compare the rows of every level at every layer."""
    down = spconv.SparseConv3d(3, 2, 2, 2, indice_key="down").double().to(DEVICE)
    with torch.inference_mode():
        y = down(sample())
        assert not y.indices.is_inference()
        before = y.sparse().coordinates
        assert y.sparse().coordinates is before is y.find_indice_pair("down").pairs.outputs
        y.indices[:, 1:] += 1
        y.spatial_shape = [n + 1 for n in y.spatial_shape]
        assert y.sparse().coordinates is not before


def test_layers_share_maps_of_one_indices_tensor():
    """Also where programs build a second tensor on it; with other voxels they share none."""
    x = sample()
    again = spconv.SparseConvTensor(x.features, x.indices, x.spatial_shape, x.batch_size)
    wider = spconv.SparseConvTensor(x.features, x.indices, [16, 16, 16], x.batch_size)
    assert x.sparse().coordinates is again.sparse().coordinates
    assert wider.sparse().coordinates is not x.sparse().coordinates
    y = spconv.SparseConv3d(3, 2, 2, 2, indice_key="down").double().to(DEVICE)(x)
    assert y.sparse().coordinates is y.find_indice_pair("down").pairs.outputs


def test_indices_that_a_program_collects_keep_no_maps():
    x = sample()
    y = spconv.SparseConv3d(3, 2, 2, 2).double().to(DEVICE)(x)
    assert y.sparse().coordinates is y.replace_feature(y.features).sparse().coordinates
    collected = [x.indices, y.indices]
    kept = [weakref.ref(t.sparse().coordinates) for t in (x, y)]
    del x, y
    assert [reference() for reference in kept] == [None, None]
    assert len(collected[0]) > len(collected[1])


def test_an_inverse_layer_writes_the_inputs_voxels():
    x = sample()
    y = spconv.SparseConv3d(3, 4, 3, 2, 1, indice_key="down").double().to(DEVICE)(x)
    z = spconv.SparseInverseConv3d(4, 2, 3, "down").double().to(DEVICE)(y)
    assert z.indices is x.indices
    assert z.spatial_shape == x.spatial_shape
    copied = y.replace_feature(y.features)
    copied.indices = y.indices.clone()  # equal voxels in another tensor are the same level
    inverse = spconv.SparseInverseConv3d(4, 2, 3, "down").double().to(DEVICE)
    same(inverse(copied).features, inverse(y).features)


def test_the_dictionary_is_shared_as_in_spconv():
    x = sample()
    layer = spconv.SubMConv3d(3, 3, 3, indice_key="a").double().to(DEVICE)
    y = layer(x)
    assert not x.indice_dict  # a layer writes to a copy
    assert y.replace_feature(y.features).indice_dict is y.indice_dict
    assert layer(y).find_indice_pair("a").pairs.kept is y.find_indice_pair("a").pairs.kept
    assert y.find_indice_pair(None) is y.find_indice_pair("b") is None
    y.indice_dict.clear()
    assert y.find_indice_pair("a") is None


def test_pairs_as_programs_read_them():
    x = sample()
    y = spconv.SparseConv3d(3, 2, 3, 2, 1, indice_key="down").double().to(DEVICE)(x)
    data = y.find_indice_pair("down")
    assert isinstance(data, spconv.core.IndiceData)
    assert data.indices is x.indices
    assert data.out_indices is y.indices
    assert (data.ksize, data.stride, data.padding) == ([3] * 3, [2] * 3, [1] * 3)
    pairs, counts = data.indice_pairs, data.indice_pair_num
    for k, count in enumerate(counts.tolist()):
        rows, outs = pairs[:, k, :count].long()
        offset = torch.tensor(np.unravel_index(k, (3, 3, 3)), device=DEVICE) - 1
        same(x.indices[rows, 1:].long(), y.indices[outs, 1:].long() * 2 + offset)
        assert int((pairs[:, k, count:] + 1).abs().sum()) == 0
        same(data.pair_fwd[k, outs].long(), rows)
        same(data.pair_bwd[k, rows].long(), outs)


def test_checkpoints_hold_spconvs_layout():
    net = spconvs.unet(spconv)
    shapes = {name: tuple(t.shape) for name, t in net.state_dict().items() if t.dim() > 1}
    assert shapes["conv_input.0.weight"] == (4, 5, 5, 5, 3)
    assert shapes["final.weight"] == (5, 1, 1, 1, 4)
    kept = io.BytesIO()
    torch.save(net.state_dict(), kept)
    kept.seek(0)
    other = spconvs.unet(spconv)
    other.load_state_dict(torch.load(kept), strict=True)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        same(a, b)


def test_parameters_are_drawn_from_spconvs_range():
    layer = spconv.SparseConv3d(16, 32, 3)
    bound = (27 * 16) ** -0.5
    for parameter in layer.parameters():
        assert float(parameter.detach().abs().max()) <= bound
    assert float(layer.weight.detach().abs().max()) > 0.99 * bound


def test_counts_of_outputs_are_kept():
    layer = spconv.SparseConv3d(3, 2, 2, 2, record_voxel_count=True).double().to(DEVICE)
    most = max(len(layer(sample(seed=seed)).indices) for seed in range(3))
    assert layer.get_max_num_voxels().tolist() == [most]
    old = {n: t for n, t in layer.state_dict().items() if not n.startswith("max")}
    layer.load_state_dict(old, strict=True)
    assert layer.get_max_num_voxels().tolist() == [0]
    assert spconv.SparseConv3d(3, 2, 2).get_max_num_voxels() is None


def test_pools():
    x = sample()
    y = spconv.SparseMaxPool3d(2)(x)
    lowest = torch.finfo(torch.float64).min
    dense = torch.where(occupied(x), x.dense(), lowest)
    same(y.features, at(F.max_pool3d(dense, 2), y))
    mean = spconv.SparseAvgPool3d(2, 2)(x)
    windows = F.avg_pool3d(occupied(x).double(), 2)
    exact = at(F.avg_pool3d(x.dense(), 2) / windows, mean)
    rough = at(F.avg_pool3d(x.dense().float(), 2) / windows.float(), mean)
    assert_as_accurate(mean.features, exact, plain_error(rough, exact, torch.float64))
    same(spconv.SparseGlobalMaxPool()(x), dense.amax((2, 3, 4)))
    assert spconv.SparseGlobalAvgPool()(x).shape == (2, 3)
    assert spconv.SparseMaxPool2d(3).stride == [3, 3]
    assert spconv.SparseMaxPool(2, 3).stride == [1, 1]


def test_tensors_as_programs_use_them():
    x = sample()
    assert x.spatial_size == int(np.prod(x.spatial_shape))
    assert not x.is_quantized
    same(x.minus().features, -x.features)
    same(spconv.SparseConvTensor.from_dense(x.dense(channels_first=False)).dense(), x.dense())
    same((x + x).features, 2 * x.features)
    same((x + x.features).features, 2 * x.features)
    z = x
    z += x
    same(z.features, 2 * x.features)
    same(sum([x, x], start=x.features).features, 3 * x.features)
    copied = x.shadow_copy()
    assert copied is not x
    assert copied.indice_dict is x.indice_dict
    keep = x.indices[:, 1] > 3
    kept = spconv.SubMConv3d(3, 3, 3, indice_key="a").double().to(DEVICE)(x).select_by_index(keep)
    assert len(kept.indices) == len(kept.features) == int(keep.sum())
    assert not kept.indice_dict
    shape = spconv.SparseConvTensor(x.features, x.indices, np.array(x.spatial_shape), 2)
    assert shape.spatial_shape == x.spatial_shape
    assert "replace_feature" in x.__dir__()


def test_sums_of_different_voxels():
    a, b = sample(seed=0), sample(seed=1)
    same(spconv.functional.sparse_add(a, b).dense(), a.dense() + b.dense())
    same(spconv.AddTableMisaligned()([a, b]).dense(), a.dense() + b.dense())
    down = spconv.SparseConv3d(3, 3, 1, 2, indice_key="down").double().to(DEVICE)(a)
    part = down.select_by_index(torch.arange(5, device=DEVICE))
    total = spconv.functional.sparse_add_hash_based(part, down)  # the rows of the one with all
    assert total.indices is down.indices
    assert total.find_indice_pair("down") is not None
    same(total.dense(), part.dense() + down.dense())


def test_tables_of_the_same_voxels():
    x = sample()
    same(spconv.JoinTable()([x, x]).features, torch.cat([x.features, x.features], 1))
    same(spconv.AddTable()([x, x, x]).features, x.features + x.features + x.features)
    table = spconv.ConcatTable().add(spconv.Identity()).add(spconv.SparseReLU())
    first, second = table(x)
    assert first is x
    same(second.features, x.features.relu())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(2), spconv.SparseBatchNorm(2)])
@pytest.mark.parametrize("relu", [nn.ReLU(), spconv.SparseReLU()])
def test_a_norm_takes_the_activation(norm, relu, monkeypatch):
    """In one call, whatever their names; a hook takes them apart."""
    called = []

    def noted(*args, **given):
        called.append(given)
        return batch_norm(*args, **given)

    monkeypatch.setattr(modules, "batch_norm", noted)
    x, norm = sample(channels=2, dtype=torch.float32), copy.deepcopy(norm).to(DEVICE)
    expected = relu(copy.deepcopy(norm)(x.features))
    net = spconv.SparseSequential(norm, relu)
    torch.testing.assert_close(net(x).features, expected)
    assert called == [{"activation": "relu", "valid": None}]
    with_hook = relu.register_forward_hook(lambda *_: called.append("hook"))
    torch.testing.assert_close(net(x).features, expected)
    with_hook.remove()
    assert called == [{"activation": "relu", "valid": None}, "hook"]


class Doubled(spconv.SubMConv3d):
    """A layer of a program, which computes something else."""

    def forward(self, input):
        return super().forward(input.replace_feature(2 * input.features))


CONVOLUTIONS = {
    "submanifold": lambda: spconv.SubMConv3d(3, 4, 3, indice_key="a"),
    "strided": lambda: spconv.SparseConv3d(3, 4, 3, 2, padding=1, bias=False),
    "transposed": lambda: spconv.SparseConvTranspose3d(3, 4, 2, 2),
    "inverse": lambda: spconv.SparseInverseConv3d(3, 4, 2, "down"),
    "pointwise": lambda: spconv.SubMConv3d(3, 4, 1),
    "derived": lambda: Doubled(3, 4, 3),
    "hooked": lambda: spconv.SubMConv3d(3, 4, 3),
}
BY_ITSELF = ("pointwise", "derived", "hooked")
"""A norm after these is a pass of its own."""


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("steps", [("norm",), ("relu",), ("norm", "relu")])
def test_a_convolution_takes_what_follows(kind, steps, monkeypatch):
    """Seen red with: a derived layer's forward left out, no norm, no activation."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    for numbers in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        nn.init.uniform_(numbers, 0.5, 2)
    after = [{"norm": norm, "relu": nn.ReLU()}[name] for name in steps]
    net = spconv.SparseSequential(CONVOLUTIONS[kind](), *after).to(DEVICE).eval()
    x = sample(dtype=torch.float32)
    if kind == "inverse":
        x = spconv.SparseConv3d(3, 3, 2, 2, indice_key="down").to(DEVICE)(x)

    def one_by_one(dtype):
        made = copy.deepcopy(net).to(dtype)
        features = made[0](x.replace_feature(x.features.to(dtype))).features
        for module in list(made)[1:]:
            features = module(features)
        return features

    exact, rough = one_by_one(torch.float64), one_by_one(torch.float32)
    noise = plain_error(rough, exact, torch.float32)
    if kind == "hooked":
        net[0].register_forward_hook(lambda *_: None)
    recorded = net(x).features
    assert recorded.requires_grad
    assert_as_accurate(recorded, exact, noise)
    passes = []

    def noted(function):
        return lambda *args, **given: (passes.append(function), function(*args, **given))[1]

    monkeypatch.setattr(modules, "batch_norm", noted(batch_norm))
    monkeypatch.setattr(nn.BatchNorm1d, "forward", noted(nn.BatchNorm1d.forward))
    with torch.no_grad():
        assert_as_accurate(net(x).features, exact, noise)
    assert bool(passes) == ("norm" in steps and kind in BY_ITSELF)


def test_sequences():
    x = sample()
    net = spconv.SparseSequential(conv=spconv.SubMConv3d(3, 2, 1), norm=nn.BatchNorm1d(2))
    net.add(nn.ReLU(), name="act")
    net.add(spconv.SparseIdentity())
    net = net.double().to(DEVICE)
    assert [name for name, _ in net.named_children()] == ["conv", "norm", "act", "3"]
    assert len(net) == 4
    assert net[-1] is net[3]
    with pytest.raises(IndexError):
        net[4]
    spconv.assign_name_for_sparse_modules(net)
    assert net.conv._sparse_unique_name == "conv"
    empty = x.select_by_index(torch.zeros(0, dtype=torch.long, device=DEVICE))
    assert len(net(empty).features) == 0  # norms are left out where there is no voxel
    assert spconv.modules.is_sparse_conv(net.conv)
    assert spconv.modules.is_spconv_module(spconv.SparseBatchNorm(3))
    assert not spconv.modules.is_spconv_module(nn.ReLU())
    assert spconv.SparseSequential(spconv.ToDense())(x).shape == (2, 3, *spconvs.SHAPE)
    assert spconv.RemoveGrid()(x).grid is None


def test_a_programs_own_loader_sees_versions(monkeypatch):
    """As mmdet3d sets them, so that it permutes weights of older checkpoints only."""
    monkeypatch.setattr(spconv.SparseModule, "_version", 2, raising=False)
    state = spconvs.unet(spconv).state_dict()
    assert state._metadata["conv_input.0"] == {"version": 2}
    seen = []
    monkeypatch.setattr(
        spconv.SparseModule, "_load_from_state_dict", lambda self, *args: seen.append(args[2])
    )
    spconvs.unet(spconv).load_state_dict(state)
    assert all(metadata["version"] == 2 for metadata in seen)


def test_networks_are_copied_and_pickled():
    net, x = seeded(spconvs.detector).eval(), sample()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        same(other(x), net(x))
    again = copy.deepcopy(x.replace_feature(x.features.detach()))
    same(net(again), net(x))


def test_autocast_computes_in_its_dtype():
    net, x = spconvs.unet(spconv).to(DEVICE), sample(dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = net(x)
    assert y.features.dtype == torch.bfloat16
    y.features.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


def test_norms_on_tensors_and_on_features():
    x = sample()
    for module in (spconv.SparseBatchNorm(3).double().to(DEVICE), spconv.SparseReLU()):
        same(module(x).features, module(x.features))


def test_all_arguments_of_spconv_are_taken():
    options = {"algo": ConvAlgo.Native, "fp32_accum": True, "large_kernel_fast_algo": True}
    layer = spconv.SubMConv3d(3, 4, 3, 1, 1, 1, 1, True, "key", name="first", **options)
    assert (layer.algo, layer.name, layer.indice_key) == (ConvAlgo.Native, "first", "key")
    assert layer.is_inverseable() is False
    layer = spconv.SparseConv3d(3, 4, 3, 1, 1, 1, 1, False, "key", record_voxel_count=True)
    assert (layer.stride, layer.padding, layer.dilation) == ([1] * 3, [1] * 3, [1] * 3)
    assert layer.is_inverseable()
    assert layer.bias is None
    assert spconv.SparseInverseConv3d(3, 4, 3, "key", False).indice_key == "key"
    assert "kernel_size=[3, 3, 3]" in repr(layer)
    made = spconv.conv.SparseConvolution(3, 3, 4, dtype=torch.float64, device=DEVICE)
    assert made.weight.dtype == torch.float64
    assert spconv.SparseMaxPool3d(3, 2, 1, 1, "pool", ConvAlgo.Native).indice_key == "pool"
    assert spconv.ops.get_conv_output_size([9, 8], [3, 3], [2, 2], [1, 1], [1, 1]) == [5, 4]
    assert spconv.ops.get_deconv_output_size([5], [3], [2], [1], [1], [1]) == [10]


def test_a_second_tensor_is_added_to_a_layers_output():
    x = sample()
    layer = spconv.SubMConv3d(3, 3, 3).double().to(DEVICE)
    same(layer(x, add_input=x).features, layer(x).features + x.features)


def test_tf32_is_asked_for_by_the_constant(monkeypatch):
    asked = []
    known = spconv.conv.conv_of_geometry
    monkeypatch.setattr(
        spconv.conv, "conv_of_geometry", lambda *args: asked.append(args[3]) or known(*args)
    )
    monkeypatch.setattr(constants, "SPCONV_ALLOW_TF32", True)
    spconv.SubMConv3d(3, 3, 3).double().to(DEVICE)(sample())
    assert asked == [(1, "tf32", None)]


def test_features_of_points_are_gathered():
    features = torch.randn(3, 2)
    ids = torch.tensor([2, -1, 0])
    found = spconv.utils.gather_features_by_pc_voxel_id(features, ids, invalid_value=7)
    same(found, torch.stack([features[2], torch.full((2,), 7.0), features[0]]))


def layer(kind, *args, **options):
    return getattr(spconv, kind)(*args, **options).double().to(DEVICE)


def down_and(change, inverse):
    y = layer("SparseConv3d", 3, 3, 2, 2, indice_key="down")(sample())
    change(y)
    return layer("SparseInverseConv3d", 3, 3, *inverse)(y)


def keyed_twice(first, second, change=lambda y: y):
    return second(change(first(sample())))


SUBM = ("SubMConv3d", 3, 3, 3)
ERRORS = {
    "x.features was assigned": (
        lambda: setattr(sample(), "features", torch.ones(1, 1)),
        ShapeError,
    ),
    r"indices are torch.int64.*indices.int": (
        lambda: spconv.SparseConvTensor(torch.ones(1, 1), torch.zeros(1, 4).long(), [1] * 3, 1),
        DTypeError,
    ),
    r"spatial_shape has 2 lengths": (
        lambda: spconv.SparseConvTensor(torch.ones(1, 1), torch.zeros(1, 4).int(), [1] * 2, 1),
        ShapeError,
    ),
    r"batch_size is 0": (
        lambda: spconv.SparseConvTensor(torch.ones(1, 1), torch.zeros(1, 4).int(), [1] * 3, 0),
        ShapeError,
    ),
    r"benchmark=True.*torch.profiler": (
        lambda: spconv.SparseConvTensor(
            torch.ones(1, 1), torch.zeros(1, 4).int(), [1] * 3, 1, benchmark=True
        ),
        NotImplementedError,
    ),
    r"q_scale of an int8 tensor": (lambda: sample().q_scale(), NotImplementedError),
    r"\[3, 3\] has 2 numbers for 3 axes": (lambda: layer("SubMConv3d", 3, 3, [3, 3]), ShapeError),
    r"kernel_size is \[2, 2, 2\] in a submanifold": (
        lambda: layer("SubMConv3d", 3, 3, 2),
        ShapeError,
    ),
    r"padding is \[1, 1, 1\] in a layer of one": (
        lambda: layer("SparseConv3d", 3, 3, 1, padding=1),
        ShapeError,
    ),
    r"groups=3 was given.*torchweft.voxels": (
        lambda: layer("SubMConv3d", 3, 3, 3, groups=3),
        NotImplementedError,
    ),
    r"output_padding=\[1, 1, 1\] was given": (
        lambda: spconv.conv.SparseConvolution(3, 3, 3, transposed=True, output_padding=1),
        NotImplementedError,
    ),
    r"dilation=\[2, 2, 2\] in a transposed": (
        lambda: layer("SparseConvTranspose3d", 3, 3, 3, dilation=2),
        NotImplementedError,
    ),
    r"subm=True was given to SparseMaxPool": (
        lambda: spconv.SparseMaxPool(3, 3, subm=True),
        NotImplementedError,
    ),
    r"SubMConv3d was given a Tensor": (lambda: layer(*SUBM)(torch.ones(1, 3)), DTypeError),
    r"SubMConv2d was given voxels of 3 axes": (
        lambda: layer("SubMConv2d", 3, 3, 3)(sample()),
        ShapeError,
    ),
    r"built for 4 channels": (lambda: layer("SubMConv3d", 4, 3, 3)(sample()), ShapeError),
    r"names a submanifold layer with .*another key": (
        lambda: keyed_twice(
            layer(*SUBM, indice_key="a"), layer("SubMConv3d", 3, 3, 5, indice_key="a")
        ),
        ShapeError,
    ),
    r"names another layer with": (
        lambda: keyed_twice(
            layer("SparseConv3d", 3, 3, 3, padding=1, indice_key="a"), layer(*SUBM, indice_key="a")
        ),
        ShapeError,
    ),
    r"SparseConv3d has indice_key='a', under which": (
        lambda: keyed_twice(
            layer(*SUBM, indice_key="a"), layer("SparseConv3d", 3, 3, 3, indice_key="a")
        ),
        ShapeError,
    ),
    r"SparseMaxPool3d has indice_key='a', under which": (
        lambda: keyed_twice(
            layer(*SUBM, indice_key="a"), spconv.SparseMaxPool3d(2, indice_key="a")
        ),
        ShapeError,
    ),
    r"names no layer; the tensor has the keys \['down'\]": (
        lambda: down_and(lambda y: None, (2, "up")),
        ShapeError,
    ),
    r"of an inverse layer names a submanifold layer": (
        lambda: keyed_twice(
            layer(*SUBM, indice_key="a"), layer("SparseInverseConv3d", 3, 3, 3, "a")
        ),
        ShapeError,
    ),
    r"the layer of indice_key='down' has \[2, 2, 2\]": (
        lambda: down_and(lambda y: None, (3, "down")),
        ShapeError,
    ),
    r"or indices were written to since": (
        lambda: down_and(lambda y: y.indices.mul_(2), (2, "down")),
        ShapeError,
    ),
    r"\+ was given tensors of .* row by row.*sparse_add": (
        lambda: sample(seed=0) + sample(seed=1),
        ShapeError,
    ),
    r"JoinTable was given tensors": (
        lambda: spconv.JoinTable()([sample(seed=0), sample(seed=1)]),
        ShapeError,
    ),
    r"^SparseInverseConv3d was built without indice_key: .* Pass": (
        lambda: spconv.SparseInverseConv3d(4, 4, 3),
        DTypeError,
    ),
    r"sparse_add was given tensors of": (
        lambda: spconv.functional.sparse_add(sample(), sample(channels=4)),
        ShapeError,
    ),
    r"a second module was named 'a'": (
        lambda: spconv.SparseSequential(a=nn.ReLU()).add(nn.ReLU(), "a"),
        ShapeError,
    ),
    r"stands in rows": (
        lambda: layer(*SUBM)(
            spconv.SparseConvTensor(
                torch.ones(2, 3).double().to(DEVICE),
                torch.zeros(2, 4).int().to(DEVICE),
                [1] * 3,
                1,
            )
        ),
        ShapeError,
    ),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text):
    call, error = ERRORS[text]
    with pytest.raises(error, match=f"(?s){text}"):
        call()


def test_voxels_outside_of_the_box_are_refused():
    x = sample()
    x.spatial_shape = [4, 4, 4]
    with pytest.raises(IndexRangeError, match="spatial_shape"):
        layer(*SUBM)(x)


LACKING = [
    (spconv, "quantization", "half"),
    (spconv, "hash", "find"),
    (spconv.functional, "implicit_gemm", "layer"),
    (spconv.functional, "indice_maxpool", "pool"),
    (spconv.ops, "get_indice_pairs", "kernel_map"),
    (spconv.core, "scatter_nd", "dense"),
    (spconv.modules, "PrintTensorMeta", "hook"),
]


@pytest.mark.parametrize(("module", "name", "way"), LACKING, ids=str)
def test_what_is_lacking_says_the_nearest_way(module, name, way):
    with pytest.raises(NotImplementedError, match=f"(?s){name} is asked for.*{way}"):
        getattr(module, name)


def test_what_the_original_lacks_too_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = spconv.Nothing
    with pytest.raises(ImportError):
        from torchweft.compat.spconv.utils import VoxelGeneratorV2  # noqa: F401 - of spconv 1


BOX = {"vsize_xyz": [0.5, 0.25, 1.0], "coors_range_xyz": [-2, -1, 0, 2, 1, 3]}


def points(count=400, seed=0):
    torch.manual_seed(seed)
    found = torch.rand(count, 4) * torch.tensor([5.0, 3.0, 4.0, 1.0]) - torch.tensor(
        [2.5, 1.5, 0.5, 0.0]
    )
    found[7] = float("nan")
    return found.to(DEVICE)


def test_points_to_voxels_in_the_order_z_y_x():
    cloud = points()
    made = spconv.utils.PointToVoxel(
        **BOX,
        num_point_features=4,
        max_num_voxels=100,
        max_num_points_per_voxel=3,
        device=torch.device(DEVICE),
    )
    assert made.grid_size == [3, 8, 8]
    found, indices, counts, ids = made.generate_voxel_with_id(cloud)
    assert found.shape == (100, 3, 4)
    assert (indices.dtype, counts.dtype, ids.dtype) == (torch.int32, torch.int32, torch.int64)
    filled = [0] * 100
    for point, voxel in zip(cloud.tolist(), ids.tolist(), strict=True):
        if voxel < 0:
            continue
        x, y, z = (point[0] + 2) // 0.5, (point[1] + 1) // 0.25, point[2] // 1
        assert indices[voxel].tolist() == [z, y, x]
        if filled[voxel] < 3:
            assert found[voxel, filled[voxel]].tolist() == point
            filled[voxel] += 1
    assert counts.tolist() == filled
    assert ids[7] == -1
    for a, b in zip(made(cloud), (found, indices, counts), strict=True):
        same(a, b)


def test_generators_of_data_pipelines():
    """As OpenPCDet's VoxelGeneratorWrapper builds and calls it."""
    cloud = points().cpu()
    sizes = {"max_num_points_per_voxel": 5, "max_num_voxels": 60}
    made = Point2VoxelCPU3d(**BOX, num_point_features=4, **sizes)
    found = made.point_to_voxel(tensorview.from_numpy(cloud.numpy()))
    kept, indices, counts = (t.numpy() for t in found)
    assert kept.shape == (60, 5, 4)
    assert indices.max(0).tolist() == [2, 7, 7]
    assert counts.min() >= 1


POINT_ERRORS = {
    r"empty_mean=True was given": (points, {"empty_mean": True}, NotImplementedError),
    r"pc is \(400, 3\) but num_point_features is 4": (lambda: points()[:, :3], {}, ShapeError),
    r"pc is on meta but PointToVoxel": (lambda: points().to("meta"), {}, DeviceError),
}


@pytest.mark.parametrize("text", POINT_ERRORS)
def test_errors_of_points(text):
    cloud, options, error = POINT_ERRORS[text]
    made = spconv.utils.PointToVoxel(
        **BOX,
        num_point_features=4,
        max_num_voxels=9,
        max_num_points_per_voxel=3,
        device=torch.device(DEVICE),
    )
    with pytest.raises(error, match=text):
        made(cloud(), **options)
