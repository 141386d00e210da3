"""The memory that a record reads: the arguments of each call are copied there, and padded."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.capturing.layout import Layout
from torchweft.core import private

__all__ = ["Buffers"]


class Buffers:
    """Tensors with room for the arguments of one signature; other arguments are constants.

    Args:
        layout: what varies.
        leaves: of a call of the signature.
        rooms: rows that there is room for, of each size.
    """

    def __init__(self, layout: Layout, leaves: Sequence[Any], rooms: tuple[int, ...]) -> None:
        self._layout, self.rooms = layout, rooms
        self.notes: dict[Hashable, Any] = {}  # of runs in this memory, see `Run`
        self._filled: tuple[int, ...] | None = None
        with torch.inference_mode(False):
            self.leaves = [
                self._buffer(i, leaf) if isinstance(leaf, Tensor) else leaf
                for i, leaf in enumerate(leaves)
            ]

    def _buffer(self, i: int, leaf: Tensor) -> Tensor:
        shape = self._layout.shape(i, leaf.shape, self.rooms)
        buffer = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
        return buffer.requires_grad_(leaf.requires_grad)

    def write(self, leaves: Sequence[Any], lengths: tuple[int, ...]) -> None:
        """Copy the arguments of a call; where sizes have changed, fill the padding anew."""
        tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        with torch.no_grad():
            for dtype in {leaf.dtype for leaf in tensors.values()}:
                some = {i: leaf for i, leaf in tensors.items() if leaf.dtype == dtype}
                parts = [self._part(i, leaf.shape) for i, leaf in some.items()]
                if len(parts) == 1:  # torch's kernel for many has few programs for one
                    parts[0].copy_(next(iter(some.values())))
                else:
                    private.foreach_copy(parts, list(some.values()))
            if self.rooms and lengths != self._filled:
                for i in tensors:
                    self._layout.fill(i, self.leaves[i].detach(), lengths, self.rooms)
        self._filled = lengths

    def _part(self, i: int, shape: torch.Size) -> Tensor:
        """The part of a buffer that has an argument's shape."""
        part: Tensor = self.leaves[i].detach()
        for dim, n in enumerate(shape):
            part = part if part.shape[dim] == n else part.narrow(dim, 0, n)
        return part
