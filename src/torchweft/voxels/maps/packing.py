"""Exact keys of voxels: how rows of integers become integers that ascend as the rows do.

key = ((b · R0 + s0) · R1 + s1) · R2 + …
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchweft.core.backend import kernels_serve
from torchweft.voxels.maps import numba_path
from torchweft.voxels.maps.gpu import launch as map_launch

__all__ = ["HIGH", "LOW", "Packing", "packing_of", "rank"]

LOW, HIGH = -(2**31), 2**31 - 1
"""The least and the largest coordinate."""


class Packing:
    """How rows of integers become keys: exact, and ascending in lexicographic order.

    Args:
        rows: (N, columns) integers that the keys must distinguish.
        lows: the lowest value of each column.
        sizes: the number of values that each column may have.
    """

    ascended = True  # the last rows in a box that is shared

    def __init__(self, rows: Tensor, lows: Sequence[int], sizes: Sequence[int]) -> None:
        self.lows, self.sizes = tuple(lows), tuple(sizes)
        # columns packed into one integer, after the rank of the columns before; the latter's packed
        # values that occur, ascending, None for the first word
        self.words: list[tuple[range, Tensor | None]] = []
        begin, room, known = 0, 1, None
        for column, size in enumerate(self.sizes):
            if room * size >= 2**63:
                self.words.append((range(begin, column), known))
                known = torch.unique(self._key(rows))
                begin, room = column, max(known.numel(), 1)
            room *= size
        self.words.append((range(begin, len(self.sizes)), known))

    @property
    def box(self) -> map_launch.Box:
        """The lowest value of each column, and the number of its values."""
        return self.lows, self.sizes

    def to(self, device: torch.device | str) -> Packing:
        """The same for rows on another device."""
        found = object.__new__(Packing)
        found.lows, found.sizes = self.lows, self.sizes
        found.words = [(c, None if t is None else t.to(device)) for c, t in self.words]
        return found

    @property
    def single(self) -> bool:
        """Whether one integer holds all columns: keys of neighbours then differ by a constant."""
        return len(self.words) == 1

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of keys: int32 where it holds them, which halves the bytes of the sort."""
        return torch.int32 if math.prod(self.sizes) < 2**31 else torch.int64

    def step(self, offset: Sequence[int]) -> int:
        """key(row + offset) − key(row), where all columns stay in range and `single` is true."""
        found = 0
        for size, o in zip(self.sizes, offset, strict=True):
            found = found * size + o
        return found

    def inside(self, rows: Tensor, offset: Sequence[int] | None = None) -> Tensor:
        """Whether all columns of row + offset are in their ranges."""
        found = rows.new_ones(rows.shape[0], dtype=torch.bool)
        for column, (low, size) in enumerate(zip(self.lows, self.sizes, strict=True)):
            o = offset[column] if offset else 0
            if o or not offset:  # else the rows themselves are inside
                values = rows[:, column].long()  # int32 compares wrongly with larger numbers
                found &= (values >= low - o) & (values < low + size - o)
        return found

    def keys(self, rows: Tensor) -> Tensor:
        """The keys (N,); −1 where a row is out of range or has an unknown prefix."""
        return torch.where(self.inside(rows), self._key(rows), -1).to(self.dtype)

    def pack(self, rows: Tensor) -> Tensor:
        """The keys (N,) of int32 rows that are in range and have known prefixes."""
        if self.single and rows.shape[0] and kernels_serve(rows.device.type):
            return map_launch.pack(rows, self.box, self.dtype)
        if self.single and numba_path.loops_serve(rows.device.type):
            return numba_path.pack(rows, *self.box).to(self.dtype)
        return self._key(rows).to(self.dtype)

    def _key(self, rows: Tensor) -> Tensor:
        key = rows.new_zeros(rows.shape[0], dtype=torch.int64)
        absent = torch.zeros_like(key, dtype=torch.bool)
        for columns, known in self.words:
            if known is not None:
                key, missing = rank(known, key)
                absent |= missing
            for column in columns:
                key = key * self.sizes[column] + rows[:, column].long() - self.lows[column]
        return key if self.single else torch.where(absent, -1, key)

    def rows(self, keys: Tensor) -> Tensor:
        """The (N, columns) int32 rows of keys that occur."""
        columns: list[Tensor] = []
        for word, known in reversed(self.words):
            for column in reversed(word):
                columns.append(keys % self.sizes[column] + self.lows[column])
                keys = torch.div(keys, self.sizes[column], rounding_mode="floor")
            if known is not None:
                keys = known.index_select(0, keys)
        return torch.stack(columns[::-1], 1).int()


def rank(known: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The place (int64) of each key among ascending known ones, and whether it is absent."""
    if not known.numel():
        return key.new_zeros(key.shape, dtype=torch.int64), torch.ones_like(key, dtype=torch.bool)
    place = torch.searchsorted(known, key).clamp_(max=known.numel() - 1)
    return place, known.index_select(0, place) != key


@functools.lru_cache(maxsize=1024)
def packing_of(sizes: tuple[int, ...]) -> Packing | None:
    """The packing of a box (batch, *shape), shared by equal sizes; None: keys pass one integer."""
    if not 0 < math.prod(sizes) < 2**63 or max(sizes) > HIGH or sizes[0] < 1:
        return None
    return Packing(torch.empty(0, len(sizes), device="cpu"), (0,) * len(sizes), sizes)
