"""Metadata of a kernel map for gather → grouped products → scatter, as in Minuet.

A padded buffer has one slot per pair, offset by offset, the offsets with most pairs first:

    buf[in_mask] = x;   one product per group;   y += buf[out_mask]

Every input and every output row occurs at most once per offset, so that no two writes collide.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.voxels.grid import integer
from torchweft.voxels.maps.kernel_map import KernelMap

__all__ = ["GemmGroups", "Group", "KernelMapMasks", "build_masks", "greedy_group"]

PairLists = Mapping[int, Sequence[tuple[int, int]]]
"""Offset → (input row, output row) of its pairs."""


class Group(NamedTuple):
    """Offsets that share one product.

    Args:
        members: places in the list of counts.
        base: first slot.
        req: slots that are used.
        alloc: the same rounded up to the alignment.

    Example:
        >>> from torchweft import voxels
        >>> voxels.greedy_group([5, 3, 2]).groups[0]
        Group(members=(0, 1, 2), base=0, req=10, alloc=12)
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
        membership: the members of each group.
        gemm_list: for each product the number of its offsets `num_offsets`, its rows `gemm_M`, and
            how many of them are used, `slots`, and not used, `padding`.
        total_slots: of the padded buffer.

    Example:
        >>> from torchweft import voxels
        >>> voxels.greedy_group([5, 3, 2]).total_slots
        12
    """

    pos_indices: list[int]
    groups: list[Group]
    membership: list[list[int]]
    gemm_list: list[dict[str, int]]
    total_slots: int

    def as_ranges(self) -> list[tuple[list[int], int, int, int]]:
        """([first, last], base, req, alloc) of each group; [i, i] where i is alone."""
        return [([g.members[0], g.members[-1]], *g[1:]) for g in self.groups]


class KernelMapMasks(NamedTuple):
    """The slots of a map's pairs.

    Args:
        in_mask: (num_offsets · inputs,) int32, entry (o, t): the slot of point t as an input of
            offset o, −1 for none.
        out_mask: (num_offsets · outputs,), the same of point t as an output.
        offsets_active: offsets with a pair, most pairs first, ties by number.
        slot_array: (num_offsets + 1,), the number of pairs of the offsets before.
        counts: (num_offsets,), pairs of each offset.
        slots: (num_offsets,), the first slot of each offset, −1 where it has no pair.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> voxels.build_masks(voxels.kernel_map(x, 3), num_offsets=3, num_points=2).counts
        tensor([0, 2, 0])
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
    `max_slots`; a count above that is a group of its own.

    Args:
        slots: counts, descending.
        alignment: unit of a group's rows.
        max_group: most members of a group.
        max_slots: most rows of a group; None: any number.

    Raises:
        ShapeError, DTypeError: counts that do not descend or are no integers, a limit below 1.

    Returns:
        The groups, with the first slot of each count.

    Example:
        >>> from torchweft import voxels
        >>> voxels.greedy_group([5, 3, 2]).pos_indices
        [0, 5, 8]
    """
    if not isinstance(slots, Sequence | Tensor):
        raise DTypeError(
            f"slots is a {type(slots).__name__}: it must be a list of counts, descending. "
            "Pass counts[offsets_active] of a map."
        )
    counts = [integer("an entry of slots is", n, ". Pass 4, for example.") for n in slots]
    limits = {"alignment": alignment, "max_group": max_group}
    limits |= {} if max_slots is None else {"max_slots": max_slots}
    for name, value in limits.items():
        if integer(f"{name} is", value, ". Pass 4, for example.") < 1:
            raise ShapeError(
                f"{name} is {value}: it must be at least 1. Pass {name}=4, for example."
            )
    for place, (before, after) in enumerate(itertools.pairwise(counts)):
        if before < after:
            raise ShapeError(
                f"slots[{place + 1}] is {after} after {before}: counts must descend. "
                "Sort them, as counts[offsets_active] of build_masks are."
            )
    pos_indices: list[int] = []
    groups: list[Group] = []
    end = 0  # of the groups before
    for place, count in enumerate(counts):
        last = groups[-1] if groups else None
        full = last is None or len(last.members) == max_group
        if last is None or full or (max_slots is not None and last.req + count > max_slots):
            last = Group((), end, 0, 0)
            groups.append(last)
        pos_indices.append(last.base + last.req)
        req = last.req + count
        alloc = -(-req // alignment) * alignment
        groups[-1] = Group((*last.members, place), last.base, req, alloc)
        end = last.base + alloc
    products = [
        {"num_offsets": len(members), "gemm_M": alloc, "slots": req, "padding": alloc - req}
        for members, _, req, alloc in groups
    ]
    return GemmGroups(pos_indices, groups, [list(g.members) for g in groups], products, end)


def build_masks(
    kernel_map: KernelMap | PairLists,
    num_offsets: int,
    num_points: int | tuple[int, int],
    *,
    alignment: int = 4,
    max_group: int = 6,
    max_slots: int | None = None,
) -> KernelMapMasks:
    """The slots of every pair of a map in the padded buffer of `greedy_group`.

    Args:
        kernel_map: a map, or offset → [(input row, output row), …]; pairs keep their order in the
            slots, which in a map is that of the output rows.
        num_offsets: K.
        num_points: at least the number of rows of each side, or of inputs and of outputs: the
            entries of an offset in in_mask and in out_mask.
        alignment: see `greedy_group`.
        max_group: offsets in a product.
        max_slots: pairs in a product, None for any number.

    Raises:
        IndexRangeError: an offset or a row past the given numbers.

    Returns:
        The masks and slots.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> voxels.build_masks(voxels.kernel_map(x, 3), num_offsets=3, num_points=2).offsets_active
        tensor([1])
    """
    offset, in_row, out_row = _entries(kernel_map)
    _check_entries(offset, num_offsets, "offset", "num_offsets")
    points = num_points if isinstance(num_points, tuple) else (num_points, num_points)
    names = ("num_points",) * 2 if points[0] == points[1] else ("num_points[0]", "num_points[1]")
    _check_entries(in_row, points[0], "input row", names[0])
    _check_entries(out_row, points[1], "output row", names[1])
    counts = torch.bincount(offset, minlength=num_offsets)
    order = torch.sort(counts, descending=True, stable=True).indices
    active = order[counts[order] > 0]
    grouped = greedy_group(counts[active].tolist(), alignment, max_group, max_slots)
    slots = torch.full_like(counts, -1)
    slots[active] = slots.new_tensor(grouped.pos_indices)
    slot_array = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    rank = torch.arange(len(offset), device=offset.device) - slot_array[offset]
    slot = (slots[offset] + rank).int()
    in_mask, out_mask = (slot.new_full((num_offsets * n,), -1) for n in points)
    in_mask[offset * points[0] + in_row] = slot
    out_mask[offset * points[1] + out_row] = slot
    return KernelMapMasks(in_mask, out_mask, active, slot_array, counts, slots)


def _entries(kernel_map: KernelMap | PairLists) -> tuple[Tensor, Tensor, Tensor]:
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


def _check_entries(values: Tensor, limit: int, what: str, name: str) -> None:
    integer(f"{name} is", limit, ". Pass 4, for example.")
    if not values.numel():
        return
    low, high = (int(v) for v in values.aminmax())
    if low < 0 or high >= limit:
        raise IndexRangeError(
            f"the map has the {what} {low if low < 0 else high} but {name} is {limit}: every one "
            f"must lie in 0..{limit - 1}. Pass the {name} of the map."
        )
