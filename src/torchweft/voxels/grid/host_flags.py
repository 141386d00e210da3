"""Truths and counts that kernels write where the host reads them."""

from __future__ import annotations

import functools
from collections import deque
from typing import ClassVar

import torch
from torch import Tensor

from torchweft.core import private

__all__ = ["Flags"]


class Flags:
    """Numbers that kernels write into the host's memory: once they have run, nothing is copied.

    Of coordinates, whether rows are outside of their box, whether they descend, whether sorted keys
    repeat; of a table, its pairs.  The places are parts of one piece of memory that stays, since a
    kernel may write late: one that was waited for is the next to be taken, another the last.
    """

    WIDTH, MANY = 4, 256
    _free: ClassVar[dict[tuple[torch.device, int], deque[_Place]]] = {}

    def __init__(self, device: torch.device, width: int = WIDTH) -> None:
        free = self._free.setdefault((device, width), deque())
        if not free:
            on_gpu = device.type == "cuda"
            shape = self.MANY, width
            memory = torch.zeros(shape, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
            free.extend(_Place(row, device) for row in memory)
        self._place = free.pop()
        self._place.wait()
        self._place.seen.fill(0)

    @property
    def tensor(self) -> Tensor:
        """Where kernels write them."""
        return self._place.tensor

    def written(self) -> None:
        """What is launched by now will have written them."""
        self._place.record()

    def read(self) -> list[bool]:
        """What they are; the host waits for the kernels that write them, not for later ones."""
        return [number != 0 for number in self.numbers()]

    def numbers(self) -> list[int]:
        """The same as numbers."""
        self._place.wait()
        found: list[int] = self._place.seen.tolist()
        return found

    def __del__(self) -> None:
        free = self._free[self._place.device, len(self._place.seen)]
        (free.append if self._place.waited else free.appendleft)(self._place)


class _Place:
    """Memory of flags that the GPU and the host see, and when it is written."""

    __slots__ = ("_event", "device", "seen", "tensor", "waited")

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self.tensor, self.seen, self.device, self.waited = tensor, tensor.numpy(), device, True
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        if self._event is not None:
            handle = private.raw_stream(self.device.index)
            self._event.record(_stream(self.device, handle))
        self.waited = False

    def wait(self) -> None:
        if not self.waited and self._event is not None:
            self._event.synchronize()
        self.waited = True


@functools.lru_cache(maxsize=64)
def _stream(device: torch.device, handle: int) -> torch.cuda.Stream:
    """The current stream of a device, whose handle is known: torch takes longer to make one."""
    return torch.cuda.current_stream(device)
