"""Modules of voxels: torch's layers on the dense tensor, parameters, errors, torch's machinery.

Seen red with: padding and dilation swapped, weights column-major, no bias, fan-in of the outputs,
plain modules given the tensor, an inverse layer that takes any geometry.
"""

import copy
import functools
import io
import math
import pickle
import runpy
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from tests import clouds
from tests.clouds import DEVICE, at, occupied, same
from tests.conftest import INTERPRETED
from torchweft.errors import DTypeError, ShapeError
from torchweft.testing import assert_within_bound
from torchweft.voxels.layers import convolution as nn
from torchweft.voxels.layers.norm import (
    SparseBatchNorm,
    SparseGroupNorm,
    SparseInstanceNorm,
    SparseLayerNorm,
)
from torchweft.voxels.layers.pooling import GlobalPool, SparseAvgPool, SparseMaxPool, SparseUpsample
from torchweft.voxels.layers.sequential import SparseSequential
from torchweft.voxels.maps.tensor import SparseTensor

cloud = functools.partial(clouds.cloud, device=DEVICE)
empty = functools.partial(clouds.empty, device=DEVICE)
DENSE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TURNED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
UNEVEN = [3, 2, 1, 2]
EXAMPLES = Path(__file__).parents[2] / "examples/voxels"


def layer(kind, dim, *args, **options):
    return getattr(nn, f"{kind}{dim}d")(*args, **options).to(DEVICE)


def dense_weight(module):
    """torch's (C_out, C_in / groups, k…)."""
    weight = module.weight.permute(2, 1, 0)
    return weight.reshape(*weight.shape[:2], *module.kernel_size)


def dense_result(module, x, bias=True):
    """The oracle: torch's layer on the dense input."""
    shape, weight, given = module.geometry, dense_weight(module), module.bias if bias else None
    if shape.mode == "transposed":
        groups, per_group = module.groups, weight.shape[0] // module.groups
        weight = weight.unflatten(0, (groups, per_group)).transpose(1, 2).flatten(0, 1)
        return TURNED[module.dim](
            x, weight, given, shape.stride, shape.padding, 0, groups, shape.dilation
        )
    padding = "same" if shape.mode == "submanifold" else shape.padding
    return DENSE[module.dim](x, weight, given, shape.stride, padding, shape.dilation, module.groups)


CASES = {
    "SubMConv": [{}, {"dilation": 2, "padding": 1}, {"groups": 2, "bias": False}],
    "SparseConv": [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 3, "groups": 2}],
    "SparseConvTranspose": [{}, {"stride": 2, "padding": 1}, {"stride": 2, "groups": 2}],
}
GRID = [(kind, options) for kind, several in CASES.items() for options in several]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize(("kind", "options"), GRID, ids=str)
def test_layers_are_torchs(kind, options, dim, dtype):
    tensor = cloud(dim, channels=4, dtype=dtype)
    torch.manual_seed(6)
    module = layer(kind, dim, 4, 6, UNEVEN[:dim], **options).to(dtype)
    out = module(tensor)
    exact = copy.deepcopy(module).double()
    wide = tensor.replace(tensor.feats.detach().double().requires_grad_())
    dense = dense_result(exact, wide.dense())
    absolute = copy.deepcopy(exact)
    for parameter in absolute.parameters():
        parameter.data.abs_()
    size = dense_result(absolute, wide.dense().abs())
    terms = len(module.weight) * 4 // module.groups + 1
    assert out.dtype == dtype
    assert out.spatial_shape == tuple(dense.shape[2:])
    assert_within_bound(out.feats, at(dense, out), at(size, out), terms)
    reached = dense_result(
        copy.deepcopy(absolute), occupied(wide).expand(-1, 4, *wide.spatial_shape), bias=False
    )
    if kind != "SubMConv":  # every voxel that is reached is there
        assert len(out) == int((reached.amax(1) > 0).sum())


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["SubMConv", "SparseConv", "SparseConvTranspose"])
def test_gradients(kind, dim):
    tensor = cloud(dim, channels=2, batch=1, shape=(3, 3, 2, 1)[:dim], density=0.5)
    module = layer(kind, dim, 2, 2, (2, 2, 2, 1)[:dim]).double()
    parameters = dict(module.named_parameters())

    def function(feats, *values):
        given = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(module, given, (tensor.replace(feats),)).feats

    inputs = (tensor.feats, *parameters.values())
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_an_inverse_layer_returns_to_the_voxels(dim):
    tensor = cloud(dim, channels=4, dtype=torch.float32)
    down = layer("SparseConv", dim, 4, 6, 3, 2, 1, indice_key="down")
    up = layer("SparseInverseConv", dim, 6, 5, 3, indice_key="down")
    coarse = down(tensor)
    out = up(coarse)
    assert out.coordinates is tensor.coordinates
    assert out.spatial_shape == tensor.spatial_shape
    # pairs swapped: the adjoint of the strided layer with the same weights turned
    exact = up.bias.double().expand(len(tensor), 5)
    size = exact.abs()
    found = tensor.maps.named("down")
    for k, weight in enumerate(up.weight.detach().double()):
        rows, coarse_rows = found.pairs(k)
        x = coarse.feats.detach().double()[coarse_rows]
        exact = exact.index_add(0, rows, x @ weight)
        size = size.index_add(0, rows, x.abs() @ weight.abs())
    assert_within_bound(out.feats, exact, size, 6 * len(up.weight) + 1)


def test_parameters_have_torchs_start():
    for groups in (1, 4):
        torch.manual_seed(0)
        ours = nn.SparseConv3d(64, 32, 3, groups=groups)
        theirs = torch.nn.Conv3d(64, 32, 3, groups=groups)
        assert ours.weight.shape == (27, 64 // groups, 32)
        assert ours.bias.shape == (32,)
        bound = 1 / math.sqrt(64 / groups * 27)
        for parameter in ours.parameters():
            assert bound * 0.9 < float(parameter.detach().abs().max()) <= bound
        # the standard deviation of n uniform numbers is itself random, by about 1/√n of its value
        ratio = float((ours.weight.std() / theirs.weight.std()).detach())
        assert abs(ratio - 1) < 8 / math.sqrt(ours.weight.numel())
    assert nn.SubMConv2d(3, 5, (3, 1), bias=False).bias is None


def test_names_of_the_seed():
    assert nn.SubMConv3D is nn.SubMConv3d
    assert nn.SparseConv3D is nn.SparseConv3d
    assert nn.SparseConvTransposed3D is nn.SparseConvTranspose3D is nn.SparseConvTranspose3d
    assert nn.SparseInverseConv3D is nn.SparseInverseConv3d


def test_repr():
    conv = nn.SparseConv2d(4, 8, 3, 2, (1, 0), 2, 4, False, "down", precision="tf32")
    assert repr(conv) == (
        "SparseConv2d(4, 8, kernel_size=(3, 3), stride=(2, 2), padding=(1, 0), dilation=(2, 2), "
        "groups=4, indice_key='down', precision='tf32', bias=False)"
    )
    assert repr(nn.SubMConv1d(4, 8, 3, padding=1)) == "SubMConv1d(4, 8, kernel_size=(3,))"


def network(dtype=torch.float32):
    """Every kind of module in a row."""
    torch.manual_seed(1)
    return SparseSequential(
        nn.SubMConv3d(3, 8, 3),
        SparseBatchNorm(8),
        torch.nn.ReLU(),
        nn.SparseConv3d(8, 8, 2, 2, indice_key="down"),
        SparseGroupNorm(2, 8),
        SparseSequential(SparseInstanceNorm(8), SparseLayerNorm(8), torch.nn.GELU()),
        nn.SparseInverseConv3d(8, 4, 2, indice_key="down"),
        SparseMaxPool(2),
        SparseUpsample(2),
        nn.SparseConvTranspose3d(4, 4, 2, 2),
        SparseAvgPool(3, 2, 1),
        GlobalPool("mean"),
        torch.nn.Linear(4, 5),
    ).to(DEVICE, dtype)


def test_sequential_gives_plain_modules_the_features():
    tensor = cloud(dtype=torch.float32)
    chain = SparseSequential(torch.nn.Linear(3, 7), torch.nn.ReLU()).to(DEVICE)
    out = chain(tensor)
    assert out.coordinates is tensor.coordinates
    assert out.maps is tensor.maps
    same(out.feats, torch.relu(chain[0](tensor.feats)))
    assert network()(tensor).shape == (2, 5)
    same(SparseSequential()(tensor).feats, tensor.feats)


def test_state_and_pickle_keep_every_bit():
    module, tensor = network().eval(), cloud(dtype=torch.float32)
    expected = module(tensor)
    state = io.BytesIO()
    torch.save(module.state_dict(), state)
    state.seek(0)
    fresh = network().eval()
    fresh.load_state_dict(torch.load(state))
    for other in (fresh, pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        same(other(tensor), expected)


def test_every_parameter_gets_a_gradient():
    module, tensor = network(), cloud(dtype=torch.float32)
    module(tensor).square().sum().backward()
    assert tensor.feats.grad.abs().sum() > 0
    for name, parameter in module.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_modules_keep_the_dtype(dtype):
    module, tensor = network(dtype), cloud(dtype=dtype)
    out = module(tensor)
    assert out.dtype == dtype
    assert out.isfinite().all()
    out.sum().backward()
    assert tensor.feats.grad.dtype == dtype


def test_autocast_runs_in_low_precision():
    module, tensor = layer("SubMConv", 3, 3, 8, 3), cloud(dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = module(tensor)
    assert out.dtype == torch.bfloat16
    out.feats.float().square().sum().backward()
    assert module.weight.grad.dtype == torch.float32


def test_no_voxel():
    module, tensor = network(), empty()
    out = module(tensor)
    assert out.shape == (2, 5)
    out.sum().backward()
    assert tensor.feats.grad.shape == (0, 3)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name


@pytest.mark.skipif(INTERPRETED, reason="torch.compile is checked without TRITON_INTERPRET")
def test_compiles_whole():
    module, tensor = network().eval(), cloud(dtype=torch.float32)
    expected = module(tensor)  # its maps are there now
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    found = compiled(tensor)
    same(found, expected)
    parameters = list(module.parameters())
    pairs = zip(
        torch.autograd.grad(found.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    )
    for one, other in pairs:
        same(one, other)


@pytest.mark.parametrize(
    ("error", "match", "build"),
    [
        (ShapeError, r"in_channels is 0: .*Correct", lambda: nn.SubMConv3d(0, 4, 3)),
        (DTypeError, r"out_channels is 4.0: .*Pass", lambda: nn.SubMConv3d(4, 4.0, 3)),
        (ShapeError, r"in_channels is 4 but groups is 3.*Pass", lambda: _grouped(3)),
        (ShapeError, r"stride is \(2, 2, 2\) in a subm", lambda: nn.SubMConv3d(4, 4, 3, 2)),
        (ShapeError, r"kernel_size has 2 numbers", lambda: nn.SparseConv3d(4, 4, (3, 3))),
        (ShapeError, r"stride is \(0, 0\): every", lambda: nn.SparseConv2d(4, 4, 3, 0)),
        (ShapeError, r"Conv3d was given no indice_key.*Pass", lambda: _inverse(None)),
    ],
)
def test_errors_of_construction(error, match, build):
    with pytest.raises(error, match=match):
        build()


def _grouped(groups):
    return nn.SparseConv3d(4, 6, 3, groups=groups)


def _inverse(key, kernel_size=2, **options):
    return nn.SparseInverseConv3d(6, 6, kernel_size, indice_key=key, **options)


def test_errors_of_calls():
    tensor = cloud(dtype=torch.float32)
    with pytest.raises(ShapeError, match=r"SubMConv3d was built for 4 channels.*Build it for 3"):
        nn.SubMConv3d(4, 4, 3)(tensor)
    with pytest.raises(ShapeError, match=r"SubMConv2d was given coordinates of 3 axes.*needs 2"):
        nn.SubMConv2d(3, 4, 3)(tensor)
    with pytest.raises(DTypeError, match=r"SubMConv3d was given a Tensor.*SparseSequential"):
        nn.SubMConv3d(3, 4, 3)(tensor.feats)
    with pytest.raises(DTypeError, match="SparseSequential was given a Tensor"):
        SparseSequential()(tensor.feats)
    coarse = layer("SparseConv", 3, 3, 6, 2, 2, indice_key="down")(tensor)
    with pytest.raises(ShapeError, match=r"names no map of this tensor.*\['down'\]"):
        _inverse("up")(coarse)
    with pytest.raises(ShapeError, match=r"kernel_size is \(3, 3, 3\) but .*'down' has \(2, 2, 2"):
        _inverse("down", 3)(coarse)
    with pytest.raises(ShapeError, match=r"stride is \(3, 3, 3\) but .* Pass stride=\(2, 2, 2\)"):
        _inverse("down", stride=3)(coarse)
    _inverse("down", stride=2).to(DEVICE)(coarse)
    with pytest.raises(ShapeError, match="indice_key='down' names the map"):
        nn.SparseConv3d(3, 6, 3, 2, indice_key="down").to(DEVICE)(tensor)


def test_minkunet_learns():
    names = runpy.run_path(str(EXAMPLES / "plot_minkunet.py"))
    _, losses = names["train"](layers=14, steps=6)
    assert losses[-1] < losses[0] / 2
    convolutions = [
        m for m in names["MinkUNet"](4, 3, 42).modules() if isinstance(m, nn.SparseConvolution)
    ]
    assert sum(math.prod(c.kernel_size) > 1 for c in convolutions) == 42


def test_second_is_its_dense_network():
    names = runpy.run_path(str(EXAMPLES / "plot_second.py"))
    encoder = names["MiddleEncoder"](4)
    tensor = names["voxels"]([names["street"](torch.Generator().manual_seed(0))])
    assert encoder(tensor).shape == (1, 256, 32, 32)
    torch.manual_seed(2)
    encoder = names["MiddleEncoder"](4).to(DEVICE, torch.float64).eval()
    coords = (torch.rand(2, 41, 16, 16, device=DEVICE) < 0.1).nonzero()
    feats = torch.randn(len(coords), 4, device=DEVICE, dtype=torch.float64)
    tensor = SparseTensor(feats, coords, (41, 16, 16), 2)
    x, there = tensor.dense(), occupied(tensor)
    for module in encoder.layers:
        if isinstance(module, nn.SparseConvolution):
            x = dense_result(module, x)
            if module.geometry.mode == "strided":
                ones = there.new_ones(1, 1, *module.kernel_size)
                there = (F.conv3d(there, ones, None, *module.geometry[2:4]) > 0).double()
            x = x * there
        elif isinstance(module, SparseBatchNorm):
            arguments = module.running_mean, module.running_var, module.weight, module.bias
            x = F.batch_norm(x, *arguments, False, 0, module.eps) * there
        else:
            x = module(x)
    out, exact = encoder(tensor), x.flatten(1, 2)
    # 27 · 64 terms a layer at most, eleven layers, each stored once
    assert_within_bound(
        out, exact, torch.full_like(exact, float(x.detach().abs().max())), 1728, stored=11
    )
