"""from_e3nn on e3nn's own layers, and states: to_e3nn, load_state_dict, torch.jit.script.

Seen red with: tables that are not kept, a network without its last
factor, harmonics in another order of degrees.
"""

import copy

import e3nn.nn
import e3nn.o3
import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft import o3
from torchweft.errors import BackendError, DTypeError
from torchweft.testing import assert_as_accurate, assert_within_bound

if INTERPRETED:
    pytest.skip("the CPU's own executors compute these", allow_module_level=True)


class Layers(torch.nn.Module):
    """A convolution's parts, with tables that e3nn keeps in its state."""

    def __init__(self, irreps="4x0e+4x1o"):
        super().__init__()
        self.harmonics = e3nn.o3.SphericalHarmonics("0e+2e+1o", True, "component")
        self.linear = e3nn.o3.Linear(irreps, irreps, biases=True)
        self.tp = e3nn.o3.FullyConnectedTensorProduct(
            irreps, "0e+2e+1o", irreps, internal_weights=False, shared_weights=False
        )
        widths = [8, 16, 16, self.tp.weight_numel]
        self.network = e3nn.nn.FullyConnectedNet(widths, torch.nn.functional.silu, 2.0, 3.0)
        gated = ("4x0e", [torch.tanh], "4x0e", [torch.sigmoid], "4x1o")
        self.gate = e3nn.nn.Gate(*gated)
        self.last = e3nn.o3.Linear(irreps, self.gate.irreps_in)

    def forward(self, x, vectors, radial):
        rows = self.tp(self.linear(x), self.harmonics(vectors), self.network(radial))
        return self.gate(self.last(rows))


def built(kind, *given):
    """A module of e3nn, whose tables are float64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    made = kind(*given)
    torch.set_default_dtype(default)
    return made


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 16), (5, 3), (5, 8)
    return [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]


def test_e3nns_own_layers_and_their_state():
    model, other = built(Layers), built(Layers)
    exact = model(*inputs()).detach()
    noise = (copy.deepcopy(model).float()(*(a.float() for a in inputs())) - exact).detach().abs()
    noise = noise.max() * 2.0**-29  # in float64
    state = {name: table.clone() for name, table in model.state_dict().items()}
    found = o3.from_e3nn(model)
    assert not [m for m in found.modules() if type(m).__module__.startswith("e3nn")]
    assert_as_accurate(found(*inputs()), exact, noise)
    assert o3.to_e3nn(found).keys() == state.keys()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(1.5)
    other.load_state_dict(o3.to_e3nn(found), strict=True)
    assert_as_accurate(found(*inputs()), other(*inputs()).detach(), noise * 8)
    found.load_state_dict(state, strict=True)
    assert_as_accurate(found(*inputs()), exact, noise)
    # a copy keeps what the state lacks
    assert o3.to_e3nn(copy.deepcopy(found)).keys() == state.keys()


def test_signs_of_symbols_are_those_of_the_model():
    """e3nn 0.4 has the symbol (1, 2, 2) with the other sign; seen red with ours for all."""
    given = torch.randn(7, 12, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    kind = e3nn.o3.FullyConnectedTensorProduct
    tp = built(kind, "1x0e+2x1o+2e", "2e", "3x2o+2x1o+2e")
    for flipped in (False, True):
        table = dict(tp.named_buffers())["_compiled_main_left_right._w3j_1_2_2"]
        if flipped:
            table.neg_()
        exact = tp(*given).detach()
        found = o3.from_e3nn(copy.deepcopy(tp))(*given)
        size = exact.abs().max().expand_as(exact)
        assert_within_bound(found, exact, size, 30)


def test_a_network_whose_layers_are_wrapped():
    model = built(Layers)
    model.network.layer1 = torch.nn.Sequential(model.network.layer1)
    with pytest.raises(DTypeError, match="FullyConnectedNet of the model holds a Sequential: its"):
        o3.from_e3nn(model)


def test_torchscript():
    given = o3.from_e3nn(built(Layers))
    text = r"torch.jit.script was given .*TorchScript cannot read .*Use torch.compile, or torch.exp"
    with pytest.raises(BackendError, match=text):
        torch.jit.script(given)
    with pytest.raises(BackendError, match=r"load_state_dict\(o3.to_e3nn\(model\)\)"):
        torch.jit.script(given.linear)
