"""Outputs at floor(c / stride), and on given coordinates, against dictionaries in float64.

The oracle walks over offsets and voxels in Python.  Where every coordinate is ≥ 0, torch's dense
strided convolution with padding k // 2 agrees at the voxels that are there.

Seen red with: division towards zero, an even kernel centred, a stride's dilation left out, outputs
ascending instead of in their given order, tables swapped in a transposed layer.
"""

import copy
import gc
import itertools
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from tests import clouds
from tests.clouds import DEVICE, at, same
from torchweft import voxels
from torchweft.errors import DeviceError, DTypeError, IndexRangeError, ShapeError
from torchweft.testing import assert_within_bound
from torchweft.voxels import SparseTensor
from torchweft.voxels.layers import convolution as nn

LEVELS = {
    "k3 s2": ((3, 3), 2, 1),
    "k2 s2": ((2, 2), 2, 1),
    "k1 s2": ((1, 1), 2, 1),
    "k4 s3": ((4, 4), 3, 1),
    "k3 s1": ((3, 3), 1, 1),
    "uneven": ((3, 2), (2, 3), (2, 1)),
    "dilated": ((5, 3), 2, 3),
}


def signed(dim=2, channels=3, batch=2, density=0.4, dtype=torch.float64, seed=0):
    """Voxels on both sides of 0 without a box, in random order."""
    base = clouds.cloud(dim, channels, dtype, batch, density, seed)
    shift = torch.tensor([0, *(3, 2, 4, 1)[:dim]], dtype=torch.int32)
    return SparseTensor(base.F.detach().to(DEVICE).requires_grad_(), (base.C - shift).to(DEVICE))


def axes(value, dim):
    return value if isinstance(value, tuple) else (value,) * dim


def floors(rows, stride):
    """Sorted distinct floor(c / stride)."""
    steps = (1, *axes(stride, len(rows[0]) - 1))
    return sorted({tuple(c // s for c, s in zip(row, steps, strict=True)) for row in rows})


def offsets_of(kernel, dilation):
    """−(k // 2) … k // 2 of an odd axis, 0 … k − 1 of an even one, the last axis fastest."""
    spans = [range(-(k // 2), k // 2 + 1) if k % 2 else range(k) for k in kernel]
    return [
        tuple(j * d for j, d in zip(place, axes(dilation, len(kernel)), strict=True))
        for place in itertools.product(*spans)
    ]


def oracle(tensor, out_rows, weight, kernel, stride, dilation, bias=None, transposed=False):
    """out[o] = bias + Σ x[q] @ w[k] over q = o·stride + offset; transposed: sides swapped."""
    x, weight = tensor.F.double(), weight.double()
    steps = axes(stride, len(kernel))
    fine_rows, coarse_rows = (
        (out_rows, tensor.C.tolist()) if transposed else (tensor.C.tolist(), out_rows)
    )
    fine = {tuple(row): place for place, row in enumerate(fine_rows)}
    out = x.new_zeros(len(out_rows), weight.shape[2])
    for k, offset in enumerate(offsets_of(kernel, dilation)):
        pairs = []
        for place, (sample, *voxel) in enumerate(coarse_rows):
            there = (sample, *(v * s + o for v, s, o in zip(voxel, steps, offset, strict=True)))
            if there in fine:
                pairs.append((place, fine[there]))
        coarse, found = torch.tensor(pairs, dtype=torch.int64, device=x.device).view(-1, 2).T
        q, o = (coarse, found) if transposed else (found, coarse)
        out = out.index_add(0, o, x[q] @ weight[k])
    return out if bias is None else out + bias.double()


def agree(out, exact, tensor, module, **geometry):
    """Within the bound of a sum of products in the layer's dtype."""
    positive = copy.deepcopy(module)
    for parameter in positive.parameters():
        parameter.data.abs_()
    rows = out.C.tolist()
    size = oracle(
        tensor.replace(tensor.F.abs()), rows, positive.weight, bias=positive.bias, **geometry
    )
    terms = module.weight.shape[0] * module.in_channels + 1
    assert_within_bound(out.F, exact, size, terms)


def given(name):
    kernel, stride, dilation = LEVELS[name]
    return {"kernel": kernel, "stride": stride, "dilation": dilation}


def floor_layer(name, kind=nn.SparseConv2d, dtype=torch.float64, channels=(3, 4), **options):
    kernel, stride, dilation = LEVELS[name]
    torch.manual_seed(1)
    layer = kind(*channels, kernel, stride, dilation=dilation, outputs="floor", **options)
    return layer.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LEVELS)
def test_outputs_are_at_the_floor_of_every_input(name, dtype):
    tensor = signed(dtype=dtype)
    layer = floor_layer(name, dtype=dtype)
    out, geometry = layer(tensor), given(name)
    rows = out.C.tolist()
    if name == "k3 s1":  # the inputs themselves
        assert out.coordinates is tensor.coordinates
    else:
        assert rows == [list(row) for row in floors(tensor.C.tolist(), geometry["stride"])]
    exact = oracle(tensor, rows, layer.weight, bias=layer.bias, **geometry)
    agree(out, exact.detach(), tensor, layer, **geometry)
    assert out.stride == axes(geometry["stride"], 2)
    assert out.batch_size == 2
    assert out.coordinates.given_shape is None


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_floor_layers_have_gradients_of_any_order(dim):
    tensor = signed(dim, channels=2, batch=1, density=0.5)
    tensor = tensor.prune(torch.arange(len(tensor), device=DEVICE) < 8)
    kernel = (3, 2, 1, 1)[:dim]
    layer = getattr(nn, f"SparseConv{dim}d")(2, 2, kernel, 2, outputs="floor").to(DEVICE).double()
    parameters = dict(layer.named_parameters())

    def function(feats, *values):
        named = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(layer, named, (tensor.replace(feats),)).feats

    inputs = (tensor.F.detach().requires_grad_(), *parameters.values())
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)
    rows = [list(row) for row in floors(tensor.C.tolist(), 2)]
    exact = oracle(tensor, rows, layer.weight, kernel, 2, 1, layer.bias)
    agree(layer(tensor), exact.detach(), tensor, layer, kernel=kernel, stride=2, dilation=1)


def test_dense_convolution_agrees_where_voxels_are():
    tensor = clouds.cloud(2, shape=(6, 8), density=0.5, device=DEVICE)
    layer = floor_layer("k3 s2")
    out = layer(tensor)
    weight = layer.weight.permute(2, 1, 0).reshape(4, 3, 3, 3)
    dense = F.conv2d(tensor.dense(), weight, layer.bias, 2, 1)
    exact = at(dense, out).detach()
    agree(out, exact, tensor, layer, **given("k3 s2"))
    assert out.spatial_shape == tuple(dense.shape[2:])
    odd = SparseTensor(tensor.F, tensor.C, (7, 9), 2)  # the last plane counts too
    assert layer(odd).spatial_shape == (4, 5)
    same(layer(odd).F, out.F)


def test_layers_of_one_stride_share_their_outputs():
    """A shortcut of one place beside a kernel of three, as in MinkowskiEngine's ResNet."""
    tensor = signed()
    a, b = floor_layer("k3 s2")(tensor), floor_layer("k1 s2")(tensor)
    assert a.coordinates is b.coordinates
    same((a + b).F, a.F + b.F)
    next_level = [floor_layer(name, channels=(4, 4))(y) for name, y in (("k2 s2", a), ("k1 s2", b))]
    assert next_level[0].coordinates is next_level[1].coordinates
    assert voxels.sparse_max_pool(tensor, 2, outputs="floor").coordinates is a.coordinates


@pytest.mark.parametrize("name", LEVELS)
def test_inverse_layers_return_to_the_voxels(name):
    tensor = signed()
    coarse = floor_layer(name, indice_key="down")(tensor)
    up = nn.SparseInverseConv2d(4, 2, LEVELS[name][0], indice_key="down").to(DEVICE).double()
    out = up(coarse)
    assert out.coordinates is tensor.coordinates
    exact = oracle(
        coarse, tensor.C.tolist(), up.weight, bias=up.bias, transposed=True, **given(name)
    )
    agree(out, exact.detach(), coarse, up, transposed=True, **given(name))


@pytest.mark.parametrize("name", LEVELS)
def test_transposed_layers_write_an_earlier_level(name):
    tensor = signed()
    coarse = floor_layer(name)(tensor)
    up = floor_layer(name, nn.SparseConvTranspose2d, channels=(4, 2))
    out = up(coarse, tensor.coordinates)
    assert out.coordinates is tensor.coordinates
    assert out.stride == (1, 1)
    exact = oracle(
        coarse, tensor.C.tolist(), up.weight, bias=up.bias, transposed=True, **given(name)
    )
    agree(out, exact.detach(), coarse, up, transposed=True, **given(name))
    with pytest.raises(ShapeError, match=r"outputs='floor' was given no coord.*coordinates="):
        up(coarse)
    padding = up.geometry.begin  # torch's transposed layer has the same pairs
    rule = {"padding": padding, "transposed": True, "submanifold": False}
    steps = {"stride": up.stride, "dilation": up.dilation, "coordinates": tensor.C}
    plain = voxels.sparse_conv(coarse, up.weight, up.kernel_size, up.bias, **steps, **rule)
    same(plain.F, out.F)


FUNCTION = {
    "submanifold": {},
    "strided": {"stride": 2, "submanifold": False, "padding": 1},
    "floor": {"stride": 2, "submanifold": False, "outputs": "floor"},
}


@pytest.mark.parametrize("kept", [False, True], ids=["rows", "coordinates"])
@pytest.mark.parametrize("name", FUNCTION)
def test_outputs_on_given_coordinates(name, kept):
    """In their order, one without a pair is the bias; red without: there was no such argument."""
    tensor, options = signed(), FUNCTION[name]
    stride = options.get("stride", 1)
    rows = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 90, 0], [0, -1, 1], [1, 0, -1]], device=DEVICE)
    other = SparseTensor(torch.zeros(5, 1, device=DEVICE), rows, stride=stride)
    layer = nn.SubMConv2d(3, 4, 3).to(DEVICE).double()  # for its parameters
    weight, bias = layer.weight, layer.bias
    target = other.coordinates if kept else rows
    out = voxels.sparse_conv(tensor, weight, 3, bias, coordinates=target, **options)
    assert out.C.tolist() == rows.tolist()
    assert out.stride == (stride, stride)
    exact = oracle(tensor, rows.tolist(), weight, (3, 3), stride, 1, bias).detach()
    agree(out, exact, tensor, layer, kernel=(3, 3), stride=stride, dilation=1)
    same(out.F[2], bias)

    def function(feats, weight, bias):
        x = tensor.replace(feats)
        return voxels.sparse_conv(x, weight, 3, bias, coordinates=target, **options).F

    tensor = tensor.prune(torch.arange(len(tensor), device=DEVICE) < 9)
    inputs = tensor.F.detach().requires_grad_(), weight, bias
    assert torch.autograd.gradcheck(function, inputs)
    if kept:  # else the map is built in each of many calls
        assert torch.autograd.gradgradcheck(function, inputs)


def test_a_map_onto_kept_coordinates_is_kept_with_both(monkeypatch):
    built = []
    module = voxels.maps.kernel_map
    build = module.meet
    monkeypatch.setattr(module, "meet", lambda *args: built.append(1) or build(*args))
    tensor, weight = signed(), torch.randn(9, 3, 2, dtype=torch.float64, device=DEVICE)
    other = signed(seed=3)
    for _ in range(3):
        voxels.sparse_conv(tensor, weight, 3, coordinates=other.coordinates)
    assert len(built) == 1
    for _ in range(2):  # rows may change between calls
        voxels.sparse_conv(tensor, weight, 3, coordinates=other.C)
    assert len(built) == 3
    kept = voxels.kernel_map(tensor, 3, coordinates=other.coordinates)
    again = voxels.kernel_map(tensor, 3, coordinates=other.coordinates)
    assert kept.kept is again.kept
    table = weakref.ref(kept.kept)
    back = voxels.kernel_map(other, 3, coordinates=tensor.coordinates)  # each level knows the other
    same(back.sources, kept.targets.flip(0))
    gone = weakref.ref(other.coordinates)
    gc.disable()
    try:  # reference counts free both
        del kept, again, other, back
        assert gone() is None
        assert table() is None
    finally:
        gc.enable()


def test_levels_are_freed_by_reference_counts():
    tensor = signed()
    coarse = floor_layer("k3 s2")(tensor)
    floor_layer("k3 s2", nn.SparseConvTranspose2d, channels=(4, 2))(coarse, tensor.coordinates)
    fine, level = weakref.ref(tensor.coordinates), weakref.ref(coarse.coordinates)
    gc.disable()
    try:
        del tensor, coarse
        assert fine() is None
        assert level() is None
    finally:
        gc.enable()


def test_copies_have_the_maps_of_their_geometry():
    tensor = signed()
    layer = floor_layer("k3 s2")
    exact = layer(tensor)
    voxels.kernel_map(tensor, 3, coordinates=exact.C)
    detached = tensor.replace(tensor.F.detach())
    for twin in (copy.deepcopy(detached), pickle.loads(pickle.dumps(detached))):
        same(layer(twin).F, exact.F)
        same(
            voxels.kernel_map(twin, 3, coordinates=twin.coordinates).counts.sum(),
            voxels.kernel_map(tensor, 3).counts.sum(),
        )


def test_networks_compile_to_one_graph_once_their_maps_are_there():
    tensor = signed()
    down = floor_layer("k3 s2")
    up = floor_layer("k3 s2", nn.SparseConvTranspose2d, channels=(4, 2))

    def run(x):
        coarse = down(x)
        return up(coarse, x.coordinates).F

    exact = run(tensor)
    same(torch.compile(run, fullgraph=True, backend="eager")(tensor), exact)


@pytest.mark.parametrize("rows", [0, 4])
def test_empty_clouds(rows):
    tensor = SparseTensor(torch.zeros(0, 3, device=DEVICE), torch.zeros(0, 3, device=DEVICE).int())
    layer = floor_layer("k3 s2", dtype=torch.float32)
    out = layer(tensor)
    assert len(out) == 0
    assert out.batch_size == 0
    assert out.spatial_shape == (0, 0)
    wanted = torch.arange(3 * rows, device=DEVICE).view(rows, 3)
    onto = layer(tensor, wanted)
    same(onto.F, layer.bias.expand(rows, 4))
    none = layer(signed(dtype=torch.float32), wanted[:0])
    assert none.F.shape == (0, 4)
    none.F.sum().backward()


def test_windows_are_those_of_the_layers():
    tensor = signed()
    for kernel, stride in (((3, 3), 2), ((2, 2), 2), ((1, 3), (2, 3))):
        options = {"kernel_size": kernel, "stride": stride, "outputs": "floor"}
        largest = voxels.SparseMaxPool(**options)(tensor)
        mean = voxels.SparseAvgPool(**options)(tensor)
        rows = floors(tensor.C.tolist(), stride)
        assert largest.C.tolist() == [list(row) for row in rows]
        at_row = {tuple(row): place for place, row in enumerate(tensor.C.tolist())}
        for place, (sample, *voxel) in enumerate(rows):
            corner = [v * s for v, s in zip(voxel, axes(stride, 2), strict=True)]
            window = [
                at_row[there]
                for offset in offsets_of(kernel, 1)
                if (there := (sample, *map(sum, zip(corner, offset, strict=True)))) in at_row
            ]
            if not window:
                same(torch.cat([largest.F[place], mean.F[place]]), tensor.F.new_zeros(6))
                continue
            same(largest.F[place], tensor.F[window].amax(0))
            size = tensor.F[window].abs().mean(0)
            assert_within_bound(mean.F[place], tensor.F[window].mean(0), size, len(window))
        gradient, *_ = torch.autograd.grad(largest.F.sum(), tensor.F)
        full = (
            voxels.kernel_map(tensor, kernel, stride, submanifold=False, outputs="floor").sources
            >= 0
        ).any(0)
        assert int(gradient.sum()) == 3 * int(full.sum())
    assert "outputs='floor'" in repr(voxels.SparseMaxPool(2, outputs="floor"))


def test_wide_coordinates_stay_exact():
    """Keys of two words, and quotients that float32 would round."""
    far = 2**31 - 1
    rows = torch.tensor([[0, -far, far - 1, 5], [0, far, -far, 7], [1, 16777217, 3, -(2**31)]])
    tensor = SparseTensor(torch.randn(3, 2), rows)
    out = nn.SparseConv3d(2, 2, 3, 2, outputs="floor")(tensor)
    assert out.C.tolist() == [list(row) for row in floors(rows.tolist(), 2)]
    counts = voxels.kernel_map(tensor, 3, 2, submanifold=False, outputs="floor").counts
    assert int(counts.sum()) == 3  # each is met by its own floor alone


REFUSED = {
    "rule": (
        lambda: nn.SparseConv2d(3, 4, 3, outputs="minkowski"),
        ShapeError,
        r"outputs is 'minkowski': .* Pass one",
    ),
    "submanifold": (
        lambda: nn.SubMConv2d(3, 4, 3, outputs="floor"),
        ShapeError,
        r"outputs='floor' was given to a submanifold layer.*SparseConv",
    ),
    "padding": (
        lambda: nn.SparseConv2d(3, 4, 3, 2, 1, outputs="floor"),
        ShapeError,
        r"padding is \(1, 1\) in a layer with outputs='floor'.*Leave padding out",
    ),
    "another rule": (
        lambda: nn.SparseInverseConv2d(4, 2, 3, indice_key="a", outputs="floor")(
            nn.SparseConv2d(3, 4, 3, 2, 1, indice_key="a")(clouds.cloud(2, dtype=torch.float32))
        ),
        ShapeError,
        r"outputs is 'floor' but the layer of indice_key='a' has 'torch'.*outputs='torch'",
    ),
    "no box": (
        lambda: nn.SparseConv2d(3, 4, 3, 2).to(DEVICE, torch.float64)(signed()),
        IndexRangeError,
        r"no spatial_shape.*outputs='floor', which need no box",
    ),
    "twice": (
        lambda: onto(torch.tensor([[0, 1, 1], [0, 2, 2], [0, 1, 1]], device=DEVICE)),
        ShapeError,
        r"voxel \(0, 1, 1\) stands in rows 0 and 2",
    ),
    "columns": (
        lambda: onto(torch.zeros(1, 4, dtype=torch.int64, device=DEVICE)),
        ShapeError,
        r"coordinates are \(1, 4\): .* then d = 2 axes",
    ),
    "axes": (
        lambda: onto(clouds.cloud(3, device=DEVICE).coordinates),
        ShapeError,
        r"coordinates have 3 axes but the tensor has 2: .*Pass",
    ),
    "no batch": (
        lambda: onto(torch.zeros(3, dtype=torch.int64, device=DEVICE)),
        ShapeError,
        r"are \(3,\): they must be \(N, 1 \+ d\)",
    ),
    "floats": (lambda: onto(torch.zeros(1, 3, device=DEVICE)), DTypeError, "must be integers"),
    "device": (
        lambda: onto(torch.zeros(1, 3, device="meta").long()),
        DeviceError,
        r"device of coordinates is meta, that of the voxels .*Move coordinates",
    ),
    "a tensor's": (
        lambda: onto(signed()),
        DTypeError,
        r"coordinates is a SparseTensor: .* Pass other\.coordinates",
    ),
    "level": (
        lambda: onto(
            SparseTensor(torch.zeros(1, 1), torch.zeros(1, 3).int(), stride=2)
            .to(DEVICE)
            .coordinates
        ),
        ShapeError,
        r"coordinates have stride \(2, 2\) but .* into \(1, 1\): .*of that level",
    ),
    "sample": (
        lambda: onto(torch.tensor([[2, 0, 0]], device=DEVICE), batch_size=2),
        IndexRangeError,
        r"value 2 but batch_size is 2",
    ),
}


def onto(coordinates, batch_size=None):
    base = signed()
    tensor = SparseTensor(base.F, base.C, batch_size=batch_size)
    weight = torch.zeros(9, 3, 4, dtype=torch.float64, device=DEVICE)
    return voxels.sparse_conv(tensor, weight, 3, coordinates=coordinates)


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_geometry_is_refused(name):
    function, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        function()


def test_sizes_are_integers_of_any_library():
    """Red before: kernel_size=np.int64(3) was refused."""
    plain = nn.SparseConv3d(4, 6, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), 2)
    layers = [
        nn.SparseConv3d(
            number(4), number(6), number(3), [number(2)] * 3, number(1), number(1), number(2)
        )
        for number in (np.int64, np.int32, np.uint8, torch.tensor)
    ]
    layers.append(nn.SparseConv3d(4, 6, np.full(3, 3), torch.full((3,), 2), np.array(1), 1, 2))
    for layer in layers:
        assert layer.geometry == plain.geometry
        assert repr(layer) == repr(plain)
        sizes = layer.kernel_size, layer.stride, layer.padding, layer.dilation
        assert sizes == ((3,) * 3, (2,) * 3, (1,) * 3, (1,) * 3)
        assert (layer.in_channels, layer.out_channels, layer.groups) == (4, 6, 2)
        numbers = itertools.chain(*sizes, (layer.in_channels, layer.groups))
        assert all(type(n) is int for n in numbers)
    tensor = clouds.cloud(3, 4, torch.float32)
    weight = torch.randn(27, 2, 6)
    out = voxels.sparse_conv(tensor, weight, np.int64(3), groups=np.int64(2))
    same(out.F, voxels.sparse_conv(tensor, weight, 3, groups=2).F)
    assert len(voxels.sparse_max_pool(tensor, np.int64(2)))
    for wrong in (True, np.True_, torch.tensor(True), 1.0, None):
        with pytest.raises(DTypeError, match=r"stride holds .*: it must be an integer, or 3"):
            nn.SparseConv3d(4, 6, 3, wrong)
    with pytest.raises(DTypeError, match=r"groups is 2\.5: it must be an integer\. Pass"):
        voxels.sparse_conv(tensor, weight, 3, groups=2.5)


def test_the_key_of_an_inverse_layer_is_passed_by_its_keyword():
    """spconv's fourth argument is the key; red before: the text spoke of each of its letters."""
    with pytest.raises(DTypeError, match=r"stride is 'down': .* keyword: indice_key='down'\.$"):
        nn.SparseInverseConv3d(4, 4, 3, "down")
