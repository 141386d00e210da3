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

__all__ = ["Launcher", "Tile"]


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
        self._aligned: Any = None
        self._ready: dict[tuple[int, ...], Any] = {}
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
                run = self._ready.get(_alignment(pointers))
                break
        if run is None:
            self._launch_first(operands, pointers)
        else:
            stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
            run(stream, pointers, self._settled)

    def _launch_first(
        self, operands: Sequence[Tensor | None], pointers: Sequence[int | None]
    ) -> None:
        """Launch by Triton's own door, which compiles, and keep what it found."""
        if self._grid[0] == 0:
            return
        launch = self._kernel[self._grid]
        if interpreted():
            launch(*operands, *self._rest)
            return
        compiled = _bound(launch(*operands, *self._rest, **self._options), self._grid)
        # machine code depends on which operands are aligned to 16 bytes
        key = _alignment(pointers)
        self._ready[key] = compiled
        if not any(key):
            self._aligned = compiled


def _bound(compiled: Any, grid: tuple[int, int, int]) -> Any:
    """Launches compiled code as Triton's own launcher does, without its hooks for profilers."""
    run, code = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    x, y, z = grid

    def launch(stream: int, pointers: Sequence[int | None], settled: tuple[Any, ...]) -> None:
        run(x, y, z, stream, *code, *pointers, *settled)

    return launch


def _alignment(pointers: Sequence[int | None]) -> tuple[int, ...]:
    return tuple((p or 0) & 15 and 1 for p in pointers)
