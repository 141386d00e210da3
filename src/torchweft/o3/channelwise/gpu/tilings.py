"""The one rule of how kernels are laid out: groups of paths, channels, edges, warps, stages.

Registers of a thread with two channels, compiled for sm_90 in float32; none spills:

    17 paths, z of 71 components   forward 255   backward 168   second order 255 and 254, two groups
    23 paths, z of 99 components   forward 255 and 160          backward 168 and 127

What a thread sums from edge to edge decides.  The row's own tensors are read again for every edge,
from L1: in registers they leave room for one channel a thread alone (242), and then the arithmetic
on y, which channels share, is done twice as often.  Long rows of all warps are more than L1 holds:
where programs can take some edges of a row, two warps share one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchweft.o3.channelwise.arithmetic import entries
from torchweft.o3.channelwise.calls import Call
from torchweft.o3.channelwise.gpu.kernel_spec import Job, Tiling
from torchweft.o3.channelwise.structure import Path, Product
from torchweft.o3.edges.shared_source_runs import BESIDE

__all__ = ["WARP", "choose", "groups"]

CARRIED = 72
"""Components that a thread with two channels sums over edges in a kernel that does nothing else."""

CARRIED_BESIDE = 40
"""The same where edges have results of their own."""

WORK = 1600
"""Entries of 3j symbols times terms of the call, of two channels: more compile for many seconds."""

FIRST_ORDER = 3
"""Terms of a call up to which half of `WORK` is faster: its kernels wait for memory."""

LIGHT = 32
"""Components of a row up to which each warp can have its own, in L1 or summed in registers."""

WARP = 32

WASTE = 0.25
"""The part of a block of channels that may stay empty."""


def groups(product: Product, call: Call, owner: str, wide: bool) -> list[tuple[int, ...]]:
    """The paths of a product, by number, in groups: each is a kernel.

    They are cut between blocks of x where they can be: then no two groups share a block of x or,
    where every path has its own, of z or w, and no number is read or written twice.
    """
    slots = {result.slot for result in call.results}
    most = CARRIED if slots == {owner} else CARRIED_BESIDE
    single = 1 if _pairs(product, wide, slots == {owner}) else 2
    most *= 1 if wide else single
    terms = sum(len(result.terms) for result in call.results)
    limit = WORK // 2 if single == 1 and terms <= FIRST_ORDER else WORK * single
    found: list[list[int]] = [[]]

    def fits(paths: list[int]) -> bool:
        chosen = [product.paths[p] for p in paths]
        carried = _components(product, chosen, owner) if owner in slots else 0
        work = sum(len(entries(product, path)[0]) for path in chosen)
        return carried <= most and terms * work <= limit

    for block in _by_block_of_x(product.paths):
        for part in [block] if fits(block) else [[p] for p in block]:
            if fits(found[-1] + part) or not found[-1]:
                found[-1] += part
            else:
                found.append(part)
    return [tuple(group) for group in found if group]


def choose(job: Job) -> Tiling:
    """How a job is laid out."""
    channels, slots = job.product.channels, {result.slot for result in job.call.results}
    if job.runs:
        return Tiling(2 * WARP if _pairs(job.product, job.wide, False) else WARP, BESIDE, BESIDE)
    alone = slots == {job.owner} and job.segmented
    stages = 3 if alone else 1
    if channels <= WARP:
        block = 1 << (channels - 1).bit_length()
        two = not job.segmented or _pairs(job.product, job.wide, alone)
        edges = (2 * WARP if two else WARP) // block
        return Tiling(block, edges, 1, stages)
    summed = any(
        not block.channel_step
        for result in job.call.results
        for block in job.product.blocks(result.slot)
    )
    # what is summed over channels is so by shuffles alone where a program is one warp
    warps = 1 if summed else 4 if not job.segmented else 2
    width = 2 * WARP if _pairs(job.product, job.wide, alone) else WARP
    whole = not (job.wide or job.ordered or channels % width)
    light = _components(job.product, [job.product.paths[p] for p in job.paths], job.owner) <= LIGHT
    if alone and light and whole:  # many warps, which ask ahead, hide loads; none is copied
        return Tiling(width)
    if summed and job.divisible and width > WARP and not light:
        return Tiling(width, edges=2, warps=2)
    while warps > 1 and _wasted(channels, warps * width):
        warps //= 2
    return Tiling(warps * width, 1, warps, stages)


def _pairs(product: Product, wide: bool, alone: bool) -> bool:
    """Whether a thread has two channels: for what they share, the arithmetic on y.

    Where they are few, the threads that are left take another edge.  What the channels of an edge
    then share is not summed by halves: only where no edge has results of its own (`alone`).
    """
    shared = any(not product.y[path.y].channel_step for path in product.paths)
    if product.channels <= WARP:
        return shared and not wide and alone
    return shared and not wide and not _wasted(product.channels, 64)


def _wasted(channels: int, block: int) -> bool:
    padded = -(-channels // block) * block
    return padded - channels > WASTE * padded


def _by_block_of_x(paths: Iterable[Path]) -> Iterator[list[int]]:
    order = sorted(enumerate(paths), key=lambda item: (item[1].x, item[1].z))
    for block in sorted({path.x for _, path in order}):
        yield [n for n, path in order if path.x == block]


def _components(product: Product, paths: Iterable[Path], slot: str) -> int:
    """Of the blocks of a slot that paths reach."""
    blocks = {getattr(path, slot) for path in paths}
    return sum(product.blocks(slot)[block].components for block in blocks)
