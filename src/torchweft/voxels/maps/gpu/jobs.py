"""The sorted tiles of several tables in one launch of each kernel and one sort; so their pairs.

The results are what `tiles_of` and `pairs_of` build for each table, and are kept in the same
caches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import Call, Kernel, Tile, compile_together, current_device
from torchweft.voxels.maps.gpu.tiles import (
    KEYED,
    LISTED,
    MASK_BITS,
    MASKED,
    MOST_RANKED,
    PANEL,
    ROWS_PER_SORT,
    SCANNED,
    Flags,
    HostTotals,
    OffsetPairs,
    SearchRemains,
    Tiles,
    empty_pairs,
    has_turns,
    keep_pairs,
    keep_tiles,
    kernel_for,
    num_listed,
    padded,
    pair_dtype,
    pairs_of,
    samples,
    split_ints,
    tiles_of,
)

__all__ = ["Job", "PairJob", "TilePlan", "groups", "pairs_together", "tiles_together"]

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
        seen: where totals come to stand, see `tiles_of`.
    """

    table: Tensor
    order: Tensor | None
    offsets: int
    left: SearchRemains
    seen: HostTotals | None = None

    @property
    def parts(self) -> int:
        """How many masks the search left; 0: they are computed from the table."""
        return 0 if self.left.parts is None else len(self.left.parts)

    @property
    def kind(self) -> tuple[int, int, bool, bool]:
        """What code depends on."""
        return self.offsets, self.parts, self.left.rest is None, self.order is None


class PairJob(NamedTuple):
    """A table whose pairs are listed; see `pairs_of`."""

    table: Tensor
    order: Tensor | None
    offsets: int
    mirrored: bool

    @property
    def rows(self) -> torch.dtype:
        """The dtype of the lists."""
        return pair_dtype(self.table.shape[1], self.mirrored)

    @property
    def kind(self) -> tuple[int, bool, bool, torch.dtype]:
        """What code depends on."""
        return self.offsets, self.mirrored, self.order is None, self.rows


J = TypeVar("J", Job, PairJob)


def groups(jobs: Sequence[J]) -> Iterator[list[J]]:
    """At most MOST_JOBS jobs of one kind each; one that cannot share launches is alone.

    The key of a column holds a job, a bit and all offsets.
    """
    kinds: dict[object, list[J]] = {}
    for n, job in enumerate(jobs):
        shares = job.table.shape[1] <= ROWS_PER_SORT and job.offsets <= MOST_OFFSETS
        kinds.setdefault(job.kind if shares else n, []).append(job)
    for same in kinds.values():
        for n in range(0, len(same), MOST_JOBS):
            yield same[n : n + MOST_JOBS]


def tiles_together(jobs: Sequence[Job]) -> None:
    """Build and keep the tiles of tables on one device; tables of one kind share launches."""
    jobs = _with_totals([job for job in jobs if job.table.shape[1]])
    for group in groups(jobs):
        with current_device(group[0].table):
            if len(group) > 1:
                _make(group)
            else:
                tiles_of(*group[0])


def _with_totals(jobs: list[Job]) -> list[Job]:
    """The jobs, with memory of the host for the totals of many rows; one wait serves all."""
    sizes = [padded(job.offsets) if job.table.shape[1] > MOST_RANKED else 0 for job in jobs]
    if not any(sizes):
        return jobs
    flags = Flags(jobs[0].table.device, padded(sum(sizes)))
    begins = itertools.accumulate(sizes, initial=0)
    return [
        job._replace(seen=HostTotals(flags, begin)) if size else job
        for job, size, begin in zip(jobs, sizes, begins, strict=False)
    ]


def pairs_together(jobs: Sequence[PairJob]) -> None:
    """List and keep the pairs of tables on one device; tables of one kind share a launch.

    The host waits for the totals of tables with many rows: once, if tiles were built together.
    """
    for group in groups([job for job in jobs if job.table.shape[1]]):
        with current_device(group[0].table):
            if len(group) > 1:
                _list(group)
            else:
                pairs_of(*group[0])


def _list(jobs: Sequence[PairJob]) -> None:
    first, tiles = jobs[0], [tiles_of(*job[:3]) for job in jobs]
    made = [empty_pairs(job.table, t, *job[2:]) for job, t in zip(jobs, tiles, strict=True)]
    begins = [0, *itertools.accumulate(-(-job.table.shape[1] // PANEL) for job in jobs)]
    rows = _uploaded(
        [_numbers_of_pairs(*of) for of in zip(begins, jobs, tiles, made, strict=False)],
        begins[-1],
        first.table,
    )
    listed = num_listed(first.offsets, first.mirrored)
    constants = listed, padded(listed), first.order is not None, first.rows == torch.int16
    name, tile = "maps.gpu.job_kernels.pair_kernel", Tile((PANEL,))
    kernel = kernel_for(name, (), constants, tile, first.table.device)
    kernel(begins[-1] * -(-listed // LISTED), (rows,))
    for job, pairs in zip(jobs, made, strict=True):
        keep_pairs(job.table, job.order, job.mirrored, pairs)


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


class TilePlan:
    """Memory for the tiles of tables of one kind, and the launches that fill it.

    Args:
        jobs: what is left of their searches must stay until the launches.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        first = jobs[0]
        self.jobs, self.tiles = jobs, [_empty_tiles(job) for job in jobs]
        begins = [0, *itertools.accumulate(-(-job.table.shape[1] // BLOCK) for job in jobs)]
        self._blocks = begins[-1]
        numbers = [_numbers(*of) for of in zip(begins, jobs, self.tiles, strict=False)]
        self._rows = _uploaded(numbers, self._blocks, first.table)
        dtype = _key_dtype(first.offsets)
        self._keys = first.table.new_empty(self._blocks * BLOCK, dtype=dtype)
        self._kernels = _kernels_of(first, dtype)
        self._turning = any(tiles.turns[0] is not None for tiles in self.tiles)

    def launch(self) -> None:
        """Fill the tiles."""
        (k, parts), count, run = self.jobs[0].kind[:2], len(self.jobs), self._kernels
        words, rows = -(-k // MASK_BITS), (self._rows,)
        if not run.list.compiled:
            self._compile()
        if not parts:
            run.mask(self._blocks * BLOCK // MASKED.blocks[0] * words, rows)
        run.key(self._blocks, (self._rows, self._keys))
        run.scan(k * count, rows)
        for flags in {tiles.seen.flags for tiles in self.tiles if tiles.seen is not None}:
            flags.written()
        by_key = torch.sort(self._keys, stable=True)[1]
        run.list(self._blocks * BLOCK // PANEL * words, (self._rows, by_key))
        if self._turning:
            run.turn(2 * (k + 1) * count, rows)

    def _compile(self) -> None:
        run, rows = self._kernels, (self._rows,)
        calls = [Call(run.key, (*rows, self._keys)), Call(run.list, rows * 2), Call(run.scan, rows)]
        calls += [Call(run.turn, rows)] * self._turning
        calls += [Call(run.mask, rows)] * (not self.jobs[0].parts)
        compile_together(calls)

    def keep(self) -> None:
        """Keep the tiles with their tables."""
        for job, tiles in zip(self.jobs, self.tiles, strict=True):
            keep_tiles(job.table, job.order, tiles)


def _key_dtype(offsets: int) -> torch.dtype:
    """The dtype of keys; the fewer bits, the faster they are sorted."""
    bits = offsets + 1 + (MOST_JOBS - 1).bit_length()
    return torch.int16 if bits <= 15 else torch.int32 if bits <= 31 else torch.int64


def _make(jobs: Sequence[Job]) -> None:
    plan = TilePlan(jobs)
    plan.launch()
    for job in jobs:
        job.left.rest = job.left.parts = None
    plan.keep()


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
    both = (orders[0], orders[1]) if orders else (None, None)
    return Tiles(rows, lists, halves, both, masks, starts, totals, job.seen)


def _numbers(begin: int, job: Job, tiles: Tiles) -> list[int]:
    """The numbers and addresses of a job, see `job_kernels`."""
    masks = tiles.masks if job.left.parts is None else job.left.parts
    seen = tiles.totals if tiles.seen is None else tiles.seen.tensor
    tensors = (
        *(job.table, job.left.rest, job.order, masks, tiles.masks, tiles.starts, tiles.totals),
        *(seen, tiles.rows, tiles.lists, tiles.halves, *tiles.turns),
    )
    return [begin, job.table.shape[1], *map(_address, tensors)]


def _numbers_of_pairs(begin: int, job: PairJob, tiles: Tiles, pairs: OffsetPairs) -> list[int]:
    """The numbers and addresses of a job, see `job_kernels`."""
    lists = job.table, pairs.inputs, job.order, pairs.outputs
    given = *lists, tiles.masks, tiles.starts, tiles.totals
    return [begin, job.table.shape[1], *map(_address, given)]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _uploaded(numbers: Sequence[Sequence[int]], blocks: int, table: Tensor) -> Tensor:
    """The numbers of jobs beside a table, as `job_kernels` reads them."""
    rows = [[*of, *[0] * (WIDTH - len(of))] for of in numbers]
    rows += [[blocks] + [0] * (WIDTH - 1)] * (MOST_JOBS - len(rows))
    made = torch.tensor(rows, device="cpu", pin_memory=table.is_cuda)
    return made.to(table.device, non_blocking=True)
