"""Launches of the voxels' kernels: compiled once for their constants, for any cloud."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core.backend import interpreted
from weft.core.explain import Launch, record, recording
from weft.core.launcher import Tile, alignment, current_stream
from weft.core.machine import Run, machine_code

__all__ = ["Kernel", "current_device"]


class Kernel:
    """`kernel[(programs,)](*tensors, *free, *numbers, *constants, *tile.blocks)` for any cloud.

    Triton's own launcher binds, inspects and hashes every argument at every call.  This one does
    so once for each combination of aligned tensors.  `free` counts rows: code does not depend
    on them.  It does on the device, on dtypes and on which tensors are None: who keeps a kernel
    has one for each.
    """

    def __init__(
        self, kernel: Any, numbers: tuple[int, ...], constants: tuple[Any, ...], tile: Tile
    ) -> None:
        self._kernel = kernel
        self._constants = (*constants, *tile.blocks)
        self._settled = (*numbers, *self._constants)
        self._options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        self._ready: dict[tuple[int, ...], Run] = {}
        self._aligned: Run | None = None

    def __call__(
        self, programs: int, tensors: Sequence[Tensor | None], free: tuple[int, ...] = ()
    ) -> None:
        """Launch on the current stream of the device that is current: the tensors' own."""
        if programs == 0:
            return
        if recording():
            self._record(programs)
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        run = self._aligned
        for pointer in pointers:
            if pointer is not None and pointer & 15:
                run = self._ready.get(alignment(pointers))
                break
        if run is None:
            if interpreted():
                self._kernel[(programs,)](*tensors, *free, *self._settled)
                return
            run = self._compile(tensors, pointers, free)
        run(programs, current_stream(), (*pointers, *free, *self._settled))

    def _compile(
        self,
        tensors: Sequence[Tensor | None],
        pointers: Sequence[int | None],
        free: tuple[int, ...],
    ) -> Run:
        run = machine_code(self._kernel, (*tensors, *free, *self._settled), self._options)
        key = alignment(pointers)
        self._ready[key] = run
        if not any(key):
            self._aligned = run
        return run

    def _record(self, programs: int) -> None:
        names = self._kernel.arg_names[-len(self._constants) :] if self._constants else ()
        shown = dict(zip(names, self._constants, strict=True)) | self._options
        record(Launch("triton", self._kernel.__name__, shown, programs))


_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def current_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's device current, as launches need it."""
    if not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice():
        return _NOTHING
    return torch.cuda.device(tensor.device)
