"""Test set-up: with TRITON_INTERPRET=1, kernels run on the CPU, repaired and sanitized.

pytest imports this file before any test, so before any kernel.  One mode per process.
"""

import os
from collections.abc import Iterator

import hypothesis
import pytest

from torchweft.testing.memory import poisoned_memory as poison

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["triton"] if INTERPRETED else ["numba", "torch"]
"""The backends of this process: kernels in the interpreter, or the CPU's own."""

if INTERPRETED:
    from torchweft.testing import interpreter, sanitizer

    interpreter.install()
    sanitizer.install()

# the same examples every time; slow first examples are compilations
hypothesis.settings.register_profile("torchweft", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("torchweft")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New uninitialised memory is NaN."""
    with poison():
        yield
