"""Plans: entries sorted once for every role, so that each gradient is a sorted sum too.

A plan is a list of K entries.  Each entry names one row in each of its *roles*: for a product
they are `x` and `y` (the rows read), `z` (the row added to), `t` (the term, the index of its scale)
and `k` (the entry itself).  The product reads roles x and y and sums into z; its gradient for x
reads y and z and sums into x.  `Plan.table("xyz")` returns the entries sorted by the last role, the
one that is summed into: no atomics, and the same order of additions every time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchweft.core.tables.segments import SLICE, Slices, cut, indptr_of, narrow, sort_rows

__all__ = ["Plan", "Table"]

T = TypeVar("T")


class Table(NamedTuple):
    """Entries sorted by the row they are added to.

    Row m of the result sums the entries indptr[m] .. indptr[m+1]-1, in this order; entry k reads
    row index1[k] of the first operand, row index2[k] of the second, and scale[term[k]].
    None stands for the identity: `indptr=None` gives entry k to row k, `index1=None` reads row k.
    Index tensors are contiguous, on one device, all int32 where every number is below 2^31, else
    all int64.  Entries outside of indptr[0] .. indptr[-1] belong to no row.
    """

    indptr: Tensor | None  # (num_rows + 1,); None: num_rows == num_entries, one entry a row
    index1: Tensor | None  # (num_entries,)
    index2: Tensor | None  # (num_entries,)
    term: Tensor | None  # (num_entries,)
    num_rows: int
    num_entries: int
    longest: int  # entries of the longest segment
    slices: Slices | None  # pieces of at most SLICE entries, None where no segment is longer


class Plan:
    """An immutable list of entries over named roles; a table is sorted at its first use.

    Args:
        rows: for each role the (K,) rows of its entries; None is the identity, entry k is row k.
        sizes: for each role the number of its rows.
        num_entries: K.
        device: device of the tables.
        sorted_by: the role by which the entries are already sorted, and its (M + 1,) indptr.
        partial: a role in which some entries have a row past the last; these belong to no sum.
    """

    __slots__ = (
        "_derived",
        "_limit",
        "_partial",
        "_rows",
        "_sizes",
        "_sorted_by",
        "device",
        "num_entries",
    )

    def __init__(
        self,
        rows: Mapping[str, Tensor | None],
        sizes: Mapping[str, int],
        num_entries: int,
        device: torch.device,
        sorted_by: tuple[str, Tensor] | None = None,
        partial: str | None = None,
    ) -> None:
        self._sizes = dict(sizes)
        self._limit = max(num_entries, *sizes.values()) + 1
        self._rows = {role: None if i is None else self._narrow(i) for role, i in rows.items()}
        self._sorted_by = (sorted_by[0], self._narrow(sorted_by[1])) if sorted_by else None
        self._partial = partial
        self._derived: dict[Hashable, Any] = {}
        self.num_entries = num_entries
        self.device = device

    def __repr__(self) -> str:
        sizes = ", ".join(f"{role}={size}" for role, size in self._sizes.items())
        return f"Plan({self.num_entries} entries, rows {sizes})"

    def size(self, role: str) -> int:
        """Number of rows of a role."""
        return self._sizes[role]

    def derived(self, key: Hashable, build: Callable[[], T]) -> T:
        """The value of `build()`, cached under a key: tile lists, casts, sorted tables."""
        try:
            value: T = self._derived[key]
        except KeyError:
            value = self._derived.setdefault(key, build())
        return value

    def table(self, roles: str) -> Table:
        """The entries sorted by the last of three roles, e.g. "xyz": read x and y, sum into z.

        A role that is not read may be any letter without rows, such as "_".
        """
        return self.derived(roles, lambda: self._sort(*roles))

    def _narrow(self, index: Tensor) -> Tensor:
        return narrow(index, self._limit)

    def _sort(self, first: str, second: str, result: str) -> Table:
        indptr, entries = self._order(result)

        def read(role: str) -> Tensor | None:
            index = self._rows.get(role)
            if entries is None or role == "_":
                return index
            return entries if index is None else index.index_select(0, entries)

        num_rows = self._sizes[result]
        num_entries = self.num_entries if entries is None else entries.numel()
        longest = min(1, num_entries) if indptr is None else _longest(indptr)
        if indptr is not None and longest == 1 and num_rows == num_entries:
            covered = int(indptr[-1] - indptr[0])  # less than num_entries if some row has no entry
            indptr = None if covered == num_entries else indptr
        slices = cut(indptr, SLICE) if indptr is not None and longest > SLICE else None
        return Table(
            indptr, read(first), read(second), read("t"), num_rows, num_entries, longest, slices
        )

    def _order(self, role: str) -> tuple[Tensor | None, Tensor | None]:
        """(indptr, entries in the order of the role's rows); None stands for the identity."""
        if self._sorted_by and role == self._sorted_by[0]:
            return self._sorted_by[1], None
        rows, size = self._rows.get(role), self._sizes[role]
        kept = None
        if self._partial and (index := self._rows[self._partial]) is not None:
            kept = (index < self._sizes[self._partial]).nonzero().squeeze(1)
            rows = kept if rows is None else rows.index_select(0, kept)
        if rows is None:
            if size == self.num_entries:
                return None, None
            bounds = torch.arange(size + 1, device=self.device).clamp(max=self.num_entries)
            return self._narrow(bounds), None
        order = sort_rows(rows)
        indptr = indptr_of(rows.index_select(0, order), size)
        entries = order if kept is None else kept.index_select(0, order)
        return self._narrow(indptr), self._narrow(entries)


def _longest(indptr: Tensor) -> int:
    return int(indptr.diff().max()) if indptr.numel() > 1 else 0
