"""What a layer on the voxels of a cloud costs: pairs, groups, tiles, operations and bytes.

L = Σ_k pairs of offset k         operations 2 L C², of a dense layer 2 K (voxels of the box) C²
tile waste = Σ_tiles (rows of the tile · offsets that one of its rows needs) / L
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.errors import ShapeError
from torchweft.reductions import LazyTensor
from torchweft.voxels import SparseTensor, greedy_group, kernel_map

__all__ = [
    "NEAR",
    "TILES",
    "Layer",
    "by_mask",
    "descending",
    "layer_of",
    "padding_of",
    "spacing_of",
    "tile_waste",
]

TILES = (64, 128)  # rows of a tile of the GPU kernels
NEAR = 2**20  # rows that those kernels sort by mask among themselves
BITS = 63  # of a sort key
ASKED = 1000  # points whose nearest neighbour gives the spacing
MOST = 2**28  # entries of a table, one GB of them


class Layer(NamedTuple):
    """A submanifold layer on a cloud's voxels.

    Args:
        size: edge of a voxel.
        kernel: of every axis.
        voxels: N.
        box: voxels of the box around them.
        counts: (K,) pairs of each offset.
        waste: by (order, rows of a tile), order "ascending" or "by mask".
    """

    size: float
    kernel: int
    voxels: int
    box: int
    counts: Tensor
    waste: dict[tuple[str, int], float]

    @property
    def pairs(self) -> int:
        """L, of all offsets."""
        return int(self.counts.sum())

    def operations(self, channels: int) -> int:
        """2 L C², forward."""
        return 2 * self.pairs * channels**2

    def saved(self, channels: int) -> float:
        """Operations of torch's dense layer on the box, for each of this layer's."""
        return 2 * len(self.counts) * self.box * channels**2 / self.operations(channels)

    def bytes(self, channels: int) -> dict[str, int]:
        """What a layer in float16 keeps, and what gathering its rows would add."""
        tables = 1 if self.kernel % 2 else 2  # of an odd kernel one serves both directions
        return {
            "in, out": 2 * 2 * self.voxels * channels,
            "map": tables * 4 * len(self.counts) * self.voxels,
            "weight": 2 * len(self.counts) * channels**2,
            "gathered": 2 * self.pairs * channels,
        }


def layer_of(tensor: SparseTensor, size: float, kernel: int) -> Layer:
    """The numbers of a submanifold layer on voxels in ascending order."""
    num_offsets = kernel**tensor.dim
    if num_offsets * len(tensor) > MOST:
        raise ShapeError(
            f"a kernel of {kernel} on {len(tensor):,} voxels of edge {size:g} makes tables of "
            f"{num_offsets * len(tensor):,} entries: {MOST:,} are the most that are inspected. "
            "Pass a larger --size, a smaller --kernel, or a part of the cloud."
        )
    found = kernel_map(tensor, kernel)
    there = found.sources >= 0
    order = by_mask(there)
    waste = {("ascending", rows): tile_waste(there, rows) for rows in TILES}
    there = there.index_select(1, order)
    waste |= {("by mask", rows): tile_waste(there, rows) for rows in TILES}
    box = int(torch.tensor(tensor.spatial_shape).prod())
    return Layer(size, kernel, len(tensor), box, found.counts, waste)


def by_mask(there: Tensor) -> Tensor:
    """(N,) the rows in the order of the GPU kernels' tiles, from (K, N): whether a pair is there.

    Rows are sorted by their masks among their NEAR neighbours: Gray codes, in which neighbours
    differ at one offset, the rarest offset in the highest bit.  Offsets past 63 bits, the most
    frequent ones, do not count.
    """
    count = there.shape[1]
    near = torch.arange(count) // NEAR
    bits = min(len(there), BITS - int(near.amax() if count else 0).bit_length())
    rarest = there.sum(1).argsort(stable=True)[:bits]
    key = torch.zeros(count, dtype=torch.int64)
    for place, offset in enumerate(rarest.tolist()):
        key += there[offset].long() << (bits - 1 - place)
    for log in range(6):
        key ^= key >> (1 << log)
    return torch.argsort((near << bits) | key, stable=True)


def tile_waste(there: Tensor, rows: int) -> float:
    """Products of tiles of so many rows over those of the pairs, (K, N) in the order of tiles."""
    padded = torch.nn.functional.pad(there, (0, -there.shape[1] % rows))
    needed = padded.view(len(there), -1, rows).any(2).sum()
    return rows * int(needed) / max(int(there.sum()), 1)


def spacing_of(points: Tensor) -> float:
    """Median distance of a point to the nearest at another place, over a thousand of them."""
    asked = torch.linspace(0, len(points) - 1, min(ASKED, len(points))).long()
    squares = LazyTensor(points[asked][:, None]).sqdist(LazyTensor(points[None]))
    elsewhere = (-squares).ifelse(torch.inf, squares)  # inf where the square is 0
    found = float(elsewhere.min(1).median().sqrt())
    if found == float("inf"):
        raise ShapeError(
            f"all {len(points)} points are at one place: a voxel size follows from distances. "
            "Pass --size, or another cloud."
        )
    return found


def padding_of(counts: Tensor, alignment: int) -> tuple[int, float]:
    """How many groups `greedy_group` makes of the pairs, and what part of their rows is padding."""
    groups = greedy_group(descending(counts), alignment)
    return len(groups.groups), 1 - int(counts.sum()) / max(groups.total_slots, 1)


def descending(counts: Tensor) -> list[int]:
    """The counts of the offsets with a pair, most first."""
    most: list[int] = counts[counts > 0].sort(descending=True).values.tolist()
    return most
