"""The stand-in for torchsparse: networks and layers against its rules, by dictionaries.

Seen red with: offsets of odd kernels with the last axis fastest, even submanifold kernels centred,
the box of the level above kept for a level, a map kept after coords were written to, a transposed
layer by a map of other voxels.
"""

import copy
import functools
import inspect
import itertools
import pickle

import numpy as np
import pytest
import torch

from tests import voxel_rules
from tests.clients.agreement import assert_agree
from tests.clouds import DEVICE, same
from torchweft.compat import torchsparse
from torchweft.compat.torchsparse import SparseTensor, backbones, backends
from torchweft.compat.torchsparse import nn as spnn
from torchweft.compat.torchsparse.nn import functional as F  # noqa: N812 - torchsparse's habit
from torchweft.compat.torchsparse.nn.functional import conv
from torchweft.compat.torchsparse.nn.utils import fapply, get_kernel_offsets
from torchweft.compat.torchsparse.utils import make_ntuple, tensor_cache, to_dense
from torchweft.errors import DTypeError, IndexRangeError, ShapeError, WeftError

SHAPE = (11, 6, 9)


def sample(channels=3, shape=SHAPE, density=0.3, seed=0, dtype=torch.float64, given=False):
    """Random voxels in random order."""
    generator = torch.Generator().manual_seed(seed)
    coords = (torch.rand(2, *shape, generator=generator) < density).nonzero().int()
    coords = coords[torch.randperm(len(coords), generator=generator)].to(DEVICE)
    feats = torch.randn(len(coords), channels, generator=generator, dtype=torch.float64)
    feats = feats.to(DEVICE, dtype).requires_grad_()
    return SparseTensor(feats, coords, spatial_range=(2, *shape) if given else None)


def results(net, build, dtype, rule=None):
    """Outputs, and gradients of a random direction; `rule` replaces the convolutions."""
    net, x = copy.deepcopy(net).to(DEVICE, dtype), build(dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        if rule is not None:
            patch.setattr(spnn.Conv3d, "forward", rule)
        outputs = net(x)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randn(y.F.shape, generator=generator, dtype=torch.float64) for y in outputs]
    loss = sum((y.F * d.to(y.F)).sum() for y, d in zip(outputs, draws, strict=True))
    names, parameters = zip(*net.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, [x.F, *parameters], allow_unused=True)
    found = {n: g for n, g in zip(["x", *names], grads, strict=True) if g is not None}
    for k, y in enumerate(outputs):
        found |= {f"feats{k}": y.F, f"coords{k}": y.C}
    geometry = [(y.stride, y.spatial_range) for y in outputs]
    return {n: t.detach().double() for n, t in found.items()}, geometry


def assert_by_the_rules(net, build, rule=voxel_rules.forward):
    """In float64: in float32 another rounding may turn a ReLU's gradient on or off."""
    exact, geometry = results(net, build, torch.float64, rule)
    rounded, _ = results(net, build, torch.float32, rule)
    found, own = results(net, build, torch.float64)
    assert own == geometry
    assert_agree(found, exact, rounded)


def seeded(build):
    torch.manual_seed(0)
    return build()


def wide(**options):
    return functools.partial(sample, 4, (33, 34, 36), 0.006, **options)


@pytest.mark.parametrize(("name", "given"), [("SparseResUNet42", False), ("SparseResNet21D", True)])
def test_networks(name, given):
    net = seeded(lambda: getattr(backbones, name)(width_multiplier=0.125))
    assert_by_the_rules(net, wide(given=given))


LAYERS = [
    {"kernel_size": 3},
    {"kernel_size": (1, 3, 5), "bias": True},
    {"kernel_size": 1, "bias": True},
    {"kernel_size": 2},
    {"kernel_size": 4},
    {"kernel_size": (2, 3, 1)},
    {"kernel_size": 3, "stride": 2, "padding": 1, "bias": True},
    {"kernel_size": 3, "stride": 2},
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": (3, 1, 1), "stride": (2, 1, 1)},
    {"kernel_size": [3, 2, 4], "stride": [2, 1, 3], "padding": [1, 0, 2]},
]
MODES = {
    "on_the_fly": {},
    "spconv": {"kmap_mode": "hashmap"},
    "minkowski": {"kmap_mode": "hashmap", "downsample_mode": "minkowski"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_layers_and_their_transposes(options, given, mode):
    config = F.get_default_conv_config().copy()
    config.update(MODES[mode])

    def build():
        up = {n: v for n, v in options.items() if n != "padding"} | {"transposed": True}
        down = spnn.Conv3d(3, 4, **options, config=config)
        return torch.nn.Sequential(down, spnn.Conv3d(4, 2, **up, config=config))

    rule = functools.partialmethod(voxel_rules.forward, mode=mode)
    net, x = seeded(build), functools.partial(sample, given=given)
    assert_by_the_rules(net[:1], x, rule)
    assert_by_the_rules(net, x, rule)


def test_the_box_of_a_level_is_that_of_its_voxels():
    """A voxel behind the last whole window is dropped, and no window of its level counts it."""
    coords = torch.tensor([[0, 0, 0, 0], [0, 3, 1, 1], [0, 5, 1, 1], [0, 6, 0, 0]]).int().to(DEVICE)
    x = SparseTensor(torch.ones(4, 1, device=DEVICE), coords)
    down = spnn.Conv3d(1, 1, 2, stride=2).to(DEVICE)
    assert down(x).C.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0]]
    x = SparseTensor(x.F, coords, spatial_range=(1, 8, 2, 2))
    y = down(x)
    assert y.C[:, 1].tolist() == [0, 1, 2, 3]
    assert y.spatial_range == (1, 4, 1, 1)


def test_parameters_are_torchsparses():
    torch.manual_seed(0)
    layer = spnn.Conv3d(4, 6, 3, bias=True)
    assert {n: tuple(p.shape) for n, p in layer.state_dict().items()} == {
        "kernel": (27, 4, 6),
        "bias": (6,),
    }
    assert spnn.Conv3d(4, 6, 1).kernel.shape == (4, 6)
    assert spnn.Conv3d(4, 6, 1, stride=2).kernel.shape == (1, 4, 6)
    torch.manual_seed(0)
    bound = 1 / (4 * 27) ** 0.5
    same(layer.kernel, torch.empty(27, 4, 6).uniform_(-bound, bound))
    same(layer.bias, torch.empty(6).uniform_(-bound, bound))
    up = spnn.Conv3d(4, 1, 3, transposed=True)
    assert bound < float(up.kernel.detach().abs().max()) <= 1 / 27**0.5
    assert "transposed=True" in repr(up)
    assert "stride=(2, 2, 2), bias=False" in repr(spnn.Conv3d(4, 6, 2, stride=2))


def test_backbones_have_torchsparses_names():
    names = (
        "stem.3.kernel encoders.3.0.0.kernel encoders.0.1.main.4.running_mean "
        "encoders.1.1.shortcut.0.kernel decoders.0.upsample.1.weight"
    )
    assert set(names.split()) <= set(backbones.SparseResUNet42(width_multiplier=0.125).state_dict())


@pytest.mark.parametrize("stride", [1, 2])
def test_no_map_of_before_is_used(stride):
    """After coords were assigned or written to, as VoxelNeXt does between levels."""
    layer = seeded(lambda: spnn.Conv3d(3, 2, 3, stride=stride)).double().to(DEVICE)
    x = sample()
    layer(x)
    x.coords[:, 1:] *= 2
    fresh = SparseTensor(x.feats, x.coords.clone())
    same(layer(x).F, layer(fresh).F)
    y = sample(seed=1)
    x.C, x.F = y.C, y.F
    same(layer(x).F, layer(y).F)
    same(layer(x).C, layer(y).C)


def test_a_levels_coords_may_be_written_to():
    down = spnn.Conv3d(3, 2, 3, stride=2).double().to(DEVICE)
    x = sample()
    y = down(x)
    before = y.C.clone()
    y.C[:, 1:] *= 2
    same(down(x).C, before)


def test_a_transposed_layer_needs_the_voxels_of_its_layer():
    down = spnn.Conv3d(3, 2, 2, stride=2).double().to(DEVICE)
    up = spnn.Conv3d(2, 3, 2, stride=2, transposed=True).double().to(DEVICE)
    x = sample()
    y = down(x)
    same(up(y).C, x.C)
    assert up(y).stride == (1, 1, 1)
    alone = SparseTensor(y.F, y.C, y.s)
    with pytest.raises(ShapeError, match=r"stride \(1, 1, 1\) the tensor knows no such layer"):
        up(alone)
    alone._caches = y._caches
    same(up(alone).F, up(y).F)
    y.C[:, 1:] += 1
    with pytest.raises(ShapeError, match="knows one that wrote or read other voxels"):
        up(y)
    z = down(x)
    x.C[:, 1:] += 1
    with pytest.raises(ShapeError, match="knows one that wrote or read other voxels"):
        up(z)


def test_maps_are_built_once(monkeypatch):
    searched, build = [], conv.conv_of_geometry
    monkeypatch.setattr(conv, "Coordinates", lambda rows: searched.append(rows) or make(rows))
    make = build.__globals__["Coordinates"]
    net = torch.nn.Sequential(spnn.Conv3d(3, 3, 3, stride=2), spnn.BatchNorm(3)).to(DEVICE)
    x = sample(dtype=torch.float32)
    first, second = net(x), net(x)
    assert first.C is second.C
    assert len(searched) == 1
    assert first._caches is x._caches
    assert set(x._caches.cmaps) == {(2, 2, 2)}
    assert set(x._caches.kmaps) == {((1, 1, 1), (3, 3, 3), (2, 2, 2), (1, 1, 1))}


def test_tensors_as_programs_use_them():
    x = sample(given=True)
    assert x.F is x.feats
    assert x.C is x.coords
    x.s = 2
    assert x.stride == (2, 2, 2)
    dense = x.dense()
    assert dense.shape == (2, *SHAPE, 3)
    assert dense.is_contiguous()
    same(dense[tuple(x.C.long().T)], x.F)
    same(to_dense(x.F, x.C, (2, *SHAPE)), dense)
    both = torchsparse.cat([x, x.derived(2 * x.F)])
    same(both.F, torch.cat([x.F, 2 * x.F], 1))
    assert both._caches is x._caches
    same((x + x).F, 2 * x.F)
    assert (x + x).spatial_range == x.spatial_range
    assert x.detach() is x
    assert not x.F.requires_grad
    assert x.half() is x
    assert x.F.dtype == torch.float16
    assert x.cpu() is x.to("cpu") is x
    points = torchsparse.PointTensor(x.F, x.C)
    points.idx_query[1] = "kept"
    assert (points + points).idx_query == {1: "kept"}
    same((points + points).F, 2 * x.F)
    assert points.to("cpu").detach().F.device.type == "cpu"


def test_sums_on_all_voxels():
    a, b = sample(), sample(seed=1)
    found = torchsparse.generative_add(a, b)
    total = torch.zeros(2, *SHAPE, 3, dtype=torch.float64, device=DEVICE)
    for x in (a, b):
        total = total.index_put(tuple(x.C.long().T), x.F, accumulate=True)
    same(found.F, total[tuple(found.C.long().T)])
    rows = {tuple(row) for x in (a, b) for row in x.C.tolist()}
    assert [tuple(row) for row in found.C.tolist()] == sorted(rows)


def test_modules_on_features():
    x = sample(4)
    for module, function in (
        (spnn.ReLU(), torch.relu),
        (spnn.LeakyReLU(), torch.nn.functional.leaky_relu),
        (spnn.SiLU(), torch.nn.functional.silu),
    ):
        same(module(x).F, function(x.F))
    for function, plain in ((F.relu, torch.relu), (F.silu, torch.nn.functional.silu)):
        same(function(x, inplace=False).F, plain(x.F))
    same(F.leaky_relu(x, inplace=False).F, torch.nn.functional.leaky_relu(x.F, 0.1))
    norm = spnn.BatchNorm(4).double().to(DEVICE)
    same(norm(x).F, torch.nn.BatchNorm1d(4).double().to(DEVICE)(x.F))
    assert isinstance(norm, torch.nn.BatchNorm1d)
    with pytest.warns(UserWarning, match="does not match num_features"):  # each voxel, as there
        found = spnn.InstanceNorm(4)(x)
    with pytest.warns(UserWarning, match="does not match num_features"):
        same(found.F, torch.nn.InstanceNorm1d(4)(x.F))
    assert fapply(x, torch.mul, 2)._caches is x._caches


def test_norms_and_pools_by_sample():
    x, norm = sample(4), spnn.GroupNorm(2, 4).double().to(DEVICE)
    found = norm(x)
    means, maxima = spnn.GlobalAvgPool()(x), spnn.GlobalMaxPool()(x)
    for k in range(2):
        rows = x.F[x.C[:, 0] == k]
        exact = torch.nn.functional.group_norm(rows.T[None], 2)[0].T
        rough = torch.nn.functional.group_norm(rows.float().T[None], 2)[0].T.double()
        named = {"norm": found.F[x.C[:, 0] == k], "mean": means[k]}
        assert_agree(
            named,
            {"norm": exact, "mean": rows.mean(0)},
            {"norm": rough, "mean": rows.float().mean(0).double()},
        )
        same(maxima[k], rows.amax(0))


def fnv(row):
    """64 bits of FNV-1a over the columns, as a signed integer."""
    found = 14695981039346656037
    for n in row:
        found = (found ^ (n % 2**32)) * 1099511628211 % 2**64
    return found - 2**64 if found >= 2**63 else found


def test_hashes():
    coords = torch.tensor([[0, 1, 2, 3], [1, -5, 0, 7]], dtype=torch.int32, device=DEVICE)
    assert F.sphash(coords).tolist() == [fnv(row) for row in coords.tolist()]
    offsets = get_kernel_offsets(2, device=DEVICE)
    found = F.sphash(coords, offsets)
    assert found.shape == (8, 2)
    moved = coords.clone()
    moved[:, 3] += 1
    assert found[1].tolist() == F.sphash(moved).tolist()
    keys = F.sphash(coords)
    queries = torch.stack([keys.flip(0), keys + 1])
    assert F.sphashquery(queries, torch.cat([keys, keys])).tolist() == [[1, 0], [-1, -1]]
    assert F.sphashquery(keys, keys[:0]).tolist() == [-1, -1]


def test_offsets_of_kernels():
    assert get_kernel_offsets(3)[:2].tolist() == [[-1, -1, -1], [0, -1, -1]]
    assert get_kernel_offsets(2)[:2].tolist() == [[0, 0, 0], [0, 0, 1]]
    assert get_kernel_offsets((1, 1, 4)).tolist() == [[0, 0, n] for n in (-1, 0, 1, 2)]
    assert get_kernel_offsets(3, 2, 3)[-1].tolist() == [6, 6, 6]


def test_points_and_voxels():
    """Means of points in voxels, and trilinear values back, against loops over the points."""
    generator = torch.Generator().manual_seed(0)
    points = 4 * torch.rand(60, 3, generator=generator, dtype=torch.float64)
    feats = torch.randn(60, 5, generator=generator, dtype=torch.float64).requires_grad_()
    cells = torch.cat([torch.zeros(60, 1), points.floor()], 1).int()
    rows = torch.unique(cells, dim=0)[::2]  # every other voxel is missing
    voxel = F.sphashquery(F.sphash(cells), F.sphash(rows))
    known = {tuple(row): n for n, row in enumerate(rows.tolist())}
    assert voxel.tolist() == [known.get(tuple(row), -1) for row in cells.tolist()]
    counts = F.spcount(voxel.int(), len(rows) + 1)
    assert counts.tolist() == [(voxel == n).sum() for n in range(len(rows) + 1)]
    assert counts.dtype == torch.int32
    means = F.spvoxelize(feats, voxel, counts)
    exact = torch.stack([feats[voxel == n].mean(0) for n in range(len(rows))])
    assert_close_sums(means[:-1], exact, feats)
    assert not means[-1].any()

    corners = F.sphashquery(F.sphash(cells, get_kernel_offsets(2)), F.sphash(rows)).T
    weights = F.calc_ti_weights(points, corners)
    found = F.spdevoxelize(means, corners, weights)
    expected = []
    for point in points.detach():
        total, shares = torch.zeros(5, dtype=torch.float64), 1e-8
        for step in itertools.product((0, 1), repeat=3):
            at = point.floor() + torch.tensor(step)
            share = float((1 - (point - at).abs()).prod())
            n = known.get((0, *at.int().tolist()))
            if n is not None:
                total, shares = total + share * means[n], shares + share
        expected.append(total / shares)
    assert_close_sums(found, torch.stack(expected), feats)
    assert torch.autograd.gradcheck(lambda x: F.spvoxelize(x, voxel, counts), feats)
    again = means.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: F.spdevoxelize(x, corners, weights), again)
    doubled = F.calc_ti_weights(2 * points, corners, scale=2)
    assert_close_sums(doubled, weights, torch.ones(1))


def assert_close_sums(found, expected, size):
    bound = 64 * torch.finfo(torch.float64).eps * size.abs().max()
    assert (found - expected).abs().max() <= bound


def test_the_hash_table():
    x = sample()
    table = torchsparse.backend.GPUHashTable(torch.zeros(9).long(), torch.zeros(9).int())
    sizes, steps = (torch.tensor([n] * 3, device=DEVICE) for n in (2, 1))
    with pytest.raises(ShapeError, match="lookup_coords was called on an empty table"):
        table.lookup_coords(x.C, sizes, steps, 8)
    table.insert_coords(x.C[:, [1, 2, 3, 0]])
    found = table.lookup_coords(x.C[:, [1, 2, 3, 0]], sizes, steps, 8)
    assert found.shape == (-(-len(x.C) // 128) * 128, 8)
    assert not found[len(x.C) :].any()
    known = {tuple(row): n + 1 for n, row in enumerate(x.C.tolist())}
    for row, places in zip(x.C.tolist(), found.tolist(), strict=False):
        steps = itertools.product((0, 1), repeat=3)
        around = [(row[0], *(c + s for c, s in zip(row[1:], step, strict=True))) for step in steps]
        assert places == [known.get(voxel, 0) for voxel in around]


def test_quantization():
    points = np.random.default_rng(0).uniform(-2, 2, (50, 3))
    found, index, inverse = torchsparse.utils.quantize.sparse_quantize(
        points, (0.5, 1, 2), return_index=True, return_inverse=True
    )
    assert found.dtype == np.int32
    cells = np.floor(points / [0.5, 1, 2]).astype(int).tolist()
    assert [tuple(row) for row in found.tolist()] == sorted({tuple(c) for c in cells})
    assert [cells.index(row) for row in found.tolist()] == index.tolist()
    assert found[inverse].tolist() == cells


def test_collation():
    one = SparseTensor(np.ones((2, 3), "f"), np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32))
    two = SparseTensor(torch.zeros(1, 3), torch.tensor([[7, 8, 9]]).int())
    inputs = [{"x": x, "y": {"n": np.arange(2) + k, "s": f"{k}"}} for k, x in enumerate((one, two))]
    found = torchsparse.utils.collate.sparse_collate_fn(inputs)
    assert found["x"].C.tolist() == [[0, 1, 2, 3], [0, 4, 5, 6], [1, 7, 8, 9]]
    assert found["x"].C.dtype == torch.int32
    assert found["x"].F.tolist() == [[1.0] * 3] * 2 + [[0.0] * 3]
    assert found["y"]["n"].tolist() == [[0, 1], [1, 2]]
    assert found["y"]["s"] == ["0", "1"]
    assert torchsparse.utils.collate.sparse_collate_fn([1, 2]) == [1, 2]


def test_voxels_of_strided_layers():
    x = sample()
    floors = torch.unique(torch.cat([x.C[:, :1], x.C[:, 1:] // 2], 1), dim=0)
    same(F.spdownsample(x.C), floors)
    same(F.spdownsample(x.C, 2, 3, 1, downsample_mode="minkowski"), floors)
    rows = [tuple(row) for row in x.C.tolist()]
    reached, _ = voxel_rules.pairs_of(rows, (3,) * 3, (2,) * 3, (1,) * 3, None)
    assert [tuple(row) for row in F.spdownsample(x.C, 2, 3, 1).tolist()] == reached


def test_one_cache_for_the_program():
    tensor_cache.set_tensor_cache_mode(tensor_cache.TensorCacheMode.GLOBAL_TENSOR_CACHE)
    try:
        x, y = sample(), sample(seed=1)
        assert x._caches is y._caches is tensor_cache.get_global_tensor_cache()
        layer = spnn.Conv3d(3, 2, 3).double().to(DEVICE)
        layer(x)
        found = layer(y)
        tensor_cache.clear_global_tensor_cache()
        assert sample()._caches is not x._caches
    finally:
        tensor_cache.set_tensor_cache_mode(tensor_cache.TensorCacheMode.SEPARATE_TENSOR_CACHE)
        tensor_cache.clear_global_tensor_cache()
    same(found.F, layer(sample(seed=1)).F)
    assert tensor_cache.get_tensor_cache_mode().value == 0


def test_configurations():
    config = F.conv_config.ConvConfig(kmap_mode="hashmap", downsample_mode="minkowski")
    down = spnn.Conv3d(3, 2, 3, stride=2).double().to(DEVICE)
    x = sample()
    try:
        F.set_global_conv_config(config)
        assert F.get_global_conv_config().dataflow == F.Dataflow.ImplicitGEMM
        same(down(x).C, F.spdownsample(x.C, downsample_mode="minkowski"))
    finally:
        F.clear_global_conv_config()
    reached = len(down(sample()).C)
    F.set_kmap_mode("hashmap")  # without effect, as in torchsparse 2.1
    F.set_downsample_mode("minkowski")
    F.set_conv_mode(2)
    assert (F.get_kmap_mode(), F.get_downsample_mode()) == ("hashmap", "minkowski")
    assert F.get_conv_mode() is F.ConvMode.mode2
    assert len(down(sample()).C) == reached
    assert torchsparse.tune(down, [x], n_samples=1) is None
    assert not hasattr(config, "dataflows")


def test_tf32_is_asked_for_by_the_switch(monkeypatch):
    asked, run = [], conv.conv_of_geometry
    monkeypatch.setattr(
        conv, "conv_of_geometry", lambda *args: asked.append(args[3][1]) or run(*args)
    )
    layer = spnn.Conv3d(3, 2, 3).double().to(DEVICE)
    layer(sample())
    monkeypatch.setattr(backends, "allow_tf32", True)
    layer(sample())
    assert asked == ["ieee", "tf32"]
    backends.init()
    assert (backends.device_capability > 0) == torch.cuda.is_available()


@pytest.mark.parametrize("kernel_size", [1, 3])
def test_half_features_are_multiplied_in_half(kernel_size):
    layer, x = spnn.Conv3d(3, 2, kernel_size, bias=True).to(DEVICE), sample(dtype=torch.float32)
    expected = copy.deepcopy(layer).half()(x.derived(x.F.half()))
    found = layer(x.derived(x.F.half()))
    assert found.F.dtype == torch.float16
    same(found.F, expected.F)


def test_autocast_computes_in_its_dtype():
    net = backbones.SparseConvBlock(3, 4, 3, 2).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert net[0](sample(dtype=torch.float32)).F.dtype == torch.bfloat16


def test_tensors_are_pickled_with_what_they_keep():
    net, x = spnn.Conv3d(3, 4, 3, 2).double().to(DEVICE), sample()
    y = net(x)
    found = pickle.loads(pickle.dumps(x))
    assert set(found._caches.kmaps) == set(x._caches.kmaps)
    same(net(found).F, y.F)


def test_a_cloud_without_voxels():
    down, up = (spnn.Conv3d(3, 3, 2, 2, transposed=t).to(DEVICE) for t in (False, True))
    none = torch.zeros(0, 4, dtype=torch.int32, device=DEVICE)
    for given in (None, (2, 4, 4, 4)):
        x = SparseTensor(torch.zeros(0, 3, device=DEVICE), none, spatial_range=given)
        assert up(down(x)).F.shape == (0, 3)
    assert down(x).dense().shape == (2, 2, 2, 2, 3)


def test_arguments_are_torchsparses():
    order = {
        spnn.Conv3d: "in_channels out_channels kernel_size stride padding dilation bias transposed "
        "generative config",
        F.conv3d: "input weight kernel_size bias stride padding dilation config transposed "
        "generative training",
        SparseTensor: "feats coords stride spatial_range",
    }
    for function, names in order.items():
        assert list(inspect.signature(function).parameters) == names.split()


X = SparseTensor(torch.zeros(2, 3), torch.zeros(2, 3).int())
ERRORS = {
    r"coords are \(2, 3\) and spatial_range is None: \(N, 4\)": lambda: spnn.Conv3d(3, 2, 3)(X),
    "input is a Tensor: it must be a torchsparse.SparseTensor": lambda: spnn.Conv3d(3, 2, 3)(X.F),
    "dense.. was called without a spatial_range": lambda: X.dense(),
    r"\[1, 2\] has 2 numbers for 3 axes": lambda: make_ntuple([1, 2], 3),
    "cat was given no tensor": lambda: torchsparse.cat([]),
    "cat was given tensors of 2 and 2 voxels": lambda: torchsparse.cat(
        [X, SparseTensor(X.F, X.C + 1)]
    ),
    r"\+ was given tensors of 2 and 1 voxels": lambda: X + SparseTensor(X.F[:1], X.C[:1]),
    r"generative_add was given tensors at strides \(1, 1, 1\) and \(2, 2, 2\)": (
        lambda: torchsparse.generative_add(X, SparseTensor(X.F, X.C, 2))
    ),
    r"2 samples at the strides \[\(1, 1, 1\), \(2, 2, 2\)\]": (
        lambda: torchsparse.utils.collate.sparse_collate([X, SparseTensor(X.F, X.C, 2)])
    ),
    r"coords are \(2, 4\) and voxel_size is 1": (
        lambda: torchsparse.utils.quantize.sparse_quantize(np.ones((2, 4)))
    ),
    "coords are torch.int64: they must be torch.int32": lambda: F.sphash(X.C.long()),
    r"offsets are \(8, 4\): they must be \(N, 3\)": lambda: F.sphash(
        torch.zeros(1, 4).int(), torch.zeros(8, 4).int()
    ),
    "kmap_mode is 'grid': it must be one of hashmap_on_the_fly": lambda: F.set_kmap_mode("grid"),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text):
    with pytest.raises((ShapeError, DTypeError, WeftError), match=text):
        ERRORS[text]()


def test_bad_voxels_are_refused():
    coords = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]], dtype=torch.int32)
    layer = spnn.Conv3d(3, 2, 3)
    with pytest.raises(ShapeError, match="stands in rows 0 and 1"):
        layer(SparseTensor(torch.zeros(2, 3), coords))
    with pytest.raises(IndexRangeError, match="spatial_shape"):
        layer(SparseTensor(torch.zeros(1, 3), coords[:1], spatial_range=(1, 9, 9, 3)))
    strided, below = spnn.Conv3d(3, 2, 3, stride=2), coords[:1] * torch.tensor([1, -1, 1, 1]).int()
    with pytest.raises(IndexRangeError, match="coordinate -1"):
        strided(SparseTensor(torch.zeros(1, 3), below))
    with pytest.raises(ShapeError, match="weight is"):
        layer(SparseTensor(torch.zeros(1, 4), coords[:1]))


LACKING = [
    (torchsparse, "sparse_tensor", "use torchsparse.SparseTensor"),
    (spnn, "ToBEVHeightCompression", r"x\.dense\(\)"),
    (spnn, "SparseCrop", "compares"),
    (F, "build_kernel_map", "kernel_map"),
    (torchsparse.backend, "hash_cuda", "sphash"),
]


@pytest.mark.parametrize(("module", "name", "way"), LACKING)
def test_what_is_lacking_says_the_nearest_way(module, name, way):
    with pytest.raises(NotImplementedError, match=rf"torchsparse.*{name} is asked for.*{way}"):
        getattr(module, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: spnn.Conv3d(3, 2, 3, dilation=2), "dilation is 2: torchsparse 2.1 ignores it"),
        (lambda: spnn.Conv3d(3, 2, 3, transposed=True, generative=True), "generative=True was"),
        (lambda: torchsparse.tensor.set_allow_negative_coordinates(True), "rounds the bounds"),
    ],
)
def test_what_the_original_computes_wrongly_is_refused(build, text):
    with pytest.raises(NotImplementedError, match=text):
        build()
    torchsparse.tensor.set_allow_negative_coordinates(False)
    assert not torchsparse.tensor.get_allow_negative_coordinates()
