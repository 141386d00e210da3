"""Modules of clifford: formulas, parameters, starting scale, errors, and torch's own machinery.

Seen red with: gp weights without 1/√F, a bias on all blades, `weight_expansion` not dropped, the
norm's kind not passed on, a parameter left out of the forward pass.
"""

import copy
import functools
import io
import math
import pickle

import pytest
import torch

from tests.cases.clifford import ROWS
from tests.conftest import INTERPRETED
from torchweft.clifford import (
    CEMLP,
    EGCL,
    PGA,
    Algebra,
    CliffordConv1d,
    CliffordConv2d,
    CliffordConv3d,
    CliffordLayer,
    EquiLayerNorm,
    EquiLinear,
    FullyConnectedGeometricProduct,
    GATr,
    GeometricBilinear,
    GeometricProduct,
    GradeNormalization,
    LGATr,
    MixedLinear,
    MultivectorGELU,
    MultivectorLinear,
    MultivectorRMSNorm,
    MVLayerNorm,
    MVSiLU,
    ScalarGatedNonlinearity,
    SteerableGeometricProduct,
    clifford_conv,
    geometric_attention,
    geometric_product,
    grade_linear,
    message_plan,
    reference,
)
from torchweft.errors import BackendError, DTypeError, ShapeError
from torchweft.testing import assert_as_accurate, assert_within_bound, plain_error

SPACE, TIME = Algebra.cl(3), Algebra.cl(1, 3)
F = 6
DRAWS = 16
"""Calls whose noise is known where a metric norm may be near 0: its largest errors are rare."""
MODULES = {
    "layer": lambda dim: CliffordLayer(F, 3, blade_dim=dim),
    "layer_fc": lambda dim: CliffordLayer(F, 3, use_fc=True, blade_dim=dim),
    "layer_raw": lambda dim: CliffordLayer(F, algebra=SPACE, normalize=False, blade_dim=dim),
    "linear": lambda dim: MultivectorLinear(F, 4, SPACE, blade_dim=dim),
    "no_bias": lambda dim: MultivectorLinear(F, 4, SPACE, bias=False, blade_dim=dim),
    "rms_norm": lambda dim: MultivectorRMSNorm(SPACE, blade_dim=dim),
    "gelu": lambda dim: MultivectorGELU(blade_dim=dim),
    "product": lambda dim: GeometricProduct(F, SPACE, blade_dim=dim),
    "product_fc": lambda dim: FullyConnectedGeometricProduct(F, 4, SPACE, blade_dim=dim),
    "silu": lambda dim: MVSiLU(F, SPACE, blade_dim=dim),
    "layer_norm": lambda dim: MVLayerNorm(F, SPACE, blade_dim=dim),
    "equi_linear": lambda dim: EquiLinear(F, 4, Algebra.cl(2, 0, 1), blade_dim=dim),
}

LEARNING = [name for name in MODULES if name not in ("rms_norm", "gelu")]


def built(name, blade_dim=0):
    """A module with random parameters, and inputs for it."""
    torch.manual_seed(0)
    module = MODULES[name](blade_dim)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    inputs = [torch.randn(8, 2, 5, F) for _ in range(2 if name.startswith("product") else 1)]
    return module, [x.movedim(0, blade_dim) for x in inputs]


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def formula(layer, x):
    """CliffordLayer by the oracle."""
    algebra = layer.algebra
    y = torch.stack([x[j] @ layer.linear_weight[g] for j, g in enumerate(algebra.grades)])
    y = torch.cat([y[:1] + layer.linear_bias, y[1:]])
    product = reference.fully_connected if layer.use_fc else reference.product
    order = (layer.gp_weight, algebra) if layer.use_fc else (algebra, layer.gp_weight)
    out = product(reference.gate(x), reference.gate(y), *order)
    kind = "euclidean" if algebra.is_definite else "metric"
    return reference.rms_norm(out, algebra, kind) if layer.normalize else out


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("use_fc", [True, False])
@pytest.mark.parametrize("algebra", [SPACE, TIME, PGA], ids=str)
def test_layer_is_its_formula(algebra, use_fc, normalize):
    torch.manual_seed(0)
    layer = CliffordLayer(F, algebra=algebra, use_fc=use_fc, normalize=normalize)
    torch.nn.init.normal_(layer.linear_bias)
    x = torch.randn(DRAWS, algebra.num_blades, ROWS, F)
    wide = copy.deepcopy(layer).double()
    exact = torch.stack([formula(wide, one.double()) for one in x])
    plain = torch.stack([formula(layer, one) for one in x])
    assert_as_accurate(layer(x[0]), exact[0], plain_error(plain, exact, torch.float32))


def test_parameters_have_flash_cliffords_names_and_shapes():
    shapes = {name: tuple(p.shape) for name, p in CliffordLayer(F, dims=2).state_dict().items()}
    linear = {"linear_weight": (3, F, F), "linear_bias": (1, 1, F)}
    assert shapes == {"gp_weight": (F, 10), **linear}
    fc = CliffordLayer(F, dims=2, use_fc=True)
    assert fc.gp_weight.shape == (10, F, F)
    assert "Algebra((1, 1)), gp_weight=(10, 6, 6)" in repr(fc)
    names = dict(EquiLinear(F, 4).named_parameters())
    assert {name: tuple(p.shape) for name, p in names.items()} == {
        "weight": (9, F, 4),
        "bias": (4,),
    }
    assert EquiLinear(F, 4, TIME).weight.shape == (5, F, 4)


@pytest.mark.parametrize("name", MODULES)
def test_blades_last(name):
    (first, inputs), (last, _) = built(name), built(name, -1)
    plain = first(*inputs)
    exact = first.double()(*(x.double() for x in inputs))
    found = last(*(x.movedim(0, -1) for x in inputs)).movedim(-1, 0)
    noise = plain_error(plain, exact, torch.float32)
    assert_as_accurate(found, exact, noise + noise.max())


@pytest.mark.parametrize("name", MODULES)
def test_state_and_pickle_keep_every_bit(name):
    module, inputs = built(name)
    expected = module(*inputs)
    state = io.BytesIO()
    torch.save(module.state_dict(), state)
    state.seek(0)
    fresh = MODULES[name](0)
    fresh.load_state_dict(torch.load(state))
    for other in (fresh, pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        same(other(*inputs), expected)


@pytest.mark.parametrize("name", LEARNING)
def test_every_parameter_gets_a_gradient(name):
    module, inputs = built(name)
    module(*inputs).square().sum().backward()
    for parameter in module.parameters():
        assert parameter.grad.abs().sum() > 0


NETWORKS = {"GATr": GATr, "LGATr": LGATr}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_of_a_network_gets_a_gradient(name):
    torch.manual_seed(0)
    network = NETWORKS[name](F, 4, 8, 3, 3, 4, blocks=2, heads=2)
    x, scalars = network(torch.randn(16, 2, 5, F), torch.randn(2, 5, 3))
    (x.square().sum() + scalars.square().sum()).backward()
    for parameter_name, parameter in network.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


SCALES = {
    "layer": lambda f: CliffordLayer(f, 3, normalize=False),
    "layer_fc": lambda f: CliffordLayer(f, 3, normalize=False, use_fc=True),
    "linear": lambda f: MultivectorLinear(f, f, SPACE),
    "product": lambda f: GeometricProduct(f, SPACE),
    "product_fc": lambda f: FullyConnectedGeometricProduct(f, f, SPACE),
    "equi_linear": lambda f: EquiLinear(f, f),
}


@pytest.mark.parametrize("name", SCALES)
def test_fresh_layers_keep_the_scale(name):
    """The size of the outputs grows like F⁰: nearer to it than to the √F of a forgotten factor."""
    torch.manual_seed(0)
    features = (16, 64, 256, 512)
    sizes = []
    for f in features:
        module = SCALES[name](f)
        inputs = [torch.randn(16 if name == "equi_linear" else 8, 4, f) for _ in range(2)]
        count = 2 if name.startswith("product") else 1
        sizes.append(float(module(*inputs[:count]).square().mean().sqrt().detach()))
    growth = math.log(sizes[-1] / sizes[0]) / math.log(features[-1] / features[0])
    assert abs(growth) < 1 / 4
    if "linear" in name:  # and the size is that of the input
        assert abs(math.log2(sizes[-1])) < 1 / 4


def transformer():
    return GATr(F, 4, 8, 3, 3, 4, blocks=1, heads=2), [torch.randn(16, 5, F), torch.randn(5, 3)]


def convolution():
    return CliffordConv1d(SPACE, 4, 6, 3), [torch.randn(2, 4, 7, 8)]


COMPILED = {name: functools.partial(built, name) for name in LEARNING}
COMPILED |= {"transformer": transformer, "convolution": convolution}


@pytest.mark.skipif(INTERPRETED, reason="torch.compile is checked without TRITON_INTERPRET")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", COMPILED)
def test_modules_compile_whole(name, dynamic):
    torch.manual_seed(0)
    module, inputs = COMPILED[name]()
    # what happens in aot_autograd is up to the operators, and slow for a network of many
    backend = "aot_eager" if name.startswith("layer") else "eager"
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend=backend)
    found, expected = (gradients(f, module, inputs) for f in (compiled, module))
    for one, other in zip(found, expected, strict=True):
        same(one, other)


def gradients(function, module, inputs):
    """The outputs and the gradients of the parameters."""
    out = function(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    loss = sum(t.square().sum() for t in outs)
    return [*outs, *torch.autograd.grad(loss, list(module.parameters()))]


@pytest.mark.parametrize("name", ["layer", "layer_fc", "linear", "product", "product_fc"])
def test_autocast_runs_in_low_precision(name):
    module, inputs = built(name)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(*inputs)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MODULES)
def test_modules_keep_the_dtype(name, dtype):
    module, inputs = built(name)
    assert module.to(dtype)(*(x.to(dtype) for x in inputs)).dtype == dtype


@pytest.mark.parametrize("name", MODULES)
def test_empty_batch(name):
    module, inputs = built(name)
    out = module(*(x[:, :0].requires_grad_() for x in inputs))
    assert out.shape[:3] == (8, 0, 5)
    out.sum().backward()
    assert all(not p.grad.any() for p in module.parameters())


def test_no_features():
    """Red before: torch was left to infer a dimension of a tensor without numbers."""
    x = torch.zeros(3, 8, 5, 0, requires_grad=True)
    weight = torch.zeros(4, 0, 2, requires_grad=True)
    y = grade_linear(x[0], weight, None, SPACE)
    torch.testing.assert_close(y, torch.zeros(8, 5, 2), rtol=0, atol=0)
    assert [t.shape for t in torch.autograd.grad(y.sum(), (x, weight))] == [x.shape, weight.shape]
    product = functools.partial(geometric_product, algebra=SPACE)
    assert torch.vmap(product)(x, x).shape == x.shape


@pytest.mark.parametrize("batch", [(0, 5), (2, 0)])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_no_items(name, batch):
    network = NETWORKS[name](F, 4, 8, 3, 2, 4, blocks=1, heads=2)
    x, scalars = network(torch.randn(16, *batch, F), torch.randn(*batch, 3))
    assert (x.shape, scalars.shape) == ((16, *batch, 4), (*batch, 2))
    (x.sum() + scalars.sum()).backward()
    assert all(p.grad is None or not p.grad.any() for p in network.parameters())


INNER = [j for j, square in enumerate(PGA.squares) if square and PGA.grades[j] != 3]


def logits(q, k, q_scalars, k_scalars, weights):
    """Of geometric attention in PGA, by inner products and distances."""
    inner = torch.einsum("jbhqc,jbhkc->bhqk", q[INNER], k[INNER]) + q_scalars @ k_scalars.mT
    p, r = points(q)[..., :, None, :], points(k)[..., None, :, :]
    distances = (p[:3] * r[3] - p[3] * r[:3]).square().sum(0)
    return inner - torch.einsum("bhqkc,hc->bhqk", distances, weights)


def expanded_logits(q, k, q_scalars, k_scalars, weights):
    """The same as one matrix product, the squares of the distances written out."""
    p, r, w = points(q), points(k), weights[:, None]
    size_p, size_r = p[:3].square().sum(0), r[:3].square().sum(0)
    own = [*q[INNER], w * size_p, w * p[3].square(), *(w * p[:3] * p[3]), q_scalars]
    other = [*k[INNER], -r[3].square(), -size_r, *(2 * r[:3] * r[3]), k_scalars]
    return torch.cat(own, -1) @ torch.cat(other, -1).mT


def points(x):
    return x[11:15] * (x[14] / (x[14].square() + 1e-3))


def attention(find_logits, q, k, v, q_scalars, k_scalars, v_scalars, weights, mask):
    features = q.shape[-1] * (len(INNER) + 5) + q_scalars.shape[-1]
    found = find_logits(q, k, q_scalars, k_scalars, weights) / features**0.5
    shares = found.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,jbhkc->jbhqc", shares, v), shares @ v_scalars


def test_attention_is_its_formula():
    torch.manual_seed(0)
    multivectors = [torch.randn(16, 3, 2, 5, 4) for _ in range(3)]
    given = [*multivectors, *(torch.randn(3, 2, 5, 3) for _ in range(3))]
    weights, mask = torch.rand(2, 4), torch.ones(5, 5, dtype=torch.bool).tril()
    found = geometric_attention(*given, weights=weights, mask=mask)
    plain = attention(expanded_logits, *given, weights, mask)
    exact = attention(logits, *(x.double() for x in given), weights.double(), mask)
    for out, p, e in zip(found, plain, exact, strict=True):
        assert_as_accurate(out, e, plain_error(p, e, torch.float32))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("algebra", [SPACE, TIME], ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution_is_a_sum_of_products(dims, algebra, groups):
    """A kernel as large as the input: one position, and a fully written sum of products."""
    torch.manual_seed(0)
    kernel = (3, 2, 2)[:dims]
    cls = (CliffordConv1d, CliffordConv2d, CliffordConv3d)[dims - 1]
    conv = cls(algebra, 4, 6, kernel, groups=groups)
    x = torch.randn(2, 4, *kernel, algebra.num_blades)

    def oracle(x, weight, bias, table):
        x = x.flatten(2, -2).unflatten(1, (groups, -1))
        weight = weight.flatten(3).unflatten(1, (groups, -1))
        return torch.einsum("ijk,ngcti,kgoct->ngoj", table, x, weight).flatten(1, 2) + bias.T

    given = [t.detach().double() for t in (x, conv.weight, conv.bias, algebra.cayley())]
    terms = conv.weight[0, 0].numel() * algebra.num_blades + 1
    out = conv(x)
    assert out.shape == (2, 6, *(1,) * dims, algebra.num_blades)
    magnitude = oracle(*(t.abs() for t in given))
    assert_within_bound(out.flatten(2, -2)[:, :, 0], oracle(*given), magnitude, terms)


def test_unknown_dims():
    with pytest.raises(ShapeError, match=r"dims is 7: Cl\(dims, 0\) needs 1 to 5. Pass"):
        CliffordLayer(F, 7)
    with pytest.raises(ShapeError, match=r"neither dims nor algebra .*Pass dims=3"):
        CliffordLayer(F)
    with pytest.raises(ShapeError, match="both dims and algebra are given"):
        CliffordLayer(F, 3, SPACE)
    with pytest.raises(DTypeError, match=r"algebra is a tuple: .* Pass Algebra"):
        MultivectorLinear(F, F, (1, 1, 1))
    with pytest.raises(ShapeError, match="n_features is 0: it must be at least 1"):
        CliffordLayer(0, 3)
    with pytest.raises(ShapeError, match="blade_dim is 1: it must be 0"):
        CliffordLayer(F, 3, blade_dim=1)


@pytest.mark.parametrize("shape", [(7, 5, F), (8, 5, F + 1), (5, F, 8), (F,), (8,)])
def test_wrong_blades_or_features(shape):
    layer = CliffordLayer(F, 3)
    with pytest.raises(ShapeError, match=r"x is .*CliffordLayer of Algebra.* needs \(8, batch…, 6"):
        layer(torch.randn(shape))
    last = GeometricProduct(F, SPACE, blade_dim=-1)
    x = torch.randn(5, F, 8)
    with pytest.raises(ShapeError, match=r"y is .*GeometricProduct .* needs \(…, 6, 8\)"):
        last(x, torch.randn(shape)[..., :7])


def test_wrong_layers_of_scalars_and_convolutions():
    with pytest.raises(ShapeError, match=r"scalars is \(5, 2\): MixedLinear needs \(batch…, 3\)"):
        MixedLinear(F, 4, 3)(torch.randn(16, 5, F), torch.randn(5, 2))
    with pytest.raises(ShapeError, match="in_features is 0, out_features 4: both must be at"):
        EquiLinear(0, 4)
    with pytest.raises(ShapeError, match=r"out_features is 3: half .* Give an even number"):
        GeometricBilinear(F, 3, 2, 2)
    with pytest.raises(ShapeError, match="groups must divide both"):
        CliffordConv1d(SPACE, 4, 6, 3, groups=4)
    with pytest.raises(ShapeError, match=r"kernel_size is \(3, 3\): CliffordConv1d needs 1 sizes"):
        CliffordConv1d(SPACE, 4, 6, (3, 3))
    with pytest.raises(ShapeError, match=r"x is \(2, 8, 4, 9\): it must be \(N, 4, 1 spatial"):
        CliffordConv1d(SPACE, 4, 6, 3)(torch.randn(2, 8, 4, 9))
    with pytest.raises(ShapeError, match=r"weight is \(4, 6, 4, 3\): it must be \(8, C_out"):
        clifford_conv(torch.randn(2, 4, 9, 8), torch.randn(4, 6, 4, 3), None, SPACE)


def test_unlucky_checkpoint():
    state = CliffordLayer(F, 2).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for gp_weight"):
        CliffordLayer(F, 3).load_state_dict(state)


def networks(backend):
    """Every module of the family and a call of it, where one backend is asked for."""
    x, pga, time = torch.randn(8, 5, F), torch.randn(16, 5, F), torch.randn(16, 5, F)
    scalars, image = torch.randn(5, 4), torch.randn(1, 2, 5, 8)
    src, dst = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])
    plan, given = message_plan(src, dst, 5), {"backend": backend}
    return {
        "layer": (CliffordLayer(F, 3, **given), x),
        "layer_fc": (CliffordLayer(F, 3, use_fc=True, **given), x),
        "linear": (MultivectorLinear(F, 4, SPACE, **given), x),
        "rms_norm": (MultivectorRMSNorm(SPACE, **given), x),
        "gelu": (MultivectorGELU(**given), x),
        "product": (GeometricProduct(F, SPACE, **given), x, x),
        "product_fc": (FullyConnectedGeometricProduct(F, 4, SPACE, **given), x, x),
        "silu": (MVSiLU(F, SPACE, **given), x),
        "layer_norm": (MVLayerNorm(F, SPACE, **given), x),
        "equi_linear": (EquiLinear(F, 4, **given), pga),
        "mixed": (MixedLinear(F, 4, 4, 3, **given), pga, scalars),
        "grade_normalization": (GradeNormalization(F, SPACE, **given), x),
        "steerable": (SteerableGeometricProduct(F, SPACE, **given), x),
        "cemlp": (CEMLP(F, 4, SPACE, **given), x),
        "egcl": (EGCL(F, SPACE, **given), x, plan),
        "equi_norm": (EquiLayerNorm(PGA, **given), pga, scalars),
        "gate": (ScalarGatedNonlinearity(**given), pga, scalars),
        "gatr": (GATr(F, 2, 4, 4, 1, 8, blocks=1, heads=2, **given), pga, scalars),
        "lgatr": (LGATr(F, 2, 4, 4, 1, 8, blocks=1, heads=2, **given), time, scalars),
        "convolution": (CliffordConv1d(SPACE, 2, 3, 3, **given), image),
    }


@pytest.mark.skipif(INTERPRETED, reason="needs a backend that cannot serve the CPU")
@pytest.mark.parametrize("name", networks(None))
def test_a_backend_that_cannot_serve_is_refused(name):
    """Seen red with: a module that does not pass it on."""
    module, *inputs = networks("triton")[name]
    with pytest.raises(BackendError, match="backend='triton' was asked for"):
        module(*inputs)
    module, *inputs = networks("torch")[name]
    module(*inputs)


@pytest.mark.parametrize("algebra", [PGA, Algebra.cl(1, 3)], ids=str)
def test_keys_and_values_of_one_head_are_those_of_all(algebra):
    q, k = torch.randn(16, 2, 3, 5, 4), torch.randn(16, 2, 1, 6, 4)
    q_scalars, k_scalars = torch.randn(2, 3, 5, 2), torch.randn(2, 1, 6, 2)
    shared = geometric_attention(q, k, k, q_scalars, k_scalars, k_scalars, algebra)
    k, k_scalars = k.expand(-1, -1, 3, -1, -1), k_scalars.expand(-1, 3, -1, -1)
    given = geometric_attention(q, k, k, q_scalars, k_scalars, k_scalars, algebra)
    for a, b in zip(shared, given, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("multi_query", [False, True])
def test_several_heads_without_scalars(multi_query):
    """Red before: scalars, of which there are none, had one head."""
    network = LGATr(1, 1, 4, 0, 0, 0, blocks=1, heads=2, multi_query=multi_query)
    x, scalars = network(torch.randn(16, 3, 5, 1))
    assert (x.shape, scalars.shape) == ((16, 3, 5, 1), (3, 5, 0))


def test_attention_without_heads():
    """Red before: it was refused."""
    x, scalars = torch.randn(16, 5, 2), torch.randn(5, 3)
    given = (x, x, x, scalars, scalars, scalars)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    heads = [t.unsqueeze(-3) for t in given]
    found = geometric_attention(*given, mask=mask)
    for alone, one_head in zip(found, geometric_attention(*heads, mask=mask), strict=True):
        assert not (alone - one_head.squeeze(-3)).any()
    with pytest.raises(ShapeError, match=r"q_scalars 2, .*the same number.*unsqueeze"):
        geometric_attention(*heads[:3], scalars, scalars, scalars)
