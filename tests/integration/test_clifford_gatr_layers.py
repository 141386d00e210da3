"""GATr's options and further networks with its checkpoints: its own numbers come out.

The expected numbers, scalars of the result, were printed by GATr 1.4.2 in float64 and with the same
parameters.  Seen red with: angles twice as large, rows for columns, reinserted features
before the block's own, the layers of an MLP numbered as if there were no dropout.
"""

import re

import pytest
import torch

from tests.integration.test_clifford_checkpoints import same, waves
from torchweft.clifford import AxialGATr, CrossAttention, GATr, RotaryEncoding, from_gatr
from torchweft.clifford.layers.equilinear import GradeDropout
from torchweft.errors import ShapeError

SHAPE = (2, 1, 2, 1, 2, 2)


def as_saved(module, dropout=False):
    """A checkpoint of GATr with waves for parameters."""
    state = {}
    linear = 3 if dropout else 2
    for i, (name, tensor) in enumerate(sorted(module.state_dict().items())):
        name = name.replace("rotary.frequencies", "pos_encoding.inv_freq")
        name = name.replace("log_weights", "attention.log_weights").replace(".mvs2mvs.", ".")
        name = name.replace("mlp.bilinear.", "mlp.layers.0.")
        name = name.replace("mlp.linear.", f"mlp.layers.{linear}.")
        if name.startswith("blocks"):
            name = re.sub(r"attention\.([qkv]_linear)", r"attention.qkv_module.\1", name)
        shape = tuple(tensor.shape)
        shape = shape[::-1] if tensor.dim() == 3 else shape
        shape = (shape[0], 1, shape[1]) if "log_weights" in name else shape
        state[name] = tensor if "inv_freq" in name else waves(*shape, phase=0.1 * i, size=0.5)
    return state


def loaded(module, configuration, **options):
    module = module.double().eval()
    module.load_state_dict(from_gatr(as_saved(module, **options), configuration=configuration))
    return module


NETWORKS = {
    "rotary": (
        lambda: GATr(*SHAPE, 1, 2, rotary_base=100.0, blade_dim=-1),
        {"attention": {"num_heads": 2, "pos_encoding": True, "pos_enc_base": 100}},
        (3,),
        "1.836837 .990337 1.352000 1.373231 .883262 1.691242",
    ),
    "reinsert": (
        lambda: GATr(*SHAPE, 1, 2, reinsert=((1, 0), (0,)), blade_dim=-1),
        {
            "attention": {"num_heads": 2},
            "reinsert_mv_channels": (1, 0),
            "reinsert_s_channels": (0,),
        },
        (3,),
        "1.709970 -.646091 1.379089 -.295214 .698037 .343552",
    ),
    "dropout": (
        lambda: GATr(*SHAPE, 1, 2, dropout=0.3, blade_dim=-1),
        {"attention": {"num_heads": 2}, "dropout_prob": 0.3},
        (3,),
        "1.837533 -.709802 1.369005 -.402904 .610803 .341576",
    ),
    "axial": (
        lambda: AxialGATr(*SHAPE, 2, 2, rotary_bases=(100.0, None), blade_dim=-1),
        {"attention": {"num_heads": 2, "pos_enc_base": 100}, "pos_encodings": (True, False)},
        (2, 3),
        "-1.001613 .608840 -.681496 .698125 -1.907534 1.685245 "
        "-1.546893 1.457013 -1.898346 1.978909 -1.751328 1.952790",
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name):
    """Red before: GATr had none of these options, and there was no axial one."""
    build, configuration, items, expected = NETWORKS[name]
    network = loaded(build(), configuration, dropout=name == "dropout")
    _, scalars = network(waves(1, *items, 2, 16), waves(1, *items, 1, phase=0.5))
    same(scalars, [float(v) for v in expected.split()])


CROSS = ".762066 .753509 .051282 .465591 .210885 .251516"


def test_cross_attention():
    attention = CrossAttention(2, 2, 3, 1, heads=2, blade_dim=-1)
    attention = loaded(attention, {"attention": {"num_heads": 2}})
    x, other = waves(1, 3, 2, 16), waves(1, 4, 3, 16, phase=0.3)
    _, scalars = attention(x, waves(1, 3, 2), other, waves(1, 4, 1, phase=0.5))
    same(scalars, [float(v) for v in CROSS.split()])


def test_dropout_of_grades():
    """A grade of a multivector is dropped whole, or divided by 1 − p, and so is a scalar."""
    torch.manual_seed(0)
    dropout = GradeDropout(0.25)
    x, scalars = dropout(torch.ones(16, 50, 8), torch.ones(50, 30))
    for blades in dropout.algebra.of_grade:
        of_grade = x[blades.start : blades.stop]
        assert not (of_grade - of_grade[:1]).any()
    for found in (x, scalars):
        assert set(found.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert dropout.eval()(x, scalars) == (x, scalars)


def test_options_that_cannot_be_are_refused():
    with pytest.raises(ShapeError, match=r"scalars is 3: a rotary encoding turns pairs.*even"):
        RotaryEncoding(3)
    with pytest.raises(ShapeError, match=r"p is 1: it is the probability.*Pass p=0.1"):
        GradeDropout(1)
