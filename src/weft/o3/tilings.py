"""The one rule of how kernels are laid out: groups of paths, channels, edges, warps, stages.

Measured by compilation for sm_90, float32, two channels a thread (registers; none spills):

    17 paths, 71 components    forward 255   backward 168   second order, groups of 40 and 31: 255
    23 paths, 99 components    forward, groups of 71 and 28: 255   backward 168   second order 255

What a thread carries from edge to edge decides, and how much code there is: 3 channels' worth of
registers do not exist, and of one channel the arithmetic on y is not shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.o3.contraction import Call
from weft.o3.generator import Job, Tiling
from weft.o3.polynomial import entries
from weft.o3.structure import Path, Product

__all__ = ["choose", "groups"]

CARRIED = 72
"""Components that a thread sums over edges in a kernel that does nothing else."""

CARRIED_BESIDE = 40
"""The same where edges have results of their own."""

WORK = 1250
"""Entries of 3j symbols times terms of the call in a kernel: more compile for many seconds."""

PAIR = 64
"""Channels of a warp where each thread has two."""

WARP = 32

WASTE = 0.25
"""The part of a block of channels that may stay empty."""


def groups(product: Product, call: Call, owner: str) -> list[tuple[int, ...]]:
    """The paths of a product, by number, in groups: each is a kernel.

    They are cut between blocks of x where they can be: then no two groups share a block of x or,
    where every path has its own, of z or w, and no number is read or written twice.
    """
    slots = {result.slot for result in call.results}
    most = CARRIED if slots == {owner} else CARRIED_BESIDE
    terms = sum(len(result.terms) for result in call.results)
    found: list[list[int]] = [[]]

    def fits(paths: list[int]) -> bool:
        chosen = [product.paths[p] for p in paths]
        carried = _components(product, chosen, owner) if owner in slots else 0
        work = sum(len(entries(product, path)[0]) for path in chosen)
        return carried <= most and terms * work <= WORK

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
    alone = slots == {job.owner} and job.segmented
    stages = 3 if alone else 1
    if channels <= WARP:
        block = 1 << (channels - 1).bit_length()
        return Tiling(block, (WARP if job.segmented else PAIR) // block, 1, stages)
    padded = -(-channels // PAIR) * PAIR
    if job.wide or padded - channels > WASTE * padded:
        return Tiling(WARP, 1, 1, stages)
    warps = 2 if alone and channels % (2 * PAIR) == 0 else 1
    return Tiling(warps * PAIR, 1, warps, stages)


def _by_block_of_x(paths: Iterable[Path]) -> Iterator[list[int]]:
    order = sorted(enumerate(paths), key=lambda item: (item[1].x, item[1].z))
    for block in sorted({path.x for _, path in order}):
        yield [n for n, path in order if path.x == block]


def _components(product: Product, paths: Iterable[Path], slot: str) -> int:
    """Of the blocks of a slot that paths reach."""
    blocks = {getattr(path, slot) for path in paths}
    return sum(product.blocks(slot)[block].components for block in blocks)
