"""Maps whose outputs read voxels of other ranks: all that are asked for together in one exchange.

The outputs in a rank's box read voxels in a larger box, which every rank knows.  A rank sends each
other one the voxels that it owns in the larger box of that rank, its slab: they become a `Halo`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.collectives import Group, exchange
from torchweft.distributed.agreement import Calls, numbers_of_ranks
from torchweft.distributed.halo import Halo, planned_halo
from torchweft.distributed.scenes.boxes import END, Box
from torchweft.voxels.grid import Geometry
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.kernel_map import build_map, meet, output_stride
from torchweft.voxels.maps.shards import Around, Shards

__all__ = ["Asked", "Slabs", "Tables", "tables_between"]

Tables = tuple[Tensor, Tensor | None, Coordinates | None, Around | None]
"""`kept` and `back` of a map, its outputs, None where they are the inputs, and what it numbers,
None where that is the inputs too."""


class Asked(NamedTuple):
    """A map that a layer asks for.

    Args:
        inputs: own voxels that are read.
        shape: the geometry.
        onto: own voxels that are written; None: those of the geometry.
        inverse: whether the map is that of the geometry with its sides swapped.
    """

    inputs: Coordinates
    shape: Geometry
    onto: Coordinates | None
    inverse: bool

    @property
    def stride(self) -> tuple[int, ...]:
        """Of the outputs."""
        if self.onto is not None:
            return self.onto.stride
        return output_stride(self.inputs.stride, self.shape)


class Slabs(NamedTuple):
    """Where the outputs of each rank read voxels.

    Args:
        boxes: of finest voxels, by rank.
        rank: of this process.
        group: the ranks; None: all.
        calls: those of layers on the scene.
    """

    boxes: Sequence[Box]
    rank: int
    group: Group | None
    calls: Calls

    def read(self, stride: Sequence[int], shape: Geometry, inverse: bool) -> list[Box]:
        """By rank, where the inputs lie that outputs of a stride in its box can read."""
        at = [box.at(stride) for box in self.boxes]
        return [box if box.empty else _read_by(box, shape, inverse) for box in at]

    def shared(
        self, strides: tuple[Sequence[int], Sequence[int]], shape: Geometry, inverse: bool
    ) -> bool:
        """Whether outputs of some rank can read inputs of another: every rank knows it.

        Args:
            strides: of the inputs, and of the outputs.
            shape: the geometry.
            inverse: whether its sides are swapped.
        """
        at = [box.at(strides[0]) for box in self.boxes]
        return any(
            own != other and box.meets(read)
            for other, read in enumerate(self.read(strides[1], shape, inverse))
            for own, box in enumerate(at)
        )

    def maps(self, asked: Sequence[Asked], shards: Shards) -> list[Tables]:
        """Maps that read voxels of other ranks; every rank asks for the same.

        Cost: one message between the hosts, which wait for the GPU before, and one exchange.
        """
        ranks = range(len(self.boxes))
        inside = self._inside(asked)
        totals: list[int] = torch.cat([flags.sum(1) for flags in inside]).tolist()
        told = numbers_of_ranks(totals, self.group)
        firsts = range(0, len(totals), len(ranks))
        send = [totals[first : first + len(ranks)] for first in firsts]
        receive = [[counts[first + self.rank] for counts in told] for first in firsts]
        places = [_rows(flags, sum(n)) for flags, n in zip(inside, send, strict=True)]
        rows = [each.inputs.rows[p] for each, p in zip(asked, places, strict=True)]
        others = self._sent(rows, send, receive)
        found = []
        for i, (each, beside) in enumerate(zip(asked, others, strict=True)):
            plan = places[i], send[i], receive[i]
            halo = planned_halo(len(each.inputs), *plan, self.group, self.calls)
            found.append(self._tables(each, beside, halo, shards))
        return found

    def _inside(self, asked: Sequence[Asked]) -> list[Tensor]:
        """Of each map (ranks, n) bool: which own voxels lie in the slab of a rank."""
        nowhere = Box(*[(END,) * (asked[0].inputs.dim + 1)] * 2)
        reads = [self.read(each.stride, each.shape, each.inverse) for each in asked]
        for boxes in reads:
            boxes[self.rank] = nowhere
        device = asked[0].inputs.device
        bounds = torch.tensor([list(zip(*boxes, strict=True)) for boxes in reads], device=device)
        found = []
        for each, (low, end) in zip(asked, bounds[:, :, :, None], strict=True):
            rows = each.inputs.rows
            found.append(((rows >= low) & (rows < end)).all(2))
        return found

    def _sent(
        self, rows: Sequence[Tensor], send: list[list[int]], receive: list[list[int]]
    ) -> list[Tensor]:
        """Of each map the rows from other ranks, rank by rank."""
        pieces = [torch.split(each, counts) for each, counts in zip(rows, send, strict=True)]
        by_rank = torch.cat([part for parts in zip(*pieces, strict=True) for part in parts])
        given, taken = ([sum(n) for n in zip(*of, strict=True)] for of in (send, receive))
        arrived = exchange(by_rank, given, taken, self.group)
        parts = torch.split(arrived, [n for of in zip(*receive, strict=True) for n in of])
        return [torch.cat(parts[i :: len(rows)]) for i in range(len(rows))]

    def _tables(self, asked: Asked, others: Tensor, halo: Halo, shards: Shards) -> Tables:
        """The map onto own outputs, given those voxels of others that lie in the slab."""
        inputs, shape, onto, inverse = asked
        every = Coordinates.of_distinct(torch.cat([inputs.rows, others]), *inputs.grid)
        outputs = onto
        if onto is None and shape.has_outputs:
            found = every.coarse(shape) if shape.mode == "floor" else build_map(every, shape)[2]
            assert found is not None  # as the layer has outputs
            own = self.boxes[self.rank].at(asked.stride).holds(found.rows)
            outputs = found.select(own.nonzero().squeeze(1))
            outputs.shards = shards
        target = inputs if outputs is None else outputs
        tables = tables_between(every, target, shape, inverse)
        return *tables, None if onto is not None else outputs, Around(every, halo)


def tables_between(
    inputs: Coordinates, outputs: Coordinates, shape: Geometry, inverse: bool
) -> tuple[Tensor, Tensor]:
    """`kept` and `back` of a map between known voxels, or of its inverse."""
    return meet(outputs, inputs, shape)[::-1] if inverse else meet(inputs, outputs, shape)


def _rows(flags: Tensor, count: int) -> Tensor:
    """Columns of the `count` flags (ranks, n) that are set, rank by rank, without a wait."""
    order = flags.logical_not().flatten().byte().argsort(stable=True)
    return order[:count] % max(flags.shape[1], 1)


def _read_by(box: Box, shape: Geometry, inverse: bool) -> Box:
    """Where inputs lie that outputs in a box can read."""
    low, end = list(box.low), list(box.end)
    for axis, (k, s, d, b) in enumerate(
        zip(shape.kernel_size, shape.stride, shape.dilation, shape.begin, strict=True), 1
    ):
        first, last = -b, (k - 1) * d - b  # offsets
        if shape.transposed != inverse:  # output = input · s + offset
            sides = -((last - low[axis]) // s), (end[axis] - 1 - first) // s + 1
        else:  # input = output · s + offset
            if shape.mode == "floor":  # so that the owner of ⌊input / s⌋ sees it
                first, last = min(first, 0), max(last, s - 1)
            sides = low[axis] * s + first, (end[axis] - 1) * s + last + 1
        low[axis], end[axis] = (
            side if abs(side) == END else max(-END, min(END, found))
            for side, found in zip((low[axis], end[axis]), sides, strict=True)
        )
    return Box(tuple(low), tuple(end))
