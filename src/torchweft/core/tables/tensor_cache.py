"""A cache of values computed from tensors, valid while the tensors live and are not changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

__all__ = ["TensorCache"]

V = TypeVar("V")

MOST_VALUES = 4096
"""Values that a cache keeps: a value computed without tensors is not dropped with one."""


class _Entry(NamedTuple):
    value: Any
    versions: tuple[int, ...]
    references: tuple[weakref.ref[Tensor] | None, ...]  # each drops the entry with its tensor


class TensorCache(Generic[V]):
    """A cache keyed by the identity and the version of tensors, and by any further key.

    An address alone would go stale, since the allocator reuses it.  The tensor object and its
    `_version`, which every in-place change increments, do not.  Inference tensors have no version,
    so nothing is cached for them.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}

    def get(self, tensors: tuple[Tensor | None, ...], key: Hashable, build: Callable[[], V]) -> V:
        """The value of `build()`, cached for these tensor objects in their present version."""
        full_key = (key, *map(id, tensors))
        entry = self._entries.get(full_key)
        if entry is not None and _unchanged(tensors, entry.versions):
            return entry.value  # type: ignore[no-any-return]
        value = build()
        if not any(t is not None and t.is_inference() for t in tensors):
            if len(self._entries) >= MOST_VALUES:
                self._entries.pop(next(iter(self._entries)), None)  # the oldest
            self._entries[full_key] = _Entry(
                value,
                tuple(0 if t is None else t._version for t in tensors),
                tuple(None if t is None else self._watch(t, full_key) for t in tensors),
            )
        return value

    def keeps(self, tensors: tuple[Tensor | None, ...], key: Hashable) -> bool:
        """Whether `get` would find a cached value."""
        entry = self._entries.get((key, *map(id, tensors)))
        return entry is not None and _unchanged(tensors, entry.versions)

    def _watch(self, tensor: Tensor, full_key: Hashable) -> weakref.ref[Tensor]:
        entries = self._entries
        return weakref.ref(tensor, lambda _: entries.pop(full_key, None))


def _unchanged(tensors: tuple[Tensor | None, ...], versions: tuple[int, ...]) -> bool:
    for i, tensor in enumerate(tensors):
        if tensor is not None and tensor._version != versions[i]:
            return False
    return True
