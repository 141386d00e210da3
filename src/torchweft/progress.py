"""Progress on standard error: rich's bar on a terminal that has it, else lines of text."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["say", "step", "track"]

T = TypeVar("T")

FIRST = 1.0  # seconds after which a job is long enough for a line
QUIET = 10.0  # seconds between two lines of a log


def track(items: Sequence[T], what: str) -> Iterator[T]:
    """The items one by one, and on standard error how many of them are done.

    A terminal has a bar.  A log has a line after one second, and then one every ten seconds.
    """
    if not sys.stderr.isatty():
        with step(what):
            yield from _logged(items, what)
    elif importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.progress import track as rich_track

        yield from rich_track(items, what, total=len(items), console=Console(stderr=True))
    else:
        yield from _rewritten(items, what)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Name what the block does, on standard error, where it takes more than a second."""
    timer = threading.Timer(FIRST, say, [f"{what} …"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say(line: str) -> None:
    """One line on standard error, at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _logged(items: Sequence[T], what: str) -> Iterator[T]:
    begin = said = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - said >= QUIET:
            say(f"{what} {done}/{len(items)}, {now - begin:.0f} s")
            said = now
        yield item


def _rewritten(items: Sequence[T], what: str) -> Iterator[T]:
    for done, item in enumerate(items):
        sys.stderr.write(f"\r{what} {done}/{len(items)}")
        sys.stderr.flush()
        yield item
    say(f"\r{what} {len(items)}/{len(items)}")
