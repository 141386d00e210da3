"""The sorted tiles of several tables in one launch of each kernel, and one sort.

The result is what `tiles_of` builds for each table, and is kept in the same cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import Call, Kernel, Tile, compile_together, current_device
from torchweft.voxels.maps.gpu.tiles import (
    KEYED,
    MASK_BITS,
    MASKED,
    MOST_RANKED,
    PANEL,
    ROWS_PER_SORT,
    SCANNED,
    Flags,
    SearchRemains,
    Tiles,
    has_turns,
    keep_tiles,
    kernel_for,
    padded,
    samples,
    split_ints,
    tiles_of,
)

__all__ = ["Job", "tiles_together"]

MOST_JOBS, WIDTH, MOST_OFFSETS = 8, 16, 59
"""See `job_kernels`, as for the fields of a job."""

BLOCK = KEYED.blocks[0]
"""Each table's columns are laid out from the beginning of a block."""


class Job(NamedTuple):
    """A table whose tiles are built.

    Args:
        table: see `tiles_of`.
        order: see `tiles_of`.
        offsets: K.
        left: what the search of the table left; of half a table, its rest.
    """

    table: Tensor
    order: Tensor | None
    offsets: int
    left: SearchRemains

    @property
    def parts(self) -> int:
        """How many masks the search left; 0: they are computed from the table."""
        return 0 if self.left.parts is None else len(self.left.parts)

    @property
    def shares(self) -> bool:
        """Whether it may share launches: the key of a column holds a job, a bit and all offsets."""
        return self.table.shape[1] <= ROWS_PER_SORT and self.offsets <= MOST_OFFSETS

    @property
    def kind(self) -> tuple[int, int, bool, bool]:
        """What code depends on."""
        return self.offsets, self.parts, self.left.rest is None, self.order is None


def tiles_together(jobs: Sequence[Job]) -> None:
    """Build and keep the tiles of tables on one device; tables of one kind share launches."""
    kinds: dict[object, list[Job]] = {}
    for n, job in enumerate(jobs):
        if job.table.shape[1]:
            kinds.setdefault(job.kind if job.shares else n, []).append(job)
    for same in kinds.values():
        for n in range(0, len(same), MOST_JOBS):
            group = same[n : n + MOST_JOBS]
            with current_device(group[0].table):
                if len(group) > 1:
                    _make(group)
                else:
                    tiles_of(*group[0])


class _Kernels(NamedTuple):
    mask: Kernel
    key: Kernel
    scan: Kernel
    list: Kernel
    turn: Kernel


def _kernels_of(job: Job, keys: torch.dtype) -> _Kernels:
    k, halved, ordered = job.offsets, job.left.rest is not None, job.order is not None
    offsets, device = padded(k), job.table.device

    def kernel(name: str, constants: tuple[int | bool, ...], tile: Tile) -> Kernel:
        return kernel_for(f"maps.gpu.job_kernels.{name}_kernel", (), constants, tile, device, keys)

    return _Kernels(
        kernel("mask", (k, halved, BLOCK), MASKED),
        kernel("key", (k, max(job.parts, 1), offsets, samples(offsets)), KEYED),
        kernel("scan", (k,), SCANNED),
        kernel("list", (k, halved, ordered, BLOCK), Tile((), 1)),
        kernel("turn", (k,), SCANNED),
    )


def _make(jobs: Sequence[Job]) -> None:
    first = jobs[0]
    k, parts, words = first.offsets, first.parts, -(-first.offsets // MASK_BITS)
    made = [_empty_tiles(job) for job in jobs]
    begins = [0, *itertools.accumulate(-(-job.table.shape[1] // BLOCK) for job in jobs)]
    blocks = begins[-1]
    numbers = [_numbers(*of) for of in zip(begins, jobs, made, strict=False)]
    numbers += [[blocks] + [0] * (WIDTH - 1)] * (MOST_JOBS - len(jobs))
    rows = torch.tensor(numbers, pin_memory=first.table.is_cuda)
    rows = rows.to(first.table.device, non_blocking=True)
    wide = torch.int64 if k + 1 + (MOST_JOBS - 1).bit_length() > 31 else torch.int32
    keys = first.table.new_empty(blocks * BLOCK, dtype=wide)
    run = _kernels_of(first, wide)
    turning = any(tiles.turns[0] is not None for tiles in made)
    if not run.list.compiled:
        calls = [Call(run.key, (rows, keys)), Call(run.list, (rows, rows)), Call(run.scan, (rows,))]
        calls += [Call(run.turn, (rows,))] * turning + [Call(run.mask, (rows,))] * (not parts)
        compile_together(calls)
    if not parts:
        run.mask(blocks * BLOCK // MASKED.blocks[0] * words, (rows,))
    run.key(blocks, (rows, keys))
    run.scan(k * len(jobs), (rows,))
    for tiles in made:
        if tiles.seen is not None:
            tiles.seen.written()
    by_key = torch.sort(keys, stable=True)[1]
    run.list(blocks * BLOCK // PANEL * words, (rows, by_key))
    if turning:
        run.turn(2 * (k + 1) * len(jobs), (rows,))
    for job, tiles in zip(jobs, made, strict=True):
        job.left.rest = job.left.parts = None
        keep_tiles(job.table, job.order, tiles)


def _empty_tiles(job: Job) -> Tiles:
    """Memory for the tiles of a table; masks that the search left whole are taken over."""
    k, count, words = job.offsets, job.table.shape[1], -(-job.offsets // MASK_BITS)
    panels, own = -(-count // PANEL), 0 if job.parts == 1 else words * count
    sizes = [own, k * panels, k, panels * PANEL, 2 * panels * words, panels * k * PANEL]
    turns = [2 * panels, panels] if has_turns(count) else []
    masks, starts, totals, rows, halves, lists, *orders = split_ints(job.table, sizes + turns)
    if job.parts == 1:
        assert job.left.parts is not None
        masks = job.left.parts
    seen = Flags(totals.device, k + -k % 4) if count > MOST_RANKED else None
    both = (orders[0], orders[1]) if orders else (None, None)
    return Tiles(rows, lists, halves, both, masks, starts, totals, seen)


def _numbers(begin: int, job: Job, tiles: Tiles) -> list[int]:
    """The numbers and addresses of a job, see `job_kernels`."""
    masks = tiles.masks if job.left.parts is None else job.left.parts
    seen = tiles.totals if tiles.seen is None else tiles.seen.tensor
    tensors = (
        *(job.table, job.left.rest, job.order, masks, tiles.masks, tiles.starts, tiles.totals),
        *(seen, tiles.rows, tiles.lists, tiles.halves, *tiles.turns),
    )
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    return [begin, job.table.shape[1], *addresses, 0]
