"""What `mypy --strict` says of users' files: the types of public names, and their mistakes.

Seen red with: a module's `__getattr__` that returns Any where type checkers see it, products
published as `Callable[..., Tensor]`, a reduction that returns Any, options that are Any, a name
left out.
"""

import functools
import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import torchweft
from torchweft import clifford, compat, distributed, o3, products, reductions, voxels
from torchweft.reductions import cluster, numpy
from torchweft.reductions.keywords import CallKeywords, GenredKeywords

ROOT = Path(__file__).parents[2]
USERS = Path(__file__).parent / "users"
NAMES = {
    "products_and_reductions": (products, reductions, cluster, numpy),
    "other_families": (torchweft, o3, clifford, voxels, compat, distributed),
}
"""Files that use every public name of some packages; each has one of mistakes beside it."""
REPORT = re.compile(r"^([^:\n]+)\.py:(\d+): error: .*?\[([\w-]+)\]$", re.MULTILINE)


@functools.cache
def reported():
    """The errors (line, code) by file, whose imports are checked as those of installed ones."""
    options = ["--strict", "--config-file=", "--follow-imports=silent", "--hide-error-context"]
    cache = ROOT / ".mypy_cache" / "users"
    files = [f"{user}{mistakes}.py" for user in NAMES for mistakes in ("", "_mistakes")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, f"--cache-dir={cache}", *files],
        env=os.environ | {"MYPYPATH": str(ROOT / "src")},
        cwd=USERS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = {Path(file).stem: set() for file in files}
    for file, line, code in REPORT.findall(done.stdout):
        found[file].add((int(line), code))
    return found, done.stdout


@pytest.mark.parametrize("user", NAMES)
def test_types_of_every_name(user):
    found, said = reported()
    assert not found[user], said


@pytest.mark.parametrize("user", NAMES)
def test_every_mistake_is_reported(user):
    lines = (USERS / f"{user}_mistakes.py").read_text(encoding="utf-8").splitlines()
    expected = {
        (number, line.rpartition("  # ")[2])
        for number, line in enumerate(lines, 1)
        if "  # " in line
    }
    assert expected
    found, said = reported()
    assert found[f"{user}_mistakes"] == expected, said


@pytest.mark.parametrize("user", NAMES)
def test_the_file_of_every_name_runs(user):
    runpy.run_path(str(USERS / f"{user}.py"))


def test_keywords_that_are_typed_are_those_of_the_functions():
    """Of Genred and of its call."""
    given = inspect.signature(reductions.Genred).parameters
    own = {"formula", "aliases", "reduction_op", "axis"}
    assert {*GenredKeywords.__annotations__} | own == {*given}
    call = inspect.signature(reductions.Genred.__call__).parameters
    assert {"self", "args", *CallKeywords.__annotations__} == {*call}


@pytest.mark.parametrize("user", NAMES)
def test_the_file_of_every_name_names_all(user):
    text = (USERS / f"{user}.py").read_text(encoding="utf-8")
    every = [name for module in NAMES[user] for name in module.__all__]
    missing = [name for name in every if not re.search(rf"\b{name}\b", text)]
    assert not missing
