"""The leaves of arguments and results; fixed tables are values among them, not inputs.

A record reads a fixed table (`core/recorded.py`) where it is: it is neither copied nor padded, and
what was derived from it before is found again.  Another table is another kind of call.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def flatten(value: Any) -> tuple[list[Any], Any]:
    """The leaves of nested values, and their structure."""
    leaves, structure = private.flatten(value)
    return [_Fixed(t) if isinstance(t, Tensor) and is_fixed(t) else t for t in leaves], structure


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """The values that `flatten` took apart."""
    tables = [leaf.table if isinstance(leaf, _Fixed) else leaf for leaf in leaves]
    return private.unflatten(tables, structure)
