"""Arguments copied into their buffers, and padding filled, by one launch; `kernels.py` does it.

The oracle is `Layout.fill` behind torch's copies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.capturing.layout import Layout, Rows
from torchweft.core.gpu.launcher import Kernel, Tile, current_device
from torchweft.core.operators.operator import will_write
from torchweft.core.printing.modules import written

__all__ = ["Writer", "takes"]

TILE = Tile((1024,))
REPEATED, CONSTANT, NUMBERS = range(3)
"""See `kernels`, as for the numbers of a leaf."""

MOST_BYTES = 2**30
"""Of a buffer, so that its words are counted in int32."""

ENTRY_BYTES = 8
"""Of a constant, which stands in one number of the table."""


def takes(layout: Layout, leaf: int, buffer: Tensor) -> bool:
    """Whether the kernel writes a buffer: it has at most one dimension that varies."""
    fill, varying = layout.fills.get(leaf), layout.dims[leaf]
    if isinstance(fill, Rows):
        known = buffer.dtype in (torch.int32, torch.int64)
    else:
        known = fill is None or buffer.itemsize <= ENTRY_BYTES
    return known and sum(n is not None for n in varying) <= 1 and buffer.nbytes <= MOST_BYTES


class Writer:
    """Writes the arguments of calls into buffers, in one launch.

    Args:
        layout: what varies.
        buffers: by the number of their leaf; the kernel takes each.
        rooms: rows that there is room for, of each size.
    """

    def __init__(self, layout: Layout, buffers: Mapping[int, Tensor], rooms: Sequence[int]) -> None:
        self._buffers = list(buffers.values())
        lines = [_lines(layout, *item) for item in buffers.items()]
        counts = [n * -(-room * row // (word * TILE.blocks[0])) for n, room, row, word in lines]
        leaves, begin = [], 0
        for (i, buffer), (_, room, row, word), count in zip(
            buffers.items(), lines, counts, strict=True
        ):
            size = next((n for n in layout.dims[i] if n is not None), len(rooms))
            entry = max(buffer.itemsize // word, 1)
            words = room * row // word, row // word, len(buffers) + size, word, entry
            filling = _filling(layout.fills.get(i), buffer.dtype, len(buffers), rooms)
            leaves.append([begin, buffer.data_ptr(), *words, *filling, 0])
            begin += count
        device = self._buffers[0].device
        owners = torch.arange(len(buffers)).repeat_interleave(torch.tensor(counts))
        self._tables = torch.tensor(leaves).to(device), owners.int().to(device)
        self._kernel = _kernel(device)
        self._given = [(i, word) for i, (*_, word) in zip(buffers, lines, strict=True)]

    def write(self, leaves: Sequence[Any], lengths: Sequence[int]) -> None:
        """Copy the arguments of a call and fill the padding."""
        sources = [_plain(leaves[i], word) for i, word in self._given]  # alive until the launch
        numbers = [*map(Tensor.data_ptr, sources), *lengths, 1]
        first, (table, owners) = self._buffers[0], self._tables
        given = torch.tensor(numbers, device="cpu", pin_memory=first.is_cuda)
        will_write(self._buffers)
        with current_device(first):
            given = given.to(first.device, non_blocking=True)
            self._kernel(len(owners), (table, owners, given))


@functools.cache
def _kernel(device: torch.device) -> Kernel:
    """For tensors on a device."""
    return Kernel(written("torchweft.capturing.kernels", "write_kernel"), (), (), TILE)


def _lines(layout: Layout, leaf: int, buffer: Tensor) -> tuple[int, int, int, int]:
    """Lines of a buffer, rows of a line, bytes of a row, and of the words that it is copied in."""
    count, room, row, shape = 1, 1, buffer.nbytes, buffer.shape
    for dim, size in enumerate(layout.dims[leaf]):
        if size is not None:
            count, room = math.prod(shape[:dim]), shape[dim]
            row = math.prod(shape[dim + 1 :]) * buffer.itemsize
    return count, room, row, math.gcd(row, 4)


def _filling(
    fill: Rows | float | None, dtype: torch.dtype, count: int, rooms: Sequence[int]
) -> tuple[int, int, int, int]:
    """The padding of one of `count` leaves: KIND, VALUE, ROOM, TABLE."""
    if fill is None:
        return REPEATED, 0, 1, 0
    if isinstance(fill, Rows):
        return NUMBERS, count + fill.size, rooms[fill.size], fill.table
    pattern = torch.empty(ENTRY_BYTES // dtype.itemsize, dtype=dtype).fill_(fill)
    return CONSTANT, int(pattern.view(torch.int64)), 1, 0


def _plain(source: Tensor, word: int) -> Tensor:
    """A tensor whose memory holds its values in order, in whole words: the source or a copy."""
    lazy = source.is_conj() or source.is_neg()
    if source.is_contiguous() and not lazy and source.data_ptr() % word == 0:
        return source
    return source.clone(memory_format=torch.contiguous_format)
