"""from_allegro on models of the real Allegro."""

import functools

import pytest
import torch

pytest.importorskip("allegro")
from allegro.model import AllegroModel

from tests.clients import test_nequip as nequip
from tests.clients.agreement import assert_agree, names_of
from torchweft import o3
from torchweft.errors import DTypeError

state = nequip.state
pytestmark = pytest.mark.filterwarnings("ignore")

VARIANTS = {
    "coupled": {},
    "parity": {"parity": True, "l_max": 2, "num_layers": 3},
    "uncoupled": {"tp_path_channel_coupling": False},
    "one path": {"l_max": 0, "num_layers": 1, "tp_path_channel_coupling": False},
    "diagonal": {"num_layers": 1},
    "one weight": {"weight_individual_irreps": False},
}


def original(dtype="float64", **settings):
    embed = {"_target_": "allegro.nn.TwoBodyBesselScalarEmbed", "num_bessels": 4}
    own = {"seed": 0, "model_dtype": dtype, "r_max": nequip.R_MAX, "type_names": ["O", "Si"]}
    own |= {"num_layers": 2, "l_max": 1, "num_scalar_features": 8, "num_tensor_features": 3}
    own |= {"avg_num_neighbors": 16.0, "radial_chemical_embed": embed, "parity": False}
    own |= {"per_type_energy_scales": 1.0, "per_type_energy_shifts": 0.5}
    return AllegroModel(**own | settings).train()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_gives_what_it_gave(variant):
    make = functools.partial(original, **VARIANTS[variant])
    model, single = make(), make("float32")
    single.load_state_dict(model.state_dict())
    exact, noisy = nequip.results(model), nequip.results(single)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = {name: id(p) for name, p in model.named_parameters()}

    found = o3.from_allegro(model)
    assert {name: id(p) for name, p in found.named_parameters()} == parameters
    assert not names_of(found, "e3nn")
    assert not [name for name in names_of(found, "allegro") if ".tps." in name]
    assert all(module.training for module in found.modules())
    assert [m for m in found.modules() if isinstance(m, o3.TensorProduct)]
    assert_agree(nequip.results(found), exact, noisy)
    assert_agree(nequip.results(o3.from_allegro(single)), exact, noisy, torch.float32)

    # weights go both ways, with every table
    other = make()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(1.25)
    other.load_state_dict(o3.to_e3nn(found), strict=True)
    assert_agree(nequip.results(other), nequip.results(found), noisy, multiple=64)
    found.load_state_dict(state, strict=True)
    assert_agree(nequip.results(found), exact, noisy)


def test_what_goes_where():
    """No error sends a user to a function that raises."""
    with pytest.raises(DTypeError, match=r"products of Allegro.*Pass it to from_allegro\."):
        o3.from_nequip(original())
    model = nequip.original()
    with pytest.raises(DTypeError, match=r"products \(Contracter\)\. Pass it to from_nequip"):
        o3.from_allegro(model)
    o3.from_nequip(model)
    with pytest.raises(DTypeError, match="Pass the model before it is scripted"):
        o3.from_allegro(torch.nn.Linear(1, 1))
    model = original()
    model.model.func.allegro.tps[0].irrep_normalization = None
    with pytest.raises(DTypeError, match=r"allegro\.tps\.0 is a Contracter with irrep_normaliz"):
        o3.from_allegro(model)
