"""Finds suites and peers: modules of the folder `benchmarks` of a clone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, cast

from weft.bench.case import Case, Peer
from weft.errors import WeftError

__all__ = ["Suite", "benchmarks_folder", "load_peers", "load_suite", "suite_names"]

PEERS = (
    "torch_eager",
    "torch_compile",
    "cuequivariance",
    "openequivariance",
    "e3nn",
    "spconv",
    "flexgemm",
    "pykeops",
    "flash_sinkhorn",
)
"""In the order in which tables show them."""


class Suite(NamedTuple):
    """Cases of one family."""

    name: str
    family: str
    cases: tuple[Case, ...]


def benchmarks_folder() -> Path:
    """The folder `benchmarks` of the clone we are in.

    Raises:
        WeftError: the working directory is not a clone.
    """
    folder = Path.cwd() / "benchmarks"
    if not (folder / "suites").is_dir():
        raise WeftError(
            f"the working directory is {Path.cwd()}: suites live in the folder benchmarks of a "
            "clone of weft. Clone weft and run this command in its root."
        )
    return folder


def suite_names() -> list[str]:
    """The suites that there are: modules with a list CASES."""
    files = (benchmarks_folder() / "suites").glob("*.py")
    return sorted(path.stem for path in files if "\nCASES = " in path.read_text(encoding="utf-8"))


def load_suite(name: str, only: str | None = None) -> Suite:
    """A suite, or those of its cases whose name contains `only`.

    Raises:
        WeftError: there is no such suite or case.
    """
    if name not in suite_names():
        raise WeftError(
            f"the suite is {name!r}: it must be one of {', '.join(suite_names())}. "
            "Name one of these."
        )
    module = _module(f"benchmarks.suites.{name}")
    all_cases: Sequence[Case] = module.CASES
    cases = tuple(case for case in all_cases if only is None or only in case.name)
    if not cases:
        raise WeftError(
            f"no case of suite {name!r} has {only!r} in its name: its cases are "
            f"{', '.join(case.name for case in all_cases)}. Name one of these, or a part."
        )
    return Suite(name, module.FAMILY, cases)


def load_peers() -> list[Peer]:
    """The adapters in benchmarks/peers."""
    benchmarks_folder()
    return [cast(Peer, _module(f"benchmarks.peers.{name}")) for name in PEERS]


def _module(name: str) -> ModuleType:
    root = str(benchmarks_folder().parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module(name)
