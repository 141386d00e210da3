"""Runs beside each other on one machine: they check side by side, and time one at a time.

Most of a case's time goes into checks and compilers, of ours and of peers, which leave the GPU
idle.  Runs that name the same folder take cases from one queue: each case is measured by one run.
A check begins where no run waits to time, and any number of checks
run at once; a run times where no other checks or times.  So all check, then each times.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TextIO
from urllib.parse import quote

__all__ = ["ALONE", "Alone", "Beside", "Turns"]


class Turns(Protocol):
    """When a run may do what."""

    def takes(self, name: str) -> bool:
        """Whether this run is the one to measure a case."""

    def checking(self) -> contextlib.AbstractContextManager[None]:
        """While cases are built, checked and called for the first time."""

    def timing(self) -> contextlib.AbstractContextManager[None]:
        """While calls are timed."""


class Alone:
    """A run that shares its machine with no other."""

    def takes(self, name: str) -> bool:
        """Every case is its own."""
        return True

    def checking(self) -> contextlib.AbstractContextManager[None]:
        """At any time."""
        return contextlib.nullcontext()

    timing = checking


ALONE = Alone()


class Beside:
    """A run beside others that name the same folder, which must be new for each measurement."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def takes(self, name: str) -> bool:
        """True for the first run that asks."""
        try:
            (self._folder / quote(name, safe="")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Waits while a run times or waits to."""
        with self._file("machine") as machine:
            with self._file("timing") as timing:
                fcntl.flock(timing, fcntl.LOCK_EX)
                fcntl.flock(machine, fcntl.LOCK_SH)
            yield

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Waits until no other run checks or times."""
        with self._file("timing") as timing, self._file("machine") as machine:
            fcntl.flock(timing, fcntl.LOCK_SH)
            fcntl.flock(machine, fcntl.LOCK_EX)
            yield

    def _file(self, name: str) -> TextIO:
        """A file of the folder, whose locks end where it is closed."""
        return (self._folder / f"{name}.lock").open("w", encoding="utf-8")
