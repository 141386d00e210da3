"""What a warm call of a convolution costs the host: few calls of functions, and nothing stale.

Counted are calls of torchweft's own functions in a warm call (its map is built) whose gradients are
recorded; nothing runs on a GPU.
"""

import pytest
import torch

import torchweft
from tests.contract.announced import watch
from tests.contract.test_o3_host import calls
from torchweft import voxels
from torchweft.core.operators.call_cache import CallCache
from torchweft.voxels.convolution import functions, launch
from torchweft.voxels.maps.gpu import launch as map_launch
from torchweft.voxels.norms import functions as norms

C_IN, C_OUT = 8, 16


def cloud(seed=0, channels=C_IN, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(8**3, generator=generator)[:200]
    rows = torch.stack([places * 0, places // 64, places // 8 % 8, places % 8], 1)
    feats = torch.randn(len(rows), channels, generator=generator, dtype=dtype, requires_grad=True)
    return voxels.SparseTensor(feats, rows, (8, 8, 8), 1)


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors on the CPU as if they were on a GPU: the launches of kernels."""
    monkeypatch.setattr(launch, "_compiled_layers", set())
    monkeypatch.setattr(map_launch, "_compiled_maps", set())
    monkeypatch.setattr(functions, "_serving", lambda backend, device: "triton")
    monkeypatch.setattr(functions, "_checked_calls", CallCache())
    return watch(monkeypatch.setattr)


def step(layer, tensor):
    return lambda: layer(tensor).feats


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_warm_call_on_the_cpu(shuffled):
    layer, tensor = voxels.SubMConv3d(C_IN, C_OUT, 3), cloud()
    if not shuffled:
        order = tensor.coordinates.order.long()
        tensor = voxels.SparseTensor(tensor.feats.detach()[order], tensor.C[order], (8, 8, 8), 1)
        tensor.feats.requires_grad_()
    forward = step(layer, tensor)
    for _ in range(2):
        forward().sum().backward()
    found = calls(forward)
    assert len(found) <= 36, found
    y = forward()
    found = calls(lambda: y.backward(y.detach()))
    assert len(found) <= 40, found


def test_a_warm_call_on_a_gpu(on_gpu):
    layer, tensor = voxels.SubMConv3d(C_IN, C_OUT, 3), cloud()
    forward = step(layer, tensor)
    for _ in range(2):
        forward().sum().backward()
    found = calls(forward)
    assert len(found) <= 37, found
    y = forward()
    found = calls(lambda: y.backward(y.detach()))
    assert len(found) <= 47, found


def test_a_warm_norm_on_a_gpu(monkeypatch, on_gpu):
    """In training, with an activation and a residual."""
    monkeypatch.setattr(norms, "_serving", lambda backend, device: "triton")
    norm, tensor = voxels.SparseBatchNorm(C_IN), cloud()

    def forward():
        return norm(tensor, tensor, "relu").feats

    for _ in range(2):
        forward().sum().backward()
    found = calls(forward)
    assert len(found) <= 48, found
    y = forward()
    found = calls(lambda: y.backward(y.detach()))
    assert len(found) <= 26, found


def test_warm_inference_compares_no_tensors(monkeypatch, on_gpu):
    """Red before: an epilogue compared with an empty one, where torch raises inside: 29 µs."""
    monkeypatch.setattr(norms, "_serving", lambda backend, device: "triton")
    layer, norm, tensor = voxels.SubMConv3d(C_IN, C_OUT, 3), voxels.SparseBatchNorm(C_OUT), cloud()
    norm.eval()

    @torch.no_grad()
    def forward():
        return layer(tensor, norm=norm, activation="relu").feats

    forward()

    def compared(self, other):
        raise AssertionError("tensors are compared")

    monkeypatch.setattr(torch.Tensor, "__eq__", compared)
    found = calls(forward)
    assert len(found) <= 43, found


def expected(layer, tensor):
    """The layer by torch's own dense convolution."""
    kernel = layer.weight.detach().double().permute(2, 1, 0).unflatten(2, (3, 3, 3))
    bias = None if layer.bias is None else layer.bias.detach().double()
    dense = tensor.replace(tensor.feats.detach().double()).dense()
    y = torch.nn.functional.conv3d(dense, kernel, bias, padding=1)
    return y[(tensor.C[:, 0].long(), slice(None), *tensor.C[:, 1:].long().T)]


def check(layer, tensor):
    y = layer(tensor).feats
    assert y.dtype == tensor.dtype
    error = (y.detach().double() - expected(layer, tensor)).abs().max()
    assert error < 1e3 * torch.finfo(y.dtype).eps


def test_a_warm_call_sees_what_has_changed():
    layer, tensor = voxels.SubMConv3d(C_IN, C_OUT, 3), cloud()
    for _ in range(2):
        check(layer, tensor)
    with torch.no_grad():
        layer.weight.mul_(2)
        tensor.feats.add_(1)
    check(layer, tensor)
    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))
    check(layer, tensor)
    layer.bias = None
    check(layer, tensor)
    check(layer, cloud(1))
    check(layer.double(), cloud(1, dtype=torch.float64))
    check(layer.float().eval(), tensor)
    tensor.feats = torch.randn_like(tensor.feats)
    check(layer, tensor)
    tensor.coordinates = cloud(2).coordinates
    check(layer, tensor)


def test_a_warm_call_sees_autocast_and_other_dtypes():
    layer, tensor = voxels.SubMConv3d(C_IN, C_OUT, 3), cloud()
    for _ in range(2):
        layer(tensor)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(tensor).dtype == torch.bfloat16
    assert layer(tensor).dtype == torch.float32
    with pytest.raises(torchweft.DTypeError, match=r"weight is torch\.float32 but feats"):
        layer(tensor.to(torch.float64))
    with pytest.raises(torchweft.ShapeError, match="built for 8 channels"):
        layer(cloud(channels=C_IN // 2))
    layer.groups = 2
    with pytest.raises(torchweft.ShapeError, match="weight must be"):
        layer(tensor)
