"""Test set-up: with TRITON_INTERPRET=1, kernels run on the CPU, repaired and sanitized.

pytest imports this file before any test, so before any kernel.  One mode per process.
"""

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests.covering import FULL, covering, requirements
from torchweft.testing.contract import poisoned_memory as poison

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["triton"] if INTERPRETED else ["numba", "torch"]
"""The backends of this process: kernels in the interpreter, or the CPU's own."""

if INTERPRETED:
    from torchweft.testing import interpreter, sanitizer

    interpreter.install()
    sanitizer.install()
    pytest_plugins = ["tests.launches"]

# the same examples every time; slow first examples are compilations
hypothesis.settings.register_profile("torchweft", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("torchweft")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New uninitialised memory is NaN."""
    with poison():
        yield


def pytest_collection_finish() -> None:
    """What is imported and collected stays: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # after -k and -m: what these leave of a test is covered
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a pairwise covering of each parametrised test; `MATRIX=full` keeps all items."""
    if FULL or any("[" in argument for argument in config.args):
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[pytest.Item] = set()
    for same in tests.values():
        pairs = same[0].get_closest_marker("singly") is None
        covers = [requirements(i.callspec.params, pairs) for i in same if hasattr(i, "callspec")]
        kept.update([same[place] for place in covering(covers)] if covers else same)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
