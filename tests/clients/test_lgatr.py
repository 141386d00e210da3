"""L-GATr 2's networks in ours: outputs, gradients of inputs and of parameters, also in training.

In float64, with errors by the original's own in float32.
"""

import pytest
import torch

pytest.importorskip("lgatr")
import lgatr

from tests.clients.agreement import assert_agree
from torchweft import clifford
from torchweft.clifford import LGATR_2, from_lgatr
from torchweft.errors import ShapeError

ITEMS, OTHERS = 5, 3
NETWORK = {"num_blocks": 2, "in_mv_channels": 2, "out_mv_channels": 1, "hidden_mv_channels": 4}
NETWORK |= {"in_s_channels": 3, "out_s_channels": 2, "hidden_s_channels": 4}
NETWORK |= {"attention": {"num_heads": 2}, "mlp": {}}
SLIM = {"num_blocks": 2, "in_v_channels": 2, "out_v_channels": 1, "hidden_v_channels": 4}
SLIM |= {"in_s_channels": 3, "out_s_channels": 2, "hidden_s_channels": 4, "num_heads": 2}
OURS = (2, 1, 4, 3, 2, 4)
NO_SCALARS = {"in_s_channels": 0, "out_s_channels": 0, "hidden_s_channels": 0}
CROSS = {"num_heads": 4, "multi_query": True, "attn_ratio": 2, "head_scale": True}


def network(name, **options):
    """The original, and ours in its layout."""
    given = {k: {**NETWORK.get(k, {}), **v} if type(v) is dict else v for k, v in options.items()}
    return getattr(lgatr, name), {**NETWORK, **given}


def slim(name, **options):
    return getattr(lgatr, name), {**SLIM, **options}


def ours(name="LGATr", shape=OURS, activation="gelu_tanh", **options):
    kept = {} if "Slim" in name else {"options": LGATR_2}
    kept |= options
    return lambda: getattr(clifford, name)(*shape, activation=activation, blade_dim=-1, **kept)


def second(**options):
    return LGATR_2._replace(**options)


def of_heads(count=2, **options):
    return ours(blocks=2, heads=count, **options)


CASES = {
    "default": (network("LGATr"), of_heads()),
    "multi_query": (
        network("LGATr", attention={"multi_query": True}),
        of_heads(multi_query=True),
    ),
    "reflections": (
        network("LGATr", primitives={"subgroup": False}),
        of_heads(pseudoscalar=False),
    ),
    "attention": (
        network("LGATr", attention={"attn_ratio": 2, "head_scale": True}),
        of_heads(options=second(attention_ratio=2, head_scale=True)),
    ),
    "mlp": (
        network("LGATr", mlp={"mlp_ratio": 2, "num_layers_mlp": 3, "nonlinearity": "silu"}),
        of_heads(activation="silu", options=second(mlp_ratio=2, mlp_layers=3)),
    ),
    "one_layer": (
        network(
            "LGATr",
            mlp={"num_layers_mlp": 1, "nonlinearity": "silu"},
            primitives={"sparse_gp": False},
        ),
        of_heads(activation="silu", options=second(mlp_layers=1)),
    ),
    "no_products": (
        network("LGATr", primitives={"geometric_product": False}, norm_elementwise_affine=False),
        of_heads(options=second(products=False, norm_gains=False)),
    ),
    "no_bivectors": (
        network("LGATr", primitives={"bivector": False}),
        of_heads(options=second(bivectors=False)),
    ),
    "reinsert": (
        network("LGATr", reinsert_mv_channels=(1,), reinsert_s_channels=(2, 0)),
        of_heads(reinsert=((1,), (2, 0))),
    ),
    "reinsert_multi_query": (
        network("LGATr", reinsert_mv_channels=(1, 0), attention={"multi_query": True}),
        of_heads(reinsert=((1, 0), ()), multi_query=True),
    ),
    "dropout": (
        network("LGATr", dropout_prob=0.3, mlp={"num_layers_mlp": 3}),
        of_heads(options=second(dropout=0.3, mlp_layers=3)),
    ),
    "no_products_no_scalars": (
        network("LGATr", primitives={"geometric_product": False}, **NO_SCALARS),
        of_heads(shape=(2, 1, 4, 0, 0, 0), options=second(products=False)),
    ),
    "conditional": (
        network(
            "ConditionalLGATr",
            mv_channels_cond=3,
            s_channels_cond=2,
            crossattention=CROSS,
            dropout_prob=0.3,
        ),
        ours(
            "ConditionalLGATr",
            (*OURS, 3, 2, 2, (2, 4), (False, True)),
            options=second(dropout=0.3),
            cross_options=second(attention_ratio=2, head_scale=True, dropout=0.3),
        ),
    ),
    "slim": (slim("LGATrSlim"), ours("LGATrSlim", (*OURS, 2, 2))),
    "slim_options": (
        slim(
            "LGATrSlim",
            nonlinearity="relu",
            nonlinearity_v=None,
            mlp_ratio=3,
            attn_ratio=2,
            num_layers_mlp=3,
            norm_elementwise_affine=False,
            dropout_prob=0.3,
        ),
        ours(
            "LGATrSlim",
            (*OURS, 2, 2),
            "relu",
            vector_activation="relu",
            mlp_ratio=3,
            attention_ratio=2,
            mlp_layers=3,
            norm_gains=False,
            dropout=0.3,
        ),
    ),
    "conditional_slim": (
        slim("ConditionalLGATrSlim", v_channels_cond=3, s_channels_cond=2),
        ours("ConditionalLGATrSlim", (*OURS, 3, 2, 2, 2)),
    ),
}


def inputs_of(name, dtype):
    generator = torch.Generator().manual_seed(0)
    components = 4 if "slim" in name else 16
    scalars = 0 if "no_scalars" in name else 3
    shapes = [(2, ITEMS, 2, components), (2, ITEMS, scalars)]
    if "conditional" in name:
        shapes[1:1] = [(2, OTHERS, 3, components)]
        shapes += [(2, OTHERS, 2)]
    given = [3 * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).requires_grad_() for x in given]


def results(module, inputs):
    """Outputs, and gradients of inputs and parameters, in training."""
    torch.manual_seed(0)
    found = dict(zip(("vectors", "scalars"), module.train()(*inputs), strict=True))
    found = {k: v for k, v in found.items() if v is not None and v.numel()}
    loss = sum((v * torch.arange(v.numel()).cos().view_as(v)).sum() for v in found.values())
    parameters = dict(module.named_parameters())
    every = [*inputs, *parameters.values()]
    needed = [x for x in every if x.requires_grad and x.numel()]
    grads = dict(zip(needed, torch.autograd.grad(loss, needed, allow_unused=True), strict=True))
    of_each = [torch.zeros_like(x) if grads.get(x) is None else grads[x] for x in every]
    found |= {f"input {i}": g for i, g in enumerate(of_each[: len(inputs)])}
    named = dict(zip(parameters, of_each[len(inputs) :], strict=True))
    return {k: v.detach() for k, v in found.items()}, named


@pytest.mark.parametrize("name", CASES)
def test_network(name):
    """Red before: 13 of these 16 checkpoints did not load."""
    (build, options), ours = CASES[name]
    torch.manual_seed(1)
    original = build(**options)
    with torch.no_grad():
        for parameter in original.parameters():  # gains and biases too
            parameter.add_(0.1 * torch.randn_like(parameter))
    found = {}
    for dtype in (torch.float32, torch.float64):
        original.to(dtype)
        for buffer_owner in original.modules():
            if getattr(buffer_owner, "epsilon", None) is not None:  # a constant in float32
                buffer_owner.epsilon = torch.tensor(0.01, dtype=dtype)
        values, grads = results(original, inputs_of(name, dtype))
        found[dtype] = values | from_lgatr(grads, configuration={})
    module = ours().double()
    module.load_state_dict(from_lgatr(original))
    values, grads = results(module, inputs_of(name, torch.float64))
    values |= grads
    has_values = [k for k, v in values.items() if v.numel()]  # without scalars some are empty
    assert values.keys() == found[torch.float64].keys()
    of_each = (values, found[torch.float64], found[torch.float32])
    assert_agree(*({k: given[k] for k in has_values} for given in of_each))


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("default", {"heads": 4}, r"heads is 2 in the checkpoint.*has 4"),
        ("default", {"activation": "gelu"}, r"activation is 'gelu_tanh' in the checkpoint"),
        ("no_bivectors", {}, r"bivectors is False in the checkpoint.*has True"),
        ("reinsert", {"reinsert": ((0,), (2, 0))}, r"features is \(1,\) in the checkpoint"),
        ("slim", {"vector_activation": "tanh"}, r"activations is \('gelu_tanh', 'sigmoid'\)"),
    ],
)
def test_options_that_no_shape_shows(name, options, match):
    (build, given), _ = CASES[name]
    state = from_lgatr(build(**given))
    if name == "slim":
        module = ours("LGATrSlim", (*OURS, 2, 2), **options)()
    else:
        module = ours(**{"blocks": 2, "heads": 2} | options)()
    with pytest.raises(ShapeError, match=match):
        module.load_state_dict(state)


def test_cross_attention_alone():
    """Red before: its number of heads was taken for that of a self attention."""
    config = lgatr.CrossAttentionConfig(
        q_mv_channels=2, kv_mv_channels=3, out_mv_channels=2, num_heads=2
    )
    original = lgatr.layers.CrossAttention(config, lgatr.PrimitivesConfig()).double()
    module = clifford.LGATrCrossAttention(2, 0, 3, 0, 2, bias=False, blade_dim=-1).double()
    module.load_state_dict(from_lgatr(original))
    x, other = torch.randn(2, 5, 2, 16).double(), torch.randn(2, 4, 3, 16).double()
    none = [t[..., 0, :0] for t in (x, other)]
    found, expected = module(x, none[0], other, none[1])[0], original(x, other)[0]
    assert_agree(
        {"x": found}, {"x": expected}, {"x": original.float()(x.float(), other.float())[0]}
    )
