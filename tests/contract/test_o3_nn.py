"""IrrepWiseLinear, TensorDot, Gating: functional layers with tables and weights of their own.

Seen red with: the factor left out, tables cast with the module.
"""

import copy
import math
import pickle

import pytest
import torch

from tests.conftest import BACKENDS, INTERPRETED
from torchweft import o3
from torchweft.errors import BackendError, ShapeError
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import assert_same_bits

pytestmark = pytest.mark.kernels

DOUBLE = torch.float64
IRREPS = "2x0e+1x1o+1x2e"
X, Y = torch.randn(2, 3, 10, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
LAYERS = {
    "linear": lambda **options: o3.IrrepWiseLinear(IRREPS, 4, 5, **options),
    "dot": lambda **options: o3.TensorDot(IRREPS, **options),
    "dot, unscaled": lambda **options: o3.TensorDot(IRREPS, scaled=False, **options),
    "gating": lambda **options: o3.Gating(IRREPS, **options),
}


def call(layer, x=X, y=Y):
    kind = type(getattr(layer, "_orig_mod", layer))
    given = {o3.IrrepWiseLinear: (x,), o3.TensorDot: (x, y), o3.Gating: (x, y[:, :4])}
    return layer(*given[kind])


def parts(x):
    """The components of each irrep."""
    return x.split([1, 1, 3, 5], 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear(backend):
    layer = o3.IrrepWiseLinear(IRREPS, 4, 5, backend=backend).double()
    assert tuple(layer.weight.shape) == (4, 4, 5)
    weight = layer.weight.detach()

    def exact(x, w):
        return torch.cat([p @ w[i] for i, p in enumerate(parts(x))], 1) / math.sqrt(4)

    size = exact(X.abs(), weight.abs())
    assert_within_bound(layer(X).detach(), exact(X, weight), size, 4, stored=2)
    layer(X).sum().backward()
    assert layer.weight.grad.abs().min() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaled", [True, False])
def test_dot(scaled, backend):
    layer = o3.TensorDot(IRREPS, scaled, backend=backend)
    pairs = list(zip(parts(X), parts(Y), strict=True))

    def exact(values):
        sums = [v.sum(1) / (math.sqrt(v.shape[1]) if scaled else 1) for v in values]
        return torch.stack(sums, 1)

    size = exact([(x * y).abs() for x, y in pairs])
    assert_within_bound(layer(X, Y), exact([x * y for x, y in pairs]), size, 5, stored=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gating(backend):
    exact = torch.cat([p * Y[:, i, None] for i, p in enumerate(parts(X))], 1)
    found = o3.Gating(IRREPS, backend=backend)(X, Y[:, :4])
    assert_within_bound(found, exact, exact.abs(), 1, stored=2)


@pytest.mark.parametrize("name", LAYERS)
def test_casts_round_no_table(name):
    layer = LAYERS[name]()
    exact = call(copy.deepcopy(layer).double())
    state = layer.state_dict()
    cast = layer.half().double()
    cast.load_state_dict(state)
    assert_same_bits(call(cast).detach(), exact.detach(), "after a cast")
    assert list(state) == (["weight"] if name == "linear" else [])
    assert cast.to("meta").info.irrep_index.is_meta


@pytest.mark.parametrize("name", LAYERS)
def test_copies_and_pickles(name):
    layer = LAYERS[name]().double()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(call(other), call(layer), "copied")


@pytest.mark.skipif(INTERPRETED, reason="the doors are checked without TRITON_INTERPRET")
@pytest.mark.parametrize("name", LAYERS)
def test_compiled(name):
    layer = LAYERS[name]().double()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same_bits(call(compiled), call(layer), name)


def test_reprs():
    assert repr(LAYERS["linear"]()) == "IrrepWiseLinear(2x0e+1x1o+1x2e, 4 -> 5)"
    assert repr(LAYERS["dot"]()) == "TensorDot(2x0e+1x1o+1x2e, scaled=True)"


def test_errors():
    with pytest.raises(ShapeError, match=r"channels_in is -1 and channels_out 2: they must be 0"):
        o3.IrrepWiseLinear("0e", -1, 2)
    with pytest.raises(ShapeError, match=r"input is \(3, 10, 4\) but there are 1 components"):
        o3.IrrepWiseLinear("0e", 4, 2)(X)
    for make in LAYERS.values():
        with pytest.raises(BackendError, match="there is no such backend"):
            call(make(backend="cuda").double())
