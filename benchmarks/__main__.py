"""`python -m benchmarks [SUITE]`: measure, next to plain torch and peers; a row each of results."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Suite, tables
from benchmarks.harness.case import Case
from benchmarks.harness.record import Machine, append, read
from benchmarks.harness.turns import ALONE, Beside, Turns
from torchweft.device import device_of
from torchweft.errors import WeftError
from torchweft.progress import say, track


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure suites; 0: all is measured or time is up, 1: a case of ours is red, a wrong call."""
    options = _parser().parse_args(arguments)
    try:
        return _measure(options)
    except (WeftError, OSError) as error:
        say(f"benchmarks: {error}")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    which = f"all, or one of {', '.join(harness.suite_names())}; default: products (on a CPU: cpu)"
    parser.add_argument("suite", nargs="?", help=which)
    parser.add_argument("--case", help="only cases with this in their name")
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--out", type=Path, help="folder of rows; default: benchmarks/results")
    parser.add_argument("--no-peers", action="store_true", help="measure torchweft alone")
    minutes = "leave out whole models that Inductor compiles, minutes each"
    parser.add_argument("--no-inductor", action="store_true", help=minutes)
    rest = "leave out cases that the folder has of this commit and machine"
    parser.add_argument("--resume", action="store_true", help=rest)
    beside = "share the cases with other runs that name the same new folder, and time in turn"
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help=beside)
    parser.add_argument("--seconds", type=float, help="begin no case that may end after so long")
    return parser


def _measure(options: argparse.Namespace) -> int:
    deadline = _Deadline(options.seconds)
    device = device_of(options.device)
    here = harness.machine(device)
    folder = (options.out or harness.FOLDER / "results") / here.folder
    peers = [] if options.no_peers else harness.load_peers()
    turns = Beside(options.beside) if options.beside else ALONE
    leave_out = {"compiled"} if options.no_inductor else set[str]()
    num_red = 0
    for suite in _suites(options, device.type):
        path = folder / f"{suite.family}.jsonl"
        cases = _missing(suite, path, here) if options.resume else suite.cases
        say(f"{suite.name}: {len(cases)} of {len(suite.cases)} cases to measure")
        queue = _queue(suite._replace(cases=tuple(cases)), turns, deadline)
        for rows in harness.run(suite.name, queue, peers, device, say, turns, leave_out):
            append(path, rows)
            print(*map(tables.line, rows), sep="\n", flush=True)
            ours = [row for row in rows if row.peer == "torchweft"]
            num_red += sum(row.ms_p50 is None for row in ours) + (not ours)
    if options.out is None:
        tables.update(harness.FOLDER.parent)
    return 1 if num_red else 0


def _suites(options: argparse.Namespace, device: str) -> list[Suite]:
    if options.suite == "all":
        every = [harness.load_suite(name) for name in harness.suite_names(device)]
        suites = [s._replace(cases=tuple(c for c in s.cases if _named(options, c))) for s in every]
        if not any(suite.cases for suite in suites):
            raise WeftError(
                f"no case of a suite for {device} has {options.case!r} in its name: the suites are "
                f"{', '.join(suite.name for suite in suites)}. Name one of these, to see its cases."
            )
        return [suite for suite in suites if suite.cases]
    default = "products" if device == "cuda" else "cpu"
    return [harness.load_suite(options.suite or default, options.case)]


def _named(options: argparse.Namespace, case: Case) -> bool:
    return options.case is None or options.case in case.name


def _queue(suite: Suite, turns: Turns, deadline: _Deadline) -> Iterator[Case]:
    """The cases that this run measures, each when the one before is done."""
    for done, case in enumerate(track(suite.cases, suite.name)):
        if deadline.reached():
            left = len(suite.cases) - done
            say(f"{suite.name}: {left} cases are left: call again with --resume")
            return
        if turns.takes(f"{suite.name} {case.name}"):
            yield case


def _missing(suite: Suite, path: Path, here: Machine) -> tuple[Case, ...]:
    """The cases of a suite that have no row of ours of this commit and machine."""
    rows = read(path) if path.exists() else []
    done = {
        row.case
        for row in rows
        if (row.suite, row.peer) == (suite.name, "torchweft")
        and (row.commit, row.dirty, row.gpu) == (here.commit, here.dirty, here.gpu)
    }
    return tuple(case for case in suite.cases if case.name not in done)


class _Deadline:
    """Of a run: reached where a case as long as the longest so far would end too late."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._begin = self._last = time.perf_counter()
        self._longest = 0.0

    def reached(self) -> bool:
        """To be asked before each case."""
        now = time.perf_counter()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        return self._seconds is not None and now - self._begin + self._longest > self._seconds


if __name__ == "__main__":
    sys.exit(main())
