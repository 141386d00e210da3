"""`import torchweft` needs neither triton nor numba nor a test tool; a call says what is missing.

Seen red with: a top-level `import triton` in products.functions, `import pytest` in testing, no
warning without numba, one that each call repeats.
"""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

PREAMBLE = """
import sys
from importlib.machinery import PathFinder

found = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] in {names} else found(name, path, target)

PathFinder.find_spec = find_spec
"""


def run(code: str, *missing: str, warning: str = "") -> str:
    """What a program prints where packages are missing; it warns once, or not at all."""
    program = PREAMBLE.format(names=set(missing)) + textwrap.dedent(code)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    warned = [line for line in result.stderr.splitlines() if "Warning: " in line]
    assert len(warned) == bool(warning), result.stderr
    assert not warning or warning in warned[0]
    return result.stdout


def test_products_without_triton_and_numba():
    printed = run(
        """
        import torch, torchweft, warnings
        import torchweft.testing, torchweft.testing.contract, tests.cases.receipt
        x = torch.ones(2, 3)
        print(float(torchweft.products.indexed_mul(x, x).sum()))
        warnings.simplefilter("always")
        torchweft.products.indexed_outer(x, x)
        for backend in ("triton", "numba"):
            try:
                torchweft.products.indexed_mul(x, x, backend=backend)
            except torchweft.BackendError as error:
                print(error)
        """,
        "triton", "numba", "pytest", "hypothesis", "rich",
        warning="UserWarning: numba is not installed: torch's own operations compute CPU tensors",
    )  # fmt: skip
    total, triton, numba = printed.strip().splitlines()
    assert total == "6.0"
    assert "triton is not installed" in triton
    assert "numba is not installed" in numba


def test_import_torchweft_imports_no_heavy_package():
    printed = run(
        """
        import torchweft
        print([name for name in ("torch", "triton", "numba") if name in sys.modules])
        """,
        "triton",
    )
    assert printed.strip() == "[]"
