"""Caches of layers and operators for all that depends on the signature of a call alone.

    signature = type, shape, dtype and device of each tensor

Validation, the choice of a backend and the launches of a call depend on the signature alone.  They
are computed at the first call of each signature, and later calls find them in one look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, strided

from torchweft.core.operators.operator import PLAIN, compiling, watched
from torchweft.core.private import any_autocast

__all__ = ["CallCache", "signature"]

V = TypeVar("V")

ENTRIES_PER_CACHE = 256
"""Each layer has a cache, and graphs may have another size every step."""


def signature(tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """The signature of a call with these tensors; None where a call must not be cached.

    Calls that torch traces, that a dispatch mode watches, under autocast, of tensor subclasses, or
    of sparse or nested tensors are not cached.
    """
    if compiling() or watched() or any_autocast():
        return None
    found: list[Any] = []
    try:
        for tensor in tensors:
            if type(tensor) not in PLAIN or tensor.layout is not strided:
                return None
            found += tensor.shape, tensor.dtype, tensor.device
    except RuntimeError:  # a nested tensor has no shape
        return None
    return tuple(found)


class CallCache(dict[Hashable, V], Generic[V]):
    """Values by signature; a copy of its owner starts with an empty one."""

    def keep(self, key: Hashable, value: V) -> None:
        """Add a value; drop the oldest if there are too many."""
        if len(self) >= ENTRIES_PER_CACHE:
            oldest, *_ = tuple(self)  # a snapshot: other threads may add entries
            self.pop(oldest, None)
        self[key] = value

    def __reduce__(self) -> tuple[Callable[[], CallCache[V]], tuple[()]]:
        return CallCache, ()
