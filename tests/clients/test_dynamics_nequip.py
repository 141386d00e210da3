"""o3.calculator with models of the real NequIP, Allegro and SevenNet: the numbers of their own.

Errors are measured by those that their calculators have in float32 against float64.
"""

import pytest
import torch

pytest.importorskip("nequip")
pytest.importorskip("vesin")

from ase.build import molecule
from nequip.ase import NequIPCalculator
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.model import NequIPGNNModel
from nequip.utils.global_state import set_global_state

from tests.clients.agreement import assert_agree, properties
from tests.clients.maces import rattled
from tests.recorders import structures_recorded
from torchweft import o3
from torchweft.errors import DTypeError, ShapeError

ELEMENTS = ["O", "Si"]
R_MAX = 4.0


def structures():
    sheared = rattled()
    sheared.set_cell(sheared.cell.array @ [[1, 0.1, 0], [0, 1, 0.05], [0, 0, 0.95]], True)
    return {"solid": sheared, "molecule": molecule("SiO")}


@pytest.fixture(autouse=True)
def _float64():
    """NequIP's models compute where it is the default, which NequIP sets for the process, once."""
    torch.set_default_dtype(torch.float64)


def nequip(dtype="float64", names=tuple(ELEMENTS)):
    set_global_state()
    return NequIPGNNModel(
        seed=0,
        model_dtype=dtype,
        type_names=list(names),
        r_max=R_MAX,
        num_layers=2,
        l_max=1,
        num_features=4,
        radial_mlp_depth=1,
        radial_mlp_width=8,
        avg_num_neighbors=20.0,
    ).eval()


def nequips_own(dtype):
    transforms = [ChemicalSpeciesToAtomTypeMapper(ELEMENTS), NeighborListTransform(r_max=R_MAX)]
    return NequIPCalculator(nequip(dtype), "cpu", transforms=transforms)


@pytest.mark.parametrize("name", ["solid", "molecule"])
@pytest.mark.parametrize("convert", [True, False], ids=["converted", "as it is"])
def test_numbers_are_those_of_nequips_calculator(name, convert):
    atoms = structures()[name]
    exact, plain = (properties(atoms, nequips_own(dtype)) for dtype in ("float64", "float32"))
    for dtype, precision in (("float64", 2.0**-29), ("float32", 1.0)):
        model = nequip(dtype)
        ours = o3.calculator(o3.from_nequip(model) if convert else model)
        for value, noisy, best in zip(properties(atoms, ours), plain, exact, strict=True):
            noise = float((noisy - best).abs().max())
            assert float((value - best).abs().max()) <= 4 * precision * noise


@pytest.mark.parametrize("convert", [True, False], ids=["converted", "as it is"])
def test_steps_of_a_recorded_model(convert):
    """As on a GPU, with room for edges: the numbers of the model without, and one record."""
    calculator, plain = (
        o3.calculator(o3.from_nequip(nequip()) if convert else nequip()) for _ in range(2)
    )
    with structures_recorded() as made:
        for seed in range(4):
            atoms = structures()["solid"]
            atoms.rattle(0.02, seed=seed)
            found = properties(atoms, calculator)
            with structures_recorded(False):
                exact = properties(atoms, plain)
            rounded = properties(atoms, nequips_own("float32"))
            names = ("energy", "forces", "stress")
            assert_agree(*(dict(zip(names, t, strict=True)) for t in (found, exact, rounded)))
    assert [(r.rehearsals, r.records, r.replays) for r in made] == [(1, 1, 2)]


def test_another_dtype_than_it_was_built_in():
    with pytest.raises(DTypeError, match=r"dtype is torch.float32 and the model was built in .*64"):
        o3.calculator(nequip(), dtype=torch.float32)


def test_types_that_are_no_elements():
    with pytest.raises(DTypeError, match=r"types are \['water', 'salt'\]: .* chemical symbols"):
        o3.calculator(nequip(names=("water", "salt")))


def test_atoms_of_another_element():
    atoms = molecule("H2O")
    atoms.calc = o3.calculator(nequip())
    with pytest.raises(ShapeError, match="the atoms have H: the model has only the atomic numbers"):
        atoms.get_potential_energy()
