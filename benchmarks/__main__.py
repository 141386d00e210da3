"""`python -m benchmarks [SUITE]`: measure, next to plain torch and peers; a row each of results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import tables
from benchmarks.harness.record import append
from torchweft.device import device_of
from torchweft.errors import WeftError
from torchweft.progress import say, track


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a suite; 0: all is measured, 1: a case of ours is red or the call was wrong."""
    options = _parser().parse_args(arguments)
    try:
        return _measure(options)
    except (WeftError, OSError) as error:
        say(f"benchmarks: {error}")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    which = "a file of benchmarks/suites; default: products (on a CPU: cpu)"
    parser.add_argument("suite", nargs="?", help=which)
    parser.add_argument("--case", help="only cases with this in their name")
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--out", type=Path, help="folder of rows; default: benchmarks/results")
    parser.add_argument("--no-peers", action="store_true", help="measure torchweft alone")
    return parser


def _measure(options: argparse.Namespace) -> int:
    device = device_of(options.device)
    default = "products" if device.type == "cuda" else "cpu"
    suite = harness.load_suite(options.suite or default, options.case)
    peers = [] if options.no_peers else harness.load_peers()
    out = options.out or harness.FOLDER / "results"
    path = out / harness.machine(device).folder / f"{suite.family}.jsonl"
    measured = harness.run(suite.name, suite.cases, peers, device, say)
    num_red = 0  # of ours
    for _, rows in zip(track(suite.cases, suite.name), measured, strict=True):
        append(path, rows)
        print(*map(tables.line, rows), sep="\n", flush=True)
        num_red += sum(row.peer == "torchweft" and row.ms_p50 is None for row in rows)
    if options.out is None:
        tables.update(harness.FOLDER.parent)
    return 1 if num_red else 0


if __name__ == "__main__":
    sys.exit(main())
