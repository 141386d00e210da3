"""One scene of voxels over ranks: each owns a box, and maps read the voxels of others beside it.

A voxel c of stride t belongs to the rank in whose box the finest voxel c · t lies.  So every rank
knows the owner of every voxel of every layer, and a layer's outputs on a rank are those in its
box.  When a map is built, ranks send each other the coordinates that the other's outputs can read;
those that are read become a `Halo`, which completes the features at every call.
Where the boxes tell that no rank reads voxels of another, as in a layer whose kernel is its stride,
a map is that of one process, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core import private
from torchweft.core.collectives import Group, exchange, largest, world
from torchweft.core.operators.operator import below_transforms, outside_graphs
from torchweft.distributed.agreement import Calls, agree
from torchweft.distributed.directory import Sent, sent_in_parts, sent_to
from torchweft.distributed.halo import Halo, planned_halo
from torchweft.distributed.scenes.boxes import END, Box, bisected
from torchweft.errors import ShapeError
from torchweft.voxels.grid import Geometry, integer
from torchweft.voxels.maps.coordinates import Coordinates, Grid
from torchweft.voxels.maps.kernel_map import KernelMap, Maps, build_map, meet, output_stride
from torchweft.voxels.maps.shards import Around, refuse
from torchweft.voxels.maps.tensor import SparseTensor, check_sparse

__all__ = ["VoxelShards", "shard_voxels"]

Tables = tuple[Tensor, Tensor | None, Coordinates | None, Around | None]
"""`kept` and `back` of a map, its outputs, None where they are the inputs, and what it numbers,
None where that is the inputs too."""


def shard_voxels(
    tensor: SparseTensor,
    rank: int,
    world_size: int,
    *,
    whole: bool = True,
    block: int = 16,
    group: Group | None = None,
) -> SparseTensor:
    """This rank's voxels of a scene; layers on them read those of other ranks across the cuts.

    Networks run on the result as on a tensor of one process, and all ranks together compute what
    one process would: convolutions, pools, upsampling, `cat`, `+`, `union` and `prune` give this
    rank's voxels of the result, global pools the same result on every rank; norms count all
    voxels.  The gradient of a parameter is this rank's part: DDP's sum, or an all_reduce, adds
    them.  The gradient of each voxel arrives at its owner, to any order.  `replace` keeps all this;
    a SparseTensor that is built anew from rows of the result belongs to this rank only.

    Space is cut into a box for each rank, by recursive bisection along samples and axes, at
    multiples of `block`.  A layer's output belongs to the rank in whose box its lowest corner
    lies; where the product of strides divides `block`, coarse voxels are on the rank of all their
    children.

    Args:
        tensor: the scene, or batch of scenes.
        rank: number of this process in the group.
        world_size: number of processes in the group.
        whole: whether every rank passes the whole scene, of which it keeps its part, in ascending
            order.  Else the tensors of all ranks are the scene, each voxel on one of them, and
            voxels and features move to their owners.
        block: cuts lie at multiples of this number of finest voxels.
        group: the ranks; None: all.

    Returns:
        A tensor on the rank's own voxels, with the box and the batch size of the whole.

    Raises:
        ShapeError, DTypeError: on every rank, arguments of some rank that are no part of one
            scene, or that differ between ranks.

    Cost: memory for this rank's rows (and for its argument).  A map costs two exchanges of the
    voxels next to the cuts; a call of a layer one of their features, and one in its backward pass.
    Layers whose kernel is 1, or their stride where that divides `block`, exchange nothing.

    Example:
        >>> import torch
        >>> from torchweft import distributed, voxels
        >>> x = voxels.SparseTensor(torch.ones(2, 1), torch.tensor([[0, 1, 1], [0, 40, 1]]))
        >>> distributed.shard_voxels(x, 0, 1) is x  # one rank
        True
    """

    def describe() -> Mapping[str, Any]:
        _check(tensor, rank, world_size, block, group)
        return _facts(tensor, whole, block)

    if world(group)[1] == 1:
        _check(tensor, rank, world_size, block, group)
        return tensor
    calls = _calls_of_scene(describe, group)
    steps, blocks = (0, *tensor.stride), (1, *(block,) * tensor.dim)
    finest = tensor.coordinates.rows * torch.tensor((1, *tensor.stride), device=tensor.device)
    boxes = bisected(finest, world_size, steps, blocks, group, not whole)
    shards = VoxelShards(boxes, rank, group, calls)
    return shards.own_part(tensor) if whole else shards.moved(tensor)


class VoxelShards:
    """How the voxels of a scene, at every stride, are spread over the ranks of a group.

    Args:
        boxes: of finest voxels, by rank.
        rank: of this process.
        group: the ranks; None: all.
        calls: those of layers on this scene, which `shard_voxels` has compared.
    """

    def __init__(self, boxes: Sequence[Box], rank: int, group: Group | None, calls: Calls) -> None:
        self.boxes, self.rank, self.group, self._calls = list(boxes), rank, group, calls

    def kernel_map(
        self, inputs: Coordinates, shape: Geometry, onto: Coordinates | None
    ) -> KernelMap:
        """The map of a layer, from own voxels and those around them onto own voxels.

        It is built at the first call, on all ranks, and kept with the inputs.
        """
        kept = inputs.tables if onto is None else inputs.onto.setdefault(onto, {})
        if shape not in kept:
            kept[shape] = self._build(inputs, shape, onto, False)
        table, back, outputs, around = kept[shape]
        found = next(v for v in (onto, outputs, inputs) if v is not None)
        return KernelMap(table, back, inputs, found, shape, around=around)

    def transposed(self, found: KernelMap) -> KernelMap:
        """The map with its sides swapped, from the voxels around own outputs onto own inputs."""
        inputs, outputs, inverse = found.outputs, found.inputs, not found.inverse
        kept: dict[Any, Any] = inputs.onto.setdefault(outputs, {})
        key = found.geometry, inverse
        if key not in kept:
            kept[key] = self._build(inputs, found.geometry, outputs, inverse)
        table, back, _, around = kept[key]
        return KernelMap(table, back, inputs, outputs, found.geometry, inverse, around)

    def own_part(self, tensor: SparseTensor) -> SparseTensor:
        """The voxels of a whole scene that are in this rank's box."""
        rows = tensor.coordinates.rows
        own = self.boxes[self.rank].at(tensor.stride).holds(rows).nonzero().squeeze(1)
        feats = tensor.feats.index_select(0, own)
        return self._placed(rows.index_select(0, own), feats, tensor.coordinates.grid)

    def moved(self, tensor: SparseTensor) -> SparseTensor:
        """The voxels that are in this rank's box, from the ranks that have them."""
        rows = tensor.coordinates.rows
        parts = [box.at(tensor.stride).holds(rows).nonzero().squeeze(1) for box in self.boxes]
        order = torch.cat(parts)
        owner = _repeated([len(part) for part in parts], rows.device)
        sent = sent_to(owner, rows.index_select(0, order), self.group)
        feats = exchange(tensor.feats[order], sent.send, sent.receive, self.group)
        shape, size, stride, (lows, highs) = tensor.coordinates.grid
        ends = torch.tensor([[-n for n in lows], highs], device=rows.device)
        low, high = largest(ends, self.group).tolist()
        bounds = tuple(-n for n in low), tuple(high)
        return self._placed(sent.rows, feats, (shape, size, stride, bounds))

    def _placed(self, rows: Tensor, feats: Tensor, grid: Grid) -> SparseTensor:
        """Own voxels in ascending order, with their features."""
        given = _voxels(rows, grid)

        def describe() -> Mapping[str, Any]:
            given.valid(given.unchecked)  # raises where a voxel occurs twice
            return {}

        agree("shard_voxels", describe, self.group)
        if (order := given.order) is not None:
            rows, feats = rows.index_select(0, order), feats.index_select(0, order)
        found = Coordinates.of_ascending(rows, *grid)
        found.shards = self
        return SparseTensor.on(feats, found, Maps())

    @below_transforms
    @outside_graphs
    def _build(
        self, inputs: Coordinates, shape: Geometry, onto: Coordinates | None, inverse: bool
    ) -> Tables:
        """A map, or where `inverse` one with its sides swapped."""
        stride = output_stride(inputs.stride, shape) if onto is None else onto.stride
        facts = {"layer": shape, "inverse": inverse, "grid": inputs.grid, "output": stride}
        agree("kernel map", lambda: facts, self.group)
        at = [box.at(stride) for box in self.boxes]
        reads = [box if box.empty else _read_by(box, shape, inverse) for box in at]
        if not self._meet(reads, inputs.stride):
            return *self._apart(inputs, shape, onto), None
        places, sent = self._received(inputs, reads)
        outputs = onto
        if onto is None:
            every = _voxels(torch.cat([inputs.rows, sent.rows]), inputs.grid)
            outputs = self._outputs(every, shape, stride)
        target = inputs if outputs is None else outputs
        used = _reads(target, sent.rows, shape, inverse)
        others, halo = self._halo(len(inputs), places, sent, used)
        every = _voxels(torch.cat([inputs.rows, others]), inputs.grid)
        tables = _met(every, target, shape, inverse)
        return *tables, None if onto is not None else outputs, Around(every, halo)

    def _meet(self, reads: Sequence[Box], stride: Sequence[int]) -> bool:
        """Whether outputs of some rank can read inputs of another: every rank knows it."""
        return any(
            own != other and box.at(stride).meets(read)
            for own, box in enumerate(self.boxes)
            for other, read in enumerate(reads)
        )

    def _apart(
        self, inputs: Coordinates, shape: Geometry, onto: Coordinates | None
    ) -> tuple[Tensor, Tensor | None, Coordinates | None]:
        """The map of own voxels alone: all outputs that they meet are in this rank's box."""
        if onto is not None:
            return *meet(inputs, onto, shape), None
        table, back, outputs = build_map(inputs, shape)
        if outputs is not None:
            outputs.shards = self
        return table, back, outputs

    def _received(self, inputs: Coordinates, reads: Sequence[Box]) -> tuple[Tensor, Sent]:
        """The rows that were sent, and voxels of others that own outputs can read."""
        rows, parts = inputs.rows, []
        own = self.boxes[self.rank].at(inputs.stride)
        for rank, read in enumerate(reads):
            part = rows.new_empty(0, dtype=torch.int64)
            if rank != self.rank and own.meets(read):
                part = read.holds(rows).nonzero().squeeze(1)
            parts.append(part)
        places = torch.cat(parts)
        return places, sent_in_parts(rows[places], [len(part) for part in parts], self.group)

    def _halo(self, num_rows: int, places: Tensor, sent: Sent, used: Tensor) -> tuple[Tensor, Halo]:
        """The voxels of others that are used, and what completes the features by theirs."""
        of_own = exchange(used.byte(), sent.receive, sent.send, self.group).bool()
        counts = [
            part.sum()
            for flags, parts in ((used, sent.receive), (of_own, sent.send))
            for part in torch.split(flags, parts)
        ]
        numbers = torch.stack(counts).tolist()  # the host waits for the GPU
        receive, send = numbers[: len(self.boxes)], numbers[len(self.boxes) :]
        wanted = places[_flagged(of_own, sum(send))]
        halo = planned_halo(num_rows, wanted, send, receive, self.group, self._calls)
        return sent.rows[_flagged(used, sum(receive))], halo

    def _outputs(
        self, every: Coordinates, shape: Geometry, stride: Sequence[int]
    ) -> Coordinates | None:
        """The outputs in this rank's box; None where they are the inputs."""
        if not shape.has_outputs:
            return None
        found = every.coarse(shape) if shape.mode == "floor" else build_map(every, shape)[2]
        assert found is not None  # as the layer has outputs
        own = self.boxes[self.rank].at(stride).holds(found.rows)
        outputs = found.select(own.nonzero().squeeze(1))
        outputs.shards = self
        return outputs


_made: dict[str, list[str]] = {}
"""Calls of layers on the last scene, by the name of a group."""


def _calls_of_scene(describe: Callable[[], Mapping[str, Any]], group: Group | None) -> Calls:
    """The calls on a new scene: those that were made on the last one are compared here."""
    name = private.group_name(group)
    calls = Calls("shard_voxels", describe, group, _made.get(name, ()))
    calls.wait()
    _made[name] = calls.made
    return calls


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


def _reads(outputs: Coordinates, rows: Tensor, shape: Geometry, inverse: bool) -> Tensor:
    """(n,) bool: which of the voxels in `rows` some output reads."""
    offsets = torch.tensor([(0, *offset) for offset in shape.offsets()], device=rows.device)
    steps = torch.tensor((1, *shape.stride), device=rows.device)
    if shape.transposed != inverse:
        met = rows[:, None] * steps + offsets
        found = outputs.find(met.flatten(0, 1)) >= 0
    else:
        met = rows[:, None] - offsets
        found = outputs.find(met.div(steps, rounding_mode="floor").flatten(0, 1)) >= 0
        found &= (met % steps == 0).all(2).flatten()
    return found.view(met.shape[:2]).any(1)


def _flagged(flags: Tensor, count: int) -> Tensor:
    """The rows (count,) of the flags that are set, ascending; the host does not wait for them."""
    return flags.logical_not().byte().argsort(stable=True)[:count]


def _met(
    every: Coordinates, outputs: Coordinates, shape: Geometry, inverse: bool
) -> tuple[Tensor, Tensor]:
    """The tables by output and by input; an inverse layer's are those of the layer, swapped."""
    return meet(outputs, every, shape)[::-1] if inverse else meet(every, outputs, shape)


def _voxels(rows: Tensor, grid: Grid) -> Coordinates:
    """Distinct voxels in any order, in the bounds of all ranks."""
    found = Coordinates.of_ascending(rows, *grid)
    found.know(not len(rows), None)
    return found


def _repeated(counts: Sequence[int], device: torch.device) -> Tensor:
    """The number of each part, as often as it has rows."""
    parts = torch.arange(len(counts), device=device)
    return torch.repeat_interleave(parts, torch.tensor(counts, device=device))


def _check(
    tensor: SparseTensor, rank: int, world_size: int, block: int, group: Group | None
) -> None:
    check_sparse(tensor)
    refuse(tensor.coordinates, "shard_voxels", "Shard the whole scene once.")
    given = tuple(
        integer(f"{name} is", value, f". Pass {name}=2, say.")
        for name, value in (("rank", rank), ("world_size", world_size), ("block", block))
    )
    if given[:2] != world(group):
        raise ShapeError(
            f"rank is {rank} and world_size {world_size} but this process is rank "
            f"{world(group)[0]} of {world(group)[1]}: they must be those of the group. Pass "
            "torch.distributed.get_rank(group) and get_world_size(group)."
        )
    if given[2] < 1:
        raise ShapeError(f"block is {block}: it must be at least 1. Pass block=16, say.")


def _facts(tensor: SparseTensor, whole: bool, block: int) -> Mapping[str, Any]:
    voxels = tensor.coordinates
    return {
        "number of axes": voxels.dim,
        "spatial_shape": voxels.given_shape,
        "batch_size": voxels.given_batch_size,
        "stride": voxels.stride,
        "number of channels": tensor.feats.shape[1],
        "dtype": tensor.dtype,
        "device": tensor.device.type,
        "requires_grad": torch.is_grad_enabled() and tensor.feats.requires_grad,
        "whole": bool(whole),
        "block": block,
        "scene": _digest(voxels.rows) if whole else None,
    }


def _digest(rows: Tensor) -> tuple[int, int]:
    """The number of voxels, and a number that does not depend on their order."""
    mixed = rows.new_zeros(len(rows), dtype=torch.int64)
    for column in rows.long().unbind(1):
        mixed = (mixed + column) * 0x9E3779B97F4A7C1  # products wrap around
        mixed = mixed ^ (mixed >> 29)
    return len(rows), int(mixed.sum())
