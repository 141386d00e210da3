"""from_e3nn: layers known by their class and attributes, with their parameters; what is refused.

The layers here are stand-ins with e3nn's names and attributes; e3nn itself is not needed.
Seen red with: factors taken once more as path weights, another normalisation of Linear's paths.
"""

import math
from types import SimpleNamespace

import e3nn.nn
import pytest
import torch
from torch.nn.utils import parametrize, prune

from torchweft import o3
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.adapters.e3nn import from_e3nn
from torchweft.testing.contract import assert_same_bits

pytestmark = pytest.mark.kernels


def stand_in(name, own, parameters=(), **attributes):
    """A module of class e3nn.….name with the state and the attributes of torchweft's."""
    kind = type(name, (torch.nn.Module,), {"__module__": "e3nn.o3._stand_in"})
    made = kind()
    for key in parameters:
        made.register_parameter(key, getattr(own, key))
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def linear(normalization, **options):
    own = o3.Linear(
        "2x0e+3x1o+4x0e", "3x0e+3x1o", path_normalization=normalization, biases=True, **options
    )
    names = ("irreps_in", "irreps_out", "instructions", "internal_weights", "shared_weights")
    attributes = {name: getattr(own, name) for name in names}
    return own, stand_in("Linear", own, ("weight", "bias"), **attributes)


@pytest.mark.parametrize("features", [{}, {"f_in": 2, "f_out": 3}])
@pytest.mark.parametrize("normalization", ["element", "path"])
def test_linear(normalization, features):
    own, given = linear(normalization, **features)
    found = from_e3nn(given)
    x = torch.randn(5, *list(features.values())[:1], 15)
    assert_same_bits(found(x), own(x), "Linear")
    assert found.weight is given.weight


def test_linear_with_factors_of_nobody():
    _, given = linear("element")
    given.instructions = [i._replace(path_weight=2 * i.path_weight) for i in given.instructions]
    with pytest.raises(ShapeError, match="has factors that neither path_normalization gives"):
        from_e3nn(given)


def test_tensor_product_inside_a_model():
    own = o3.FullyConnectedTensorProduct("2x0e+1o", "0e+1o", "3x0e+1o")
    names = ("irreps_in1", "irreps_in2", "irreps_out", "internal_weights", "shared_weights")
    attributes = {name: getattr(own, name) for name in names}
    given = stand_in("TensorProduct", own, ("weight",), instructions=own.instructions, **attributes)
    model = torch.nn.Sequential(torch.nn.ModuleList([given]))
    found = from_e3nn(model)[0][0]
    for one, other in zip(found.instructions, own.instructions, strict=True):
        assert math.isclose(one.path_weight, other.path_weight, rel_tol=2**-51)
    assert list(model.parameters()) == [own.weight]


def test_gate_and_batch_norm():
    own = o3.Gate("2x0e", [torch.tanh], "1x0e", [torch.sigmoid], "1x1o")
    acts = [
        SimpleNamespace(irreps_in=a.irreps_in, acts=[SimpleNamespace(f=act.f) for act in a.acts])
        for a in (own.act_scalars, own.act_gates)
    ]
    given = stand_in(
        "Gate", own, act_scalars=acts[0], act_gates=acts[1], irreps_gated=own.irreps_gated
    )
    x = torch.randn(3, 6)
    assert_same_bits(from_e3nn(given)(x), own(x), "Gate")
    norm = o3.BatchNorm("2x0e+1o")
    norm(torch.randn(4, 5))
    names = ("irreps", "eps", "momentum", "affine", "reduce", "instance", "include_bias")
    attributes = {name: getattr(norm, name) for name in (*names, "normalization")}
    given = stand_in("BatchNorm", norm, ("weight", "bias"), **attributes)
    given.running_mean, given.running_var = norm.running_mean, norm.running_var
    found = from_e3nn(given.eval())
    assert_same_bits(found(x[:, :5]), norm.eval()(x[:, :5]), "BatchNorm")


def test_what_is_unknown():
    with pytest.raises(DTypeError, match="from_e3nn was given a ReLU: it must be, or hold, layers"):
        from_e3nn(torch.nn.ReLU())
    with pytest.raises(DTypeError, match="given a TensorSquare"):
        from_e3nn(stand_in("TensorSquare", None))


def test_models_that_are_not_what_was_asked_for():
    """Red before: to_e3nn returned the state; check named from_e3nn, which nobody had called."""
    with pytest.raises(DTypeError, match=r"to_e3nn was given a ReLU: .*layers of torchweft\. Pass"):
        o3.to_e3nn(torch.nn.ReLU())
    with pytest.raises(DTypeError, match=r"check was given a Linear: .* layers of e3nn, or .*MACE"):
        o3.check(torch.nn.Linear(2, 2), torch.ones(1, 2))

    class Own(o3.Linear):
        pass

    assert "0.weight" in o3.to_e3nn(torch.nn.Sequential(Own("2x0e", "2x0e")))


class Doubled(torch.nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return 2 * weight


CHANGED = {
    "parametrized": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", amount=0.5),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_parameters_that_a_layer_lacks(change):
    """Seen red with: layers that take the parameters of their own names, and keep a random one."""
    _, given = linear("element")
    change(given)
    with pytest.raises(DTypeError, match=r"has the parameters .*weight.*Remove parametrizations"):
        from_e3nn(given)


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_parameters_that_a_layer_of_a_network_lacks(change):
    given = e3nn.nn.FullyConnectedNet([3, 4, 5], torch.tanh)
    change(given.layer0)
    with pytest.raises(DTypeError, match=r"a \w*_Layer has the parameters .*weight"):
        from_e3nn(given)
