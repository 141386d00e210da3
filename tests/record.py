"""`pytest -p tests.record --record FILE`: keep in FILE how each test ended, and where it ran.

For tests that only a GPU runs: CI never sees them, so what they found is committed.  A test that
ran before keeps its line until it runs again.
"""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.harness.record import machine

ENDED: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="a JSON file of tests and how they ended")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or (report.failed and report.when == "setup"):
        ENDED[report.nodeid] = f"{report.outcome} in {report.duration:.1f} s"


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--record")
    if path is None or hasattr(session.config, "workerinput"):
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = machine(device)
    where = f"{here.gpu}, torch {here.torch}, triton {here.triton}, {here.commit}, {here.date[:10]}"
    found = json.loads(path.read_text()) if path.exists() else {}
    found |= {name: f"{ended}: {where}" for name, ended in ENDED.items()}
    path.write_text(json.dumps(dict(sorted(found.items())), indent=0) + "\n")
