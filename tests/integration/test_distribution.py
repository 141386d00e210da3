"""What is given to package indexes agrees with the sources.

`.ci/try-wheel` builds and tries the packages.  Seen red with: another version in the recipe, a
dependency that the recipe lacks, a link to a page of the docs that the pattern leaves in.
"""

import re
import tomllib
from pathlib import Path

import pytest

from torchweft import __version__

pytestmark = pytest.mark.slow  # copies of the tree for mutants have none of these files

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONDA_NAMES = {"torch": "pytorch"}


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("packaging/conda/recipe.yaml", r'version: "(.+)"'), ("CITATION.cff", r"\nversion: (.+)")],
)
def test_versions_agree(name, pattern):
    assert re.findall(pattern, text(name)) == [__version__]


def test_the_conda_recipe_has_the_dependencies_of_the_wheel():
    """But triton, which conda's builds of pytorch for a GPU bring."""
    run = text("packaging/conda/recipe.yaml").partition("  run:\n")[2].partition("\n\n")[0]
    found = {line.strip().removeprefix("- ").replace(" ", "") for line in run.splitlines()}
    wanted = {f"python{PROJECT['project']['requires-python']}"}
    for dependency in PROJECT["project"]["dependencies"]:
        name = re.match(r"[\w-]+", dependency)[0]
        if name != "triton":
            wanted.add(dependency.replace(name, CONDA_NAMES.get(name, name), 1))
    assert found == wanted


def test_the_readme_of_an_index_has_no_relative_link():
    """Its text and programs stay."""
    readme = shown = text("README.md")
    for change in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        shown = re.sub(change["pattern"], change["replacement"], shown)
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert [link for link in links if not link.startswith(("http", "#"))] == []
    assert "](docs/" in readme
    assert re.findall(r"(?s)```.*?```", shown) == re.findall(r"(?s)```.*?```", readme)
    assert "[contributing]" not in shown
    assert "contributing" in shown
