"""Launch Triton kernels with little work on the host: everything but the operands is settled once.

Triton's own launcher binds, inspects and hashes every argument at every call.  A `Launcher` does
so once for each combination of aligned operands, and keeps the compiled kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

    __slots__ = (
        "_arguments",
        "_grid",
        "_kernel",
        "_options",
        "_pointers",
        "_ready",
        "_tables",
        "shown",
    )

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
        self._tables = tables
        self._arguments = (*numbers, *constants, *tile.blocks)
        self._options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        self._pointers = [None if t is None else t.data_ptr() for t in tables]
        self._ready: dict[tuple[int | None, ...], Any] = {}
        names = kernel.arg_names[-len(constants) - len(tile.blocks) :]
        values = (v if isinstance(v, str) else int(v) for v in (*constants, *tile.blocks))
        self.shown: dict[str, int | str] = dict(zip(names, values, strict=True)) | self._options

    def __call__(self, *operands: Tensor | None, workspace_bytes: int = 0) -> None:
        """Launch on the current stream of the device that is current: the operands' own."""
        if recording():
            name, programs = self._kernel.__name__, self._grid[0]
            record(Launch("triton", name, self.shown, programs, workspace_bytes))
        if self._grid[0] == 0:
            return
        if interpreted():
            self._kernel[self._grid](*operands, *self._tables, *self._arguments)
            return
        pointers = [None if t is None else t.data_ptr() for t in operands]
        # the machine code depends on which operands are aligned to 16 bytes
        aligned = tuple([p if p is None else p % 16 == 0 for p in pointers])
        run = self._ready.get(aligned)
        if run is not None:
            run(*pointers, *self._pointers, *self._arguments)
            return
        compiled = self._kernel[self._grid](
            *operands, *self._tables, *self._arguments, **self._options
        )
        self._ready[aligned] = compiled[self._grid]
