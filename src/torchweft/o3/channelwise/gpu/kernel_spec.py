"""Specifications of the kernels of a call: what each computes, and its tile.

Registers of a thread with two channels, compiled for sm_90 in float32; none spills:

    17 paths, z of 71 components   forward 255   backward 168   second order 255 and 254, two groups
    23 paths, z of 99 components   forward 255 and 160          backward 168 and 127

The values that a thread sums over edges determine the number of registers.  The row's own tensors
are read again for every edge, from L1: held in registers they leave room for one channel per thread
only (242), and the arithmetic on y, which channels share, is then done twice as often.  Long rows
of all warps do not fit into L1: where programs take some edges of a row, two warps share a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchweft.o3.channelwise.arithmetic import entries
from torchweft.o3.channelwise.calls import Call
from torchweft.o3.channelwise.structure import Block, Path, Product
from torchweft.o3.graph import RUNS_PER_PROGRAM

__all__ = [
    "WARP",
    "ResultTarget",
    "RowKernelSpec",
    "RowTiling",
    "ScatteredBlock",
    "choose_tiling",
    "path_groups",
]

MAX_SUMMED = 72
"""Components that a thread with two channels sums over edges in a kernel that does nothing else."""

MAX_SUMMED_WITH_OTHERS = 40
"""The same where edges have results of their own."""

MAX_TERMS = 1600
"""Entries of 3j symbols times terms of the call, of two channels: more compile for many seconds."""

FIRST_ORDER_TERMS = 3
"""Terms of a call up to which half of MAX_TERMS is faster: its kernels wait for memory."""

SHORT_ROW_COMPONENTS = 32
"""Components of a row up to which each warp can have its own, in L1 or summed in registers."""

WARP = 32

MAX_EMPTY_LANES = 0.25
"""Fraction of a block of channels that may be empty."""


class ScatteredBlock(NamedTuple):
    """A block whose components begin at any columns, each with its channels side by side."""

    begins: tuple[int, ...]


class ResultTarget(NamedTuple):
    """Where a kernel stores a result."""

    width: int  # numbers in a row
    blocks: tuple[Block | ScatteredBlock | None, ...]  # None: no path of the kernel reaches it
    part: int = 0  # numbers between the parts of blocks of channels, of what channels share


class RowTiling(NamedTuple):
    """The tile of a kernel."""

    block: int  # channels per program, a power of 2
    edges: int = 1  # edges per tile, a power of 2
    warps: int = 1  # warps per program
    stages: int = 1  # iterations of the edge loop whose loads are in flight; 1: no pipelining


class RowKernelSpec(NamedTuple):
    """What one kernel computes; it determines the source."""

    product: Product  # blocks and paths
    paths: tuple[int, ...]  # numbers of the product's paths that it computes
    call: Call  # its results; tensors are those of the whole call
    targets: tuple[ResultTarget, ...]  # one for each result
    owner: str  # "z" or "x", the slot whose rows programs own
    widths: tuple[int, ...]  # numbers in a row of each tensor
    segmented: bool  # whether a row has a list of edges; else each edge is a row
    pieces: bool  # whether lists are pieces of rows
    ordered: bool  # whether lists hold edge numbers; else edges are in the order of the lists
    indexed: bool  # whether each edge has an index of its row in the other slot
    shared: bool  # whether w has one row
    wide: bool  # whether numbers are float64
    runs: bool  # whether lists are runs (`o3.graph`), one for each warp
    tiling: RowTiling  # the tile

    @property
    def looped(self) -> bool:
        """Whether a program takes several rows, to sum a gradient of shared weights."""
        return self.shared and any(r.slot == "w" and r.terms for r in self.call.results)

    @property
    def divisible(self) -> bool:
        """Whether a program may take some edges of a row: it then takes a range of the lists."""
        summed = any(r.slot == self.owner and r.terms for r in self.call.results)
        return self.segmented and not summed and not self.looped

    @property
    def channel_blocks(self) -> int:
        """Programs that share a row."""
        return -(-self.product.channels // self.tiling.block)

    @property
    def alone(self) -> bool:
        """Whether all results are summed over the edges of a row."""
        return self.segmented and {result.slot for result in self.call.results} == {self.owner}


def path_groups(product: Product, call: Call, owner: str, wide: bool) -> list[tuple[int, ...]]:
    """The paths of a product, by number, in groups of one kernel each.

    Groups are cut between blocks of x where possible: then no two groups share a block of x or,
    where every path has its own, of z or w, and no number is read or written twice.
    """
    slots = {result.slot for result in call.results}
    most = MAX_SUMMED if slots == {owner} else MAX_SUMMED_WITH_OTHERS
    lanes = 1 if _two_channels(product, wide, slots == {owner}) else 2
    most *= 1 if wide else lanes
    terms = sum(len(result.terms) for result in call.results)
    limit = MAX_TERMS // 2 if lanes == 1 and terms <= FIRST_ORDER_TERMS else MAX_TERMS * lanes
    found: list[list[int]] = [[]]

    def fits(paths: list[int]) -> bool:
        chosen = [product.paths[p] for p in paths]
        summed = _components(product, chosen, owner) if owner in slots else 0
        work = sum(len(entries(product, path)[0]) for path in chosen)
        return summed <= most and terms * work <= limit

    for block in _by_block_of_x(product.paths):
        for part in [block] if fits(block) else [[p] for p in block]:
            if fits(found[-1] + part) or not found[-1]:
                found[-1] += part
            else:
                found.append(part)
    return [tuple(group) for group in found if group]


def choose_tiling(spec: RowKernelSpec) -> RowTiling:
    """The tile of a kernel."""
    product, channels, alone = spec.product, spec.product.channels, spec.alone
    if spec.runs:
        width = 2 * WARP if _two_channels(product, spec.wide, False) else WARP
        return RowTiling(width, RUNS_PER_PROGRAM, RUNS_PER_PROGRAM)
    two = _two_channels(product, spec.wide, alone)
    if channels <= WARP:
        block = 1 << (channels - 1).bit_length()
        edges = (2 * WARP if two or not spec.segmented else WARP) // block
        return RowTiling(block, edges, 1, 3 if alone else 1)
    width = 2 * WARP if two else WARP
    summed = any(
        not block.channel_step
        for result in spec.call.results
        for block in product.blocks(result.slot)
    )
    whole = not (spec.wide or spec.ordered or channels % width)
    paths = [product.paths[p] for p in spec.paths]
    short = _components(product, paths, spec.owner) <= SHORT_ROW_COMPONENTS
    if alone and short and whole:  # many warps with prefetches hide the loads
        return RowTiling(width)
    if summed and spec.divisible and two and not short:
        return RowTiling(width, edges=2, warps=2)
    # sums over channels need no shared memory in programs of one warp
    warps = 1 if summed else 2 if spec.segmented else 4
    while warps > 1 and _too_empty(channels, warps * width):
        warps //= 2
    return RowTiling(warps * width, 1, warps, 3 if alone else 1)


def _two_channels(product: Product, wide: bool, alone: bool) -> bool:
    """Whether a thread has two channels, which share the arithmetic on y.

    Where channels are few, the remaining threads take another edge.  Sums over the channels of an
    edge would then leave halves of warps apart: only where no edge has results of its own.
    """
    shared = any(not product.y[path.y].channel_step for path in product.paths)
    if product.channels <= WARP:
        return shared and not wide and alone
    return shared and not wide and not _too_empty(product.channels, 2 * WARP)


def _too_empty(channels: int, block: int) -> bool:
    padded = -(-channels // block) * block
    return padded - channels > MAX_EMPTY_LANES * padded


def _by_block_of_x(paths: Iterable[Path]) -> Iterator[list[int]]:
    order = sorted(enumerate(paths), key=lambda item: (item[1].x, item[1].z))
    for block in sorted({path.x for _, path in order}):
        yield [n for n, path in order if path.x == block]


def _components(product: Product, paths: Iterable[Path], slot: str) -> int:
    """Components of the blocks of a slot that paths reach."""
    blocks = {getattr(path, slot) for path in paths}
    return sum(product.blocks(slot)[block].components for block in blocks)
