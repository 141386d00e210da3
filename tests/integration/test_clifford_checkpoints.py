"""Checkpoints of other projects in torchweft's modules: their own numbers come out.

The expected numbers were printed by the originals, in float64 and with the same parameters.
Seen red with: the fully connected weight not transposed, the maps of GATr not rescaled, the order
of queries, keys and values turned, the weight of a convolution on the left.
"""

import functools
import math

import pytest
import torch

from torchweft.clifford import (
    Algebra,
    fully_connected_geometric_product,
    geometric_product,
)
from torchweft.clifford.algebra import SPACETIME
from torchweft.clifford.layers.attention import CrossAttention, LGATrCrossAttention
from torchweft.clifford.layers.basic import (
    CliffordLayer,
    MultivectorLinear,
)
from torchweft.clifford.layers.cegnn import EGCL, message_plan
from torchweft.clifford.layers.checkpoints import (
    from_cegnn,
    from_cliffordlayers,
    from_gatr,
    from_lgatr,
)
from torchweft.clifford.layers.convolution import CliffordConv2d
from torchweft.clifford.layers.equilinear import EquiLinear, MixedLinear
from torchweft.clifford.layers.lgatr import LGATR_2, LGATr
from torchweft.clifford.layers.transformers import GATr, equivariant_join
from torchweft.errors import DTypeError, ShapeError

X = torch.arange(1.0, 17, dtype=torch.float64)


TWO_HEADS = {"attention": {"num_heads": 2}}


def same(found, expected, digits=6):
    """Equal to the last printed digit."""
    exact = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.detach().flatten(), exact, rtol=0, atol=0.5 * 10**-digits)


def waves(*shape, phase=0.0, size=1.0):
    count = torch.Size(shape).numel()
    return size * torch.cos(torch.arange(count, dtype=torch.float64) + phase).reshape(shape)


def filled(shapes):
    return {k: waves(*shapes[k], phase=0.1 * i, size=0.5) for i, k in enumerate(sorted(shapes))}


def loaded(module, state):
    module = module.double()
    module.load_state_dict(state)
    return module


FLASH = {
    (2, False): "1.363983 .373411 -.866817 -.234769 1.070073 -.219305 -1.243711 -.673045",
    (2, True): "-.243198 -1.392173 1.124851 .066544 -.096293 -.848976 .017286 1.413672",
    (3, False): "-1.043920 .953635 -.525091 -.554901 .708035 -.036949 .923579 -.246076 -.817704 "
    "-.954141 -.219741 -.378088 .148188 .455748 -1.242595 .675132",
    (3, True): "-1.114139 .868400 -.839902 -.381987 -.133482 .904165 -.521991 .201873 -.043269 "
    "-.777821 -.499681 -.549951 .664747 .631721 -1.412358 .019433",
}


@pytest.mark.parametrize(("dims", "use_fc"), FLASH)
def test_flash_clifford_loads_as_it_is(dims, use_fc):
    paths = {2: 10, 3: 20}[dims]
    shapes = {
        "gp_weight": (paths, 2, 2) if use_fc else (2, paths),
        "linear_weight": (dims + 1, 2, 2),
        "linear_bias": (1, 1, 2),
    }
    state = filled(shapes)
    state["linear_bias"] *= 0  # theirs goes to all blades
    state["weight_expansion"] = torch.zeros(2**dims, dtype=torch.int64)
    layer = loaded(CliffordLayer(2, dims, use_fc=use_fc), state)
    same(layer(waves(2**dims, 1, 2)), [float(v) for v in FLASH[dims, use_fc].split()])
    assert "weight_expansion" in state


def test_cegnn_products():
    algebra = Algebra((1, -1))
    x, y = X[:8].view(1, 2, 4), X[:8].flip(0).view(1, 2, 4)
    weight = torch.arange(1.0, 21, dtype=torch.float64)
    weighted = {"weight": weight.view(2, 10), "linear_right.weight": torch.ones(2, 2, 3)}
    sgp = from_cegnn(weighted, algebra)["weight"]
    fc = from_cegnn({"weight": weight.view(1, 2, 10)}, algebra)["weight"]
    same(
        geometric_product(x, y, algebra, sgp, blade_dim=-1),
        [152, -32, -60, 272, 420, 348, 180, 552],
    )
    same(fully_connected_geometric_product(x, y, fc, algebra, blade_dim=-1), [572, 316, 120, 824])
    layer = from_cegnn(
        {"weight": torch.tensor([[2.0, 3]]), "bias": torch.tensor([[[5.0]]])}, algebra
    )
    linear = loaded(MultivectorLinear(2, 1, algebra, blade_dim=-1), layer)
    same(linear(x), [22, 22, 27, 32])


def test_cegnn_message_passing():
    algebra = Algebra.cl(3)
    shapes = {}
    for model, width in (("edge_model", 3), ("node_model", 4)):
        for i, features in enumerate((width, 2)):
            at = f"{model}.layers.{i}"
            shapes |= {
                f"{at}.0.weight": (2, features, 4),
                f"{at}.0.bias": (1, 2, 1),
                f"{at}.1.a": (1, 2, 4),
                f"{at}.1.b": (1, 2, 4),
                f"{at}.2.weight": (2, 20),
                f"{at}.2.normalization.a": (2, 4),
                f"{at}.2.linear_right.weight": (2, 2, 4),
                f"{at}.2.linear_left.weight": (2, 2, 4),
                f"{at}.2.linear_left.bias": (1, 2, 1),
                f"{at}.3.a": (1, 2),
            }
    state = filled(shapes)
    state |= {f"{k.rpartition('.')[0]}.algebra.cayley": torch.zeros(8, 8, 8) for k in shapes}
    layer = loaded(EGCL(2, algebra, 1), from_cegnn(state, algebra, configuration={}))
    plan = message_plan(torch.tensor([1, 2, 0, 1]), torch.tensor([0, 0, 1, 2]), 3)
    h, edges = waves(3, 2, 8), waves(4, 1, 8, phase=0.5)
    out = layer(h.movedim(-1, 0), plan, edges.movedim(-1, 0)).movedim(0, -1)
    expected = (
        "1.574585 .517837 -.416829 -.966916 -.653171 .289622 .965999 .768476 "
        "-.181933 -.902491 -.838349 -.004263 .844861 .905833 .134196 -.758658"
    )
    same(out[0], [float(v) for v in expected.split()])


def mixed(name, features_in, features_out, scalars_in, scalars_out=0, *, maps=9):
    ends = 2 if maps == 10 else 1  # with pseudoscalars, they and the scalars
    shapes = {
        f"{name}.weight": (features_out, features_in, maps),
        f"{name}.s2mvs.weight": (ends * features_out, scalars_in),
        f"{name}.s2mvs.bias": (ends * features_out,),
    }
    if scalars_out:
        shapes |= {
            f"{name}.mvs2s.weight": (scalars_out, ends * features_in),
            f"{name}.mvs2s.bias": (scalars_out,),
            f"{name}.s2s.weight": (scalars_out, scalars_in),
        }
    return shapes


def attention_shapes(hidden, multi_query, maps=9):
    """Two heads of `hidden` features and 4 scalars."""
    linear = functools.partial(mixed, maps=maps)
    at = "blocks.0.attention"
    shapes = linear(f"{at}.out_linear", 2 * hidden, 2, 8, 2)
    if not multi_query:
        return shapes | linear(f"{at}.qkv_module.in_linear", 2, 6 * hidden, 2, 24)
    shapes |= linear(f"{at}.qkv_module.q_linear", 2, 2 * hidden, 2, 8)
    shapes |= linear(f"{at}.qkv_module.k_linear", 2, hidden, 2, 4)
    return shapes | linear(f"{at}.qkv_module.v_linear", 2, hidden, 2, 4)


def gatr_shapes(multi_query):
    """GATr(2, 1, 2, 1, 1, 2) with two heads and one block."""
    bilinear = "blocks.0.mlp.layers.0"
    shapes = mixed("linear_in", 2, 2, 1, 2) | mixed("linear_out", 2, 1, 2, 1)
    shapes |= attention_shapes(2, multi_query)
    shapes |= {"blocks.0.attention.attention.log_weights": (2, 1, 2)}
    for name in ("left", "right", "join_left", "join_right"):
        shapes |= mixed(f"{bilinear}.linear_{name}", 2, 2, 2)
    shapes |= mixed(f"{bilinear}.linear_out", 4, 4, 2, 4)
    return shapes | mixed("blocks.0.mlp.layers.2", 4, 2, 4, 2)


def lgatr_shapes(multi_query, maps):
    """LGATr(2, 1, 2, 1, 1, 2) with two heads and one block."""
    linear, mlp = functools.partial(mixed, maps=maps), "blocks.0.mlp.layers"
    shapes = linear("linear_in", 2, 2, 1, 2) | linear("linear_out", 2, 1, 2, 1)
    shapes |= attention_shapes(1, multi_query, maps)
    shapes |= linear(f"{mlp}.0.linear_left", 2, 8, 2) | linear(f"{mlp}.0.linear_right", 2, 8, 2)
    return shapes | linear(f"{mlp}.0.linear_out", 8, 8, 2, 8) | linear(f"{mlp}.2", 8, 2, 8, 2)


GATR = {
    True: (
        "1.280686 .321928 -.017853 -.025395 -.009597 -.066977 -.120564 -.063289 .008629 .028151 "
        ".021790 .028475 .175147 .160833 .007264 -.154593",
        "2.283508 1.724115 1.218007",
    ),
    False: (
        "-.260506 .660316 -.036890 -.069614 -.038335 .056450 .078310 .028161 -.017087 -.038862 "
        "-.024908 -.049947 -.161799 -.124896 .000989 -.191232",
        "-.070543 -.135206 -.174412",
    ),
}


@pytest.mark.parametrize("multi_query", GATR)
def test_gatr_network(multi_query):
    state = from_gatr(filled(gatr_shapes(multi_query)), configuration=TWO_HEADS)
    network = GATr(2, 1, 2, 1, 1, 2, 1, 2, multi_query, blade_dim=-1)
    x, scalars = loaded(network, state)(waves(1, 3, 2, 16), waves(1, 3, 1, phase=0.5))
    for found, text in zip((x[0, 0], scalars), GATR[multi_query], strict=True):
        same(found, [float(v) for v in text.split()])


LGATR = {
    10: (
        "1.600311 -.070145 -.114613 .114279 .024580 -.413693 .754918 -.039728 -.852831 .442576 "
        "-.038912 .071828 .143401 .373528 .021885 .291778",
        ".768500 .189535 -.069968",
    ),
    5: (
        ".648572 .125430 -.064414 -.195823 -.157908 .022890 .078397 .034563 -.019237 -.059149 "
        "-.044395 -.127097 .191816 .332757 .179257 -.078103",
        ".144474 -.148303 -.261813",
    ),
}


@pytest.mark.parametrize("maps", LGATR)
def test_lgatr_network(maps):
    pseudoscalar = maps == 10
    state = from_lgatr(filled(lgatr_shapes(not pseudoscalar, maps)), configuration=TWO_HEADS)
    network = LGATr(2, 1, 2, 1, 1, 2, 1, 2, not pseudoscalar, pseudoscalar, blade_dim=-1)
    x, scalars = loaded(network, state)(waves(1, 3, 2, 16), waves(1, 3, 1, phase=0.5))
    for found, text in zip((x[0, 0], scalars), LGATR[maps], strict=True):
        same(found, [float(v) for v in text.split()])


def test_gatr_layers():
    state = {"weight": X[:9].view(1, 1, 9), "bias": torch.tensor([[10.0]])}
    linear = loaded(EquiLinear(1, 1, blade_dim=-1), from_gatr(state))
    expected = (
        "11 8 3 4 5 19.4728 24.7390 30.0052 11.0227 12.2474 13.4722 65.5692 72.1880 78.8068 30 215"
    )
    same(linear(X[None]), [float(v) for v in expected.split()], digits=4)
    reference = torch.zeros(16).double()
    reference[14] = 1
    join = equivariant_join(*(x[None] for x in (X, X.flip(0), reference)), blade_dim=-1)
    same(
        join,
        [342, -404, -398, -364, -342, 165, 133, 135, 86, 88, 90, -92, -77, -62, -47, 16],
    )


def test_lgatr_layers():
    algebra = Algebra.cl(1, 3)
    expected = {
        5: [11, 4, 6, 8, 10, 18, 21, 24, 27, 30, 33, 48, 52, 56, 60, 80],
        10: [-149, -131, -120, 125, -98, -70, 101, -48, 91, -26, 81, 83, 24, 77, 74, 86],
    }
    for maps, numbers in expected.items():
        state = {"weight": X[:maps].view(1, 1, maps), "bias": torch.tensor([[10.0]])}
        linear = EquiLinear(1, 1, algebra, pseudoscalar=maps == 10, blade_dim=-1)
        same(loaded(linear, from_lgatr(state))(X[None]), numbers)


def test_lgatr_mixed_layer():
    shapes = {
        "weight": (1, 2, 10),
        "s2mvs.weight": (2, 1),
        "s2mvs.bias": (2,),
        "mvs2s.weight": (1, 4),
        "mvs2s.bias": (1,),
        "s2s.weight": (1, 1),
    }
    layer = MixedLinear(2, 1, 1, 1, Algebra.cl(1, 3), pseudoscalar=True, blade_dim=-1)
    x, scalars = loaded(layer, from_lgatr(filled(shapes)))(waves(2, 16), waves(1, phase=0.5))
    expected = (
        ".832966 -.078687 .769405 -.502293 .214064 -.312443 -.932657 -.589145 "
        ".342108 .802785 .647923 -.551460 .149185 -1.082514 .342323 1.039140"
    )
    same(x, [float(v) for v in expected.split()])
    same(scalars, [1.014120])


def test_cliffordlayers_convolution():
    algebra = Algebra((1, -1))
    state = {f"weight.{k}": X[:2].view(1, 1, 1, 2) + k for k in range(4)}
    state |= {"g": torch.tensor([1.0, -1]), "bias": X[:4].view(4, 1)}
    state = from_cliffordlayers(state, configuration={})
    conv = loaded(CliffordConv2d(algebra, 1, 1, (1, 2)), state)
    same(conv(X[:8].view(1, 1, 1, 2, 4)), [53, 36, 49, 56])


def lgatr_2_shapes():
    """L-GATr 2: gains behind the norms of a block, no biases before the attention."""
    shapes = lgatr_shapes(False, 10)
    before = "qkv_module.in_linear."
    shapes = {k: v for k, v in shapes.items() if before not in k or not k.endswith(".bias")}
    gains = {f"blocks.0.norm{i}.weight_mv": (2, 5) for i in (1, 2)}
    return shapes | gains | {f"blocks.0.norm{i}.weight_s": (2,) for i in (1, 2)}


SECOND = {
    "gelu": (
        ".378627 .005839 -.127516 .273636 .028066 -.327089 1.139209 -.024765 "
        "-.372168 .347218 -.827103 .119674 .159631 .332552 -.080328 1.884209",
        "-.492501 -1.159862 -2.490053",
    ),
    "tanh": (
        ".962610 -.013335 -.066725 .304528 .100759 -.389197 1.230485 -.042132 "
        "-.407544 .422976 -.887696 .094309 .169250 .309774 -.072981 2.078891",
        ".194687 -.469229 -1.896708",
    ),
}


@pytest.mark.parametrize("name", SECOND)
def test_lgatr_2_network(name):
    """Red before: it did not load."""
    options = TWO_HEADS | {"mlp": {"nonlinearity": name}}
    state = from_lgatr(filled(lgatr_2_shapes()), configuration=options)
    ours = {"gelu": "gelu_tanh"}.get(name, name)
    options = {"activation": ours, "options": LGATR_2}
    network = LGATr(2, 1, 2, 1, 1, 2, 1, 2, False, True, **options, blade_dim=-1)
    x, scalars = loaded(network, state)(waves(1, 3, 2, 16), waves(1, 3, 1, phase=0.5))
    for found, text in zip((x[0, 0], scalars), SECOND[name], strict=True):
        same(found, [float(v) for v in text.split()])


SIGMOID = {
    "gatr": (
        "1.677773 .234215 -.017763 -.025273 -.009542 -.066905 -.120485 -.063210 "
        ".008632 .028163 .021798 .028441 .174858 .160563 .007248 -.160004",
        "2.220069 1.658744 1.152707",
    ),
    "lgatr": (
        "1.290921 -.039222 -.176668 .107775 .014221 -.382216 .816549 .172963 "
        "-.814647 .234232 -.136890 .079134 .139563 .431650 -.006009 .441678",
        ".503814 -.277007 -.824769",
    ),
}


@pytest.mark.parametrize("name", SIGMOID)
def test_another_activation(name):
    """Red before: the checkpoint loaded, as gelu."""
    options = TWO_HEADS | {"mlp": {"activation": "sigmoid"}}
    if name == "gatr":
        state = from_gatr(filled(gatr_shapes(True)), configuration=options)
        build = functools.partial(GATr, 2, 1, 2, 1, 1, 2, 1, 2, blade_dim=-1)
    else:
        state = from_lgatr(filled(lgatr_shapes(False, 10)), configuration=options)
        build = functools.partial(LGATr, 2, 1, 2, 1, 1, 2, 1, 2, blade_dim=-1)
    network = loaded(build(activation="sigmoid"), state)
    x, scalars = network(waves(1, 3, 2, 16), waves(1, 3, 1, phase=0.5))
    for found, text in zip((x[0, 0], scalars), SIGMOID[name], strict=True):
        same(found, [float(v) for v in text.split()])
    with pytest.raises(ShapeError, match=r"activation is 'sigmoid' in the checkpoint.*has 'gelu'"):
        loaded(build(), state)


@pytest.mark.parametrize("bias", [False, True])
def test_attention_over_other_items_of_both_versions(bias):
    """Red before: heads were those of another attention, version 1 was normalised as version 2."""
    state = {}
    for name, out, into in (("q", 2, 2), ("kv", 4, 3), ("out", 2, 2)):
        state[f"{name}_linear.weight"] = torch.ones(out, into, 10)
        if bias or name == "out":
            state[f"{name}_linear.bias"] = torch.ones(out, 1)
    converted = from_lgatr(state, configuration={"crossattention": {"num_heads": 2}})
    options = {"bias": bias, "blade_dim": -1}
    module = LGATrCrossAttention(2, 0, 3, 0, 2, **options)
    if bias:
        with pytest.raises(ShapeError, match=r"norm_heads is False in the checkpoint.*has True"):
            module.load_state_dict(converted)
        options |= {"hidden": (1, 0), "pseudoscalar": True}
        module = CrossAttention(2, 0, 3, 0, 2, False, SPACETIME, **options)
    module.load_state_dict(converted)


def test_a_slim_network_of_the_first_version_is_refused():
    state = {"linear_in.weight_v": torch.ones(4, 2), "blocks.0.attention.metric": torch.ones(4)}
    with pytest.raises(ShapeError, match=r"a slim network of L-GATr 1: torchweft has those of ver"):
        from_lgatr(state, configuration={})


def test_another_number_of_heads_is_refused():
    state = from_lgatr(filled(lgatr_shapes(False, 10)), configuration=TWO_HEADS)
    with pytest.raises(ShapeError, match=r"heads is 2 in the checkpoint.*has 1.*heads=2"):
        LGATr(2, 1, 2, 1, 1, 2, 1, 1, blade_dim=-1).load_state_dict(state)


@pytest.mark.parametrize(
    ("load", "options", "match"),
    [
        (
            from_gatr,
            {"attention": {"normalizer_eps": 0.1}},
            r"normalizer_eps is 0.1.*must be 0.001",
        ),
        (
            from_lgatr,
            {"crossattention": {"additional_q_mv_channels": 1}},
            r"additional_q_mv_channels is 1.*must be 0",
        ),
        (from_lgatr, {"mlp": {"shape": 3}}, r"mlp shape is 3.*not known"),
        (from_cegnn, {"invariant": "norm"}, r"invariant is 'norm'.*must be 'mag2'"),
        (from_cegnn, {"residual": False}, r"residual is False.*must be True"),
        (from_cliffordlayers, {"groups": 2}, r"groups is 2.*must be 1.*Keep the original"),
    ],
)
def test_options_without_a_counterpart_are_refused(load, options, match):
    """Red before: the checkpoints loaded, and computed another function."""
    algebra = [Algebra.cl(3)] if load is from_cegnn else []
    with pytest.raises(ShapeError, match=match):
        load({}, *algebra, configuration=options)


def test_options_are_read_off_the_original():
    """From attributes of its modules, which are named as in CEGNN and cliffordlayers."""

    class MVSiLU(torch.nn.Module):
        invariant = "norm"

    class CliffordConv2d(torch.nn.Module):
        groups, rotation, padding_mode = 2, False, "zeros"

    for load, module, match in (
        (functools.partial(from_cegnn, algebra=Algebra.cl(3)), MVSiLU(), "invariant is 'norm'"),
        (from_cliffordlayers, CliffordConv2d(), "groups is 2"),
    ):
        with pytest.raises(ShapeError, match=match):
            load(torch.nn.Sequential(module))


@pytest.mark.parametrize("load", [from_gatr, from_lgatr, from_cegnn, from_cliffordlayers])
def test_a_state_dict_needs_its_configuration(load):
    algebra = [Algebra.cl(3)] if load is from_cegnn else []
    state = {"blocks.0.mlp.layers.2.b": torch.ones(1)}
    with pytest.raises(ShapeError, match=r"without its configuration.*Pass the module itself"):
        load(state, *algebra)


LOADERS = {
    "GATr": from_gatr,
    "L-GATr": from_lgatr,
    "CEGNN": functools.partial(from_cegnn, algebra=SPACETIME),
    "cliffordlayers": functools.partial(from_cliffordlayers, configuration={}),
}


@pytest.mark.parametrize("project", LOADERS)
def test_what_holds_nothing_of_the_project_is_refused(project):
    """Red before: the given state came back as it was; other objects ended in AttributeErrors."""
    load = LOADERS[project]
    with pytest.raises(DTypeError, match=rf"x\.y was given: .* of a layer of {project}, of which"):
        load({"x.y": torch.ones(2)})
    with pytest.raises(DTypeError, match=rf"a NoneType was given: .* module of {project}.* Pass"):
        load(None)
    assert not load({})  # of a layer without parameters


@pytest.mark.parametrize("project", ["GATr", "L-GATr", "CEGNN"])
def test_a_module_of_torch_alone_is_refused(project):
    with pytest.raises(DTypeError, match=r"weight, bias was given: .*Pass the module"):
        LOADERS[project](torch.nn.Linear(2, 2))


def test_factors_have_the_precision_of_the_checkpoint():
    """Nine maps over √C(4, g) and √C(3, g); seen red with roots taken in float32."""
    sizes = [math.comb(4, g) for g in range(5)] + [math.comb(3, g) for g in range(4)]
    found = from_gatr({"weight": torch.ones(1, 1, 9, dtype=torch.float64)})["weight"].flatten()
    for factor, size in zip(found.tolist(), sizes, strict=True):
        assert abs(factor * math.sqrt(size) - 1) < 2 * torch.finfo(torch.float64).eps


def test_maps_of_another_algebra_are_refused():
    with pytest.raises(ShapeError, match=r"weight is \(1, 1, 10\): GATr's .* has 9 maps.*lgatr"):
        from_gatr({"weight": torch.ones(1, 1, 10)})


def test_layouts_share_their_parameters():
    state = from_gatr(filled(gatr_shapes(True)), configuration=TWO_HEADS)
    first, last = (loaded(GATr(2, 1, 2, 1, 1, 2, 1, 2, blade_dim=dim), state) for dim in (0, -1))
    x, scalars = waves(2, 3, 2, 16), waves(2, 3, 1)
    found = first(x.movedim(-1, 0), scalars)[0].movedim(0, -1)
    same(found, last(x, scalars)[0].flatten().tolist())
