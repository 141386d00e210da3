"""What `mypy --strict` says of users' files of o3, clifford, voxels, compat and distributed.

Seen red with: a module's `__getattr__` where type checkers see it, options that are Any, a function
without types, a name left out.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import torchweft
from torchweft import clifford, compat, distributed, o3, voxels

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
USER = HERE / "user_of_modules.py"
MISTAKEN = HERE / "user_of_modules_with_errors.py"
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


@pytest.mark.parametrize("module", [torchweft, o3, clifford, voxels, compat, distributed])
def test_the_file_of_every_name_names_all(module):
    text = USER.read_text(encoding="utf-8")
    missing = [name for name in module.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing
