"""What follows a convolution: one pass without gradients, torch's own steps with them.

Seen red with the residual left in canonical order, with the bias added after the scale, and with
a fused pass where a gradient was recorded.
"""

import pytest
import torch

from tests.clouds import DEVICE
from tests.conftest import INTERPRETED
from torchweft.errors import DeviceError, DTypeError, ShapeError
from torchweft.testing import assert_as_accurate, plain_error
from torchweft.voxels import SparseTensor, sparse_conv
from torchweft.voxels.convolution.epilogue import ACTIVATIONS, Epilogue

pytestmark = pytest.mark.kernels

BACKEND = "triton" if INTERPRETED or DEVICE == "cuda" else "torch"
NAMES = ("scale", "shift", "residual")


def problem(dtype=torch.float32, mode=False):
    generator = torch.Generator().manual_seed(0)
    cells = torch.cartesian_prod(torch.arange(2), *[torch.arange(4)] * 3)
    coords = cells[torch.randperm(128, generator=generator)[:60]]
    draw = {
        "feats": (60, 16),
        "weight": (27, 16, 24),
        "bias": (24,),
        "scale": (24,),
        "shift": (24,),
        "residual": (60, 24),
    }
    tensors = {n: torch.randn(s, generator=generator).to(DEVICE, dtype) for n, s in draw.items()}
    return SparseTensor(tensors.pop("feats"), coords.to(DEVICE), (4, 4, 4), 2), tensors


def run(tensor, tensors, **options):
    weight, bias, *rest = (tensors.get(name) for name in ("weight", "bias", *NAMES))
    given = dict(zip(NAMES, rest, strict=True)) | options
    return sparse_conv(tensor, weight, 3, bias, backend=BACKEND, **given).feats


def oracle(tensor, tensors, activation):
    """Plain steps on the plain convolution, in the dtype of the tensors."""
    plain = {name: tensors[name] for name in ("weight", "bias")}
    after = Epilogue(*(tensors.get(name) for name in NAMES), activation=activation)
    return after(sparse_conv(tensor, plain["weight"], 3, plain["bias"], backend=BACKEND).feats)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.singly  # seconds an item in the interpreter
def test_one_rounding(dtype, activation):
    tensor, tensors = problem(dtype)
    wide = {name: t.double() for name, t in tensors.items()}
    exact = oracle(tensor.to(torch.float64), wide, activation)
    narrow = {name: t.float() for name, t in tensors.items()}
    plain = oracle(tensor.to(torch.float32), narrow, activation)
    found = run(tensor, tensors, activation=activation)
    assert found.dtype == dtype
    assert_as_accurate(found, exact, plain_error(plain, exact, dtype))


@pytest.mark.parametrize("left_out", ["bias", *NAMES])
def test_each_may_be_left_out(left_out):
    tensor, tensors = problem()
    del tensors[left_out]
    tensors.setdefault("bias", None)
    wide = {name: t if t is None else t.double() for name, t in tensors.items()}
    exact = oracle(tensor.to(torch.float64), wide, "relu")
    noise = plain_error(oracle(tensor, tensors, "relu"), exact, torch.float32)
    assert_as_accurate(run(tensor, tensors, activation="relu"), exact, noise)


def test_gradients_are_those_of_the_steps():
    tensor, tensors = problem(torch.float64)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    found, expected = (
        torch.autograd.grad(function(tensor, leaves, activation="silu").sum(), [*leaves.values()])
        for function in (run, oracle)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_nan_is_not_hidden():
    tensor, tensors = problem()
    tensor.feats[5] = float("nan")
    assert run(tensor, tensors, activation="relu").isnan().any()


def test_errors():
    tensor, tensors = problem()
    wrong = {
        r"scale is \(3,\) but the output is \(60, 24\)": {"scale": torch.ones(3, device=DEVICE)},
        r"residual is \(59, 24\) .* must be \(60, 24\)": {
            "residual": torch.ones(59, 24, device=DEVICE)
        },
    }
    for match, given in wrong.items():
        with pytest.raises(ShapeError, match=match):
            run(tensor, tensors | given)
    with pytest.raises(DeviceError, match=r"of scale is meta, that of the voxels .* Move"):
        run(tensor, tensors | {"scale": torch.ones(24, device="meta")})
    with pytest.raises(ShapeError, match="'tanh': it must be one of relu, silu, gelu"):
        run(tensor, tensors, activation="tanh")
    with pytest.raises(DTypeError, match=r"shift is torch\.float64 but feats is torch\.float32"):
        run(tensor, tensors | {"shift": torch.ones(24, dtype=torch.float64, device=DEVICE)})
