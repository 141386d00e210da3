"""The memory that a record reads: the arguments of each call are copied there, and padded."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.capturing.launch import Writer, takes
from torchweft.capturing.layout import Layout
from torchweft.core import private
from torchweft.core.backend import kernels_serve

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
            memory = {i: t.detach() for i, t in enumerate(self.leaves) if isinstance(t, Tensor)}
            taken = {i: t for i, t in memory.items() if rooms and self._is_launched(i, t)}
            self._writer = Writer(layout, taken, rooms) if taken else None
        self._copied: dict[torch.dtype, dict[int, Tensor]] = {}  # by torch
        for i, buffer in memory.items():
            if i not in taken:
                self._copied.setdefault(buffer.dtype, {})[i] = buffer

    def _buffer(self, i: int, leaf: Tensor) -> Tensor:
        shape = self._layout.shape(i, leaf.shape, self.rooms)
        buffer = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
        return buffer.requires_grad_(leaf.requires_grad)

    def _is_launched(self, i: int, buffer: Tensor) -> bool:
        return kernels_serve(buffer.device.type) and takes(self._layout, i, buffer)

    def write(self, leaves: Sequence[Any], lengths: tuple[int, ...]) -> None:
        """Copy the arguments of a call and fill the padding.

        A launch fills all padding, so torch then fills the rest of it too: rows that are repeated
        are those of one call.  Without a launch padding is filled where sizes have changed.
        """
        fills = bool(self.rooms) and (self._writer is not None or lengths != self._filled)
        with torch.no_grad():
            if self._writer is not None:
                self._writer.write(leaves, lengths)
            for buffers in self._copied.values():
                parts = [_part(buffer, leaves[i].shape) for i, buffer in buffers.items()]
                if len(parts) == 1:  # torch's kernel for many has few programs for one
                    parts[0].copy_(leaves[next(iter(buffers))])
                else:
                    private.foreach_copy(parts, [leaves[i] for i in buffers])
                if fills:
                    for i, buffer in buffers.items():
                        self._layout.fill(i, buffer, lengths, self.rooms)
        self._filled = lengths


def _part(buffer: Tensor, shape: torch.Size) -> Tensor:
    """The part of a buffer that has an argument's shape."""
    for dim, n in enumerate(shape):
        buffer = buffer if buffer.shape[dim] == n else buffer.narrow(dim, 0, n)
    return buffer
