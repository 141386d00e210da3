"""A progress bar on standard error: rich's where it is installed, else one plain line."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

__all__ = ["track"]

T = TypeVar("T")


def track(items: Sequence[T], what: str) -> Iterator[T]:
    """The items one by one, with a bar that says how many are done.

    Nothing is drawn where standard error is no terminal, so that logs stay short.
    """
    if not sys.stderr.isatty():
        yield from items
    elif importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.progress import track as rich_track

        yield from rich_track(items, what, total=len(items), console=Console(stderr=True))
    else:
        yield from _plain(items, what)


def _plain(items: Sequence[T], what: str) -> Iterator[T]:
    for done, item in enumerate(items):
        sys.stderr.write(f"\r{what} {done}/{len(items)}")
        sys.stderr.flush()
        yield item
    sys.stderr.write(f"\r{what} {len(items)}/{len(items)}\n")
