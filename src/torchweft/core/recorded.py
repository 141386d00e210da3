"""Runs of a function whose launches a CUDA graph replays, with other numbers in the same memory.

In such a run the content of an index table is nobody's to read or to cache: it is another one at
each replay.  So plans of tables are made of launches alone, once in a run, and dropped after it
(`Run.value`).  What was cached before and is read by the run is kept as long as the record is
(`keep`): a cache that drops it must not free memory that replays read.

Tables that belong to an object, such as the kernel maps of voxels, are marked as fixed: a record
reads them where they are, instead of copies of them.  With room for other sizes they are arguments
like others, and what is derived from them is made in the run (`Run.varies`).

`torchweft.capture` makes such runs.  The flag belongs to the process, since autograd computes
gradients in threads of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

__all__ = ["Current", "Run", "is_fixed", "keep", "mark_fixed", "varying", "version"]

T = TypeVar("T")

_FIXED = "_torchweft_fixed"


class Run:
    """A run, as a context manager; there is one at a time.

    Args:
        recording: whether launches are recorded, not executed: tensors that are made hold nothing
            yet, and their memory belongs to the graph, so no cache may keep them.
        arguments: of the function, whose values differ between replays.
        notes: what earlier runs with these arguments found out, by any key; None: there are none,
            nor later ones.

    Attributes:
        copies: private copies of index tables, by their place, see `core/table_copies.py`.
        kept: what the record needs beside its own memory.
    """

    def __init__(
        self,
        recording: bool = False,
        arguments: Iterable[Any] = (),
        notes: dict[Hashable, Any] | None = None,
    ) -> None:
        self.recording = recording
        self.notes = notes
        self._arguments = {id(t) for t in arguments if isinstance(t, Tensor)}
        self.copies: dict[Hashable, Any] = {}
        self.kept: list[Any] = []
        self._values: dict[Hashable, Any] = {}
        self._contexts = ExitStack()

    def __enter__(self) -> Run:
        Current.run = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        Current.run = None
        self._contexts.__exit__(kind, error, traceback)
        self._values.clear()
        self.copies.clear()

    def until_end(self, context: AbstractContextManager[Any]) -> None:
        """Enter a context that ends with the run."""
        self._contexts.enter_context(context)

    def varies(self, tensors: Iterable[Tensor | None]) -> bool:
        """Whether one of the tensors is an argument of the function."""
        return any(id(t) in self._arguments for t in tensors)

    def value(self, tensors: tuple[Tensor | None, ...], key: Hashable, build: Callable[[], T]) -> T:
        """The value of `build()`, made once in the run for these tensors in their versions.

        The run holds the tensors, so that no other gets the identity of one.
        """
        full_key = (key, *((id(t), version(t)) for t in tensors))
        if full_key not in self._values:
            self._values[full_key] = tensors, build()
        found: T = self._values[full_key][1]
        return found


def version(tensor: Tensor | None) -> int:
    """The number of changes in place; inference tensors do not count them."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


class Current:
    """The run of this process, if any; hot paths read it without a call."""

    run: Run | None = None


def varying(tensor: Tensor) -> Run | None:
    """The run of a function that has the tensor as an argument, if there is one."""
    run = Current.run
    return run if run is not None and run.varies((tensor,)) else None


def mark_fixed(*tables: Tensor | None) -> None:
    """Mark tables that nobody writes to, and that are others for another object."""
    for table in tables:
        if table is not None:
            setattr(table, _FIXED, True)


def is_fixed(table: Tensor) -> bool:
    """Whether a table was marked."""
    return hasattr(table, _FIXED)


def keep(value: T) -> T:
    """The value, kept with the record if there is a run; for values of caches that drop some."""
    if Current.run is not None:
        Current.run.kept.append(value)
    return value
