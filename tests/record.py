"""`pytest -p tests.record --record FILE`: keep in FILE how each test ended, and where it ran.

For tests that only a GPU runs: CI never sees them, so what they found is committed.  A test that
ran before keeps its line until it runs again.
"""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.harness.record import machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="a JSON file of tests and how they ended")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--record")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(path))


class Record:
    """Writes the file after each test: a run that is ended leaves what it has."""

    def __init__(self, path: Path) -> None:
        here = machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        versions = f"torch {here.torch}, triton {here.triton}, {here.commit}"
        self._where = f"{here.gpu}, {versions}, {here.date[:10]}"
        self._path = path
        self._ended = json.loads(path.read_text()) if path.exists() else {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.failed and report.when == "setup"):
            how = f"{report.outcome} in {report.duration:.1f} s: {self._where}"
            self._ended[report.nodeid] = how
            text = json.dumps(dict(sorted(self._ended.items())), indent=0)
            self._path.write_text(text + "\n")
