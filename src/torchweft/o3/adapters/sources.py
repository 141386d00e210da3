"""Rows that edges read beyond those that a model is given.

Where rows stand in several places, a model is given only the rows that its edges add to.  Edges
read these, and rows after them that somebody else holds.  While `reading` is active, converted
models extend positions, attributes and features by such rows where edges read them; all else, and
every result, is of the given rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["Sources", "extended", "given_rows", "mark_reads_sources", "reading", "reads_sources"]


class Sources(NamedTuple):
    """The rows of a model's call."""

    num_rows: int
    """Rows that the model is given."""
    extend: Callable[[Tensor], Tensor]
    """(num_rows, ...) to (num_rows + more, ...), differentiable."""


class Current:
    """Sources of this process, if any; hot paths read them without a call."""

    sources: Sources | None = None


@contextmanager
def reading(num_rows: int, extend: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While active, converted models read rows of others by `extend`."""
    before, Current.sources = Current.sources, Sources(num_rows, extend)
    try:
        yield
    finally:
        Current.sources = before


def extended(x: Tensor) -> Tensor:
    """x, and behind it the rows of others that edges read; x itself outside `reading`."""
    sources = Current.sources
    return x if sources is None else sources.extend(x)


def given_rows(x: Tensor) -> int:
    """The number of rows that edges add to, of features x that may be extended."""
    sources = Current.sources
    return x.shape[0] if sources is None else sources.num_rows


def mark_reads_sources(model: Any) -> None:
    """Tell that a converted model extends all rows that its edges read."""
    model.reads_sources = True


def reads_sources(model: nn.Module) -> bool:
    """Whether a model, or one that it wraps, extends all rows that its edges read."""
    return any(getattr(module, "reads_sources", False) for module in model.modules())
