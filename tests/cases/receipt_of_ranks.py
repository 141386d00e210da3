"""The receipt of tests/distributed: on ranks that have a GPU each, or on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.cases.ended_tests import FILE
from tests.cases.receipt import Receipt

__all__ = ["check_ranks"]

TESTS = Path(__file__).parents[1] / "distributed"
EVERY_S = 1.0


def check_ranks(
    device: str,
    machine: Mapping[str, Any],
    begun: Receipt | None = None,
    seconds: float | None = None,
    *options: str,
) -> Iterator[Receipt]:
    """Run the tests of several ranks in a process of their own, and yield receipts as they end.

    Tests that skip themselves, as they need more GPUs, and those that did not run are missing.
    Those that a mark skips, as they need a package that is optional, are left out with its reason.

    Args:
        device: "cuda" gives each rank a GPU and NCCL, "cpu" gloo.
        machine: what the receipt says about where it was made.
        begun: a receipt whose missing tests, and those left out, are run; None: all are.
        seconds: after which the run is ended.
        options: of pytest, such as a file in place of all.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        ended = Path(folder) / "ended.jsonl"
        ended.touch()
        which = [*options] or ([*begun.missing, *begun.left_out] if begun else [str(TESTS)])
        if not which:  # pytest would take all tests
            yield begun
            return
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "tests.cases.ended_tests", *which],
            env=os.environ | {"TORCHWEFT_TEST_RANKS": device, FILE: str(ended)},
        )
        try:
            while process.poll() is None and (deadline is None or time.monotonic() < deadline):
                time.sleep(EVERY_S)
                yield _receipt(ended, machine, begun)
        finally:
            process.terminate()
            process.wait()
        yield _receipt(ended, machine, begun)


def _receipt(ended: Path, machine: Mapping[str, Any], begun: Receipt | None) -> Receipt:
    """Of the lines that `ended_tests` wrote, after a receipt that was begun."""
    made = Receipt(dict(machine))
    if begun is not None:
        made.checks, made.failures = begun.checks, [*begun.failures]
    whole = [text for text in ended.read_text().splitlines(keepends=True) if text.endswith("\n")]
    lines = [json.loads(text) for text in whole]
    left = dict.fromkeys(name for line in lines for name in line.get("all", ()))
    for line in (line for line in lines if "name" in line):
        if line["ended"] == "skipped":
            continue
        if line["name"] in left:  # else it failed again where it was torn down
            del left[line["name"]]
            made.checks += line["ended"] != "left out"
        if line["ended"] == "left out":
            made.left_out[line["name"]] = line["told"]
        if line["ended"] == "failed":
            made.failures.append(f"{line['name']}: {line['told']}")
    made.missing = list(left)
    return made
