"""Batch norm with a residual and an activation, by kernels, by torch, and inside a convolution.

Seen red with: the biased variance kept, the mean's share of the gradient left out, the residual's
gradient without the activation's slope, a part's squares not moved to the common mean, rows past
the last counted, running statistics that torch does not see change.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

from tests import clouds
from tests.clouds import DEVICE, same
from tests.conftest import INTERPRETED
from torchweft.core.explain import explain
from torchweft.errors import BackendError, DTypeError, ShapeError
from torchweft.testing import assert_as_accurate, plain_error
from torchweft.voxels import (
    SparseBatchNorm,
    SparseTensor,
)
from torchweft.voxels.convolution.epilogue import ACTIVATIONS
from torchweft.voxels.norms import launch, torch_path
from torchweft.voxels.norms.functions import batch_norm

pytestmark = pytest.mark.kernels

BACKEND = "triton" if INTERPRETED or DEVICE == "cuda" else "torch"
BY_KERNELS = BACKEND == "triton"
N = 75
AFTER = list(itertools.product([False, True], [None, *ACTIVATIONS]))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks a part and several parts, the last of each incomplete, of few rows."""
    monkeypatch.setattr(launch, "ELEMENTS", 64)
    monkeypatch.setattr(launch, "PROGRAMS", 4)
    monkeypatch.setattr(launch, "TOTAL", launch.Tile((2, 8)))
    monkeypatch.setattr(launch, "_calls", {})


def norm_of(channels, **options):
    torch.manual_seed(3)
    has_bias = options.pop("bias", True)
    norm = nn.BatchNorm1d(channels, **options)
    if not has_bias:
        norm.bias = None  # older versions of torch do not take the argument
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    if norm.running_mean is not None:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return norm.to(DEVICE)


def rows_of(dtype, channels=6, count=N, spread=None):
    """Rows whose channels have means and sizes of their own, a residual, and a gradient."""
    generator = torch.Generator().manual_seed(1)
    size = torch.arange(1, channels + 1)
    x, residual, grad = torch.randn(3, count, channels, generator=generator).unbind(0)
    x = x * size + (size if spread is None else spread)
    return [t.to(DEVICE, dtype) for t in (x, residual, grad)]


def ours(norm, x, residual, activation):
    return batch_norm(norm, x, residual, activation, BACKEND)


def plain(norm, x, residual, activation):
    y = norm(x)
    y = y if residual is None else y + residual
    return y if activation is None else ACTIVATIONS[activation](y)


def step(function, norm, given, after):
    """Result, gradients and running statistics."""
    x, residual, grad = (t.clone().requires_grad_() for t in given)
    with_residual, activation = after
    y = function(norm, x, residual if with_residual else None, activation)
    inputs = [x, *norm.parameters(), *([residual] if with_residual else [])]
    found = [y, *torch.autograd.grad(y, inputs, grad.detach())]
    kept = (norm.running_mean, norm.running_var)
    return [t.detach().clone() for t in (*found, *kept) if t is not None]


def check_steps(norm, given, after):
    """One step, as accurate as torch's in float32."""
    exact_norm, plain_norm = copy.deepcopy(norm).double(), copy.deepcopy(norm).float()
    exact = step(plain, exact_norm, [t.double() for t in given], after)
    rough = step(plain, plain_norm, [t.float() for t in given], after)
    for one, other, third in zip(step(ours, norm, given, after), exact, rough, strict=True):
        noise = plain_error(third, other, one.dtype)
        assert_as_accurate(one, other, noise + noise.max())


DTYPES = [torch.float32, *([torch.float16, torch.bfloat16] if BY_KERNELS else [])]


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.singly  # seconds an item in the interpreter
def test_as_accurate_as_torch(dtype, training, after):
    check_steps(norm_of(6).train(training), rows_of(dtype), after)


@pytest.mark.parametrize("channels", [3, 31, 40, 64, 160])
@pytest.mark.singly
def test_channels(channels):
    check_steps(norm_of(channels), rows_of(torch.float32, channels, 20), (True, "relu"))


@pytest.mark.parametrize("spread", [1e3, -1e5])
def test_a_mean_far_from_zero(spread):
    given = rows_of(torch.float32, spread=spread)
    given[0][0] += 1e3  # an outlier, from which sums must not be taken
    check_steps(norm_of(6), given, (False, None))


OPTIONS = {
    "momentum": {"momentum": None},
    "affine": {"affine": False},
    "statistics": {"track_running_stats": False},
    "eps": {"eps": 0.5, "momentum": 0.01},
    "bias": {"bias": False},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.singly
def test_options(name):
    """Two steps of training, then one of evaluation."""
    norm = norm_of(6, **dict(OPTIONS[name]))
    for training in (True, True, False):
        count = None if norm.num_batches_tracked is None else int(norm.num_batches_tracked)
        check_steps(norm.train(training), rows_of(torch.float32), (True, "relu"))
        if count is not None:
            assert int(norm.num_batches_tracked) == count + training


@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "residual"])
@pytest.mark.parametrize("training", [True, False])
def test_each_may_need_no_gradient(training, frozen):
    norm = norm_of(6).train(training)
    x, residual, grad = rows_of(torch.float32)
    named = {"x": x, "weight": norm.weight, "bias": norm.bias, "residual": residual}
    for name, tensor in named.items():
        tensor.requires_grad_(name != frozen)
    inputs = [t for name, t in named.items() if name != frozen]
    found, expected = (
        torch.autograd.grad(function(norm, x, residual, "relu"), inputs, grad)
        for function in (ours, plain)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def second(function, training, given, dtype):
    """Gradients of the sum of the squares of gradients."""
    norm = norm_of(given[0].shape[1]).to(dtype).train(training)
    x, residual, grad = (t.to(dtype).requires_grad_() for t in given)
    y = function(norm, x, residual, "silu")
    inputs = [x, norm.weight, residual]
    first = torch.autograd.grad(y, inputs, grad, create_graph=True)
    return torch.autograd.grad(sum(t.square().sum() for t in first), [*inputs, grad])


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_gradients(training):
    given = rows_of(torch.float32)
    exact = second(plain, training, given, torch.float64)
    found, rough = (second(f, training, given, torch.float32) for f in (ours, plain))
    for one, other, third in zip(found, exact, rough, strict=True):
        noise = plain_error(third, other, torch.float32)
        assert_as_accurate(one, other, noise + noise.max())


def test_transforms():
    """As torch's own module in each: vmap over weights, a gradient, a tangent."""
    norm = norm_of(6).eval()
    x, residual, _ = rows_of(torch.float32)

    def results(function):
        def scaled(weight):
            given = (norm, {"weight": weight}, (x, residual))
            return torch.func.functional_call(*given)

        norm.forward = lambda x, residual: function(copied, x, residual, "silu")
        copied = norm
        weights = torch.stack([norm.weight, 2 * norm.weight]).detach()
        return (
            torch.func.vmap(scaled)(weights),
            torch.func.grad(lambda w: scaled(w).sum())(weights[0]),
            torch.func.jvp(scaled, (weights[0],), (weights[1],))[1],
        )

    def by_module(norm, x, residual, activation):
        return ACTIVATIONS[activation](nn.BatchNorm1d.forward(norm, x) + residual)

    for one, other in zip(results(ours), results(by_module), strict=True):
        same(one, other)


def test_same_bits_at_every_call_and_nan_is_not_hidden():
    norm, given = norm_of(6), rows_of(torch.float32)
    first, second = (step(ours, copy.deepcopy(norm), given, (True, "relu")) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        same(one, other)
    given[0][5, 2] = float("nan")
    y, dx, *_ = step(ours, norm, given, (True, "relu"))
    assert y[:, 2].isnan().all()
    assert not y[:, 3].isnan().any()
    assert dx[:, 2].isnan().any()


def test_strides_are_read():
    """Rows that are columns of another tensor, a gradient of one number, an expanded weight."""
    norm = norm_of(6)
    norm.weight = nn.Parameter(torch.full((1,), 2.0, device=DEVICE).expand(6))
    wide = torch.randn(N, 12, device=DEVICE, requires_grad=True)
    found, expected = (
        torch.autograd.grad(function(norm, wide[:, ::2], wide[:, 1::2], "relu").sum(), wide)
        for function in (ours, plain)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.skipif(not BY_KERNELS, reason="torch's own norm does not raise")
def test_evaluation_that_was_recorded_sees_training_change_its_statistics():
    """Else its gradient would be that of other numbers."""
    norm = norm_of(6).eval()
    x, residual, grad = rows_of(torch.float32)
    x.requires_grad_()
    y = ours(norm, x, residual, "relu")
    ours(norm.train(), x, residual, "relu")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


def tensor_of(channels=6, dtype=torch.float32):
    """A cloud whose features need no gradient."""
    tensor = clouds.cloud(channels=channels, dtype=dtype, device=DEVICE)
    return tensor.replace(tensor.feats.detach())


def sparse_norm(channels=6, **options):
    norm = SparseBatchNorm(channels, backend=BACKEND, **options)
    norm.load_state_dict(norm_of(channels).state_dict())
    return norm.to(DEVICE)


@pytest.mark.parametrize("training", [True, False])
def test_residual_in_another_order(training):
    norm, tensor = sparse_norm().train(training), tensor_of()
    other, _ = clouds.permuted(tensor)
    other = other.replace(2 * other.feats)
    found = norm(tensor, other, "relu").feats
    same(found, norm(tensor, tensor.replace(2 * tensor.feats), "relu").feats)


def test_no_voxel_and_one():
    norm, none = sparse_norm(), clouds.empty(channels=6, device=DEVICE)
    before = copy.deepcopy(norm.state_dict())
    for training in (True, False):
        out = norm.train(training)(none, none, "relu")
        out.feats.sum().backward()
        assert out.feats.shape == (0, 6)
        assert not norm.weight.grad.any()
    same(norm.state_dict(), before)
    one = SparseTensor(torch.randn(1, 6, device=DEVICE), torch.zeros(1, 3, device=DEVICE).long())
    expected = torch.relu(nn.BatchNorm1d.forward(norm, one.feats) + one.feats)
    torch.testing.assert_close(norm(one, one, "relu").feats, expected)
    with pytest.raises(ShapeError, match=r"1 voxel .* at least 2, or running.*eval\(\)"):
        norm.train()(one, one, "relu")
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        ours(norm, one.feats, None, None)


def test_errors():
    norm, tensor = sparse_norm(), tensor_of()
    with pytest.raises(ShapeError, match="'tanh': it must be one of relu, silu, gelu"):
        norm(tensor, activation="tanh")
    with pytest.raises(DTypeError, match=r"residual is a Tensor: it must be .*replace\(feats\)"):
        norm(tensor, tensor.feats)
    with pytest.raises(ShapeError, match=r"different voxels .* must have the same voxels"):
        norm(tensor, SparseTensor(tensor.feats[:5], tensor.C[:5], tensor.spatial_shape, 2))
    with pytest.raises(ShapeError, match=r"residual is \(\d+, 3\) but the output is \(\d+, 6\)"):
        norm(tensor, tensor.replace(tensor.feats[:, :3]))
    with pytest.raises(DTypeError, match=r"residual is torch\.float64 but x is torch\.float32"):
        norm(tensor, tensor.to(torch.float64))
    norm.backend = "cuda"
    with pytest.raises(BackendError, match=r"backend='cuda' .* there is no such backend"):
        norm(tensor)
    if not BY_KERNELS:
        norm.backend = "triton"
        with pytest.raises(BackendError, match=r"triton serves GPU tensors"):
            norm(tensor)


def test_autocast():
    norm = sparse_norm()
    narrow, wide = tensor_of(dtype=torch.bfloat16), tensor_of()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert norm(narrow, wide, "relu").dtype == torch.bfloat16
        assert norm(wide, wide, "relu").dtype == torch.float32


@pytest.mark.skipif(not BY_KERNELS, reason="kernels run in the interpreter or on a GPU")
def test_launches():
    """One pass for statistics and one for the result in training, one in evaluation; two back."""
    norm, tensor = sparse_norm(), tensor_of()
    tensor.feats.requires_grad_()

    def names(found):
        return [launch.kernel.removesuffix("_kernel") for launch in found.launches]

    forward = explain(norm, tensor, tensor, "relu")
    assert names(forward) == ["statistics", "total_statistics", "apply"]
    y = norm(tensor, tensor, "relu").feats
    backward = ["gradient_sums", "total", "gradient"]
    assert names(explain(y.backward, torch.randn_like(y))) == backward
    assert names(explain(norm.eval(), tensor, tensor, "relu")) == ["apply"]


@pytest.mark.skipif(not BY_KERNELS, reason="kernels run in the interpreter or on a GPU")
@pytest.mark.parametrize("momentum", [0.2, None])
@pytest.mark.parametrize("cuts", [(50, 0, 25), (1, 74), (0, 0)])
def test_statistics_of_ranks_are_those_of_all_rows(cuts, momentum, monkeypatch):
    """Red with means of ranks that are not weighted, and a number that two programs write."""
    monkeypatch.setattr(launch, "JOINED", launch.Tile((4,)))
    x = rows_of(torch.float32, count=sum(cuts), spread=100)[0]
    of_ranks = torch.stack([launch.statistics_of_rank(part) for part in x.split(cuts)])
    ours, exact = (running_of(6, dtype, momentum) for dtype in (torch.float32, torch.float64))
    mean, var, count = launch.joined(x, of_ranks, ours)
    rough = running_of(6, torch.float32, momentum)
    expected, plain = moments(x.double()), moments(x)
    assert int(count) == len(x)
    torch_path.track(exact, *expected, count)
    torch_path.track(rough, *plain, count)
    for one, other, third in zip(
        (mean, var, *ours[:2]), (*expected, *exact[:2]), (*plain, *rough[:2]), strict=True
    ):
        noise = plain_error(third, other, torch.float32)
        assert_as_accurate(one, other, noise + noise.max())
    same(ours.tracked, exact.tracked)


def moments(x):
    """The mean and the biased variance of rows; 0 where there are none."""
    mean = x.sum(0) / max(len(x), 1)
    return mean, (x - mean).square().sum(0) / max(len(x), 1)


def running_of(channels, dtype, momentum):
    """Running statistics after a batch; without a momentum, the next is counted already."""
    generator = torch.Generator().manual_seed(4)
    mean, var = torch.rand(2, channels, generator=generator).to(DEVICE, dtype).unbind(0)
    tracked = torch.tensor(2 if momentum is None else 1, device=DEVICE)
    return launch.Running(mean, var, tracked, momentum)
