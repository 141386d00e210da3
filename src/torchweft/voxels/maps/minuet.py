"""Metadata of a kernel map for gather → grouped products → scatter, as the Minuet seed names it.

A padded buffer holds one slot a pair, offset by offset, the offsets with most pairs first:

    buf[in_mask] = x;   one product a group;   y += buf[out_mask]

Inside one offset every input and every output row occurs at most once, so nothing collides.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.voxels.maps.kernel_map import KernelMap

__all__ = ["GemmGroups", "Group", "KernelMapMasks", "build_masks", "greedy_group"]

Pairs = Mapping[int, Sequence[tuple[int, int]]]
"""Offset → (input row, output row) of its pairs."""


class Group(NamedTuple):
    """Offsets that share one product.

    Args:
        members: places in the list of counts.
        base: their first slot.
        req: their slots together.
        alloc: the same rounded up to the alignment.
    """

    members: tuple[int, ...]
    base: int
    req: int
    alloc: int


class GemmGroups(NamedTuple):
    """Counts packed into groups.

    Args:
        pos_indices: the first slot of each count.
        groups: in order.
        total_slots: of the padded buffer.
    """

    pos_indices: list[int]
    groups: list[Group]
    total_slots: int

    @property
    def membership(self) -> list[list[int]]:
        """The members of each group."""
        return [list(group.members) for group in self.groups]

    @property
    def gemm_list(self) -> list[dict[str, int]]:
        """For each product how many offsets it serves, its rows, and how many of them are used."""
        return [
            {
                "num_offsets": len(group.members),
                "gemm_M": group.alloc,
                "slots": group.req,
                "padding": group.alloc - group.req,
            }
            for group in self.groups
        ]

    def as_ranges(self) -> list[tuple[list[int], int, int, int]]:
        """(range, base, req, alloc) as the seed prints them: [first, last], [0, 0] for one."""
        return [
            ([g.members[0], g.members[-1]] if len(g.members) > 1 else [0, 0], *g[1:])
            for g in self.groups
        ]


class KernelMapMasks(NamedTuple):
    """The slots of a map's pairs.

    Args:
        in_mask: (num_offsets · num_points,) int32, entry (o, t): the slot of point t as an input
            of offset o, −1 for none.
        out_mask: the same of point t as an output.
        offsets_active: offsets with a pair, most pairs first, ties by number.
        slot_array: (num_offsets + 1,), how many pairs the offsets before have.
        counts: (num_offsets,), pairs of each offset.
        slots: (num_offsets,), the first slot of each offset, −1 where it has no pair.
    """

    in_mask: Tensor
    out_mask: Tensor
    offsets_active: Tensor
    slot_array: Tensor
    counts: Tensor
    slots: Tensor


def greedy_group(
    slots: Sequence[int], alignment: int = 4, max_group: int = 6, max_slots: int | None = None
) -> GemmGroups:
    """Counts packed in order into groups whose rows are multiples of `alignment`.

    A group is closed when it has `max_group` members, or when the next count would pass
    `max_slots`; a count above that stands alone.

    Raises:
        ShapeError, DTypeError: counts that do not descend or are no integers, a limit below 1.
    """
    counts = [_count(n) for n in slots]
    _check_limits(alignment, max_group, max_slots)
    for place, (before, after) in enumerate(itertools.pairwise(counts)):
        if before < after:
            raise ShapeError(
                f"slots[{place + 1}] is {after} after {before}: counts must descend. "
                "Sort them, as counts[offsets_active] of build_masks are."
            )
    pos_indices: list[int] = []
    groups: list[Group] = []
    members: list[int] = []
    base = req = 0

    def close() -> int:
        alloc = -(-req // alignment) * alignment
        groups.append(Group(tuple(members), base, req, alloc))
        return base + alloc

    for place, count in enumerate(counts):
        full = len(members) == max_group or (max_slots is not None and req + count > max_slots)
        if members and full:
            base, req, members = close(), 0, []
        pos_indices.append(base + req)
        members.append(place)
        req += count
    return GemmGroups(pos_indices, groups, close() if members else 0)


def build_masks(
    kernel_map: KernelMap | Pairs,
    num_offsets: int,
    num_points: int,
    *,
    alignment: int = 4,
    max_group: int = 6,
    max_slots: int | None = None,
) -> KernelMapMasks:
    """The slots of every pair of a map in the padded buffer of `greedy_group`.

    Args:
        kernel_map: a map, or offset → [(input row, output row), …]; the order of the pairs is that
            of their slots, in a map by output row.
        num_offsets: K.
        num_points: rows of each side, at least.
        alignment: see greedy_group, and for the next two.
        max_group: offsets in a product.
        max_slots: pairs in a product, None for any number.

    Raises:
        IndexRangeError: an offset or a row past the given numbers.
    """
    offset, in_row, out_row = _entries(kernel_map)
    _check_entries(offset, num_offsets, "offset", "num_offsets")
    for rows, name in ((in_row, "input row"), (out_row, "output row")):
        _check_entries(rows, num_points, name, "num_points")
    counts = torch.bincount(offset, minlength=num_offsets)
    order = torch.sort(counts, descending=True, stable=True).indices
    active = order[counts[order] > 0]
    grouped = greedy_group(counts[active].tolist(), alignment, max_group, max_slots)
    slots = torch.full_like(counts, -1)
    slots[active] = slots.new_tensor(grouped.pos_indices)
    slot_array = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    rank = torch.arange(len(offset), device=offset.device) - slot_array[offset]
    slot = (slots[offset] + rank).int()
    masks = slot.new_full((2, num_offsets * num_points), -1)
    for mask, rows in zip(masks, (in_row, out_row), strict=True):
        mask[offset * num_points + rows] = slot
    return KernelMapMasks(masks[0], masks[1], active, slot_array, counts, slots)


def _entries(kernel_map: KernelMap | Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """(offset, input row, output row) of each pair, offsets ascending."""
    if isinstance(kernel_map, KernelMap):
        offset, out_row = (kernel_map.sources >= 0).nonzero().unbind(1)
        return offset, kernel_map.sources[offset, out_row].long(), out_row
    if not isinstance(kernel_map, Mapping):
        raise DTypeError(
            f"kernel_map is a {type(kernel_map).__name__}: it must be a KernelMap, or a dictionary "
            "of the pairs of each offset. Pass kernel_map(tensor, kernel_size)."
        )
    listed = [(k, q, o) for k in sorted(kernel_map) for q, o in kernel_map[k]]
    offset, in_row, out_row = torch.tensor(listed, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return offset, in_row, out_row


def _count(value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise DTypeError(
            f"slots hold {value!r}: counts are integers. Pass counts[offsets_active] of a map."
        ) from None


def _check_entries(values: Tensor, limit: int, what: str, name: str) -> None:
    if not values.numel():
        return
    low, high = (int(v) for v in values.aminmax())
    if low < 0 or high >= limit:
        raise IndexRangeError(
            f"the map has the {what} {low if low < 0 else high} but {name} is {limit}: every one "
            f"must lie in 0..{limit - 1}. Pass the {name} of the map."
        )


def _check_limits(alignment: int, max_group: int, max_slots: int | None) -> None:
    limits = {"alignment": alignment, "max_group": max_group, "max_slots": max_slots}
    for name, value in limits.items():
        if value is not None and value < 1:
            raise ShapeError(f"{name} is {value}: it must be at least 1. Pass {name}=4, say.")
