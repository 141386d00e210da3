"""The tiles of generated kernels, from how many values a pair keeps in registers."""

from __future__ import annotations

from torchweft.core.gpu.launcher import Tile
from torchweft.reductions.formula.kernel_forms import LONGEST
from torchweft.reductions.gpu.source import LANES, Job, near_registers, registers

__all__ = ["BLOCK", "kept", "tile"]

BLOCK = 16
"""Tiles of a block."""

KEPT = 4096
"""Entries of the lists of a tile."""


def tile(job: Job, height: float = 64) -> Tile:
    """Rows, columns and tiles of a block; `height` is how many rows a tile can fill.

    A thread has one column of each LANES and R rows: it keeps what pairs read of a row R times, and
    R partial and whole sums of each component.
    """
    if needed := near_registers(job):
        rows, warps = 16 if needed <= NEAR_FEW else 8, 4 if height >= NEAR_HIGH else 2
        if needed <= NEAR_FEWEST:
            rows, warps = 32, 1
        return Tile((rows * warps, LANES, 2 * BLOCK), warps, 1)
    needed = registers(job) * (2 if job.wide else 1)
    shapes = LOOPED if job.inner else SHAPES
    if not job.wide and any(s.dim >= LONGEST for s in job.inner):
        needed += SHARED
    rows, columns, warps = next(shape for most, *shape in shapes if needed <= most)
    if job.wide:
        columns, warps = 2, 4
    while rows > 1 and (warps * rows >= 2 * height or warps * rows * kept(job) > KEPT):
        rows //= 2
    return Tile((warps * rows, LANES * columns, BLOCK), warps, 1)


def kept(job: Job) -> int:
    """Slots of a list."""
    return 1 << max(job.kept - 1, 0).bit_length()


NEAR_FEWEST, NEAR_FEW, NEAR_HIGH = 5, 11, 512
"""Where points are near each other: registers of a row up to which a thread has 32 rows, or 16,
else 8: what is computed of a column is 35 instructions beside 5 for a pair.  Tiles of 16 and 8 have
two warps, as the last tile is half empty; four in blocks of so many rows.  A thread has one column.
"""

SHAPES = ((6, 16, 2, 4), (14, 8, 4, 8), (30, 4, 4, 8), (1 << 30, 2, 4, 8))
"""Registers of a row up to which a thread has so many rows and columns, and the warps.

A tile has fewer columns than threads: else the compiler lays tiles out as their columns are loaded,
and sums go through shared memory.
"""

SHARED = 9
"""Registers of a row beside a thread's columns, where components are added up by shares."""

LOOPED = ((10, 8, 4, 8), (40, 4, 4, 8), (1 << 30, 2, 4, 8))
"""The same of kernels that loop over components: each is loaded for all rows and columns."""
