"""Runs pykeops' own tests with weft.reductions under pykeops' names; prints passed and failed.

    python -m benchmarks.peers.pykeops_tests CHECKOUT

CHECKOUT is a clone or an unpacked sdist of pykeops.  Its tests, and the helper functions of
pykeops/numpy/utils.py that they import, are read from there; nothing else of it is used.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import weft.reductions
from weft.reductions import cluster
from weft.reductions import numpy as arrays


def _module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(contents)
    sys.modules[name] = made
    return made


def install(package: Path) -> None:
    """Make pykeops and keopscore importable, as weft.reductions."""
    config = _module("pykeops.config", gpu_available=torch.cuda.is_available())
    sys.modules["pykeops.torch"] = weft.reductions
    sys.modules["pykeops.torch.cluster"] = cluster
    _module("pykeops.torch.operations", KernelSolve=weft.reductions.KernelSolve)
    sys.modules["pykeops.numpy"] = arrays
    sys.modules["pykeops.numpy.cluster"] = cluster
    pykeops = _module("pykeops", config=config, torch=weft.reductions, numpy=arrays)
    pykeops.__path__ = []
    _module("keopscore", auto_factorize=False)
    _load("pykeops.numpy.utils", package / "numpy" / "utils.py")


def _load(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


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


def find(checkout: Path) -> Path:
    """The package pykeops of a clone, an sdist, or itself."""
    for folder in (checkout, checkout / "pykeops", checkout / "pykeops" / "pykeops"):
        if (folder / "test" / "test_torch.py").is_file():
            return folder
    raise SystemExit(
        f"{checkout} holds no pykeops/test/test_torch.py: name a clone or an unpacked sdist."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of pytest")
    given = parser.parse_args(arguments)
    package = find(given.checkout)
    install(package)
    began, tally = time.perf_counter(), Tally()
    with tempfile.TemporaryDirectory() as folder:  # there pytest finds no package to import
        for path in sorted((package / "test").glob("test_*.py")):
            shutil.copy(path, folder)
        options = [
            "-q",
            "--continue-on-collection-errors",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            "-c",
            "/dev/null",
        ]
        pytest.main([folder, "--rootdir", folder, *options, *given.options], plugins=[tally])
    total: Counter[str] = Counter()
    for name, outcomes in sorted(tally.outcomes.items()):
        print(f"{name:45s} " + ", ".join(f"{n} {kind}" for kind, n in sorted(outcomes.items())))
        total += outcomes
    print(
        f"{len(tally.outcomes)} files: {total['passed']} passed, {total['failed']} failed, "
        f"{total['skipped']} skipped in {time.perf_counter() - began:.1f} s"
    )
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
