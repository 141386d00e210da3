"""Test set-up: with TRITON_INTERPRET=1, kernels run on the CPU, repaired and sanitized.

pytest imports this file before any test, so before any kernel.  One mode per process.
"""

import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests import covering
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a pairwise covering of each parametrised test; `MATRIX=full` keeps all items."""
    if covering.FULL or any("[" in argument for argument in config.args):
        return
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        tests.setdefault((item.nodeid.partition("[")[0], item.location[0]), []).append(item)
    kept: set[pytest.Item] = set()
    for same in tests.values():
        values = [
            tuple(i.callspec.indices.values()) if hasattr(i, "callspec") else () for i in same
        ]
        kept.update(same[place] for place in covering.covering(values))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
