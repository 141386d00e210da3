"""o3.calculator with models of the real SevenNet: the numbers of SevenNetCalculator.

Its models compute in float32: how far its numbers change where atoms are moved as a whole measures
the difference from ours.
"""

import pytest
import torch

pytest.importorskip("sevenn")
pytest.importorskip("vesin")

from ase import Atoms
from sevenn import _keys as keys
from sevenn._const import DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG
from sevenn.calculator import SevenNetCalculator
from sevenn.model_build import build_E3_equivariant_model

from tests.clients.agreement import properties
from tests.clients.maces import rattled
from torchweft import o3
from torchweft.errors import DTypeError


def sevennet():
    torch.manual_seed(0)
    return build_E3_equivariant_model(
        DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG
        | {
            keys.CUTOFF: 4.0,
            keys.NODE_FEATURE_MULTIPLICITY: 4,
            keys.NUM_CONVOLUTION: 2,
            keys.NUM_SPECIES: 2,
            keys.TYPE_MAP: {8: 0, 14: 1},
            keys.CONV_DENOMINATOR: [20.0, 20.0],
            keys.SHIFT: 0.0,
            keys.SCALE: 1.0,
            keys.CHEMICAL_SPECIES: ["O", "Si"],
        }
    ).eval()


def structures():
    sheared = rattled()
    sheared.set_cell(sheared.cell.array @ [[1, 0.1, 0], [0, 1, 0.05], [0, 0, 0.95]], True)
    return {"solid": sheared, "cluster": Atoms(sheared.symbols, sheared.positions)}


@pytest.mark.parametrize("name", ["solid", "cluster"])
def test_numbers_are_those_of_sevennets_calculator(name):
    atoms = structures()[name]
    moved = atoms.copy()
    moved.translate([0.1, 0.2, 0.3])
    own = SevenNetCalculator(sevennet(), file_type="model_instance", device="cpu")
    found = properties(atoms, o3.calculator(sevennet()))
    theirs, same = (properties(a, own) for a in (atoms, moved))
    noise = max(apart(a, b) for a, b in zip(theirs, same, strict=True))
    assert 0 < noise < 2.0**-12
    assert all(apart(a, b) <= 8 * noise for a, b in zip(found, theirs, strict=True))


def apart(value, other):
    """The largest difference over the largest value."""
    return float((value - other).abs().max() / other.abs().max())


def test_another_dtype_than_float32():
    with pytest.raises(DTypeError, match=r"dtype is torch.float64: SevenNet embeds .* float32"):
        o3.calculator(sevennet(), dtype=torch.float64)


def test_a_model_of_several_modalities():
    model = sevennet()
    model.modal_map = {"a": 0, "b": 1}
    with pytest.raises(DTypeError, match=r"has the modalities \['a', 'b'\]: .*SevenNetCalculator"):
        o3.calculator(model)
