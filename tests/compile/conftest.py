"""Statistics of compiled kernels, held against the snapshot beside a test file.

`test_<name>.py` has `<name>.json`: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import triton

from tests.covering import FULL
from torchweft.core.versions import launches_fast
from torchweft.testing.compiler import Build, compile_for, faults, growth, statistics

Check = Callable[[Build, str, str], None]

OF_SNAPSHOTS = launches_fast(triton.__version__)
"""Whether this is the Triton of the snapshots; another one's code is of another size."""

WRITES = os.environ.get("TORCHWEFT_WRITE_SNAPSHOT") == "1"


@pytest.fixture(scope="module")
def check(request: pytest.FixtureRequest) -> Iterator[Check]:
    """check(build, name, target): it compiles for the target without faults or growth."""
    path = Path(str(request.path))
    file = path.with_name(path.stem.removeprefix("test_") + ".json")
    kept = json.loads(file.read_text()) if file.exists() else {}

    def check(build: Build, name: str, target: str) -> None:
        compiled = compile_for(build, target)
        stats = statistics(compiled, target)
        assert not faults(build, compiled, target, stats)
        if WRITES:
            kept[name] = stats
        if OF_SNAPSHOTS:
            assert not growth(stats, kept[name])

    yield check
    if WRITES:
        file.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Builds for GPUs other than sm_90 belong to the full matrix."""
    if FULL or WRITES:
        return
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    others = [item for item in here if "sm_80" in item.nodeid or "gfx942" in item.nodeid]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in set(others)]
