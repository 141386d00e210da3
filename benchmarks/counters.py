"""Hardware counters of a case's kernels, by Nsight Compute: what bounds them.

    python -m benchmarks.counters voxels --case sphere512_c128 [--out FOLDER]

A process for each case runs it forward and backward a few times; `ncu` counts in the last, runs
each kernel as often as its counters need, and leaves the clocks as they are.  `ncu` must be there,
and the driver must let this user read counters.  Cases are added to `counters.json` in the
machine's folder of results, in place of earlier ones.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_calls import case_of
from benchmarks.harness.counters import METRICS, kernels_of
from benchmarks.harness.phases import cotangents, prepare
from benchmarks.harness.record import machine
from benchmarks.harness.suites import FOLDER, load_suite
from torchweft.errors import WeftError
from torchweft.progress import say

__all__ = ["main"]

BEFORE = 3
"""Passes before the one that is counted: they compile."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Count; 0: all cases are in the file, 1: ncu is missing or failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counters", description=__doc__)
    parser.add_argument("suite")
    parser.add_argument("--case", help="only cases with this in their name")
    parser.add_argument("--out", type=Path, default=FOLDER / "results", help="folder of results")
    parser.add_argument("--inside", action="store_true", help="run one case: what ncu starts")
    options = parser.parse_args(arguments)
    if options.inside:
        _run(options.suite, options.case)
        return 0
    try:
        _count(options)
    except WeftError as error:
        say(f"counters: {error}")
        return 1
    return 0


def _count(options: argparse.Namespace) -> None:
    if shutil.which("ncu") is None:
        raise WeftError("ncu is not on the path: install Nsight Compute, which reads the counters.")
    here = machine(torch.device("cuda"))
    path = options.out / here.folder / "counters.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for case in load_suite(options.suite, options.case).cases:
        if "forward+backward" not in case.phases:
            continue
        found: dict[str, Any] = {"gpu": here.gpu, "cases": {}}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
        kernels = kernels_of(_printed(options.suite, case.name))
        of = {"suite": options.suite, "case": case.name, **asdict(here)}
        found["cases"][f"{options.suite} {case.name}"] = {**of, "kernels": kernels}
        path.write_text(json.dumps(found, indent=0), encoding="utf-8")
        say(f"{case.name}: {len(kernels)} kernels")


def _printed(suite: str, case: str) -> str:
    """What ncu prints of a case."""
    names = ",".join(metric.name for metric in METRICS.values())
    ncu = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--metrics", names]
    ncu += ["--csv", "--page", "raw", "--print-units", "base", "--kernel-name-base", "function"]
    inside = [sys.executable, "-m", "benchmarks.counters", suite, "--case", case, "--inside"]
    done = subprocess.run([*ncu, *inside], capture_output=True, text=True, check=False)
    if done.returncode:
        raise WeftError(f"ncu failed on {case}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def _run(suite: str, name: str) -> None:
    """Some passes of a case, the last one between the marks that ncu counts between."""
    case = case_of(suite, name)
    workload = case.build(torch.device("cuda"), None)
    weights = cotangents(workload.function, workload.inputs)
    call = prepare("forward+backward", workload.function, workload.inputs, weights)
    for _ in range(BEFORE):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    sys.exit(main())
