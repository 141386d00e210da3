"""`pytest -p tests.cases.ended_tests`: a line of JSON for each test, as soon as it has ended.

The file is $TORCHWEFT_ENDED_TESTS.  A run that is ended leaves the lines that it has; the first one
names all tests of the run, so that those without a line are known.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

FILE = "TORCHWEFT_ENDED_TESTS"


def pytest_collection_finish(session: pytest.Session) -> None:
    worker = getattr(session.config, "workerinput", {"workerid": "gw0"})["workerid"]
    if worker == "gw0":  # all workers of pytest-xdist collect the same
        _write({"all": [item.nodeid for item in session.items]})


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that began the workers hears of each test
        config.pluginmanager.register(Ended())


class Ended:
    """Writes what each test came to."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            told = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
            ended = report.outcome
            if report.skipped and report.when == "setup":  # by a mark, before it ran
                ended, told = "left out", report.longrepr[2].removeprefix("Skipped: ")
            _write({"name": report.nodeid, "ended": ended, "told": told})


def _write(line: dict[str, Any]) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(line) + "\n")
