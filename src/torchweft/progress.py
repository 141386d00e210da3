"""How far a loop is, on standard error: rich's bar on a terminal, else a line now and then."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

__all__ = ["say", "track"]

T = TypeVar("T")

QUIET = 10.0  # seconds between two lines of a log


def track(items: Sequence[T], what: str) -> Iterator[T]:
    """The items one by one, and on standard error how many are done.

    A terminal has a bar.  A log has a line where one has been waited for, so that it stays short
    and no long job looks as if it hung.
    """
    if not sys.stderr.isatty():
        yield from _logged(items, what)
    elif importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.progress import track as rich_track

        yield from rich_track(items, what, total=len(items), console=Console(stderr=True))
    else:
        yield from _rewritten(items, what)


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
