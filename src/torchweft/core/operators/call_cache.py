"""What follows from the kinds of a call's tensors, settled at the first call and kept.

    kind = type, shape, dtype, device

Checks of what was given, the way a call takes and what it launches follow from kinds.  So they are
settled once for each combination, and a call asks for all of it by one look into a table.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from torchweft.core.operators import autocast
from torchweft.core.operators.operator import PLAIN, compiling, watched

__all__ = ["Settled", "kinds"]

V = TypeVar("V")

MOST = 256
"""Answers that a table keeps: each layer has one, and graphs may have another size every step."""


def kinds(tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """The kinds of plain tensors in a plain call; None in any other.

    Not plain are calls that torch traces, that a dispatch mode watches, and under autocast.
    """
    if compiling() or watched() or autocast.active():
        return None
    found: list[Any] = []
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            return None
        found += tensor.shape, tensor.dtype, tensor.device
    return tuple(found)


class Settled(dict[Hashable, V], Generic[V]):
    """What was settled, by kinds; a copy of its owner begins anew."""

    def keep(self, key: Hashable, value: V) -> None:
        """Keep an answer; where there are too many, forget the oldest."""
        if len(self) >= MOST:
            oldest, *_ = tuple(self)  # at once: other threads keep theirs meanwhile
            self.pop(oldest, None)
        self[key] = value

    def __reduce__(self) -> tuple[Callable[[], Settled[V]], tuple[()]]:
        return Settled, ()
