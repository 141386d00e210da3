"""act(norm(convolution) + residual): inside the convolution where nothing is recorded, else behind.

Seen red with: a residual in another order than the output's rows, the convolution's bias left out
of the folded norm, a norm in training folded, a hook that is not called.
"""

import copy
import functools

import pytest
import torch
from torch import nn

from tests import clouds
from tests.clouds import DEVICE, same
from tests.conftest import INTERPRETED
from torchweft.core.explain import explain
from torchweft.errors import DeviceError, DTypeError, ShapeError
from torchweft.testing import assert_as_accurate, plain_error
from torchweft.voxels import (
    GlobalPool,
    SparseBatchNorm,
    SparseConv3d,
    SparseGroupNorm,
    SparseInverseConv3d,
    SparseSequential,
    SparseTensor,
    SubMConv3d,
)
from torchweft.voxels.convolution.epilogue import ACTIVATIONS

pytestmark = pytest.mark.kernels

BACKEND = "triton" if INTERPRETED or DEVICE == "cuda" else "torch"
BY_KERNELS = BACKEND == "triton"
LAYERS = {
    "submanifold": lambda **options: SubMConv3d(4, 8, 3, **options),
    "strided": lambda **options: SparseConv3d(4, 8, 2, 2, indice_key="down", **options),
    "inverse": lambda **options: SparseInverseConv3d(4, 8, 2, indice_key="down", **options),
}


@functools.cache
def cloud():
    tensor = clouds.cloud(channels=4, dtype=torch.float32, device=DEVICE)
    return tensor.replace(tensor.feats.detach())


def given(name):
    """A layer, its input, and a norm whose numbers are not those of a new one."""
    torch.manual_seed(2)
    layer = LAYERS[name](backend=BACKEND).to(DEVICE)
    norm = SparseBatchNorm(8, backend=BACKEND).to(DEVICE)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    tensor = SparseTensor(cloud().feats, cloud().C, cloud().spatial_shape, 2)
    if name == "inverse":
        tensor = SparseConv3d(4, 4, 2, 2, indice_key="down").to(DEVICE)(tensor)
        tensor = tensor.replace(tensor.feats.detach())
    return layer, norm, tensor


def steps(layer, norm, tensor, residual, activation):
    """Each by torch, in the dtype of the layer."""
    y = layer(tensor).feats
    y = y if norm is None else nn.BatchNorm1d.forward(norm, y)
    y = y if residual is None else y + residual
    return y if activation is None else ACTIVATIONS[activation](y)


def residual_of(layer, tensor, dtype=torch.float32):
    out = layer(tensor)
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(out.feats.shape, generator=generator, dtype=torch.float64)
    return out.replace(rows.to(DEVICE, dtype))


def check(layer, norm, tensor, residual, activation):
    """As accurate as the steps in float32."""
    exact = copy.deepcopy(layer).double(), copy.deepcopy(norm).double() if norm else None
    rough = copy.deepcopy(layer), copy.deepcopy(norm)
    found = layer(tensor, norm=norm, residual=residual, activation=activation).feats
    rows = None if residual is None else residual.feats
    wide = None if residual is None else rows.double()
    expected = steps(*exact, tensor.to(torch.float64), wide, activation)
    noise = plain_error(steps(*rough, tensor, rows, activation), expected, torch.float32)
    assert_as_accurate(found, expected, noise + noise.max())


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.singly
def test_as_accurate_as_the_steps(name, training, recorded):
    layer, norm, tensor = given(name)
    residual = residual_of(layer, tensor)
    with torch.set_grad_enabled(recorded):
        for one, other in ((norm, residual), (norm, None), (None, residual)):
            check(layer, one and one.train(training), tensor, other, "relu")


@pytest.mark.parametrize("recorded", [True, False])
def test_a_norm_of_torch(recorded):
    layer, norm, tensor = given("submanifold")
    plain = nn.BatchNorm1d(8).to(DEVICE)
    plain.load_state_dict(norm.state_dict())
    with torch.set_grad_enabled(recorded):
        check(layer, plain.eval(), tensor, residual_of(layer, tensor), "silu")


def test_residual_in_another_order():
    layer, norm, tensor = given("submanifold")
    residual = residual_of(layer, tensor)
    other, order = clouds.permuted(residual)
    with torch.no_grad():
        for training in (False, True):
            norm.train(training)
            first = layer(tensor, norm=norm, residual=residual)
            second = layer(tensor, norm=norm, residual=other.replace(residual.feats[order]))
            same(first.feats, second.feats)


def test_sixteen_bits_keep_the_norm_in_float32():
    """The folded scale and shift are not rounded to the features' dtype."""
    layer, norm, tensor = given("submanifold")
    layer, tensor = layer.to(torch.bfloat16), tensor.to(torch.bfloat16)
    wide = copy.deepcopy(layer).double(), copy.deepcopy(norm).eval().double()
    exact = steps(*wide, tensor.to(torch.float64), None, "relu")
    rough = copy.deepcopy(layer).float(), copy.deepcopy(norm).eval()
    noise = plain_error(steps(*rough, tensor.to(torch.float32), None, "relu"), exact, torch.float32)
    with torch.no_grad():
        found = layer(tensor, norm=norm.eval(), activation="relu").feats
    assert found.dtype == torch.bfloat16
    assert_as_accurate(found, exact, noise)


def sequence():
    layer, norm, tensor = given("submanifold")
    return SparseSequential(layer, norm, nn.ReLU()), tensor


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.SiLU(), nn.GELU()])
def test_a_sequence_is_its_modules(activation):
    network, tensor = sequence()
    network[2] = activation
    for training in (True, False):
        network.train(training)
        layer, norm, _ = copy.deepcopy(network)
        expected = activation(norm(layer(tensor)).feats)
        torch.testing.assert_close(network(tensor).feats, expected)
        with torch.no_grad():
            torch.testing.assert_close(network.eval()(tensor).feats, network(tensor).feats)


@pytest.mark.skipif(not BY_KERNELS, reason="kernels run in the interpreter or on a GPU")
def test_launches_of_a_sequence():
    network, tensor = sequence()

    def names():
        network(tensor)
        found = explain(network, tensor)
        return [launch.kernel for launch in found.launches]

    training = ["statistics_kernel", "total_statistics_kernel", "apply_kernel"]
    assert names() == ["fold_kernel", *training]
    network.eval()
    assert names() == ["fold_kernel", "apply_kernel"]
    with torch.no_grad():
        assert names() == ["fold_kernel"]


class _Other(nn.ReLU):
    def forward(self, x):
        return -super().forward(x)


def test_what_is_not_plain_runs_by_itself():
    """Hooks, subclasses, other approximations, and modules with a module in between."""
    network, tensor = sequence()
    network.eval()
    with torch.no_grad():
        expected = network(tensor).feats
        seen = []
        for i, count in ((2, 1), (1, 3)):
            network[i].register_forward_hook(lambda module, args, result: seen.append(len(result)))
            torch.testing.assert_close(network(tensor).feats, expected)
            assert seen == [len(tensor)] * count
        network[2] = _Other()
        torch.testing.assert_close(network(tensor).feats, -expected)
        network[2] = nn.GELU(approximate="tanh")
        expected = network[2](network[1](network[0](tensor)).feats)
        same(network(tensor).feats, expected)


def test_a_hook_of_a_convolution_sees_its_result():
    network, tensor = sequence()
    network.eval()
    with torch.no_grad():
        expected, own, seen = network(tensor).feats, network[0](tensor).feats, []
        network[0].register_forward_hook(lambda module, args, result: seen.append(result.feats))
        torch.testing.assert_close(network(tensor).feats, expected)
    torch.testing.assert_close(seen, [own])


def test_norms_of_torch_in_a_sequence():
    network, tensor = sequence()
    plain = nn.BatchNorm1d(8).to(DEVICE)
    plain.load_state_dict(network[1].state_dict())
    expected = network(tensor).feats
    torch.testing.assert_close(
        SparseSequential(network[0], plain, nn.ReLU())(tensor).feats, expected
    )
    found = SparseSequential(plain.eval(), nn.ReLU())(network[0](tensor)).feats
    torch.testing.assert_close(found, network.eval()(tensor).feats)


def test_norms_of_dense_results():
    """Behind a GlobalPool, and a sequence that begins with a norm."""
    _, tensor = sequence()
    plain = nn.BatchNorm1d(4).to(DEVICE)
    pooled = GlobalPool()(tensor)
    found = SparseSequential(GlobalPool(), copy.deepcopy(plain), nn.ReLU())(tensor)
    same(found, torch.relu(copy.deepcopy(plain)(pooled)))
    found = SparseSequential(copy.deepcopy(plain), nn.ReLU())(tensor).feats
    torch.testing.assert_close(found, torch.relu(plain(tensor.feats)))


@pytest.mark.skipif(INTERPRETED, reason="torch.compile is checked without TRITON_INTERPRET")
@pytest.mark.parametrize("training", [True, False])
def test_compiles_whole(training):
    network, tensor = sequence()
    layer, norm, _ = network.train(training)

    def block(x):
        return layer(network(x).replace(x.feats), norm=norm, residual=network(x)).feats

    expected = block(tensor)
    found = torch.compile(block, fullgraph=True, backend="eager")(tensor)
    torch.testing.assert_close(found, expected)


def test_transforms():
    """A gradient by torch.func is that of the recorded call."""
    network, tensor = sequence()
    network.eval()
    weight = network[0].weight.detach()

    def loss(weight):
        given = (network, {"0.weight": weight}, (tensor,))
        return torch.func.functional_call(*given).feats.square().sum()

    found = torch.func.grad(loss)(weight)
    recorded = weight.clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(loss(recorded), recorded)[0])


def test_autocast():
    network, tensor = sequence()
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        for training in (True, False):
            assert network.train(training)(tensor).dtype == torch.bfloat16
        layer, norm, _ = network
        residual = tensor.replace(torch.randn(len(tensor), 8, device=DEVICE))
        assert layer(tensor, norm=norm, residual=residual).dtype == torch.bfloat16


def test_errors():
    layer, _, tensor = given("submanifold")
    with pytest.raises(DTypeError, match=r"norm is a SparseGroupNorm: it must be .*to the result"):
        layer(tensor, norm=SparseGroupNorm(2, 8))
    with pytest.raises(DTypeError, match=r"norm is a SyncBatchNorm: it must be"):
        layer(tensor, norm=nn.SyncBatchNorm(8))
    with pytest.raises(ShapeError, match=r"norm was built for 5 channels .* C_out = 8: .*for 8"):
        layer(tensor, norm=SparseBatchNorm(5))
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, pytest.raises(ShapeError, match="'tanh': it must be one of relu"):
            layer(tensor, activation="tanh")
        with context, pytest.raises(ShapeError, match=r"residual is \(\d+, 4\) but the output"):
            layer(tensor, residual=tensor)
    inverse, _, coarse = given("inverse")
    with pytest.raises(ShapeError, match=r"coordinates were given to SparseInverseConv3d: .*out"):
        inverse(coarse, coarse.C)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs two devices")
def test_a_norm_that_was_left_on_the_cpu():
    layer, _, tensor = given("submanifold")
    with torch.no_grad(), pytest.raises(DeviceError, match=r"of the norm's mean is cpu, .* Move"):
        layer(tensor, norm=SparseBatchNorm(8).eval())
