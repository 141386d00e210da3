"""FullyConnectedNet and normalize2mom: e3nn's numbers, first weights and states; parts; errors.

Seen red with: a last matrix without the factor of the function before it.
"""

import copy
import pickle

import e3nn.math
import e3nn.nn
import pytest
import torch

from torchweft import o3
from torchweft.errors import DTypeError, ShapeError
from torchweft.testing import assert_as_accurate
from torchweft.testing.contract import assert_same_bits

pytestmark = pytest.mark.kernels

DOUBLE = torch.float64
SILU = torch.nn.functional.silu
WIDTHS = [8, 16, 16, 5]


def both(*arguments, **options):
    """The same net of torchweft and e3nn, from one seed."""
    nets = []
    for kind in (o3.FullyConnectedNet, e3nn.nn.FullyConnectedNet):
        torch.manual_seed(0)
        nets.append(kind(*arguments, **options))
    return nets


def test_first_weights_text_and_states_are_e3nns():
    ours, theirs = both(WIDTHS, SILU)
    for name, weight in theirs.state_dict().items():
        assert_same_bits(ours.state_dict()[name], weight, name)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert repr(ours) == repr(theirs)
    assert repr(ours.layer0) == "Layer(8->16, act=silu)"
    assert repr(ours[-1]) == repr(theirs[-1]) == "Layer(16->5, act=None)"
    assert ours.hs == theirs.hs


def test_float64_after_float32_is_as_if_built_in_float64():
    """No constant was rounded on the way."""
    late = o3.FullyConnectedNet(WIDTHS, SILU, variance_out=3.0).double()
    early = both(WIDTHS, SILU, variance_out=3.0)[0].double()
    early.load_state_dict(late.state_dict())
    x = torch.randn(4, 8, dtype=DOUBLE)
    assert_same_bits(late(x), early(x), "float64")
    assert late.layer0.act.cst == o3.normalize2mom(SILU).cst


@pytest.mark.parametrize("widths", [WIDTHS, [8, 5]])
def test_hidden_and_last_matrix_are_the_net(widths):
    net = o3.FullyConnectedNet(widths, SILU, variance_in=2.0, variance_out=3.0).double()
    x = torch.randn(2, 3, 8, dtype=DOUBLE)
    assert net.hidden(x).shape == (2, 3, widths[-2])
    assert net.last_matrix().shape == (widths[-2], widths[-1])
    assert_same_bits(net.hidden(x) @ net.last_matrix(), net(x), "parts")


def test_layers_one_by_one():
    ours, theirs = both(WIDTHS, SILU, variance_out=3.0, out_act=True)
    x = torch.randn(4, 8)
    exact = x.double()
    with torch.no_grad():
        for own, other in zip(ours, theirs, strict=True):
            noise = (other(x) - copy.deepcopy(other).double()(x.double())).abs()
            exact = copy.deepcopy(other).double()(x.double())
            assert_as_accurate(own(x), exact, noise)
            x = own(x)


def test_copies():
    net = o3.FullyConnectedNet(WIDTHS, torch.nn.SiLU())
    x = torch.randn(4, 8)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert_same_bits(other(x), net(x), "copied")


def test_dtypes_and_compiled():
    net = o3.FullyConnectedNet(WIDTHS, SILU)
    x = torch.randn(4, 8)
    assert copy.deepcopy(net).bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype == torch.bfloat16
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), net(x), "compiled")


def test_without_layers_without_rows_without_results():
    x = torch.randn(4, 8)
    assert_same_bits(o3.FullyConnectedNet([8])(x), x, "no layers")
    assert o3.FullyConnectedNet([8, 0], SILU)(x).shape == (4, 0)
    assert o3.FullyConnectedNet(WIDTHS, SILU)(x[:0]).shape == (0, 5)


def test_moments_are_e3nns():
    for n in (1, 2, 3):
        found, value = (m(SILU, n, DOUBLE, "cpu") for m in (o3.moment, e3nn.math.moment))
        assert_same_bits(found, value, "moment")
    assert o3.normalize2mom(SILU).cst == e3nn.math.normalize2mom(SILU).cst


def test_errors():
    with pytest.raises(ShapeError, match=r"hs is \[\]: it must be one width or more"):
        o3.FullyConnectedNet([])
    with pytest.raises(ShapeError, match=r"hs is \[8, -1\].*none negative"):
        o3.FullyConnectedNet([8, -1])
    with pytest.raises(DTypeError, match=r"hs is \[8, 1\.5\]: widths must be integers"):
        o3.FullyConnectedNet([8, 1.5])
    with pytest.raises(ShapeError, match="variance_in is 0: a variance must be positive"):
        o3.FullyConnectedNet([8, 8], variance_in=0)
    with pytest.raises(ShapeError, match=r"x is \(4, 7\): it must be \(\.\.\., 8\)"):
        o3.FullyConnectedNet([8, 8])(torch.randn(4, 7))
    with pytest.raises(ShapeError, match="ends with a function: the last layer must be a matrix"):
        o3.FullyConnectedNet([8, 8], SILU, out_act=True).last_matrix()
    with pytest.raises(ShapeError, match="ends without a layer"):
        o3.FullyConnectedNet([8]).last_matrix()
    with pytest.raises(DTypeError, match=r"weight is torch.float32 but x is torch.float64"):
        o3.FullyConnectedNet([8, 8])(torch.randn(4, 8).double())
