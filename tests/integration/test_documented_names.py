"""Public names say what they are and stand in docs/api, files in the design, variables in docs.

Seen red with: a name left out of a page, a private name on one, a name twice, a function without a
docstring; a file of core that the house does not name, and one that is gone; a variable that no
page names.
"""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from tests.integration.public_api import PACKAGE, SPACES
from torchweft import o3

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "api"
LISTED = re.compile(r"^   ([\w.]+)$", re.MULTILINE)
"""A name in the list of a page."""


def public_names(space):
    """Names of a page: those of its namespace, and of the modules that this has."""
    module = importlib.import_module(f"{PACKAGE}.{space}".rstrip("."))
    for name in module.__all__:
        if not inspect.ismodule(getattr(module, name)):
            yield name
        elif space and f"{space}.{name}" in SPACES:
            yield from (f"{name}.{inner}" for inner in public_names(f"{space}.{name}"))


@pytest.mark.parametrize("space", [s for s in SPACES if "." not in s], ids=lambda s: s or PACKAGE)
def test_public_names_are_documented(space):
    page = (PAGES / f"{space or PACKAGE}.md").read_text(encoding="utf-8")
    assert sorted(LISTED.findall(page)) == sorted(public_names(space))
    module = importlib.import_module(f"{PACKAGE}.{space}".rstrip("."))
    for name in module.__all__:
        first = (getattr(module, name).__doc__ or "").partition("\n")[0]  # its own, none inherited
        assert first.strip(), f"{module.__name__}.{name} has no docstring"


def test_the_house_names_every_file_of_its_own():
    """Those of src/torchweft and of core; families have a page each."""
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    house = design.partition("src/torchweft/\n")[2].partition("\ntests/")[0]
    package = ROOT / "src" / "torchweft"
    for indent, folder, aside in ((2, package, "__main__"), (4, package / "core", "__init__")):
        named = re.findall(rf"^ {{{indent}}}(\w+)(?:\.py|/) ", house, re.MULTILINE)
        there = {path.stem for path in folder.glob("*.py")}
        there |= {path.parent.name for path in folder.glob("*/__init__.py")}
        assert sorted(named) == sorted(there - {aside})


def test_environment_variables_are_in_the_docs():
    """Those that the sources and the benchmarks read."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    read = re.compile(r"environ[\w.]*[\[(]\"(TORCHWEFT_\w+)\"")
    used = {name for file in files for name in read.findall(file.read_text(encoding="utf-8"))}
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    assert used
    assert not {name for name in used if f"`{name}" not in pages}


EQUITORCH = (
    "AlignToZWignerD AnglesToMatrix BatchRMSNorm BesselBasis CosineCutoff DenseWignerRotation "
    "Dropout Gate IrrepWiseLinear IrrepsLinear LayerRMSNorm MeanSquaredNorm MollifierCutoff Norm "
    "PolynomialCutoff SO2Linear SO3Linear Separable SinCos SparseWignerRotation SphericalHarmonics "
    "SphericalToXYZ SplitIrreps SquaredNorm TensorDot TensorProduct WignerD XYZToSinCos "
    "XYZToSpherical"
)
"""The modules of equitorch.nn."""


def test_every_module_of_equitorch_is_told():
    """And what the page names instead is there."""
    page = (ROOT / "docs/migrate/equitorch.md").read_text(encoding="utf-8")
    assert not {name for name in EQUITORCH.split() if f"`{name}`" not in page}
    named = set(re.findall(r"\bo3\.(\w+)", page))
    assert named <= set(o3.__all__)
