"""A call whose kinds were settled gives what the first gave, by every door, and says the same.

Seen red with: kinds without dtypes, without shapes, of what is no tensor; a graph known by its
sizes alone; a call under autocast taken for a plain one, a traced one asked for what was settled;
rests of gradients known by the call that they follow alone; a copy that shares the table.
"""

import copy
import pickle

import pytest
import torch

from torchweft import o3
from torchweft.core.operators.call_cache import ENTRIES_PER_CACHE, CallCache, signature
from torchweft.errors import WeftError
from torchweft.testing.contract import assert_same_bits

pytestmark = pytest.mark.kernels

INSTRUCTIONS = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (0, 1, 1, "uvu", True)]
ITEMS = ("2x0e+2x1o", "0e+1o", "2x0e+2x1o", INSTRUCTIONS)
NODES, EDGES = 5, 9


def given(conv, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    src, dst = torch.randint(NODES, (2, EDGES), generator=generator)
    rows = ((NODES, 8), (EDGES, 4), (EDGES, conv.weight_numel))
    x, y, w = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in rows)
    return x, y, w, o3.Graph(src, dst, NODES)


def plain(conv, x, y, w, graph):
    return conv(x, y, w, graph)


def without_gradients(conv, *tensors):
    with torch.no_grad():
        return conv(*tensors)


def gradients(conv, x, y, w, graph):
    leaves = [t.clone().requires_grad_() for t in (x, y, w)]
    first = torch.autograd.grad(conv(*leaves, graph).square().sum(), leaves, create_graph=True)
    return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]


def forces(conv, x, y, w, graph):
    leaf = y.clone().requires_grad_()
    weight = w.clone().requires_grad_()
    (first,) = torch.autograd.grad(
        conv(x, leaf, weight, graph).square().sum(), leaf, create_graph=True
    )
    first.square().sum().backward()
    return [first, weight.grad]


def by_func(conv, x, y, w, graph):
    return torch.func.grad(lambda a: conv(a, y, w, graph).square().sum())(x)


def mapped(conv, x, y, w, graph):
    return torch.func.vmap(lambda a: conv(a, y, w, graph))(torch.stack([x, 2 * x]))


def mapped_gradients(conv, x, y, w, graph):
    pull = torch.func.vjp(lambda a: conv(a, y, w, graph), x)[1]
    return torch.func.vmap(pull)(torch.eye(2, NODES * 8).view(2, NODES, 8))[0]


def forward_mode(conv, x, y, w, graph):
    return torch.func.jvp(lambda a: conv(a, y, w, graph), (x,), (y.new_ones(x.shape),))[1]


def strided(conv, x, y, w, graph):
    return conv(x.mT.contiguous().mT, y, w, graph)


DOORS = [
    plain,
    without_gradients,
    gradients,
    forces,
    by_func,
    mapped,
    mapped_gradients,
    forward_mode,
    strided,
]


def listed(found):
    return list(found) if isinstance(found, list | tuple) else [found]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_the_second_call_gives_the_bits_of_the_first(door):
    conv = o3.TensorProductConv(*ITEMS)
    tensors = given(conv)
    first = listed(door(conv, *tensors))
    for other in (plain, without_gradients, gradients, door, door):
        found = listed(other(conv, *tensors))
        if other is door:
            for a, b in zip(found, first, strict=True):
                assert_same_bits(a, b, door.__name__)


MIXED = [(0, 0, 0, "uvw", True), (1, 1, 0, "uvw", True), (0, 1, 1, "uvw", True)]
ROWS = 6


def rows(width, seed):
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(seed))


def product(instructions, **options):
    layer = o3.TensorProduct(*ITEMS[:3], instructions, **options)
    own = () if layer.weight.numel() else (rows(layer.weight_numel, 2),)
    return layer, (rows(8, 0), rows(4, 1), *own)


def mixed_conv():
    layer = o3.TensorProductConv(*ITEMS[:3], MIXED, internal_weights=True)
    x, y, _, graph = given(layer)
    return lambda x, y: layer(x, y, None, graph), (x, y)


def linear(**options):
    layer = o3.Linear("4x0e+3x1o", "2x0e+5x1o", **options)
    return layer, (rows(13, 0),)


def by_element():
    layer, inputs = linear(num_elements=3)
    element = torch.tensor([2, 0, 1, 1, 0, 2])
    return lambda x: layer(x, element=element), inputs


def contraction():
    layer = o3.SymmetricContraction("2x0e+2x1o", "2x0e+2x1o", 2, 3)
    element = torch.tensor([2, 0, 1, 1, 0, 2])
    return lambda x: layer(x, element), (rows(8, 0),)


LAYERS = {
    "shared": lambda: product(INSTRUCTIONS),
    "own": lambda: product(INSTRUCTIONS, shared_weights=False),
    "mixed": lambda: product(MIXED),
    "mixed own": lambda: product(MIXED, shared_weights=False),
    "mixed conv": mixed_conv,
    "linear": linear,
    "biases": lambda: linear(biases=True),
    "by element": by_element,
    "harmonics": lambda: (o3.SphericalHarmonics("0e+1o+2e", True), (rows(3, 0),)),
    "bessel": lambda: (o3.BesselBasis(2.0, 3), (rows(1, 0).abs(),)),
    "cutoff": lambda: (o3.PolynomialCutoff(2.0), (rows(1, 0)[:, 0].abs(),)),
    "radial basis": lambda: (o3.RadialBasis(2.0, 3), (rows(1, 0).abs(),)),
    "activation": lambda: (o3.normalize2mom(torch.tanh), (rows(3, 0),)),
    "contraction": contraction,
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_give_the_same_bits_again(name):
    torch.manual_seed(0)
    layer, inputs = LAYERS[name]()

    def call():
        leaves = [t.clone().requires_grad_() for t in inputs]
        z = layer(*leaves)
        first = torch.autograd.grad(z.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        twice = torch.func.vmap(layer)(*(torch.stack([t, 2 * t]) for t in inputs))
        return [z, *first, *second, twice]

    before = call()
    for _ in range(2):
        for a, b in zip(call(), before, strict=True):
            assert_same_bits(a, b, name)
    with torch.no_grad():
        assert_same_bits(layer(*inputs), before[0], name)


def test_other_kinds_are_other_calls():
    conv = o3.TensorProductConv(*ITEMS)
    for dtype in (torch.float32, torch.float64):
        tensors = given(conv, dtype)
        alone = o3.TensorProductConv(*ITEMS)
        for _ in range(2):
            assert_same_bits(conv(*tensors), alone(*tensors), str(dtype))
    x, y, w, graph = given(conv)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv(x, y, w, graph).dtype == torch.bfloat16
    assert conv(x, y, w, graph).dtype == torch.float32


def test_graphs_of_one_size_keep_their_edges():
    conv = o3.TensorProductConv(*ITEMS)
    for seed in (0, 1, 0, 1):
        tensors = given(conv, seed=seed)
        assert_same_bits(conv(*tensors), o3.TensorProductConv(*ITEMS)(*tensors), str(seed))
    # edges in order need fewer tables
    x, y, w, _ = given(conv)
    dst = torch.arange(EDGES) // 2
    ordered = o3.Graph(dst.flip(0).contiguous(), dst, NODES)
    assert_same_bits(
        conv(x, y, w, ordered), o3.TensorProductConv(*ITEMS)(x, y, w, ordered), "in order"
    )


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, lambda x: x[:-1]),
        (0, lambda x: x.double()),
        (0, lambda x: x.tolist()),
        (1, lambda y: y[:, :-1]),
        (1, lambda y: y.long()),
        (2, lambda w: w[:-1]),
        (2, lambda w: None),
    ],
)
def test_a_call_that_is_wrong_is_refused_after_one_that_is_right(place, wrong):
    conv = o3.TensorProductConv(*ITEMS)
    tensors = list(given(conv))
    for _ in range(2):
        conv(*tensors)
    tensors[place] = wrong(tensors[place])
    with pytest.raises(WeftError) as after:
        conv(*tensors)
    with pytest.raises(WeftError) as before:
        o3.TensorProductConv(*ITEMS)(*tensors)
    assert str(after.value) == str(before.value)


@pytest.mark.parametrize("elements", [None, 3])
def test_a_linear_map_asks_again_for_what_it_takes(elements):
    element = torch.tensor([2, 0, 1, 1, 0, 2])
    layer, (x,) = linear(num_elements=elements)
    right = {} if elements is None else {"element": element}
    for _ in range(2):
        layer(x, **right)
    wrong = {"element": element} if elements is None else {}
    for refused in (wrong, {**right, "bias": torch.zeros(2)}):
        with pytest.raises(WeftError):
            layer(x, **refused)
    if elements is not None:
        with pytest.raises(WeftError, match="element"):
            layer(x, element=element.short())


def test_compiled_after_eager():
    conv = o3.TensorProductConv(*ITEMS)
    tensors = given(conv)
    eager = conv(*tensors)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*tensors), eager, "compiled")
    assert_same_bits(conv(*tensors), eager, "eager again")


def test_own_weights_are_those_of_now():
    product = o3.TensorProduct(*ITEMS)
    x, y = torch.randn(3, 8), torch.randn(3, 4)
    product(x, y)
    with torch.no_grad():
        product.weight.zero_()
    assert not product(x, y).any()
    assert product.double()(x.double(), y.double()).dtype == torch.float64


def test_own_couplings_are_those_of_now():
    """Seen red with: the list of weights that a module had when it was built."""
    layer = o3.SymmetricContraction("2x0e+2x1o", "2x0e+2x1o", 2, 3)
    x, element = rows(8, 0), torch.tensor([2, 0, 1, 1, 0, 2])
    z = layer(x, element)
    twice = {name: 2 * p.detach() for name, p in layer.named_parameters()}
    found = torch.func.functional_call(layer, twice, (x, element))
    assert_same_bits(found, 2 * z, "other tensors for a call")
    assert_same_bits(layer(x, element), z, "its own again")
    for part in layer.contractions:
        part.weights_max = torch.nn.Parameter(2 * part.weights_max)
        part.weights = torch.nn.ParameterList([2 * p for p in part.weights])
    assert_same_bits(layer(x, element), 2 * z, "other parameters")


def test_copies_begin_anew():
    conv = o3.TensorProductConv(*ITEMS)
    tensors = given(conv)
    conv(*tensors)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert_same_bits(other(*tensors), conv(*tensors), "a copy")


def test_kinds_of_plain_calls_alone():
    x = torch.ones(2, 3)
    assert signature([x]) == (x.shape, x.dtype, x.device)
    assert signature([x, torch.nn.Parameter(x)]) == signature([x, x])
    assert signature([x, [1.0]]) is None
    with torch.autocast("cpu"):
        assert signature([x]) is None


def test_a_table_forgets():
    table = CallCache()
    for n in range(ENTRIES_PER_CACHE + 1):
        table.keep(n, n)
    assert list(table) == list(range(1, ENTRIES_PER_CACHE + 1))
