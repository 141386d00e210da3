"""e3nn's Irreps and Irrep where ours take irreps: the same layers, the same numbers.

Red before: a NotImplementedError without a text, since e3nn's Irrep is a tuple without a length.
"""

import e3nn.o3
import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft import o3
from torchweft.errors import DTypeError, ShapeError
from torchweft.testing import assert_o3_equivariant

if INTERPRETED:
    pytest.skip("harmonics have contracts of their own", allow_module_level=True)

TEXTS = ("", "4x0e", "2x0e+1o+0x3e+3x2e", "1e+1e", "5x4o")
THEIRS = e3nn.o3.Irreps
FORMS = {
    "e3nn's Irreps": THEIRS,
    "pairs of e3nn's Irrep": lambda text: [(mul, ir) for mul, ir in THEIRS(text)],
    "e3nn's pairs": lambda text: list(THEIRS(text)),
}


@pytest.mark.parametrize("text", TEXTS)
def test_irreps_are_equal_both_ways(text):
    ours, theirs = o3.Irreps(text), THEIRS(text)
    assert ours == theirs
    assert theirs == ours
    assert (ours != theirs, theirs != ours) == (False, False)
    assert hash(ours) == hash(theirs)
    other = THEIRS("7x3o")
    assert ours != other
    assert other != ours
    assert ours + other == theirs + ours[:0] + other == o3.Irreps(f"{text}+7x3o".strip("+"))
    assert ours != (1, 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", TEXTS)
def test_irreps_read_them(text, form):
    assert o3.Irreps(FORMS[form](text)) == o3.Irreps(text)


def test_single_irreps():
    ours, theirs = o3.Irrep("2o"), e3nn.o3.Irrep("2o")
    assert ours == theirs == o3.Irrep(theirs)
    assert o3.Irreps(theirs) == o3.Irreps([theirs]) == o3.Irreps(THEIRS("2o")[0]) == "2o"
    irreps = o3.Irreps("2x0e+3x2o")
    assert theirs in irreps
    assert irreps.count(theirs) == 3
    assert irreps.filter(THEIRS("2o")) == irreps.filter([theirs]) == "3x2o"
    assert irreps.filter(drop=THEIRS("2o")) == "2x0e"
    assert list(ours * e3nn.o3.Irrep("1e")) == list(ours * o3.Irrep("1e"))
    assert ours + THEIRS("1o") == "2o+1o"
    with pytest.raises(ShapeError, match=r"does not read as copies of an irrep: .* Write"):
        o3.Irreps([(-1, theirs)])
    with pytest.raises(ShapeError, match=r"does not read as copies of an irrep: .* Write"):
        o3.Irreps([(1, 2, theirs)])
    with pytest.raises(DTypeError, match=r"irreps is a int: .* Write"):
        o3.Irreps(3)


LAYERS = {
    "Activation": lambda i: o3.Activation(i("2x0e+3x0o"), [torch.tanh, torch.tanh]),
    "BatchNorm": lambda i: o3.BatchNorm(i("2x0e+1o")),
    "Dropout": lambda i: o3.Dropout(i("2x0e+1o"), 0.5),
    "ElementwiseTensorProduct": lambda i: o3.ElementwiseTensorProduct(
        i("2x1o"), i("2x1o"), i("0e", True)
    ),
    "Extract": lambda i: o3.Extract(i("2x0e+1o"), [i("1o"), i("2x0e")], [(1,), (0,)]),
    "ExtractIr": lambda i: o3.ExtractIr(i("2x0e+1o"), i("1o", True)),
    "FullTensorProduct": lambda i: o3.FullTensorProduct(i("2x1o"), i("2x1o"), i("0e+1e", True)),
    "FullyConnectedTensorProduct": lambda i: o3.FullyConnectedTensorProduct(
        i("2x1o"), i("1o"), i("3x0e+2e")
    ),
    "Gate": lambda i: o3.Gate(i("2x0e"), [torch.tanh], i("3x0e"), [torch.tanh], i("3x1o")),
    "Gating": lambda i: o3.Gating(i("2x0e+1o")),
    "Identity": lambda i: o3.Identity(i("2x0e+1o"), i("2x0e+1o")),
    "IrrepWiseLinear": lambda i: o3.IrrepWiseLinear(i("2x0e+1o"), 3, 4),
    "LayerNorm": lambda i: o3.LayerNorm(i("2x0e+1o")),
    "Linear": lambda i: o3.Linear(i("2x0e+1o"), i("3x0e+2x1o")),
    "Norm": lambda i: o3.Norm(i("2x0e+1o")),
    "NormActivation": lambda i: o3.NormActivation(i("2x0e+1o"), torch.tanh),
    "ReducedTensorProducts": lambda i: o3.ReducedTensorProducts("ij=ji", i=i("1o")),
    "S2Activation": lambda i: o3.S2Activation(i("0e+1o+2e"), torch.tanh, 6),
    "SO2Linear": lambda i: o3.SO2Linear(i("2x0e+2x1o"), i("3x1o"), irreps_edge=i("1o", True)),
    "SphericalHarmonics": lambda i: o3.SphericalHarmonics(i("0e+1o+2e"), True, irreps_in=i("1o")),
    "SymmetricContraction": lambda i: o3.SymmetricContraction(i("4x0e+4x1o"), i("4x0e"), 2, 3),
    "TensorDot": lambda i: o3.TensorDot(i("2x0e+1o")),
    "TensorProduct": lambda i: o3.TensorProduct(
        i("2x1o"), i("1o"), i("2x0e"), [(0, 0, 0, "uvu", True)]
    ),
    "TensorProductConv": lambda i: o3.TensorProductConv(
        i("2x1o"), i("1o"), i("2x0e"), [(0, 0, 0, "uvu", True)]
    ),
    "TensorSquare": lambda i: o3.TensorSquare(i("2x1o"), i("3x0e")),
}


def test_no_layer_of_irreps_is_left_out():
    irreps = {"CartesianTensor", "Irrep", "Irreps", "IrrepsInfo", "SphericalTensor"}
    of_degrees = {
        "FromS2Grid",
        "SO3Activation",
        "SO3Grid",
        "SphericalHarmonicsAlphaBeta",
        "ToS2Grid",
    }
    of_numbers = {"BesselBasis", "FullyConnectedNet", "Legendre", "PolynomialCutoff"}
    of_numbers |= {"RadialBasis", "SphericalHarmonicsAlphaBeta"}
    others = {"Graph", "Instruction", "NeighbourList"}
    without = irreps | of_degrees | of_numbers | others
    assert LAYERS.keys() | without == {name for name in o3.__all__ if name[0].isupper()}


def built(layer, irreps):
    torch.manual_seed(0)
    return LAYERS[layer](irreps)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_take_them(layer, form):
    def irreps(text, plain=False):
        """Where irreps without multiplicities are asked for, e3nn's Irrep stands for each."""
        found = [ir for _, ir in THEIRS(text)]
        return (found if "+" in text else found[0]) if plain else FORMS[form](text)

    ours, theirs = built(layer, lambda text, plain=False: text), built(layer, irreps)
    assert repr(theirs) == repr(ours)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        assert theirs.state_dict()[name].tolist() == tensor.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_functions_take_them(form):
    x = torch.randn(5, 3, dtype=torch.float64)
    found = o3.spherical_harmonics(FORMS[form]("1o+2e"), x, True)
    torch.testing.assert_close(found, o3.spherical_harmonics("1o+2e", x, True), rtol=0, atol=0)
    assert o3.irreps_info(FORMS[form]("2x0e+1o")).rdims.tolist() == [1, 1, 1 / 3]
    given = FORMS[form]("1o")
    assert_o3_equivariant(lambda a: 2 * a, [x], [given], given)
