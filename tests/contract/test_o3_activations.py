"""Activations with their factors: values and three orders of derivatives, ends, doors, launches.

Seen red with: a factor left out, exp of the argument's other sign, a series of tanh one term short,
results in the shape of one component, a derivative of σ without its second factor.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft import explain, o3
from torchweft.errors import BackendError
from torchweft.o3.layers.networks import between
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import assert_same_bits

pytestmark = pytest.mark.kernels

FLOAT = torch.float64
FUNCTIONS = {
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
BEFORE, AFTER = 0.37, 1.9
ORDERS = 4


def formulas(name, t):
    """f of t and its first derivatives: polynomials of σ(t), or of tanh t."""
    if name == "tanh":
        y = t.tanh()
        slope = 1 - y * y
        return y, slope, -2 * y * slope, (6 * y * y - 2) * slope
    s = t.sigmoid()
    s1 = s * (1 - s)
    s2 = s1 * (1 - 2 * s)
    s3 = s2 * (1 - 2 * s) - 2 * s1 * s1
    if name == "sigmoid":
        return s, s1, s2, s3
    return t * s, s + t * s1, 2 * s1 + t * s2, 3 * s2 + t * s3


def derivatives(function, x):
    """The function of x, and its derivatives to the third."""
    x = x.clone().requires_grad_()
    found = [function(x)]
    for _ in range(ORDERS - 1):
        found += torch.autograd.grad(found[-1].sum(), x, create_graph=True)
    return found


def scaled(name):
    function = o3.normalize2mom(FUNCTIONS[name])
    if INTERPRETED:
        return lambda x: between(function, BEFORE, x, AFTER)
    return lambda x: function.f(x * BEFORE) * AFTER


def arguments(dtype):
    torch.manual_seed(0)
    ends = torch.tensor([0.0, 1e-30, 1e-4, 1 / BEFORE, 8.0, 30.0, 200.0, 1e4, 1e30])
    return torch.cat([3 * torch.randn(603), ends, -ends]).to(dtype).view(-1, 9)


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.usefixtures("poisoned_memory")
def test_values_and_derivatives(name, dtype):
    """To rounding of the argument and of the terms, which cancel far from 0."""
    x = arguments(dtype)
    x = x[:, :7] if dtype == torch.float16 else x  # numbers that it holds
    found = derivatives(scaled(name), x)
    t = BEFORE * x.double()
    for order, (y, formula) in enumerate(zip(found, formulas(name, t), strict=True)):
        factor = AFTER * BEFORE**order
        size = factor * (1 + t.abs()) if name == "silu" else torch.full_like(t, factor)
        assert y.dtype == dtype
        assert_within_bound(y, factor * formula, size, 4, stored=8)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter: 0 times infinity
@pytest.mark.parametrize("name", FUNCTIONS)
def test_not_numbers_and_infinities_are_torchs(name):
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0, -0.0]])
    found = derivatives(scaled(name), x)
    exact = derivatives(lambda x: FUNCTIONS[name](x * BEFORE) * AFTER, x)
    for y, expected in zip(found[:2], exact[:2], strict=True):
        assert_same_bits(y.isnan(), expected.isnan(), "not a number")
        assert_same_bits(y.isinf(), expected.isinf(), "infinite")
        assert_same_bits(y[0, 3:] == 0, expected[0, 3:] == 0, "of zeros")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_doors(name):
    function = scaled(name)
    x = torch.randn(3, 5, dtype=FLOAT, requires_grad=True)
    torch.autograd.gradcheck(function, x, check_forward_ad=True, fast_mode=INTERPRETED)
    torch.autograd.gradgradcheck(function, x, fast_mode=INTERPRETED)

    def slope(x):
        return torch.autograd.grad(function(x).square().sum(), x, create_graph=True)[0]

    torch.autograd.gradgradcheck(slope, x, fast_mode=True)
    x = x.detach()
    assert_same_bits(torch.func.vmap(function)(x), function(x), "mapped")
    layer = o3.FullyConnectedNet([5, 7, 5], FUNCTIONS[name], out_act=True).double()
    torch.compiler.reset()
    for dynamic in (True, False):
        compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        assert_same_bits(compiled(x), layer(x), "compiled")
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert_same_bits(exported.module()(x[:2]), layer(x[:2]), "exported")


def test_shapes():
    function = o3.normalize2mom(torch.tanh)
    rows = torch.randn(2, 3, 4, 5)
    expected = function(rows.contiguous())
    for x in (
        rows[:, 1],
        rows[..., 2],
        rows.transpose(0, 2),
        rows[0, 0, 0],
        rows[:0],
        rows[..., :0],
    ):
        y = function(x)
        assert y.shape == x.shape
        assert y.dtype == x.dtype
    assert_same_bits(function(rows[:, 1]), expected[:, 1], "rows apart")
    assert_same_bits(function(rows[..., 2]), expected[..., 2], "columns")
    assert function(torch.tensor(0.5)).shape == ()


@pytest.mark.parametrize(
    "f",
    [torch.nn.SiLU(), torch.nn.Sigmoid(), torch.nn.Tanh(), torch.nn.functional.sigmoid],
    ids=lambda f: getattr(f, "__name__", type(f).__name__),
)
def test_modules_and_other_names_are_served(f):
    assert launches(o3.normalize2mom(f)) == INTERPRETED


@pytest.mark.parametrize("f", [torch.relu, torch.nn.SELU(), lambda x: torch.sigmoid(x)])
def test_other_functions_are_torchs(f):
    assert launches(o3.normalize2mom(f)) == 0
    x = torch.randn(4, 3)
    function = o3.normalize2mom(f)
    assert_same_bits(function(x), f(x) * function.cst, "torch's")


def test_backend_torch():
    assert launches(o3.normalize2mom(torch.tanh, backend="torch")) == 0
    for layer in (
        o3.Activation("3x0e", [torch.tanh], backend="torch"),
        o3.Gate("0e", [torch.tanh], "0e", [torch.sigmoid], "0e", backend="torch"),
        o3.FullyConnectedNet([3, 4, 5], torch.tanh, backend="torch"),
    ):
        assert launches(layer) == 0
    with pytest.raises(BackendError, match="'numba' was asked for normalize2mom, for which it has"):
        o3.normalize2mom(torch.tanh, backend="numba")


def launches(function):
    x = torch.randn(4, 3)
    function(x)
    with torch.no_grad():
        return len(explain(function, x).launches)
