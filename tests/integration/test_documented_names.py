"""Public names say what they are and stand in docs/api, files in the design, variables in docs.

A page of docs/api shows the modules that it names by `automodule`, of these the names in __all__,
and what it names itself.  Seen red with: a module left out of a page, a name left out of its
module's __all__, a function without a docstring; a file of core that the house does not name, and
one that is gone; a variable that no page names.
"""

import inspect
import re
import sys
from pathlib import Path

import pytest

from torchweft import clifford, compat, o3, products, reductions, testing, voxels

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "api"
SPACES = (clifford, compat, o3, products, reductions, testing, voxels)
SHOWN = re.compile(r"^\.\. auto(\w+):: (\S+)$", re.MULTILINE)


def shown(page):
    """The names, with their modules, that a page shows."""
    found = set()
    for kind, target in SHOWN.findall((PAGES / f"{page}.md").read_text(encoding="utf-8")):
        found.add(target)
        if kind == "module":
            __import__(target)
            found |= {f"{target}.{name}" for name in sys.modules[target].__all__}
    return found


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.__name__)
def test_public_names_are_documented(space):
    pages = shown(space.__name__.rpartition(".")[2])
    for name in space.__all__:
        value = getattr(space, name)
        first = (value.__doc__ or "").partition("\n")[0]  # its own, none inherited
        assert first.strip(), f"{space.__name__}.{name} has no docstring"
        own = value.__name__ if inspect.ismodule(value) else f"{value.__module__}.{name}"
        assert own in pages, f"docs/api shows no {own}"


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
