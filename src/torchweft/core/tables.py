"""Plans: entries sorted once for every role, so that each gradient is a sorted sum too.

A plan is a list of K entries.  Each entry names one row in each of its *roles*: for a product
they are `x` and `y` (the rows read), `z` (the row added to), `t` (the term, the index of its scale)
and `k` (the entry itself).  The product reads roles x and y and sums into z; its gradient for x
reads y and z and sums into x.  `Plan.table("xyz")` returns the entries sorted by the last role, the
one that is summed into: no atomics, and the same order of additions every time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchweft.core import recorded

__all__ = [
    "SLICE",
    "Plan",
    "Slices",
    "Table",
    "TensorCache",
    "cut",
    "greedy_group",
    "indptr_of",
    "narrow",
    "rows_of",
    "sort_rows",
]

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
        unread: whether the host must not read the rows, which other rows replace at each replay of
            a CUDA graph: lengths of segments are then estimates.
    """

    __slots__ = (
        "_derived",
        "_limit",
        "_partial",
        "_rows",
        "_sizes",
        "_sorted_by",
        "_unread",
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
        unread: bool = False,
    ) -> None:
        self._sizes = dict(sizes)
        self._limit = max(num_entries, *sizes.values()) + 1
        self._rows = {role: None if i is None else self._narrow(i) for role, i in rows.items()}
        self._sorted_by = (sorted_by[0], self._narrow(sorted_by[1])) if sorted_by else None
        self._partial = partial
        self._unread = unread
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

        num_rows, count = self._sizes[result], self.num_entries
        longest = min(1, count) if indptr is None else self._longest(indptr, num_rows)
        if indptr is not None and longest == 1 and num_rows == count:
            covered = int(indptr[-1] - indptr[0])  # less than the count if some row has no entry
            indptr = None if covered == count else indptr
        slices = self.pieces(indptr, SLICE) if indptr is not None and longest > SLICE else None
        return Table(indptr, read(first), read(second), read("t"), num_rows, count, longest, slices)

    def pieces(self, indptr: Tensor, limit: int, keep_empty: bool = True) -> Slices:
        """Segments of this plan cut into pieces, see `cut`."""
        most = indptr.numel() + self.num_entries // limit if self._unread else None
        return cut(indptr, limit, keep_empty, most)

    def _longest(self, indptr: Tensor, num_rows: int) -> int:
        """Entries of the longest segment; twice the mean where the host may not read them."""
        if self._unread:
            return min(self.num_entries, max(2, -(-2 * self.num_entries // max(num_rows, 1))))
        return int(indptr.diff().max()) if indptr.numel() > 1 else 0

    def _order(self, role: str) -> tuple[Tensor | None, Tensor | None]:
        """(indptr, entries in the order of the role's rows); None stands for the identity."""
        if self._sorted_by and role == self._sorted_by[0]:
            return self._sorted_by[1], None
        rows, size = self._rows.get(role), self._sizes[role]
        if self._partial and (index := self._rows[self._partial]) is not None:
            if rows is None:
                rows = self._narrow(torch.arange(self.num_entries, device=self.device))
            rows = rows.masked_fill(index >= self._sizes[self._partial], size)  # sorted to the end
        if rows is None:
            if size == self.num_entries:
                return None, None
            bounds = torch.arange(size + 1, device=self.device).clamp(max=self.num_entries)
            return self._narrow(bounds), None
        order = sort_rows(rows)
        indptr = indptr_of(rows.index_select(0, order), size)
        return self._narrow(indptr), self._narrow(order)


SLICE = 4096
"""Most entries that one program sums sequentially; longer segments are cut (see `cut`)."""


def narrow(index: Tensor, limit: int) -> Tensor:
    """The same integers as a contiguous int32 tensor where all are below 2^31, else int64."""
    return index.to(torch.int32 if limit < 2**31 else torch.int64).contiguous()


def sort_rows(rows: Tensor) -> Tensor:
    """The stable permutation that sorts entries by row: the order within a row is kept."""
    return torch.argsort(rows, stable=True)


def indptr_of(sorted_rows: Tensor, num_rows: int) -> Tensor:
    """indptr[m] = number of entries in rows below m; rows >= num_rows are left out."""
    bounds = torch.arange(num_rows + 1, device=sorted_rows.device, dtype=sorted_rows.dtype)
    return torch.searchsorted(sorted_rows, bounds)


def rows_of(indptr: Tensor, num_entries: int) -> Tensor:
    """The row of each of `num_entries` entries; entries no segment covers get row M."""
    entries = torch.arange(num_entries, device=indptr.device, dtype=indptr.dtype)
    rows = torch.searchsorted(indptr, entries, right=True) - 1
    return torch.where(rows < 0, indptr.numel() - 1, rows)


class Slices(NamedTuple):
    """Segments cut into pieces of at most `SLICE` entries.

    Piece p holds the entries indptr[p] .. indptr[p+1]-1 of segment owner[p]; segment m is the sum
    of the pieces owner_indptr[m] .. owner_indptr[m+1]-1, added in this order.
    """

    indptr: Tensor  # (P + 1,)
    owner: Tensor  # (P,)
    owner_indptr: Tensor  # (M + 1,)
    num_pieces: int


def cut(indptr: Tensor, limit: int, keep_empty: bool = True, most: int | None = None) -> Slices:
    """Segments cut into pieces of at most `limit` entries; an empty one gets a piece if kept.

    With `most`, no less than their number, the host does not read it: the last pieces are empty and
    belong to no segment.

    One segment of 100,000 terms among segments of one becomes 25 pieces of 4096 among pieces of
    one, so that no program walks more than `limit` entries and the order of the sum is fixed.
    """
    lengths = indptr.diff()
    pieces = ((lengths + limit - 1) // limit).clamp(min=int(keep_empty))
    owner_indptr = torch.cat([pieces.new_zeros(1), pieces.cumsum(0)])
    total = int(owner_indptr[-1]) if most is None else most
    numbers = torch.arange(total, device=indptr.device)
    owner = torch.searchsorted(owner_indptr[1:], numbers, right=True).clamp(max=len(lengths) - 1)
    rank = numbers - owner_indptr[owner]
    begin = torch.minimum(indptr[owner] + rank.to(indptr.dtype) * limit, indptr[-1])
    piece_indptr = torch.cat([begin, indptr[-1:]])
    dtype = indptr.dtype
    return Slices(piece_indptr.to(dtype), owner.to(dtype), owner_indptr.to(dtype), total)


def greedy_group(sizes: list[int], alignment: int, limit: int) -> list[list[int]]:
    """Neighbouring items packed in order into groups of at most `limit` units.

    Each size counts rounded up to `alignment`; an item larger than `limit` is a group of its own.
    """
    groups: list[list[int]] = []
    room = 0
    for item, size in enumerate(sizes):
        units = -(-size // alignment) * alignment
        if not groups or units > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= units
    return groups


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
        """The value of `build()`, cached for these tensor objects in their present version.

        In a run (`core/recorded.py`) that has one of them as an argument, it is made once in the
        run.
        """
        if (run := recorded.Current.run) is not None and run.varies(tensors):
            return run.value(tensors, (self, key), build)
        full_key = (key, *map(id, tensors))
        entry = self._entries.get(full_key)
        if entry is not None and _unchanged(tensors, entry.versions):
            found: V = entry.value
            return found if run is None else recorded.keep(found)
        value = recorded.keep(build())
        if run is not None and run.recording:
            return value
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
