"""Tables and numbers in markdown."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["short", "table"]


def short(ms: float | None) -> str:
    """Three digits, or all before the point."""
    assert ms is not None
    return f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table without the columns that are empty."""
    filled = [i for i in range(len(head)) if any(line[i] for line in lines)]
    cells = [[line[i] for i in filled] for line in (head, ["---"] * len(head), *lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
