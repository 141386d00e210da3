"""Scripts of docs/migrate beside the library that they come from, wherever it is installed.

In float32, with errors by the script before, which also runs in float64.  flash-clifford is no
package: TORCHWEFT_FLASH_CLIFFORD names a clone; without a GPU it needs TRITON_INTERPRET=1.
"""

import importlib.util
import os

import numpy as np
import pytest
import torch

from tests.clients.agreement import assert_agree
from tests.migration import results

pytestmark = pytest.mark.filterwarnings("ignore")

LIBRARIES = {
    "gatr_lgatr_cegnn": "lgatr",
    "geomloss": "geomloss",
    "mace": "mace",
    "nequip": "nequip",
    "pykeops": "pykeops",
    "spconv": "spconv",
    "torch_scatter": "torch_scatter",
}
CLONE = "TORCHWEFT_FLASH_CLIFFORD"


@pytest.mark.parametrize("name", LIBRARIES)
def test_numbers_are_those_of_the_original(name, tmp_path, monkeypatch):
    library = LIBRARIES[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: pip install {library}")
    monkeypatch.chdir(tmp_path)
    if name == "mace":
        save_a_model()
    assert_numbers_agree(name)


@pytest.mark.skipif(CLONE not in os.environ, reason=f"needs {CLONE}: a clone of flash-clifford")
def test_numbers_are_those_of_flash_clifford(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(os.environ[CLONE])
    assert_numbers_agree("flash_clifford")


def assert_numbers_agree(name):
    found, exact, plain = ({"result": result} for result in results(name))
    assert_agree(found, exact, plain, torch.float32)


def save_a_model():
    """my.model: MACE for molecules of H, C and O."""
    from tests.clients.maces import mace

    elements = [1, 6, 8]
    energies = np.array([-1.0, -2.0, -3.0])
    torch.save(mace(num_elements=3, atomic_numbers=elements, atomic_energies=energies), "my.model")
