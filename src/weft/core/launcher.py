"""Launch Triton kernels with little work on the host: everything but the operands is settled once.

Triton's own launcher binds, inspects and hashes every argument at every call.  A `Launcher` does
so once for each combination of aligned operands, and keeps the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.backend import interpreted
from weft.core.explain import Launch, record, recording
from weft.core.machine import Run, machine_code

__all__ = ["Launcher", "Tile", "alignment", "current_stream"]


class Tile(NamedTuple):
    """Block sizes of a kernel in the order of its last parameters, and how it is compiled."""

    blocks: tuple[int, ...]
    num_warps: int = 4
    num_stages: int = 3


class Launcher:
    """`kernel[(programs,)](*operands, *tables, *numbers, *constants, *tile.blocks)`.

    Args:
        kernel: a jitted function whose parameters have this order.
        programs: how many, all along grid axis 0.
        tables: tensors that every launch reads; None is one that is not there.
        numbers: counts and strides; None is one that the kernel does without.
        constants: the leading constexprs.
        tile: the trailing ones, warps and stages.
    """

    __slots__ = ("_aligned", "_grid", "_kernel", "_options", "_ready", "_rest", "_settled", "shown")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        tables: tuple[Tensor | None, ...],
        numbers: tuple[int | None, ...],
        constants: tuple[Any, ...],
        tile: Tile,
    ) -> None:
        self._kernel = kernel
        self._grid = (programs, 1, 1)
        self._rest = (*tables, *numbers, *constants, *tile.blocks)
        self._settled = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in self._rest)
        self._options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        self._aligned: Run | None = None
        self._ready: dict[tuple[int, ...], Run] = {}
        names = kernel.arg_names[-len(constants) - len(tile.blocks) :]
        values = (v if isinstance(v, str) else int(v) for v in (*constants, *tile.blocks))
        self.shown: dict[str, int | str] = dict(zip(names, values, strict=True)) | self._options

    def __call__(self, operands: Sequence[Tensor | None], workspace_bytes: int = 0) -> None:
        """Launch on the current stream of the device that is current: the operands' own.

        The same operands are None in every call of one launcher.
        """
        if recording():
            name, programs = self._kernel.__name__, self._grid[0]
            record(Launch("triton", name, self.shown, programs, workspace_bytes))
        pointers = [None if t is None else t.data_ptr() for t in operands]
        run = self._aligned
        for pointer in pointers:
            if pointer is not None and pointer & 15:
                run = self._ready.get(alignment(pointers))
                break
        if run is None:
            self._launch_first(operands, pointers)
        else:
            run(self._grid[0], current_stream(), (*pointers, *self._settled))

    def _launch_first(
        self, operands: Sequence[Tensor | None], pointers: Sequence[int | None]
    ) -> None:
        """Compile, keep what came of it, and launch."""
        if self._grid[0] == 0:
            return
        if interpreted():
            self._kernel[self._grid](*operands, *self._rest)
            return
        run = machine_code(self._kernel, (*operands, *self._rest), self._options)
        # machine code depends on which operands are aligned to 16 bytes
        key = alignment(pointers)
        self._ready[key] = run
        if not any(key):
            self._aligned = run
        run(self._grid[0], current_stream(), (*pointers, *self._settled))


def alignment(pointers: Sequence[int | None]) -> tuple[int, ...]:
    """Which addresses are not aligned to 16 bytes."""
    return tuple((p or 0) & 15 and 1 for p in pointers)


def current_stream() -> int:
    """The handle of the current stream of the current device."""
    stream: int = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    return stream
