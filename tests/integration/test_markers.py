"""Files of tests/contract that run kernels in the interpreter say so by the marker `kernels`.

The interpreter runs these alone.  Seen red with: the marker left out of a file.
"""

from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[1] / "contract").glob("test_*.py"))
HOST = ("test_clifford_nn", "test_voxels_nn")
"""Their backends launch nothing in the interpreter: tests.launches counts."""
NATIVE = ("if INTERPRETED:\n    pytest.skip(", "pytestmark = pytest.mark.skipif(INTERPRETED")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_that_tests_each_backend_is_marked(path):
    text = path.read_text(encoding="utf-8")
    native = any(line in text for line in NATIVE)
    if "BACKENDS" in text and not native and "errors" not in path.stem and path.stem not in HOST:
        assert "pytest.mark.kernels" in text
