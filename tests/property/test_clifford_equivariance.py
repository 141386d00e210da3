"""Layers are equivariant under every versor, with any parameters, biases included.

Seen red with: a bias on all blades, the euclidean norm, the join without its reference, a
pseudoscalar map under reflections, points normalised by another coordinate.
"""

import functools

import pytest
import torch

from torchweft.clifford import PGA, SPACETIME, Algebra, dual, geometric_product, sandwich, wedge
from torchweft.clifford.layers.attention import SelfAttention
from torchweft.clifford.layers.basic import (
    CliffordLayer,
    FullyConnectedGeometricProduct,
    GeometricProduct,
    MultivectorGELU,
    MultivectorLinear,
    MultivectorRMSNorm,
    MVLayerNorm,
    MVSiLU,
)
from torchweft.clifford.layers.equilinear import EquiLayerNorm, EquiLinear, MixedLinear
from torchweft.clifford.layers.lgatr import LGATr
from torchweft.clifford.layers.transformers import (
    GATr,
    GeometricMLP,
    ScalarGatedNonlinearity,
    join,
)
from torchweft.testing import assert_equivariant, random_versor
from torchweft.testing.equivariance import act, versor_action

F = 16
ALGEBRAS = [
    Algebra.cl(3),
    Algebra.cl(1, 3),
    Algebra.cl(3, 0, 1),
    Algebra.cl(4, 1),
    Algebra((1, -1, 0, 0)),
]
MODULES = {
    "layer": lambda algebra: CliffordLayer(F, algebra=algebra),
    "layer_fc": lambda algebra: CliffordLayer(F, algebra=algebra, use_fc=True),
    "linear": lambda algebra: MultivectorLinear(F, 4, algebra),
    "equi_linear": lambda algebra: EquiLinear(F, 4, algebra),
    "rms_norm": MultivectorRMSNorm,
    "gelu": lambda _: MultivectorGELU(),
    "product": lambda algebra: GeometricProduct(F, algebra),
    "product_fc": lambda algebra: FullyConnectedGeometricProduct(F, 4, algebra),
    "silu": lambda algebra: MVSiLU(F, algebra),
    "layer_norm": lambda algebra: MVLayerNorm(F, algebra),
}
MIXED = {
    "linear": lambda algebra: MixedLinear(F, 4, 3, 5, algebra),
    "norm": EquiLayerNorm,
    "gate": lambda _: ScalarGatedNonlinearity(),
    "attention": lambda algebra: SelfAttention(F, 3, 4, algebra=algebra),
    "network": lambda algebra: GATr(F, 4, 8, 3, 3, 4, 2, 2, algebra=algebra),
}


def randomised(module, dtype=torch.float64):
    """Every parameter N(0, 1): what training may lead to."""
    torch.manual_seed(0)
    for parameter in module.to(dtype).parameters():
        torch.nn.init.normal_(parameter)
    return module


def random(algebra, *shape, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(algebra.num_blades, *shape, generator=generator, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("algebra", ALGEBRAS, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, algebra, dtype):
    module = randomised(MODULES[name](algebra), dtype)
    inputs = [random(algebra, 5, F, dtype=dtype, seed=k) for k in range(2)]
    assert_equivariant(module, inputs[: 2 if name.startswith("product") else 1], algebra)


@pytest.mark.parametrize("algebra", [PGA, Algebra.cl(1, 3)], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_layers_of_multivectors_and_scalars(name, algebra):
    module = randomised(MIXED[name](algebra))
    x = random(algebra, 2, 5, F)
    scalars = random(algebra, 2, 5, 3)[0]
    assert_equivariant(lambda x: module(x, scalars)[0], [x], algebra)
    # scalars do not change: as multivectors of grade 0 they are equivariant too
    assert_equivariant(lambda x: _as_scalars(module(x, scalars)[1], algebra), [x], algebra)


def _as_scalars(t, algebra):
    return torch.cat([t[None], t.new_zeros(algebra.num_blades - 1, *t.shape)])


def test_geometric_mlp():
    mlp = randomised(GeometricMLP(F, 3))
    x, reference = random(PGA, 5, F), random(PGA, 1, 1, seed=2)
    scalars = random(PGA, 5, 3)[0]
    assert_equivariant(lambda x, r: mlp(x, scalars, r)[0], [x, reference], PGA)


def test_join_turns_with_reflections():
    inputs = [random(PGA, 5, F, seed=k) for k in range(2)]
    rotation = versor_action(random_versor(PGA, 2), PGA)
    reflection = versor_action(random_versor(PGA, 1), PGA)
    for action, sign in ((rotation, 1), (reflection, -1)):
        found = join(*(act(action, x) for x in inputs), PGA)
        expected = sign * act(action, join(*inputs, PGA))
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-12
    with pytest.raises(AssertionError, match="under a versor of 1 vectors"):
        assert_equivariant(functools.partial(join, algebra=PGA), inputs, PGA)


@pytest.mark.parametrize("algebra", ALGEBRAS, ids=str)
def test_the_action_is_the_sandwich_of_the_algebra(algebra):
    rotor = random_versor(algebra, 2)
    x = random(algebra, 5, F)
    size = geometric_product(rotor[:, None], _reverse(rotor, algebra)[:, None], algebra)[0, 0]
    found = act(versor_action(rotor, algebra), x)
    expected = sandwich(rotor[:, None, None].expand_as(x), x, algebra) / size
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-12
    assert_equivariant(
        lambda x, y: geometric_product(x, y, algebra), [x, random(algebra, 5, F, seed=2)], algebra
    )


def _reverse(versor, algebra):
    grades = torch.tensor(algebra.grades)
    return versor * (1 - 2 * (grades * (grades - 1) // 2 % 2))


def test_products_of_versors_act_one_after_the_other():
    algebra = Algebra.cl(1, 3)
    one, two = (random_versor(algebra, 1, seed) for seed in (1, 2))
    both = geometric_product(one[:, None], two[:, None], algebra)[:, 0]
    x = random(algebra, 5, F)
    found = act(versor_action(both, algebra), x)
    expected = act(versor_action(one, algebra), act(versor_action(two, algebra), x))
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("function", "algebra"),
    [
        (lambda x: x + 0.01, Algebra.cl(3)),
        (lambda x: x / x.square().sum(0).mean(-1).sqrt()[:, None], Algebra.cl(1, 3)),
        (lambda x: x / x.square().sum(0).mean(-1).sqrt()[:, None], PGA),
        (functools.partial(dual, algebra=Algebra.cl(3)), Algebra.cl(3)),
        (lambda x: torch.cat([x[:1], 1.001 * x[1:2], x[2:]]), Algebra.cl(3)),
        (lambda x: x * float("nan"), Algebra.cl(3)),
    ],
    ids=["bias", "norm-boost", "norm-translation", "dual", "one-blade", "nan"],
)
def test_the_tool_sees(function, algebra):
    with pytest.raises(AssertionError, match=r"under a versor of \d vectors .* is off by"):
        assert_equivariant(function, [random(algebra, 5, F)], algebra)


PSEUDOSCALAR = {
    "maps": lambda: EquiLinear(F, 4, SPACETIME, pseudoscalar=True),
    "network": lambda: LGATr(F, 4, 8, 3, 3, 4, 2, 2),
}


@pytest.mark.parametrize("name", PSEUDOSCALAR)
def test_the_pseudoscalar_maps_are_of_even_versors_only(name):
    module = randomised(PSEUDOSCALAR[name]())
    x, scalars = random(SPACETIME, 5, F), random(SPACETIME, 5, 3)[0]

    def function(x):
        return (module(x, scalars)[0] if name == "network" else module(x)).detach()

    for factors, equivariant in ((1, False), (2, True), (4, True)):
        action = versor_action(random_versor(SPACETIME, factors), SPACETIME)
        found, expected = function(act(action, x)), act(action, function(x))
        error = float((found - expected).abs().max() / expected.abs().max())
        assert (error < 1e-12) == equivariant


def test_lgatr_without_pseudoscalars():
    network = randomised(LGATr(F, 4, 8, 3, 3, 4, 2, 2, pseudoscalar=False))
    scalars = random(SPACETIME, 5, 3)[0]
    assert_equivariant(lambda x: network(x, scalars)[0], [random(SPACETIME, 5, F)], SPACETIME)


def test_blades_last_and_metric_free_products():
    algebra = Algebra.cl(3, 0, 1)
    layer = randomised(CliffordLayer(F, algebra=algebra, blade_dim=-1))
    assert_equivariant(layer, [random(algebra, 5, F).movedim(0, -1)], algebra, blade_dim=-1)
    assert_equivariant(
        lambda x, y: wedge(x, y, algebra), [random(algebra, 5, F, seed=k) for k in (1, 2)], algebra
    )


def test_an_algebra_of_null_vectors_has_no_versors():
    with pytest.raises(AssertionError, match="all its vectors are null"):
        random_versor(Algebra((0, 0)))
