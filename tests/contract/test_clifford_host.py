"""What a Clifford call costs the host once it is cached, and what makes it be validated again.

Counted are calls of torchweft's own functions, which no other process disturbs; nothing runs on a
GPU.  Seen red with: shapes, dtypes or the backend left out of the signature, a call under autocast
that is cached, checks of modules that ask the algebra again.
"""

import os
import sys

import pytest
import torch

import torchweft
from tests.conftest import INTERPRETED
from torchweft import clifford
from torchweft.clifford import Algebra, functions
from torchweft.clifford.calls import RowFunction
from torchweft.clifford.matrices import fully_connected
from torchweft.clifford.matrices import launch as matrices
from torchweft.clifford.programs import launch
from torchweft.core import backend, private
from torchweft.core.gpu import launcher
from torchweft.core.operators import call_cache, operator
from torchweft.errors import BackendError, DTypeError, ShapeError

if INTERPRETED:
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

SPACE = Algebra.cl(3)
F = 32


@pytest.fixture
def launched(monkeypatch):
    """Tensors on the CPU as if they were on a GPU; the launches of kernels."""
    made = []

    def loaded(kernel, arguments, options):
        return lambda programs, stream, values: made.append(kernel.__name__)

    monkeypatch.setattr(launcher, "_loaded", loaded)
    monkeypatch.setattr(launcher, "_current_stream", lambda: 0)
    monkeypatch.setattr(private, "get_device", lambda: -1)
    monkeypatch.setattr(launch, "_limits", lambda device: launch.GpuLimits(True, 132, 232_448))
    monkeypatch.setattr(launch, "_launches", {})
    matrices._cached.cache_clear()
    for function in vars(functions).values():
        if isinstance(function, RowFunction):
            monkeypatch.setattr(function, "_calls", type(function._calls)())
    monkeypatch.setattr(backend, "_why_not", lambda name, device: None)
    backend.choose.cache_clear()
    yield made
    backend.choose.cache_clear()
    matrices._cached.cache_clear()


def multivectors(*shape):
    return torch.randn(*shape, requires_grad=True)


def product(*shape, **options):
    x, y = multivectors(*shape), multivectors(*shape)
    weight = torch.randn(F, 20, requires_grad=True)
    return lambda: clifford.geometric_product(x, y, SPACE, weight, backend="triton", **options)


def of_module(make, inputs=1):
    module, given = make(), [multivectors(8, 4, F) for _ in range(inputs)]
    return lambda: module(*given)


CALLS = {
    "product": (lambda: product(8, 4, F), 22),
    "product, blades last": (lambda: product(4, F, 8, blade_dim=-1), 23),
    "product, two batch dimensions": (lambda: product(8, 2, 2, F), 22),
    "module": (
        lambda: of_module(lambda: clifford.GeometricProduct(F, SPACE, backend="triton"), 2),
        25,
    ),
    "norm": (lambda: of_module(lambda: clifford.MultivectorRMSNorm(SPACE, backend="triton")), 23),
    "gate": (lambda: of_module(lambda: clifford.MVSiLU(F, SPACE, backend="triton")), 23),
    "layer": (lambda: of_module(lambda: clifford.CliffordLayer(F, 3, backend="triton")), 45),
}
"""Calls with gradients, and how many of torchweft's functions they call at most."""


@pytest.mark.parametrize("name", CALLS)
def test_a_cached_call(name, launched):
    make, most = CALLS[name]
    call = make()
    for _ in range(2):
        call()
    launched.clear()
    found = calls(call)
    assert len(launched) == 1
    assert len(found) <= most, found


def test_the_gradients_of_a_cached_call(launched):
    call = product(8, 4, F)
    for _ in range(2):
        call().sum().backward()
    total = call().sum()
    found = calls(total.backward)
    assert len(found) <= 28, found


CONNECTED = {
    "product": (
        lambda: (
            multivectors(8, 4, F),
            multivectors(8, 4, F),
            torch.randn(20, F, F, requires_grad=True),
        ),
        lambda *tensors: clifford.gelu_geometric_product_norm(
            *tensors, SPACE, fully_connected=True, backend="triton"
        ),
        15,
        47,
    ),
    "layer": (
        lambda: (
            multivectors(8, 4, F),
            torch.randn(4, F, F, requires_grad=True),
            torch.randn(F, requires_grad=True),
            torch.randn(20, F, F, requires_grad=True),
        ),
        lambda *tensors: clifford.clifford_layer(
            *tensors, SPACE, fully_connected=True, backend="triton"
        ),
        15,
        81,
    ),
}
"""Tensors and calls, and how many launches and operators of torch they and their gradients take."""


@pytest.mark.parametrize("name", CONNECTED)
def test_launches_and_operators_of_fully_connected_products(name, launched, monkeypatch):
    """In TF32, where factors have scales.  Products of matrices are launches, and operators."""
    make, call, launches, operators = CONNECTED[name]
    tensors = make()
    go = torch.randn_like(tensors[0])

    def multiply(a, b, out, alpha=1, beta=0):
        launched.append("product")
        out.zero_()

    monkeypatch.setattr(fully_connected, "_multiply", multiply)
    monkeypatch.setattr(fully_connected, "_factors", lambda x: torch.float16)
    torch.autograd.grad(call(*tensors), tensors, go)
    launched.clear()
    # a watched call would go to the registered operator, inside of which nothing is seen
    monkeypatch.setattr(operator, "watched", lambda: 0)
    monkeypatch.setattr(call_cache, "watched", lambda: 0)
    with Operators() as found:
        torch.autograd.backward(call(*tensors), go)
    assert len(launched) <= launches, launched
    assert len(found.names) <= operators, found.names


SWITCHES = {
    torch.float16: ("allow_fp16_accumulation", "allow_fp16_reduced_precision_reduction"),
    torch.bfloat16: ("allow_bf16_reduced_precision_reduction",),
    torch.float32: (),
}


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("dtype", SWITCHES)
def test_switches_of_sums_in_16_bits(dtype, allowed):
    """Off while products of factors of their dtype run, and then as before."""
    matmul = torch.backends.cuda.matmul
    names = [name for some in SWITCHES.values() for name in some]
    before = {name: getattr(matmul, name) for name in names}
    try:
        for name in names:
            setattr(matmul, name, allowed)
        with fully_connected._sums_in_fp32(dtype):
            inside = [name for name in names if getattr(matmul, name)]
        assert inside == [name for name in names if allowed and name not in SWITCHES[dtype]]
        assert all(getattr(matmul, name) == allowed for name in names)
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


class Operators(private.DispatchMode):
    """Notes the operators of torch that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, called, types, args=(), kwargs=None):
        self.names.append(str(called))
        return called(*args, **(kwargs or {}))


def test_what_changes_between_calls_is_seen():
    x, y, weight = (torch.randn(s) for s in ((8, 4, F), (8, 4, F), (F, 20)))

    def call(x=x, y=y, weight=weight, **options):
        return clifford.geometric_product(x, y, SPACE, weight, **options)

    def same(found, expected):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    expected = call()
    same(call(), expected)
    same(call(x[:, :2], y[:, :2]), expected[:, :2])  # fewer rows
    strided = x.transpose(0, 2).contiguous().transpose(0, 2)
    same(call(strided), expected)
    same(call(x.movedim(0, -1), y.movedim(0, -1), blade_dim=-1), expected.movedim(0, -1))
    same(call(x, y[:, :1]), call(x, y[:, :1].expand_as(x)))  # broadcast
    assert call(x.double(), y.double(), weight.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert call().dtype == torch.bfloat16
    assert call().dtype == torch.float32
    assert not call().requires_grad
    assert call(x.clone().requires_grad_()).requires_grad
    with pytest.raises(DTypeError):
        call(x, y.double())
    with pytest.raises(ShapeError, match="weight is"):
        call(weight=torch.randn(F, 19))
    with pytest.raises(ShapeError, match="blades"):
        call(x[:4], y[:4])
    with pytest.raises(ShapeError, match="blade_dim"):
        call(blade_dim=1)
    with pytest.raises(BackendError):
        call(backend="triton")
    with pytest.raises(DTypeError, match="algebra"):
        clifford.geometric_product(x, y, "3,0", weight)
    plane = clifford.geometric_product(x, y, Algebra((1, 1, -1)), weight)
    assert (plane != expected).any()  # another algebra of as many blades


def test_the_size_of_what_is_added_is_part_of_the_call():
    x = torch.randn(8, 4, F)
    first, second = (clifford.rms_norm(x, SPACE, eps=eps) for eps in (1e-6, 1.0))
    assert (first != second).any()


def test_options_and_every_parameter_are_part_of_the_call():
    x, linear, bias = torch.randn(8, 4, F), torch.randn(4, F, F), torch.randn(F)
    weight = torch.randn(F, 20)

    def call(*options, linear=linear, **more):
        return clifford.clifford_layer(x, linear, bias, weight, SPACE, *options, **more)

    normalised, plain, wide = call(True), call(False), call(True, eps=1.0)
    assert (normalised != plain).any()
    assert (normalised != wide).any()
    torch.testing.assert_close(call(True), normalised, rtol=0, atol=0)
    involutions = [getattr(clifford, name)(x, SPACE) for name in ("reverse", "conjugate", "dual")]
    involutions += [clifford.grade_project(x, grade, SPACE) for grade in range(4)]
    for i, one in enumerate(involutions):
        assert all((one != other).any() for other in involutions[:i])
    with pytest.raises(DTypeError):
        call(True, linear=linear.double())
    with pytest.raises(ShapeError, match="weight is"):
        call(True, linear=linear[:3])


def calls(function):
    """The names of torchweft's functions that a call calls."""
    found, home = [], os.path.dirname(torchweft.__file__)

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(home):
            found.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found
