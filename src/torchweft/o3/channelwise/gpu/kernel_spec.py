"""What one kernel of a channelwise product computes, and how its work is laid out."""

from __future__ import annotations

from typing import NamedTuple

from torchweft.o3.channelwise.calls import Call
from torchweft.o3.channelwise.structure import Block, Product

__all__ = ["Job", "Spread", "Target", "Tiling"]


class Spread(NamedTuple):
    """A block whose components stand anywhere, each with its channels side by side."""

    begins: tuple[int, ...]


class Target(NamedTuple):
    """Where a kernel stores a result.

    Args:
        width: numbers in a row.
        blocks: where each block lies; None: no path of the kernel reaches it.
        part: numbers between the parts that blocks of channels store of what they share.
        near: whether row 0 is that of the first edge of the launch, not of the graph.
    """

    width: int
    blocks: tuple[Block | Spread | None, ...]
    part: int = 0
    near: bool = False


class Tiling(NamedTuple):
    """How a kernel lays its work out.

    Args:
        block: channels of a program, a power of 2.
        edges: of a tile, a power of 2.
        warps: of a program.
        stages: iterations of the loop over edges whose loads are under way; 1: no copies ahead.
    """

    block: int
    edges: int = 1
    warps: int = 1
    stages: int = 1


class Job(NamedTuple):
    """What one kernel computes.  Its source depends on all of it.

    Args:
        product: blocks and paths.
        paths: those of the product that it computes, by number.
        call: its results; tensors are those of the whole call.
        targets: for each of its results.
        owner: "z" or "x", the slot whose rows programs own.
        widths: numbers in a row of each tensor.
        segmented: whether a row has a list of edges; else edge and row are one.
        pieces: whether lists are pieces of rows.
        ordered: whether edges are numbered in another order than that of the lists.
        indexed: whether an edge names its row of the other slot.
        shared: whether w has one row.
        wide: for float64.
        runs: whether lists are runs (`o3.edges.shared_source_runs`), which programs take beside
            each other.
        tiling: how the work is laid out.
    """

    product: Product
    paths: tuple[int, ...]
    call: Call
    targets: tuple[Target, ...]
    owner: str
    widths: tuple[int, ...]
    segmented: bool
    pieces: bool
    ordered: bool
    indexed: bool
    shared: bool
    wide: bool
    runs: bool
    tiling: Tiling

    @property
    def looped(self) -> bool:
        """Whether a program takes several rows: its part of a shared gradient is summed."""
        return self.shared and any(r.slot == "w" and r.terms for r in self.call.results)

    @property
    def divisible(self) -> bool:
        """Whether a program can take some edges of a row alone: then it takes places of lists."""
        summed = {r.slot for r in self.call.results if r.terms} & {self.owner}
        return self.segmented and not summed and not self.looped

    @property
    def in_turn(self) -> bool:
        """Whether launches can take some edges after others, in the order of their numbers."""
        return self.divisible and not self.ordered

    @property
    def channel_blocks(self) -> int:
        """Programs that share a row."""
        return -(-self.product.channels // self.tiling.block)
