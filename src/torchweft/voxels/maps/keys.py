"""Keys of voxels: exact integers that ascend in (batch, s0, s1, …).

A key is the mixed-radix number of a voxel's columns, each less its lowest value:

    key = ((b · R0 + s0) · R1 + s1) · R2 + …

Where the product of the ranges passes 2⁶³, the columns before are replaced by their rank among
those that occur, which is below 2³¹: one more column of any int32 range fits then.  Nothing is
hashed, so no two voxels ever share a key.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.backend import choose

__all__ = ["Packing", "kernels_serve", "rank"]


@functools.cache
def kernels_serve(device: str) -> bool:
    """Whether `map_launch` serves tensors on a kind of device; the torch code serves all."""
    return device == "cuda" and choose(None, device) == "triton"


class Word(NamedTuple):
    """Columns packed into one integer after the rank of those before.

    Args:
        columns: the first and one past the last.
        known: ascending packed prefixes that occur, whose place is their rank; None for the first
            word, which has no prefix.
    """

    columns: tuple[int, int]
    known: Tensor | None


class Packing:
    """How rows of integers become keys: exact, and ascending in lexicographic order.

    Args:
        rows: (N, columns) integers that the keys must tell apart.
        lows: of each column, the lowest value.
        sizes: of each column, how many values it may have.
    """

    def __init__(self, rows: Tensor, lows: Sequence[int], sizes: Sequence[int]) -> None:
        self.lows, self.sizes = tuple(lows), tuple(sizes)
        self.words: list[Word] = []
        begin, room, known = 0, 1, None
        for column, size in enumerate(self.sizes):
            if room * size >= 2**63:
                self.words.append(Word((begin, column), known))
                known = torch.unique(self._key(rows))
                begin, room = column, max(known.numel(), 1)
            room *= size
        self.words.append(Word((begin, len(self.sizes)), known))

    def to(self, device: torch.device | str) -> Packing:
        """The same for rows on another device."""
        found = object.__new__(Packing)
        found.lows, found.sizes = self.lows, self.sizes
        found.words = [Word(c, None if t is None else t.to(device)) for c, t in self.words]
        return found

    @property
    def single(self) -> bool:
        """Whether one integer holds all columns: neighbours then differ by a constant."""
        return len(self.words) == 1

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Of the keys: int32 where it holds them all, which halves the bytes of the sort."""
        return torch.int32 if math.prod(self.sizes) < 2**31 else torch.int64

    def step(self, offset: Sequence[int]) -> int:
        """key(row + offset) − key(row), where all columns stay in range and `single` holds."""
        found = 0
        for size, o in zip(self.sizes, offset, strict=True):
            found = found * size + o
        return found

    def inside(self, rows: Tensor, offset: Sequence[int] | None = None) -> Tensor:
        """Whether all columns of row + offset are in their ranges."""
        found = None
        for column, (low, size) in enumerate(zip(self.lows, self.sizes, strict=True)):
            o = offset[column] if offset else 0
            if offset and not o:
                continue  # the rows themselves are inside
            values = rows[:, column].long()  # an int32 compares wrongly with what lies outside
            within = (values >= low - o) & (values < low + size - o)
            found = within if found is None else found & within
        return rows.new_ones(rows.shape[0], dtype=torch.bool) if found is None else found

    def keys(self, rows: Tensor) -> Tensor:
        """The keys (N,); −1 where a row is out of range or has no known prefix."""
        return torch.where(self.inside(rows), self._key(rows), -1).to(self.dtype)

    def pack(self, rows: Tensor) -> Tensor:
        """The keys (N,) of int32 rows that this packing was made for."""
        if self.single and rows.shape[0] and kernels_serve(rows.device.type):
            from torchweft.voxels.maps_gpu import launch as map_launch

            return map_launch.pack(rows, self.lows, self.sizes, self.dtype)
        return self._key(rows).to(self.dtype)

    def _key(self, rows: Tensor) -> Tensor:
        key = rows.new_zeros(rows.shape[0], dtype=torch.int64)
        absent = None
        for word in self.words:
            if word.known is not None:
                key, missing = rank(word.known, key)
                absent = missing if absent is None else absent | missing
            for column in range(*word.columns):
                value = rows[:, column].long() - self.lows[column]
                key = key * self.sizes[column] + value
        return key if absent is None else torch.where(absent, -1, key)

    def rows(self, keys: Tensor) -> Tensor:
        """The (N, columns) int32 rows of keys that occur."""
        columns: list[Tensor] = []
        for word in reversed(self.words):
            for column in reversed(range(*word.columns)):
                columns.append(keys % self.sizes[column] + self.lows[column])
                keys = torch.div(keys, self.sizes[column], rounding_mode="floor")
            if word.known is not None:
                keys = word.known.index_select(0, keys)
        return torch.stack(columns[::-1], 1).int()


def rank(known: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The place (int64) of each key among the known ones, and whether it is not there."""
    if not known.numel():
        return key.new_zeros(key.shape, dtype=torch.int64), torch.ones_like(key, dtype=torch.bool)
    place = torch.searchsorted(known, key).clamp_(max=known.numel() - 1)
    return place, known.index_select(0, place) != key
