"""What `mypy --strict` says of users' files: the types of public names, and their mistakes.

Seen red with: a module's `__getattr__` that returns Any where type checkers see it, products
published as `Callable[..., Tensor]`, a reduction that returns Any, a name left out.
"""

import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from torchweft import products, reductions
from torchweft.reductions import cluster, numpy
from torchweft.reductions.keywords import CallKeywords, GenredKeywords

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
USER = HERE / "user_of_every_name.py"
MISTAKEN = HERE / "user_with_errors.py"
REPORT = re.compile(r"^[^:\n]+:(\d+): error: .*?\[([\w-]+)\]$", re.MULTILINE)


def reported(file):
    """The errors (line, code) of a file, whose imports are checked as those of installed ones."""
    options = ["--strict", "--config-file=", "--follow-imports=silent", "--hide-error-context"]
    cache = ROOT / ".mypy_cache" / "users"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, f"--cache-dir={cache}", str(file)],
        env=os.environ | {"MYPYPATH": str(ROOT / "src")},
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return {(int(line), code) for line, code in REPORT.findall(done.stdout)}, done.stdout


def test_types_of_every_name():
    found, said = reported(USER)
    assert not found, said


def test_every_mistake_is_reported():
    lines = MISTAKEN.read_text(encoding="utf-8").splitlines()
    expected = {
        (number, line.rpartition("  # ")[2])
        for number, line in enumerate(lines, 1)
        if "  # " in line
    }
    assert expected
    found, said = reported(MISTAKEN)
    assert found == expected, said


def test_the_file_of_every_name_runs():
    runpy.run_path(str(USER))


def test_keywords_that_are_typed_are_those_of_the_functions():
    """Of Genred and of its call."""
    given = inspect.signature(reductions.Genred).parameters
    own = {"formula", "aliases", "reduction_op", "axis"}
    assert {*GenredKeywords.__annotations__} | own == {*given}
    call = inspect.signature(reductions.Genred.__call__).parameters
    assert {"self", "args", *CallKeywords.__annotations__} == {*call}


@pytest.mark.parametrize("module", [products, reductions, cluster, numpy])
def test_the_file_of_every_name_names_all(module):
    text = USER.read_text(encoding="utf-8")
    missing = [name for name in module.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing
