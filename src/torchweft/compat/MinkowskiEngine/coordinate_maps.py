"""Coordinate maps: distinct voxels in units of their level, and which of them a kernel joins.

MinkowskiEngine counts in voxels of the finest level: a map of tensor stride t holds multiples of t.
torchweft counts in voxels of the map's own level: neighbours differ by 1.  Its spatial columns
are reversed here, so that its order of a kernel's offsets, whose last axis is fastest, is the
original's, whose first axis is: kernels need no permutation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.errors import ShapeError
from torchweft.voxels.grid import Geometry, geometry
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.packing import Packing

__all__ = [
    "CoordinateMap",
    "Region",
    "Window",
    "distinct",
    "expanded",
    "region",
    "steps_of",
    "turned",
]


class CoordinateMap:
    """Distinct voxels of one tensor stride.

    Args:
        level: the voxels, spatial columns reversed, in units of the tensor stride; in voxels of the
            finest level where some are no multiples of it.
        tensor_stride: voxels of the finest level that one spans, by axis; 0 for the origin.
        units: voxels of the finest level in one step of a row's column, the batch first.
    """

    def __init__(
        self, level: Coordinates, tensor_stride: Sequence[int], units: Sequence[int]
    ) -> None:
        self.level, self.tensor_stride, self.units = level, tuple(tensor_stride), tuple(units)

    @classmethod
    def of(cls, rows: Tensor, tensor_stride: Sequence[int]) -> CoordinateMap:
        """The map of distinct rows (batch, …) in voxels of the finest level."""
        units = steps_of(tensor_stride)
        if set(units) != {1}:
            steps = torch.tensor(units, device=rows.device)
            if bool((rows % steps).any()):
                units = (1,) * len(units)
            else:
                rows = torch.div(rows, steps, rounding_mode="floor")
        return cls(Coordinates(rows, stride=units[1:]), tensor_stride, units)

    def __len__(self) -> int:
        return len(self.level)

    @property
    def counts_strides(self) -> bool:
        """Whether its units are its tensor stride."""
        return self.units == steps_of(self.tensor_stride)

    @property
    def coordinates(self) -> Tensor:
        """(N, 1 + d) int32, the original's coordinates; a copy."""
        return turned(self.finest.rows)

    @functools.cached_property
    def finest(self) -> Coordinates:
        """The same rows in voxels of the finest level."""
        if set(self.units) == {1}:
            return self.level
        rows = self.level.rows
        return Coordinates(rows * torch.tensor(self.units, device=rows.device))

    def strided(self, stride: Sequence[int]) -> CoordinateMap:
        """The voxels ⌊c / (t s)⌋ t s of all voxels c; t is the tensor stride."""
        new = [t * s for t, s in zip(self.tensor_stride, stride, strict=True)]
        source, steps = (self.level, stride) if self.counts_strides else (self.finest, new)
        shape = geometry(len(new), 1, tuple(steps)[::-1], mode="floor")
        return CoordinateMap(source.coarse(shape), new, steps_of(new))

    def find(self, cells: Tensor) -> Tensor:
        """The rows (int32) of voxels that are given in units of the tensor stride; −1 for none."""
        if not self.counts_strides:
            cells = cells * torch.tensor(steps_of(self.tensor_stride), device=cells.device)
        return self.level.find(cells)


def steps_of(tensor_stride: Sequence[int]) -> tuple[int, ...]:
    """The tensor stride by column of turned rows: 1 for the batch, and where it is 0."""
    return (1, *(max(t, 1) for t in tuple(tensor_stride)[::-1]))


def turned(rows: Tensor) -> Tensor:
    """Rows (batch, …) with the spatial columns in reverse order; a copy."""
    return torch.cat((rows[:, :1], rows[:, 1:].flip(1)), 1)


def distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The first row of each voxel, ascending, and the number of each row's voxel among these."""
    count = len(rows)
    places = torch.arange(count, device=rows.device)
    if not count:
        return places, places
    low, high = torch.stack(torch.aminmax(rows.long(), dim=0)).tolist()
    packing = Packing(rows, low, [b - a + 1 for a, b in zip(low, high, strict=True)])
    keys, voxel = torch.unique(packing.keys(rows), return_inverse=True)
    if len(keys) == count:
        return places, places
    first = torch.full_like(keys, count, dtype=torch.int64)
    first = first.scatter_reduce(0, voxel, places, "amin")
    first, order = torch.sort(first)
    return first, torch.argsort(order)[voxel]


class Window(NamedTuple):
    """The window of a layer, one number per axis in the original's order."""

    kernel_size: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]


class Region(NamedTuple):
    """The voxels that a layer joins, in common units, and torchweft's geometry of its window.

    Attributes: fine and coarse, of which a transposed layer reads the coarse ones; coarse is None
    where the geometry says them: they are the fine ones, or the floors ⌊u / stride⌋ of all.
    """

    fine: Coordinates
    coarse: Coordinates | None
    shape: Geometry


def region(fine: CoordinateMap, coarse: CoordinateMap, window: Window) -> Region:
    """A coarse voxel u meets the fine voxels u + offset · dilation · (the fine tensor stride).

    The stride has no effect here: it chose the coarse map.

    Raises:
        ShapeError: a window of several offsets on the origin, where all of them coincide.
    """
    dim = len(fine.tensor_stride)
    sizes = tuple(window.kernel_size)[::-1]
    dilation = tuple(window.dilation)[::-1]
    if 0 in fine.tensor_stride and set(sizes) != {1}:
        raise ShapeError(
            f"kernel_size is {list(window.kernel_size)} on a tensor of tensor stride 0, as global "
            "pools leave it: it must be 1. Use MinkowskiLinear, or a convolution of kernel_size=1."
        )
    if fine.level is coarse.level and fine.counts_strides and all(k % 2 for k in sizes):
        return Region(fine.level, None, geometry(dim, sizes, 1, 0, dilation))
    joined = zip(fine.tensor_stride, window.stride, coarse.tensor_stride, strict=True)
    counted = fine.counts_strides and coarse.counts_strides
    if counted and all(a * s == b for a, s, b in joined):  # the stride takes one into the other
        shape = geometry(dim, sizes, tuple(window.stride)[::-1], 0, dilation, mode="floor")
        ones = set(window.stride) == {1}
        floors = fine.level if ones else fine.level.tables.get(shape.stride)
        return Region(fine.level, None if floors is coarse.level else coarse.level, shape)
    steps = tuple(d * t for d, t in zip(dilation, fine.tensor_stride[::-1], strict=True))
    steps = tuple(max(step, 1) for step in steps)  # of one offset on the origin
    return Region(fine.finest, coarse.finest, geometry(dim, sizes, 1, 0, steps, mode="floor"))


def expanded(
    inputs: CoordinateMap, offsets: Tensor, window: Window, transposed: bool
) -> CoordinateMap:
    """Every voxel that an input reaches by an offset: the outputs of a layer that makes voxels.

    Args:
        inputs: the voxels that are read.
        offsets: (K, d) positions of the kernel, in the original's order of axes.
        window: of the layer.
        transposed: whether the outputs are finer by the stride; else they are coarser, and only
            what lies on their grid is kept.

    Raises:
        ShapeError: a tensor stride that the stride does not divide, in a transposed layer.
    """
    rows, old = inputs.finest.rows.long(), inputs.tensor_stride
    if transposed:
        new = [t // s for t, s in zip(old, window.stride, strict=True)]
        if any(n * s != t for n, s, t in zip(new, window.stride, old, strict=True)):
            raise ShapeError(
                f"stride is {list(window.stride)} in a transposed layer on a tensor of tensor "
                f"stride {list(old)}: it must divide it. Pass a tensor of a coarser level."
            )
    else:
        new = [t * s for t, s in zip(old, window.stride, strict=True)]
    unit = new if transposed else old  # the finer of the two
    steps = offsets * torch.tensor([d * t for d, t in zip(window.dilation, unit, strict=True)])
    steps = torch.nn.functional.pad(steps.flip(1), (1, 0)).to(rows.device)
    rows = (rows.unsqueeze(1) + steps).flatten(0, 1)
    if not transposed:
        grid = torch.tensor(steps_of(new), device=rows.device)
        rows = rows[(rows % grid == 0).all(1)]
    return CoordinateMap.of(rows.index_select(0, distinct(rows)[0]), new)
