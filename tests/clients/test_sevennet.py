"""from_sevennet on models of the real SevenNet.

SevenNet computes in float32 alone: for exact results its one-hot rows are cast to float64.
Seen red with: items of products joined in ir_mul rows.
"""

import copy
import functools

import pytest
import torch

pytest.importorskip("sevenn")
import sevenn._const as const
import sevenn._keys as KEY  # noqa: N812 - its name there
from ase.build import bulk
from sevenn.atom_graph_data import AtomGraphData
from sevenn.model_build import build_E3_equivariant_model
from sevenn.nn.convolution import IrrepsScatterGatterFusedConvolution
from sevenn.train.dataload import unlabeled_atoms_to_graph

from tests.clients.agreement import assert_agree, default_dtype, names_of, operations, trained
from torchweft import o3
from torchweft.errors import DTypeError

pytestmark = pytest.mark.filterwarnings("ignore")

R_MAX = 4.0
VARIANTS = {
    "parity": {KEY.IS_PARITY: True},
    "no parity": {KEY.IS_PARITY: False, KEY.LMAX: 2},
    "linear": {KEY.SELF_CONNECTION_TYPE: "linear", KEY.TRAIN_DENOMINTAOR: True},
    "biases": {KEY.USE_BIAS_IN_LINEAR: True, KEY.READOUT_AS_FCN: True},
    "XPLOR": {KEY.CUTOFF_FUNCTION: {"cutoff_function_name": "XPLOR", "cutoff_on": 3.0}},
}


def original(dtype=torch.float64, **settings):
    """A model of seed 0, built in float64 and rounded."""
    own = {KEY.CUTOFF: R_MAX, KEY.NUM_SPECIES: 2, KEY.TYPE_MAP: {8: 0, 14: 1}}
    own |= {KEY.SHIFT: 0.5, KEY.SCALE: 2.0, KEY.CONV_DENOMINATOR: 4.0}
    own |= {KEY.LMAX: 1, KEY.NODE_FEATURE_MULTIPLICITY: 4, KEY.NUM_CONVOLUTION: 2}
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        config = copy.deepcopy(const.DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG) | own | settings
        model = build_E3_equivariant_model(config).to(dtype).train()
    model.set_is_batch_data(False)
    model.onehot_idx_to_onehot.register_forward_hook(functools.partial(_cast, dtype))
    return model


def _cast(dtype, module, args, data):
    for name in (KEY.NODE_FEATURE, KEY.NODE_ATTR):
        data[name] = data[name].to(dtype)


@functools.cache
def graph():
    crystal = bulk("SiO", "zincblende", a=4.9)
    crystal.rattle(0.1, seed=0)
    found = AtomGraphData.from_numpy_dict(unlabeled_atoms_to_graph(crystal, R_MAX)).to_dict()
    return {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}


def data(dtype):
    return {k: v.to(dtype) if v.is_floating_point() else v.clone() for k, v in graph().items()}


def results(model, dtype=torch.float64):
    given = data(dtype)
    given[KEY.EDGE_VEC].requires_grad_()
    out = model(given)
    vector = torch.arange(out[KEY.PRED_FORCE].numel(), dtype=dtype).view(-1, 3).cos()
    (product,) = torch.autograd.grad(
        out[KEY.PRED_FORCE], given[KEY.EDGE_VEC], vector, retain_graph=True
    )
    found = trained(model, out[KEY.PRED_TOTAL_ENERGY], out[KEY.PRED_FORCE])
    return found | {"stress": out[KEY.PRED_STRESS].detach(), "product": product}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_gives_what_it_gave(variant):
    settings = VARIANTS[variant]
    model = original(**settings)
    single = copy.deepcopy(model).float()
    single.onehot_idx_to_onehot._forward_hooks.clear()
    exact, noisy = results(model), results(single, torch.float32)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = {name: id(p) for name, p in model.named_parameters()}

    found = o3.from_sevennet(model)
    assert {name: id(p) for name, p in found.named_parameters()} == parameters
    assert not names_of(found, "e3nn")
    convolutions = [m for m in found.modules() if isinstance(m, o3.TensorProductConv)]
    assert len(convolutions) == 2
    assert_agree(results(found), exact, noisy)
    single = o3.from_sevennet(single)
    assert_agree(results(single, torch.float32), exact, noisy, torch.float32)

    # weights go both ways, with every table
    other = original(**settings)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(1.25)
    other.load_state_dict(o3.to_e3nn(found), strict=True)
    assert_agree(results(other), results(found), noisy, multiple=64)
    found.load_state_dict(state, strict=True)
    assert_agree(results(found), exact, noisy)


def test_half_of_the_operations():
    model = original(**{KEY.LMAX: 3}).eval()
    before = operations(lambda: model(data(torch.float64)))
    o3.from_sevennet(model)
    for module in model.modules():  # None is torch under a dispatch mode
        if isinstance(module, o3.SphericalHarmonics):
            pytest.importorskip("numba")
            module.backend = "numba"
    after = operations(lambda: model(data(torch.float64)))
    assert after <= 0.5 * before, (after, before)


def test_the_mode_of_a_model_stays():
    model = o3.from_sevennet(original().eval())
    assert not [name for name, module in model.named_modules() if module.training]


def test_models_of_other_libraries():
    model = original()
    conv = model._modules["1_convolution"]
    model._modules["1_convolution"] = IrrepsScatterGatterFusedConvolution.from_irreps_convolution(
        conv
    )
    with pytest.raises(DTypeError, match=r"1_convolution is an IrrepsScatter.*without cuEqui"):
        o3.from_sevennet(model)
    model = original()
    model._modules["0_convolution"].convolution = torch.nn.Identity()
    with pytest.raises(DTypeError, match=r"0_convolution is an IrrepsConvolution with a torch.*Id"):
        o3.from_sevennet(model)
    with pytest.raises(DTypeError, match="from_sevennet was given a Linear: it must hold layers"):
        o3.from_sevennet(torch.nn.Linear(1, 1))
