"""Boxes of space, one for each rank, and atoms that move to the rank whose box they have entered.

    box of ranks a .. b  =  box of a .. m − 1, where place[axis] < cut, and box of m .. b

Places are coordinates along the lattice vectors, within the cell where it repeats.  Every box is
cut across its longest side, so that the weight on either side is as the number of ranks there.  A
cut is found by histograms that the ranks add up: no rank sees another's atoms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.collectives import Group, all_sum, largest, world
from torchweft.distributed.agreement import agree
from torchweft.distributed.directory import sent_to
from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.o3.dynamics.neighbours import System, check_values, frame_of, system_of

__all__ = ["Domains", "facts", "one_structure"]

BINS, ROUNDS = 256, 4
"""A cut is found to within BINS^−ROUNDS of the box."""


class _Level(NamedTuple):
    """One cut of each box, by the first rank of the box."""

    axis: Tensor  # (P,)
    cut: Tensor  # (P,), inf where a box has one rank
    middle: Tensor  # (P,), the first rank beyond the cut


class Domains:
    """The parts of space that ranks own, found by recursive bisection.

    Every rank of the group builds it, and calls `migrate`, together.

    Args:
        positions: (n, 3), atoms of this rank; any, also none.
        cell: (3, 3), three lattice vectors as rows, the same on every rank.
        pbc: whether images repeat along each lattice vector: a bool or (3,).
        weights: (n,) integers, the work of each atom; None: one each.
        parts: number of boxes; None: one for each rank.  Others are for planning.
        group: the ranks; None: all.

    Raises:
        ShapeError, DTypeError, IndexRangeError: on every rank, where the arguments of some rank
            do not fit, or differ between the ranks.

    A part has its share of the weight to within the atoms of one place along the cut: of a perfect
    crystal, to within a plane of atoms.

    Memory and cost: O(n + 256 · parts) on this rank; five all_reduces for each of log₂(parts)
    levels.

    Example:
        >>> import torch, torchweft
        >>> line = torch.arange(8.0)[:, None] * torch.tensor([1.0, 0.0, 0.0])
        >>> torchweft.distributed.Domains(line, parts=4).owner(line)
        tensor([0, 0, 1, 1, 2, 2, 3, 3])
    """

    def __init__(
        self,
        positions: Tensor,
        cell: Tensor | None = None,
        pbc: Any = False,
        *,
        weights: Tensor | None = None,
        parts: int | None = None,
        group: Group | None = None,
    ) -> None:
        self.group = group
        self.parts = world(group)[1] if parts is None else parts
        found: list[System] = []

        def describe() -> Mapping[str, Any]:
            _check_parts(self.parts)
            _check_weights(weights, positions)
            found.append(one_structure(positions, cell, pbc))
            return {"parts": self.parts, **facts(found[0])}

        agree("Domains", describe, group)
        self._pbc = found[0].pbc[0]
        self._frame = frame_of(found[0])
        places = self._places(found[0].positions)
        whole = torch.ones(len(places), dtype=torch.int64, device=places.device)
        self._levels = self._cuts(places, whole if weights is None else weights.long())

    def owner(self, positions: Tensor) -> Tensor:
        """The part in which each position lies; no communication.

        Args:
            positions: (n, 3).

        Returns:
            (n,) int64.
        """
        places = self._places(positions.detach().double())
        owner = torch.zeros(len(places), dtype=torch.int64, device=places.device)
        for level in self._levels:
            owner = _next(owner, places, level)
        return owner

    def migrate(self, ids: Tensor, positions: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        """Atoms to the ranks that own them: one exchange of all that belongs to them.

        Args:
            ids: (n,) integers, the global number of each atom of this rank.
            positions: (n, 3); they may lie outside the cell, and keep their values.
            rows: (n, ...) tensors of any dtype that move with the atoms.

        Returns:
            ids, positions and rows of the atoms that this rank owns now, by ascending number.  No
            gradients.

        Raises:
            ShapeError, DTypeError: on every rank, where tensors do not fit or their dtypes or
                shapes of rows differ between ranks.
        """
        tensors = (ids, positions, *rows)

        def describe() -> Mapping[str, Any]:
            _check_owned(self.parts, self.group)
            return _check_rows(tensors)

        agree("migrate", describe, self.group)
        owner, order = self.owner(positions).sort(stable=True)
        packed = torch.cat([_bytes(t)[order] for t in tensors], 1)
        arrived = sent_to(owner, packed, self.group).rows
        found = _unpacked(arrived, tensors)
        by_id = found[0].argsort()
        return tuple(t[by_id] for t in found)

    def _places(self, positions: Tensor) -> Tensor:
        """(n, 3) coordinates along the lattice vectors, in [0, 1) along those that repeat."""
        places = positions @ self._frame.inverse().to(positions.device)
        return torch.where(self._pbc.to(places.device), places - places.floor(), places)

    def _cuts(self, places: Tensor, weights: Tensor) -> list[_Level]:
        heights = (1 / self._frame.inverse().norm(dim=0)).to(places.device)
        owner = torch.zeros(len(places), dtype=torch.int64, device=places.device)
        first = torch.arange(self.parts, device=places.device)
        end = torch.where(first == 0, self.parts, first)  # of the boxes that there are
        levels = []
        while bool((end - first > 1).any()):
            several = end - first > 1
            middle = torch.where(several, (first + end) // 2, first)
            share = (middle - first) / (end - first).clamp(min=1)
            level = self._cut(places, weights, owner, heights, share)._replace(middle=middle)
            levels.append(level._replace(cut=torch.where(several, level.cut, math.inf)))
            owner = _next(owner, places, levels[-1])
            end = end.scatter(0, middle[several], end[several])
            end = torch.where(several, middle, end)
        return levels

    def _cut(
        self, places: Tensor, weights: Tensor, owner: Tensor, heights: Tensor, share: Tensor
    ) -> _Level:
        """Where each box is cut, so that a share of its weight is below."""
        low, extent = self._extents(places, owner)
        axis = (extent * heights).argmax(1)
        along = places.gather(1, axis[owner][:, None])[:, 0]
        low, width = (t.gather(1, axis[:, None])[:, 0] for t in (low, extent))
        for _ in range(ROUNDS):
            width = (width / BINS).clamp(min=torch.finfo(width.dtype).tiny)
            bin = ((along - low[owner]) / width[owner]).floor().clamp(0, BINS - 1).long()
            counts = weights.new_zeros(self.parts * BINS).index_add(0, owner * BINS + bin, weights)
            below = all_sum(counts, self.group).reshape(self.parts, BINS).cumsum(1)
            wanted = share * below[:, -1]
            chosen = (below < wanted[:, None]).sum(1)
            low = low + chosen * width
        below = torch.nn.functional.pad(below, (1, 0))
        lower, upper = (below.gather(1, (chosen + i)[:, None])[:, 0] for i in (0, 1))
        return _Level(axis, torch.where(wanted - lower < upper - wanted, low, low + width), axis)

    def _extents(self, places: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        """(lowest places, extent) of the atoms in each box, (P, 3) each; zeros of an empty box."""
        ends = places.new_full((self.parts, 6), -math.inf)
        index = owner[:, None].expand(-1, 6)
        ends = ends.scatter_reduce(0, index, torch.cat([places, -places], 1), "amax")
        ends = largest(ends, self.group)
        ends = torch.where(ends.isinf(), 0, ends)
        return -ends[:, 3:], ends[:, :3] + ends[:, 3:]


def one_structure(positions: Tensor, cell: Tensor | None, pbc: Any) -> System:
    """Atoms of this rank and the cell of all, checked."""
    system = system_of(positions, cell, pbc, None)
    check_values(system)
    frame_of(system)
    return system


def facts(system: System) -> Mapping[str, Any]:
    """What the ranks have in common."""
    return {
        "cell": system.cells[0].tolist(),
        "pbc": system.pbc[0].tolist(),
        "device": system.positions.device.type,
    }


def _next(owner: Tensor, places: Tensor, level: _Level) -> Tensor:
    """The first rank of the box on the side of the cut where each atom lies."""
    along = places.gather(1, level.axis[owner][:, None])[:, 0]
    return torch.where(along >= level.cut[owner], level.middle[owner], owner)


def _bytes(rows: Tensor) -> Tensor:
    """(n, bytes of a row) uint8."""
    rows = rows.detach().reshape(len(rows), math.prod(rows.shape[1:]))
    # a single row counts as contiguous whatever its stride
    return rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    sizes = [math.prod(t.shape[1:]) * t.element_size() for t in like]
    parts = torch.split(packed, sizes, 1)
    return [
        part.clone(memory_format=torch.contiguous_format)
        .view(t.dtype)
        .reshape(len(packed), *t.shape[1:])
        for part, t in zip(parts, like, strict=True)
    ]


def _check_parts(parts: int) -> None:
    if not isinstance(parts, int) or parts < 1:
        raise ShapeError(f"parts is {parts!r}: it must be 1 or more. Pass parts=8, for example.")


def _check_weights(weights: Tensor | None, positions: Tensor) -> None:
    if weights is None:
        return
    if weights.shape != positions.shape[:1]:
        raise ShapeError(
            f"weights is {tuple(weights.shape)} and there are {len(positions)} positions: each "
            f"atom must have one. Pass ({len(positions)},)."
        )
    if weights.dtype not in (torch.int32, torch.int64):
        raise DTypeError(
            f"weights is {weights.dtype}: it must be int32 or int64, which add up to the same "
            "bits in any order. Round them, e.g. the number of neighbours of each atom."
        )
    if len(weights) and int(weights.min()) < 0:
        raise IndexRangeError(
            f"weights holds {int(weights.min())}: work must be 0 or more. Correct weights."
        )


def _check_owned(parts: int, group: Group | None) -> None:
    if parts != world(group)[1]:
        raise ShapeError(
            f"there are {parts} parts and {world(group)[1]} ranks: atoms migrate between parts "
            "that are ranks. Leave parts out of Domains."
        )


def _check_rows(tensors: Sequence[Tensor]) -> Mapping[str, Any]:
    """The kinds of rows, which the ranks have in common."""
    for place, t in enumerate(tensors):
        if not t.dim() or len(t) != len(tensors[0]):
            raise ShapeError(
                f"tensor {place} of migrate is {tuple(t.shape)} and there are {len(tensors[0])} "
                f"ids: each atom must have a row. Pass ({len(tensors[0])}, ...)."
            )
    if tensors[0].dim() != 1 or tensors[0].dtype != torch.int64:
        raise DTypeError(
            f"ids is {tensors[0].dtype}, {tuple(tensors[0].shape)}: it must be int64 and (n,). "
            "Pass ids.long()."
        )
    return {
        "dtypes": [t.dtype for t in tensors],
        "shapes of rows": [tuple(t.shape[1:]) for t in tensors],
    }
