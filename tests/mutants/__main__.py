"""`python -m tests.mutants [NAME …]`: plant each bug in a copy of the tree; tests must fail.

Prints a line a mutant, and ends with 1 where one survived, or where its text is not in the
sources any more.  `--all` runs the whole short suite, natively and in the interpreter, in place
of the tests a mutant names; MATRIX=full in the environment runs every item of them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from tests.mutants import Mutant

ROOT = Path(__file__).parents[2]
FAMILIES = (
    "core",
    "products",
    "o3",
    "clifford",
    "reductions",
    "voxels",
    "compat",
    "distributed",
    "commands",
)
CACHES = ("NUMBA_CACHE_DIR", "TORCHWEFT_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
LIMIT = 600
"""Seconds of one mutant's tests."""

FAILED = 1
"""What pytest returns where a test failed."""


class Verdict(NamedTuple):
    """What became of a mutant: caught, SURVIVED, STALE, or BROKEN where no test could run."""

    mutant: str
    word: str
    seconds: float
    why: str = ""


def mutants() -> Iterator[Mutant]:
    """All mutants, family by family; their names begin with the family's."""
    for family in FAMILIES:
        for mutant in importlib.import_module(f"tests.mutants.{family}").MUTANTS:
            yield mutant._replace(name=f"{family}: {mutant.name}")


def place(mutant: Mutant, tree: Path) -> Path | str:
    """The file that holds the mutant's text, or what is wrong with the mutant."""
    files = sorted((tree / "src" / "torchweft").rglob("*.py"))
    counts = {file: file.read_text(encoding="utf-8").count(mutant.old) for file in files}
    found = [file for file, count in counts.items() if count]
    if sum(counts.values()) == 1:
        return found[0]
    names = ", ".join(str(file.relative_to(tree)) for file in found)
    return f"its text stands {sum(counts.values())} times in the sources: {names or 'nowhere'}"


def passes(mutant: Mutant, whole: bool) -> list[tuple[bool, list[str]]]:
    """(whether interpreted, arguments of pytest) of the runs that may catch it."""
    if not whole:
        return [(mutant.kernels, shlex.split(mutant.tests))]
    native = ["-m", "not slow", "--ignore=tests/compile"]
    return [(False, native), (True, ["-m", "kernels", "tests/contract"])]


def judge(mutant: Mutant, tree: Path, whole: bool) -> Verdict:
    """Plant the bug in a tree, run tests, and take it out again."""
    begin = time.monotonic()
    file = place(mutant, tree)
    if isinstance(file, str):
        return Verdict(mutant.name, "STALE", 0.0, file)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        word, why = "SURVIVED", ""
        for interpreted, arguments in passes(mutant, whole):
            code, said = run(tree, interpreted, arguments)
            if code == FAILED:
                word, why = "caught", said
                break
            if code:
                word, why = "BROKEN", f"pytest ended with {code}: {said}"
    finally:
        file.write_text(text, encoding="utf-8")
    return Verdict(mutant.name, word, time.monotonic() - begin, why)


def run(tree: Path, interpreted: bool, arguments: list[str]) -> tuple[int, str]:
    """The exit status of pytest and its last line, with caches that nobody shares.

    numba looks at the file of a function alone: a cached caller would hide a mutated callee.
    """
    with tempfile.TemporaryDirectory() as caches:
        places = {name: str(Path(caches) / name) for name in CACHES}
        environment = os.environ | places | {"PYTHONPATH": str(tree / "src")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment["TRITON_INTERPRET"] = "1" if interpreted else "0"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, *arguments],
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                timeout=None if "not slow" in arguments else LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return FAILED, f"no end within {LIMIT} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (lines or (done.stdout + done.stderr).splitlines() or [""])[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the mutants whose names hold one of the given words, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of names; default: every mutant")
    parser.add_argument("--all", action="store_true", help="run the whole short suite for each")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--places", action="store_true", help="look for the texts alone")
    options = parser.parse_args(arguments)
    words = options.words or [""]
    chosen = [mutant for mutant in mutants() if any(word in mutant.name for word in words)]
    if options.places:
        stale = [(m.name, at) for m in chosen if isinstance(at := place(m, ROOT), str)]
        for name, why in stale:
            print(f"STALE    {name}: {why}")
        return 1 if stale else 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        trees: Queue[Path] = Queue()
        for job in range(options.jobs):
            trees.put(copied(Path(folder) / str(job)))

        def one(mutant: Mutant) -> Verdict:
            tree = trees.get()
            try:
                return judge(mutant, tree, options.all)
            finally:
                trees.put(tree)

        verdicts = []
        for verdict in pool.map(one, chosen):
            print(f"{verdict.word:8} {verdict.seconds:4.0f} s  {verdict.mutant}", flush=True)
            if verdict.word != "caught":
                print(f"         {verdict.why}", flush=True)
            verdicts.append(verdict)
    caught = sum(verdict.word == "caught" for verdict in verdicts)
    print(f"{caught} of {len(verdicts)} mutants were caught")
    return 0 if caught == len(verdicts) else 1


def copied(tree: Path) -> Path:
    """A copy of the checkout: all that git knows or would take."""
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    return tree


if __name__ == "__main__":
    sys.exit(main())
