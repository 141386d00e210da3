"""The leaves of arguments and results; fixed tables are values among them, not inputs.

A record reads a fixed table (`core/recorded.py`) where it is: it is neither copied nor padded, and
what was derived from it before is found again.  Another table is another signature.  Tables that
`sizes` name are inputs like other tensors.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchweft.core import private
from torchweft.core.recorded import is_fixed

__all__ = ["flatten", "unflatten"]


class _Fixed(NamedTuple):
    """A fixed table; two are equal if they are one tensor."""

    table: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fixed) and other.table is self.table

    def __hash__(self) -> int:
        return id(self.table)


def flatten(value: Any, varied: Container[int] = ()) -> tuple[list[Any], Any]:
    """The leaves of nested values, and their structure; `varied` leaves are never fixed."""
    leaves, structure = private.flatten(value)
    found = [
        _Fixed(t) if isinstance(t, Tensor) and is_fixed(t) and i not in varied else t
        for i, t in enumerate(leaves)
    ]
    return found, structure


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """The values that `flatten` took apart."""
    tables = [leaf.table if isinstance(leaf, _Fixed) else leaf for leaf in leaves]
    return private.unflatten(tables, structure)
