"""Runs another project's own tests with torchweft under its names; what its runners share."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

__all__ = ["module", "options_of", "run_tests"]


def module(name: str, **contents: Any) -> ModuleType:
    """A module of that name and content, importable from now on."""
    made = ModuleType(name)
    made.__dict__.update(contents)
    sys.modules[name] = made
    return made


def options_of(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """CHECKOUT and options of pytest."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of pytest")
    return parser.parse_args(arguments)


class Tally:
    """A pytest plugin that counts outcomes by file."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if hasattr(report, "context"):
            return  # of a subtest, whose test reports too
        if report.when == "call" or report.outcome != "passed":
            self._count(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._count(report.nodeid, "failed")

    def _count(self, node: str, outcome: str) -> None:
        self.outcomes.setdefault(Path(node.partition("::")[0]).name, Counter())[outcome] += 1


def run_tests(files: Iterable[Path], options: list[str]) -> int:
    """Run copies of test files, print outcomes by file; 1 if some failed."""
    began, tally = time.perf_counter(), Tally()
    with tempfile.TemporaryDirectory() as folder:  # there pytest finds no package to import
        for path in files:
            shutil.copy(path, folder)
        quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "-c", "/dev/null"]
        pytest.main([folder, "--rootdir", folder, *quiet, *options], plugins=[tally])
    total: Counter[str] = Counter()
    for name, outcomes in sorted(tally.outcomes.items()):
        print(f"{name:45s} " + ", ".join(f"{n} {kind}" for kind, n in sorted(outcomes.items())))
        total += outcomes
    print(
        f"{len(tally.outcomes)} files: {total['passed']} passed, {total['failed']} failed, "
        f"{total['skipped']} skipped in {time.perf_counter() - began:.1f} s"
    )
    return 1 if total["failed"] else 0
