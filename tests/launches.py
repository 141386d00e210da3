"""Counts launches in Triton's interpreter, and holds the marker `kernels` against them.

`make test` runs the marked files of tests/contract alone in the interpreter.  A pass over the
folder fails where a marked file launched nothing, and with MATRIX=full, which runs every file,
where one without the mark launched a kernel.

Seen red with: the mark at a file without kernels, the mark left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from triton.runtime import interpreter

CONTRACT = Path(__file__).parent / "contract"
TOTAL = "total"

LAUNCHES: Counter[str] = Counter()
"""Kernels launched, by the file of the test, and in all."""
MARKED: dict[str, bool] = {}
"""Whether a file of tests/contract is marked; those of which an item ran."""


def pytest_configure() -> None:
    plain = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        LAUNCHES[TOTAL] += 1
        return plain(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = LAUNCHES[TOTAL]
    result = yield
    if item.path.parent == CONTRACT:
        LAUNCHES[item.path.name] += LAUNCHES[TOTAL] - before
        MARKED[item.path.name] = item.get_closest_marker("kernels") is not None
    return result


def pytest_testnodedown(node: Any) -> None:
    launches, marked = json.loads(getattr(node, "workeroutput", {}).get("launches", "[{}, {}]"))
    LAUNCHES.update(launches)
    MARKED.update(marked)


def faults() -> list[str]:
    """What the marks say that the launches contradict."""
    return [
        f"{name} launches no kernel: take its mark `kernels` away"
        if marked
        else f"{name} launches kernels: give it `pytestmark = pytest.mark.kernels`"
        for name, marked in sorted(MARKED.items())
        if marked != bool(LAUNCHES[name])
    ]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        config.workeroutput["launches"] = json.dumps([LAUNCHES, MARKED])
    elif not config.option.keyword and config.args == ["tests/contract"] and faults():
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.option.keyword and config.args == ["tests/contract"]:
        for fault in faults():
            terminalreporter.write_line(fault, red=True)
