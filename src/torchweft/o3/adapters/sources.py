"""Rows that edges read beyond those that a model is given.

Where rows stand in several places, a model is given only the rows that its edges add to.  Edges
read these, and rows after them that somebody else holds.  While `reading` is active, converted
models extend positions, attributes and features by such rows where edges read them; all else, and
every result, is of the given rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from torchweft.core.operators.operator import compiling

__all__ = [
    "Sources",
    "extended",
    "extending",
    "given_rows",
    "mark_reads_sources",
    "reading",
    "reads_sources",
]


class Extend(Protocol):
    """Own rows (num_rows, ...) to (num_rows + more, ...), differentiable; also in two halves."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def begin(self, x: Tensor) -> Any: ...
    def finish(self, begun: Any) -> Tensor: ...


class Sources(NamedTuple):
    """The rows of a model's call."""

    num_rows: int
    """Rows that the model is given."""
    extend: Extend


class Current:
    """Sources of this process, if any; hot paths read them without a call."""

    sources: Sources | None = None


@contextmanager
def reading(num_rows: int, extend: Extend) -> Iterator[None]:
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


def extending(x: Tensor) -> Callable[[], Tensor]:
    """Begin `extended(x)`; what is returned ends it.  Between, own rows are worked on."""
    sources = Current.sources
    if sources is None or compiling():
        found = extended(x)
        return lambda: found
    extend = sources.extend
    begun = extend.begin(x)
    return lambda: extend.finish(begun)


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
