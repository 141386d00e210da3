"""Activations and Gate: e3nn's constants, orders of irreps, parities, layouts, errors.

Seen red with: another seed, gates taken in the order of x, an odd gate that keeps the parity.
"""

import copy
import pickle

import pytest
import torch

from torchweft import o3
from torchweft.errors import ShapeError
from torchweft.o3.irreps.irreps import join, split
from torchweft.o3.layers.networks import MOMENT_SAMPLES
from torchweft.testing import assert_o3_equivariant, assert_within_bound
from torchweft.testing.contract import assert_same_bits

pytestmark = pytest.mark.kernels

DOUBLE = torch.float64

CONSTANTS = {
    torch.tanh: 1.5937334472592695,
    torch.nn.functional.silu: 1.6791767923989418,
    torch.sigmoid: 1.8467055342154763,
    torch.nn.functional.gelu: 1.5360642850770576,
}
"""e3nn 0.6's: sums of squares, whose last digit depends on the number of threads."""

LARGE = (
    "16x0o+3x0e+2x0e",
    [torch.tanh, torch.nn.functional.silu, None],
    "20x0o+12x0e",
    [torch.tanh, torch.sigmoid],
    "16x1e+8x1o+2x2e+6x1e",
)


def gate(layout="mul_ir"):
    return o3.Gate(*LARGE, layout=layout)


@pytest.mark.parametrize("f", CONSTANTS, ids=lambda f: f.__name__)
def test_constants(f):
    found, value = (torch.tensor(c, dtype=DOUBLE) for c in (o3.normalize2mom(f).cst, CONSTANTS[f]))
    assert_within_bound(found, value, value, MOMENT_SAMPLES)


def test_constants_near_one_are_left_out():
    x = torch.randn(5)
    assert o3.normalize2mom(torch.square).cst != 1
    assert o3.normalize2mom(lambda t: t).cst != 1.0  # off by 3e-4, as e3nn finds
    assert o3.normalize2mom(lambda t: torch.full_like(t, 1.00005)).cst == 1.0
    assert_same_bits(o3.normalize2mom(torch.sin)(x), x.sin() * _cst(torch.sin), "scaled")


def _cst(f):
    return o3.normalize2mom(f).cst


def test_modules_as_functions():
    assert o3.normalize2mom(torch.nn.SiLU()).cst == CONSTANTS[torch.nn.functional.silu]
    half = torch.nn.PReLU(dtype=torch.float16)
    assert o3.normalize2mom(half)(torch.ones(2).half()).dtype == torch.float16


def test_activation_parities():
    act = o3.Activation("256x0o+16x1e+3x0o+2x0e", [torch.abs, None, torch.tanh, torch.sigmoid])
    assert act.irreps_out == "256x0e+16x1e+3x0o+2x0e"
    x = torch.randn(2, act.irreps_in.dim)
    assert_same_bits(act(x)[:, 256:304], x[:, 256:304], "no function")
    assert_same_bits(act(x.T, dim=0).T.contiguous(), act(x), "another dimension")


def test_gate_sorts_its_input():
    found = gate()
    assert str(found.irreps_in) == "36x0o+17x0e+8x1o+22x1e+2x2e"
    assert str(found.irreps_out) == "16x0o+3x0e+2x0e+16x1o+4x1e+4x1o+2x2e+6x1e"
    assert repr(found) == f"Gate ({found.irreps_in} -> {found.irreps_out})"


def test_gate_by_hand():
    """Gates and scalars of one irrep are told apart by their order."""
    found = o3.Gate("1x0e", [torch.tanh], "2x0e", [torch.sigmoid], "1x1o+1x0o").double()
    assert found.irreps_in == "1x0o+3x0e+1x1o"
    x = torch.tensor([[7.0, 1, 2, 3, 10, 20, 30]], dtype=DOUBLE)
    tanh, sigmoid = CONSTANTS[torch.tanh], CONSTANTS[torch.sigmoid]
    gates = sigmoid * torch.tensor([2.0, 3.0], dtype=DOUBLE).sigmoid()
    exact = torch.cat(
        [
            tanh * x[0, 1:2].tanh(),
            gates[0] * x[0, 4:],
            gates[1] * x[0, :1],
        ]
    )[None]
    assert found.irreps_out == "1x0e+1x1o+1x0o"
    assert_within_bound(found(x), exact, exact.abs(), 1, stored=4)


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
def test_equivariant(layout):
    found = gate(layout)
    x = torch.randn(5, found.irreps_in.dim, dtype=DOUBLE)
    assert_o3_equivariant(found, [x], [found.irreps_in], found.irreps_out, layout=layout)


def test_layouts_hold_the_same_numbers():
    one, other = gate(), gate("ir_mul")
    x = torch.randn(2, 3, one.irreps_in.dim)
    found = other(join(split(x, one.irreps_in, "mul_ir"), "ir_mul"))
    assert_same_bits(join(split(found, one.irreps_out, "ir_mul"), "mul_ir"), one(x), "layouts")


def test_without_gates():
    found = o3.Gate("4x0e", [torch.tanh], "", [], "")
    assert found(torch.randn(3, 4)).shape == (3, 4)
    assert found.irreps_out == "4x0e"
    only = o3.Gate("", [], "2x0e", [torch.tanh], "2x1o")
    assert only(torch.randn(3, 8)).shape == (3, 6)


def test_compiled_exported_copied():
    found = gate()
    x = torch.randn(3, found.irreps_in.dim)
    expected = found(x)
    compiled = torch.compile(found, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), expected, "compiled")
    assert_same_bits(torch.export.export(found, (x,)).module()(x), expected, "exported")
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert_same_bits(other(x), expected, "copied")


def test_errors():
    with pytest.raises(ShapeError, match="irreps_gates is 2x1o: it must be scalars, 0e or 0o"):
        o3.Gate("", [], "2x1o", [None], "2x1o")
    with pytest.raises(ShapeError, match="irreps_scalars is 2x1o"):
        o3.Gate("2x1o", [None], "", [], "")
    with pytest.raises(ShapeError, match=r"3x0e has 3 scalars and irreps_gated 2x1o has 2 irreps"):
        o3.Gate("", [], "3x0e", [torch.tanh], "2x1o")
    with pytest.raises(ShapeError, match="there are 2 functions but 3x0e has 1 items"):
        o3.Activation("3x0e", [torch.tanh, torch.tanh])
    with pytest.raises(ShapeError, match="a function was given for 3x1o: only scalars have one"):
        o3.Activation("3x1o", [torch.tanh])
    with pytest.raises(ShapeError, match=r"sigmoid was given for 3x0o.*must be even or odd"):
        o3.Activation("3x0o", [torch.sigmoid])
    with pytest.raises(ShapeError, match=r"x is \(2, 3\) but Gate takes 2x0e\+2x1o"):
        o3.Gate("", [], "2x0e", [torch.tanh], "2x1o")(torch.randn(2, 3))
