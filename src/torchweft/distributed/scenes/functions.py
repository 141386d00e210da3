"""One scene of voxels over ranks: each owns a box, and maps read the voxels of others beside it.

A voxel c of stride t belongs to the rank in whose box the finest voxel c · t lies.  So every rank
knows the owner of every voxel of every layer, and a layer's outputs on a rank are those in its
box.  When maps are built, ranks send each other the voxels that the other's outputs can read: they
become a `Halo`, which completes the features at every call (slabs.py).
Where the boxes tell that no rank reads voxels of another, as in a layer whose kernel is its stride,
a map is that of one process, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core import private
from torchweft.core.collectives import Group, exchange, largest, world
from torchweft.core.operators.operator import below_transforms, outside_graphs
from torchweft.distributed.agreement import Calls, Made, agree
from torchweft.distributed.directory import sent_to
from torchweft.distributed.scenes.boxes import Box, bisected
from torchweft.distributed.scenes.slabs import Asked, Slabs, Tables, tables_between
from torchweft.errors import ShapeError
from torchweft.voxels.grid import Geometry, integer
from torchweft.voxels.maps.coordinates import Coordinates, Grid
from torchweft.voxels.maps.kernel_map import KernelMap, Maps, build_map, output_stride
from torchweft.voxels.maps.recipes import Key, Step, note
from torchweft.voxels.maps.shards import refuse
from torchweft.voxels.maps.tensor import SparseTensor, check_sparse
from torchweft.voxels.maps.together import MapRead, build_levels, list_maps

__all__ = ["VoxelShards", "shard_voxels"]


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
    rank's voxels of the result, global pools the same result on every rank; norms count all voxels.
    The gradient of a parameter is this rank's part: DDP's sum, or an all_reduce, adds them; those
    of parameters behind a global pool differ, see `voxels.global_pool`.  The gradient of each voxel
    arrives at its owner, to any order.  `replace` keeps all this; a SparseTensor that is built anew
    from rows of the result belongs to this rank only.

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

    Cost: memory for this rank's rows (and for its argument), and a pass over them for each doubling
    of the ranks.  A map costs an exchange of the voxels next to the cuts, for which the host waits
    once; if all ranks asked for the same maps of the last scene, those of layers whose outputs are
    their inputs share one.  A call of a layer costs an exchange of features, and one in its
    backward pass.  Layers whose kernel is 1, or their stride where that divides `block`, exchange
    nothing.

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
    last = _last.get(private.group_name(group), _Last([], {}))
    recipe = list(last.maps.values())
    calls = Calls("shard_voxels", describe, group, last.calls)
    calls.wait()
    steps, blocks = (0, *tensor.stride), (1, *(block,) * tensor.dim)
    finest = tensor.coordinates.rows * torch.tensor((1, *tensor.stride), device=tensor.device)
    boxes = bisected(finest, world_size, steps, blocks, group, not whole)
    shards = VoxelShards(boxes, rank, group, calls, recipe)
    found = shards.own_part(tensor) if whole else shards.moved(tensor)
    _last[private.group_name(group)] = _Last(calls.made, shards.asked)
    return found


class VoxelShards:
    """How the voxels of a scene, at every stride, are spread over the ranks of a group.

    Args:
        boxes: of finest voxels, by rank.
        rank: of this process.
        group: the ranks; None: all.
        calls: those of layers on this scene, which `shard_voxels` has compared.
        recipe: maps that were asked of the last scene.
    """

    def __init__(
        self,
        boxes: Sequence[Box],
        rank: int,
        group: Group | None,
        calls: Calls,
        recipe: Sequence[Step],
    ) -> None:
        self.boxes, self.rank, self.group, self._calls = list(boxes), rank, group, calls
        self._slabs, self._recipe = Slabs(self.boxes, rank, group, calls), recipe
        self.asked: dict[Key, Step] = {}
        """Maps that were asked of the scene and of all levels that derive from it."""

    def kernel_map(
        self, inputs: Coordinates, shape: Geometry, onto: Coordinates | None
    ) -> KernelMap:
        """The map of a layer, from own voxels and those around them onto own voxels.

        It is built at the first call, on all ranks, and kept with the inputs.
        """
        kept = inputs.tables if onto is None else inputs.onto.setdefault(onto, {})
        if shape not in kept:
            kept[shape] = self._first_asked(Asked(inputs, shape, onto, False))
        table, back, outputs, around = kept[shape]
        found = next(v for v in (onto, outputs, inputs) if v is not None)
        return KernelMap(table, back, inputs, found, shape, around=around)

    def transposed(self, found: KernelMap) -> KernelMap:
        """The map with its sides swapped, from the voxels around own outputs onto own inputs."""
        inputs, outputs, inverse = found.outputs, found.inputs, not found.inverse
        kept: dict[Any, Any] = inputs.onto.setdefault(outputs, {})
        key = found.geometry, inverse
        if key not in kept:
            kept[key] = self._first_asked(Asked(inputs, found.geometry, outputs, inverse))
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
        found.shards, found.asked = self, self.asked
        return SparseTensor.on(feats, found, Maps())

    @below_transforms
    @outside_graphs
    def _first_asked(self, asked: Asked) -> Tables:
        """The tables of a map: foreseen, or built now."""
        inputs, shape, onto, inverse = asked
        facts = {"layer": shape, "inverse": inverse, "level": inputs.level}
        facts |= {"input": inputs.stride, "output": asked.stride}
        self._calls.compare("kernel map", lambda: facts, always=True)
        if inputs.asked is self.asked and not self.asked and self._calls.foreseen:
            self._foresee(inputs)
        if onto is not None:
            return self._built(asked)
        found: Tables = inputs.foreseen.pop(shape, None) or self._built(asked)
        note(inputs, shape, inputs if found[2] is None else found[2])
        return found

    def _built(self, asked: Asked) -> Tables:
        inputs, shape, onto, inverse = asked
        if self._slabs.shared((inputs.stride, asked.stride), shape, inverse):
            return self._slabs.maps([asked], self)[0]
        if onto is not None:
            return *tables_between(inputs, onto, shape, inverse), None, None
        tables = build_map(inputs, shape)
        if tables[2] is not None:
            tables[2].shards = self
        return *tables, None

    def _foresee(self, cloud: Coordinates) -> None:
        """Build what was asked of the last scene: levels at once, and maps across the cuts."""
        strides, alone, across = {0: cloud.stride}, list[Step](), list[Step]()
        for step in self._recipe:
            stride = strides[step.inputs]
            found = output_stride(stride, step.shape)
            strides.setdefault(step.outputs, found)
            shared = self._slabs.shared((stride, found), step.shape, False)
            (across if shared else alone).append(step)
        known = build_levels(cloud, alone)
        for level in known.values():
            level.shards = self
            level.foreseen = {shape: (*tables, None) for shape, tables in level.foreseen.items()}
        across = [s for s in across if s.inputs == s.outputs and s.inputs in known]
        if across:
            asked = [Asked(known[step.inputs], step.shape, None, False) for step in across]
            maps = self._slabs.maps(asked, self)
            for each, tables in zip(asked, maps, strict=True):
                each.inputs.foreseen[each.shape] = tables
            list_maps([_map_read(*made) for made in zip(across, asked, maps, strict=True)])


def _map_read(step: Step, asked: Asked, tables: Tables) -> MapRead:
    table, back, _, around = tables
    return step, table, back, asked.inputs, asked.inputs if around is None else around.voxels


class _Last(NamedTuple):
    """What was asked of the last scene of a group, which grows with that scene."""

    calls: list[Made]
    maps: dict[Key, Step]


_last: dict[str, _Last] = {}
"""By the name of a group."""


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
        integer(f"{name} is", value, f". Pass {name}=2, for example.")
        for name, value in (("rank", rank), ("world_size", world_size), ("block", block))
    )
    if given[:2] != world(group):
        raise ShapeError(
            f"rank is {rank} and world_size {world_size} but this process is rank "
            f"{world(group)[0]} of {world(group)[1]}: they must be those of the group. Call "
            "torch.distributed.init_process_group first, and pass get_rank(group) and "
            "get_world_size(group)."
        )
    if given[2] < 1:
        raise ShapeError(f"block is {block}: it must be at least 1. Pass block=16, for example.")


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
