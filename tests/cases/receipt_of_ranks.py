"""The receipt of tests/distributed: on ranks that have a GPU each, or on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.cases.receipt import Receipt

__all__ = ["check_ranks"]

TESTS = Path(__file__).parents[1] / "distributed"


def check_ranks(device: str, machine: Mapping[str, Any], *options: str) -> Receipt:
    """Run the tests of several ranks in a process of their own; skipped ones are missing.

    Args:
        device: "cuda" gives each rank a GPU and NCCL, "cpu" gloo.
        machine: what the receipt says about where it was made.
        options: of pytest, such as a file in place of all.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={results}", *(options or [TESTS])],
            check=False,
            env=os.environ | {"TORCHWEFT_TEST_RANKS": device},
        )
        cases = list(ElementTree.parse(results).iter("testcase"))
    receipt = Receipt(dict(machine))
    for case in cases:
        name = f"{case.get('classname')}.{case.get('name')}"
        told = next(
            (case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None
        )
        if case.find("skipped") is not None:
            receipt.missing.append(name)
            continue
        receipt.checks += 1
        if told is not None:
            receipt.failures.append(f"{name}: {told.get('message')}")
    return receipt
