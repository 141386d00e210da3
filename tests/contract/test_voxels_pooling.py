"""Pools and upsampling against torch's on dense tensors, where voxels that are not there count −∞
for a maximum and not at all for a mean.

Seen red with: a mean over the whole window, the last of equals chosen, a maximum that starts at 0,
`targets` read in the forward sum, an order of rows that is not the canonical one, NaN skipped.
"""

import functools

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from tests import clouds
from tests.clouds import DEVICE, at, occupied, permuted, same
from torchweft.errors import DTypeError, ShapeError
from torchweft.testing import assert_within_bound
from torchweft.voxels.layers import pooling
from torchweft.voxels.layers.pooling import (
    GlobalPool,
    SparseAvgPool,
    SparseMaxPool,
    SparseUpsample,
    global_pool,
    sparse_avg_pool,
    sparse_max_pool,
    sparse_upsample,
)
from torchweft.voxels.layers.sequential import SparseSequential
from torchweft.voxels.maps.tensor import SparseTensor

cloud = functools.partial(clouds.cloud, device=DEVICE)
empty = functools.partial(clouds.empty, device=DEVICE)
numbers = functools.partial(torch.tensor, device=DEVICE)
MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
WINDOWS = [(2, None, 0, 1), (3, 2, 1, 1), (3, 1, 1, 1), (2, 1, 1, 2), (1, 2, 0, 1), (4, 3, 2, 1)]
LOW = [torch.float16, torch.bfloat16, torch.float32]
LAYERS = {
    "max": lambda t: sparse_max_pool(t, 3, 2, 1).feats,
    "avg": lambda t: sparse_avg_pool(t, 3, 2, 1).feats,
    "up": lambda t: sparse_upsample(t, 2).feats,
    "global max": lambda t: global_pool(t, "max"),
    "global mean": lambda t: global_pool(t, "mean"),
    "global sum": lambda t: global_pool(t, "sum"),
}


def gradient(y, x, absolute=False):
    """The gradient of a random linear function of y, or of the one of absolute coefficients."""
    torch.manual_seed(2)
    grad = torch.randn(y.shape, dtype=torch.float64).to(y)
    (found,) = torch.autograd.grad(y, x, grad.abs() if absolute else grad, retain_graph=True)
    return found


def assert_gradient(found, exact, x, terms):
    """The gradient by x of `found`, within the bound of that of `exact`, whose weights are ≥ 0."""
    size = gradient(exact, x, absolute=True)
    assert_within_bound(gradient(found, x), gradient(exact, x), size, terms)


def max_oracle(tensor, kernel, stride, padding, dilation):
    dense = tensor.dense().masked_fill(occupied(tensor) == 0, -torch.inf)
    return MAX[tensor.dim](dense, kernel, stride, padding, dilation)


def window_sums(dense, kernel, stride, padding, dilation):
    dim, channels = dense.dim() - 2, dense.shape[1]
    ones = dense.new_ones(channels, 1, *(kernel,) * dim)
    return CONV[dim](dense, ones, None, stride or kernel, padding, dilation, channels)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_max_pool_is_torchs(window, dim):
    tensor = cloud(dim)
    dense = max_oracle(tensor, *window)
    out = sparse_max_pool(tensor, *window)
    assert out.spatial_shape == tuple(dense.shape[2:])
    same(out.C.long(), (dense > -torch.inf).any(1).nonzero())
    same(out.feats, at(dense, out))
    assert_gradient(out.feats, at(dense, out), tensor.feats, window[0] ** dim)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_avg_pool_divides_by_the_voxels_that_are_there(window, dim, dtype):
    tensor = cloud(dim, dtype=dtype)
    out = sparse_avg_pool(tensor, *window)
    wide = tensor.replace(tensor.feats.detach().double().requires_grad_())
    count = at(window_sums(occupied(wide), *window), out)
    exact = at(window_sums(wide.dense(), *window), out) / count
    size = at(window_sums(wide.dense().abs(), *window), out) / count
    terms = window[0] ** dim
    assert out.dtype == dtype
    assert_within_bound(out.feats, exact, size, terms + 1)
    grad = torch.randn(out.feats.shape, dtype=torch.float64).to(out.feats)
    (found,) = torch.autograd.grad(out.feats, tensor.feats, grad)
    (exact,) = torch.autograd.grad(exact, wide.feats, grad.double(), retain_graph=True)
    (size,) = torch.autograd.grad(
        at(window_sums(wide.dense(), *window), out) / count, wide.feats, grad.double().abs()
    )
    assert_within_bound(found, exact, size, terms + 1)


@pytest.mark.parametrize("scale", [1, 2, 3])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_upsample_is_torchs_nearest(dim, scale):
    tensor = cloud(dim)
    out = sparse_upsample(tensor, scale)
    dense = F.interpolate(tensor.dense(), scale_factor=scale, mode="nearest")
    same(out.dense(), dense)
    assert len(out) == len(tensor) * scale**dim
    assert_gradient(out.dense(), dense, tensor.feats, scale**dim)


def test_upsample_by_axis_and_its_stride():
    tensor = cloud(2)
    pooled = sparse_max_pool(tensor, 2)
    assert pooled.stride == (2, 2)
    out = sparse_upsample(pooled, (2, 1))
    assert out.stride == (1, 2)
    assert out.spatial_shape == (2 * pooled.spatial_shape[0], pooled.spatial_shape[1])


@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
@pytest.mark.parametrize("reduce", ["max", "mean", "sum"])
def test_global_pool_by_sample(reduce, dtype):
    tensor = cloud(2, batch=3, dtype=dtype, density=0.5, shape=(40, 40))
    given = SparseTensor(tensor.feats, tensor.C * numbers([2, 1, 1]), (40, 40), 7)
    out = global_pool(given, reduce)
    assert out.shape == (7, 3)
    assert out.dtype == dtype
    for sample in range(7):
        rows = given.feats[given.C[:, 0] == sample].double()
        if not len(rows):
            same(out[sample], torch.zeros(3, dtype=dtype, device=DEVICE))
            continue
        if reduce == "max":
            same(out[sample], rows.amax(0).to(dtype))
            continue
        exact, size = (getattr(r, reduce)(0) for r in (rows, rows.abs()))
        assert_within_bound(out[sample], exact, size, len(rows) + 1)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_gradients(name):
    tensor = cloud(2, channels=2, density=0.5, shape=(4, 4))

    def function(feats):
        return LAYERS[name](tensor.replace(feats))

    assert torch.autograd.gradcheck(function, tensor.feats)
    assert torch.autograd.gradgradcheck(lambda f: function(f).pow(3), tensor.feats)


@pytest.mark.parametrize("name", LAYERS)
def test_bits_do_not_depend_on_the_order_of_rows(name):
    tensor = cloud(3, dtype=torch.float32, density=0.6, shape=(9, 9, 9))
    other, order = permuted(tensor)
    for _ in range(2):
        first, second = LAYERS[name](tensor), LAYERS[name](other)
        same(first, second)
    first, second = (gradient(LAYERS[name](t).square(), t.feats) for t in (tensor, other))
    same(first[order], second)


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "max"])
def test_vmap_is_a_loop(name):
    tensor = cloud(2)
    stack = torch.randn(4, *tensor.feats.shape, device=DEVICE)

    def function(feats):
        return LAYERS[name](tensor.replace(feats))

    same(torch.vmap(function)(stack), torch.stack([function(f) for f in stack]))


@pytest.mark.parametrize("name", LAYERS)
def test_devices_that_do_not_walk_rows_find_the_same(name, monkeypatch):
    """The way of a GPU, on the CPU."""
    tensor = cloud(3, dtype=torch.float32, density=0.6, shape=(9, 9, 9))
    out = LAYERS[name](tensor)
    expected = gradient(out, tensor.feats)
    monkeypatch.setattr(pooling, "walks_rows", lambda device: False)
    again = LAYERS[name](tensor)
    same(again, out)
    same(gradient(again, tensor.feats), expected)
    none = empty()
    LAYERS[name](none).sum().backward()
    assert none.feats.grad.shape == (0, 3)


@pytest.mark.parametrize("name", LAYERS)
def test_empty(name):
    tensor = empty()
    out = LAYERS[name](tensor)
    assert out.shape == ((2, 3) if "global" in name else (0, 3))
    out.sum().backward()
    assert tensor.feats.grad.shape == (0, 3)
    assert not out.any()


def test_equals_and_values_that_are_no_numbers():
    feats = numbers([[1.0], [1.0], [-torch.inf], [torch.nan], [2.0]], requires_grad=True)
    coords = numbers([[0, 1], [0, 0], [0, 2], [0, 5], [0, 4]])
    out = sparse_max_pool(SparseTensor(feats, coords, (6,), 1), 2)
    same(out.feats, numbers([[1.0], [-torch.inf], [torch.nan]]))
    out.feats.backward(numbers([[3.0], [5.0], [7.0]]))
    same(feats.grad, numbers([[0.0], [3.0], [5.0], [7.0], [0.0]]))
    feats.grad = None
    rows = numbers([[0, 3], [0, 1], [1, 2], [2, 5], [2, 4]])
    out = global_pool(SparseTensor(feats, rows, (6,), 3), "max")
    same(out, numbers([[1.0], [-torch.inf], [torch.nan]]))
    out.backward(numbers([[3.0], [5.0], [7.0]]))
    same(feats.grad, numbers([[0.0], [3.0], [5.0], [7.0], [0.0]]))


def test_a_maximum_of_windows_is_not_mapped():
    tensor = cloud(2)
    with pytest.raises(ShapeError, match=r"sparse_max_pool .* torch.vmap.*Put the mapped"):
        torch.vmap(lambda f: LAYERS["max"](tensor.replace(f)))(torch.stack([tensor.feats] * 2))


def test_the_first_of_several_nan_is_chosen():
    feats = numbers([[torch.nan], [torch.nan], [3.0]], requires_grad=True)
    tensor = SparseTensor(feats, numbers([[0, 2], [0, 1], [0, 0]]))
    for out in (sparse_max_pool(tensor, 3).feats, global_pool(tensor, "max")):
        (found,) = torch.autograd.grad(out, feats, torch.ones_like(out))
        same(found, numbers([[0.0], [1.0], [0.0]]))


def test_minus_infinity_alone_in_its_window():
    feats = numbers([[-torch.inf]], requires_grad=True)
    out = sparse_max_pool(SparseTensor(feats, numbers([[0, 1]])), 2).feats
    same(out, feats)
    out.sum().backward()
    same(feats.grad, torch.ones_like(feats))


def test_windows_of_more_places_than_16_bits_count():
    assert pooling._position_dtype(torch.empty(2**15 - 1, 0)) == torch.int16
    assert pooling._position_dtype(torch.empty(2**15, 0)) == torch.int32


def test_modules_are_the_functions():
    tensor = cloud()
    same(SparseMaxPool(3, 2, 1)(tensor).feats, LAYERS["max"](tensor))
    same(SparseAvgPool(3, 2, 1)(tensor).feats, LAYERS["avg"](tensor))
    same(SparseUpsample(2)(tensor).feats, LAYERS["up"](tensor))
    same(GlobalPool("sum")(tensor), LAYERS["global sum"](tensor))
    assert repr(SparseMaxPool(2)) == (
        "SparseMaxPool(kernel_size=2, stride=2, padding=0, dilation=1)"
    )
    assert repr(GlobalPool()) == "GlobalPool(reduce='mean')"
    assert repr(SparseUpsample((2, 1))) == "SparseUpsample(scale=(2, 1))"
    net = SparseSequential(SparseMaxPool(2), GlobalPool(), torch.nn.Linear(3, 5).to(tensor.feats))
    assert net(tensor).shape == (2, 5)


def test_errors():
    with pytest.raises(ShapeError, match=r"reduce is 'min': .* max, mean or sum .* Pass"):
        GlobalPool("min")
    with pytest.raises(ShapeError, match="reduce is 'first'"):
        global_pool(cloud(), "first")
    with pytest.raises(DTypeError, match=r"SparseMaxPool was given a Tensor: .*SparseSequential"):
        SparseMaxPool(2)(torch.ones(3, 3))
    with pytest.raises(ShapeError, match="stride is"):
        sparse_avg_pool(cloud(), 2, 0)
