"""Neighbour lists over ranks: the edges of one process whose dst this rank owns, and their halo.

    edge e:  |x[dst[e]] − x[src[e]] + shift[e] @ cell| < cutoff        x = halo(positions)

Ranks tell each other the box around their atoms.  Each sends the images of its atoms that are
within reach of another's box, and searches among its own atoms and those that arrive.  Whose atoms
are whose does not matter to the result: `Domains` make boxes small and the halo with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.collectives import Group, all_sum, exchange, world
from torchweft.core.table_copies import mark_constant
from torchweft.distributed.agreement import agree
from torchweft.distributed.atoms.domains import facts, one_structure
from torchweft.distributed.directory import sent_to
from torchweft.distributed.halo import Halo
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.dynamics.neighbours import (
    ROUNDING,
    NeighbourList,
    System,
    frame_of,
    lengths2,
    neighbour_list,
)

__all__ = ["DistributedNeighbourList", "Neighbours"]


class Neighbours(NamedTuple):
    """The edges that end at atoms of this rank, from `DistributedNeighbourList`.

    Args:
        halo: the atoms of other ranks that the edges begin at, by ascending number.
        src: (E,) int64, row of `halo(x)`: own atoms, then the halo's.
        dst: (E,) int64, row of own atoms.
        shift: (E, 3), how many lattice vectors the image of dst is away, in the positions' dtype.

    Example:
        >>> import torch
        >>> from torchweft.distributed import DistributedNeighbourList
        >>> line = torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.0, 0.0])
        >>> DistributedNeighbourList(1.5)(torch.arange(4), line).dst
        tensor([0, 1, 1, 2, 2, 3])
    """

    halo: Halo
    src: Tensor
    dst: Tensor
    shift: Tensor


class DistributedNeighbourList:
    """The neighbour list of atoms that are spread over ranks, as `o3.NeighbourList`.

    Every rank of the group builds it, and calls it, together.

    Args:
        cutoff: edges are shorter than this length, positive, the same on every rank.
        skin: by how much candidates exceed the cutoff, 0 or more.
        group: the ranks; None: all.

    Raises:
        ShapeError, DTypeError: as `o3.NeighbourList`.

    All ranks search again, and rebuild the halo, when an atom of any rank has moved by more than
    half the skin.  The edges are exactly those of one process, in the order of dst's row, then of
    src's number, then of shift.

    Memory and cost: O(own atoms + halo + edges).  A call that keeps its candidates sends the
    positions of the halo; one that searches, images of atoms by one exchange, and what a Halo is
    built with.

    Example:
        >>> import torch, torchweft
        >>> near = torchweft.distributed.DistributedNeighbourList(1.5)
        >>> line = torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.0, 0.0])
        >>> halo, src, dst, shift = near(torch.arange(4), line)  # one rank: no halo
        >>> src.tolist(), halo.num_halo
        ([1, 0, 2, 1, 3, 2], 0)
    """

    def __init__(self, cutoff: float, skin: float = 0.5, group: Group | None = None) -> None:
        checked = NeighbourList(cutoff, skin)
        self.cutoff, self.skin, self.group = checked.cutoff, checked.skin, group
        self.builds = 0
        self._of: tuple[Tensor, System] | None = None
        self._candidates: Neighbours | None = None

    def __repr__(self) -> str:
        return (
            f"DistributedNeighbourList(cutoff={self.cutoff}, skin={self.skin}, "
            f"builds={self.builds})"
        )

    def __call__(
        self, ids: Tensor, positions: Tensor, cell: Tensor | None = None, pbc: Any = False
    ) -> Neighbours:
        """The edges that end at atoms of this rank.

        Args:
            ids: (n,) int64, the global number of each atom of this rank.
            positions: (n, 3), float64 or float32; they may lie outside the cell.
            cell: (3, 3), three lattice vectors as rows, the same on every rank.
            pbc: whether images repeat along each lattice vector: a bool or (3,).

        Raises:
            ShapeError, DTypeError, IndexRangeError, BackendError: on every rank, where the
                arguments of some rank do not fit or differ, or vesin is not installed.
        """
        system = self._agreed(ids, positions, cell, pbc)
        if not self._all_serve(ids, system):
            self._candidates = self._search(ids, system)
            self._of = ids.clone(), system
            self.builds += 1
        assert self._candidates is not None
        halo, src, dst, shift = self._candidates
        system = system._replace(positions=halo(system.positions))
        kept = (lengths2(system, src, dst, shift) < self.cutoff**2).nonzero().flatten()
        src, dst = src[kept], dst[kept]
        mark_constant(src, dst)
        return Neighbours(halo, src, dst, shift[kept].to(positions.dtype))

    def serves(
        self, ids: Tensor, positions: Tensor, cell: Tensor | None = None, pbc: Any = False
    ) -> bool:
        """Whether a call would keep its candidates: the same on every rank."""
        return self._all_serve(ids, self._agreed(ids, positions, cell, pbc))

    def _agreed(self, ids: Tensor, positions: Tensor, cell: Tensor | None, pbc: Any) -> System:
        found: list[System] = []

        def describe() -> Mapping[str, Any]:
            found.append(one_structure(positions, cell, pbc))
            _check_ids(ids, positions)
            common = {"cutoff": self.cutoff, "skin": self.skin, "dtype": positions.dtype}
            return common | dict(facts(found[0]))

        agree("neighbours", describe, self.group)
        return found[0]

    def _all_serve(self, ids: Tensor, system: System) -> bool:
        """Whether the candidates of every rank are complete."""
        stale = ids.new_tensor([not self._own_serve(ids, system)], dtype=torch.int64)
        return not bool(all_sum(stale, self.group))

    def _own_serve(self, ids: Tensor, system: System) -> bool:
        if self._of is None or self._of[1].signature != system.signature:
            return False
        moved = (system.positions - self._of[1].positions).square().sum(1)
        same = (moved <= (self.skin / 2) ** 2).all() & (ids == self._of[0]).all()
        return bool(same & (system.cells == self._of[1].cells).all())

    @torch.no_grad()
    def _search(self, ids: Tensor, system: System) -> Neighbours:
        """Candidates, with a halo of those atoms alone that they begin at."""
        reach = self.cutoff * (1 + ROUNDING) + self.skin
        images = _images(ids, system, reach, self.group)
        found: list[tuple[Tensor, Tensor]] = []

        def describe() -> Mapping[str, Any]:
            src, dst, _ = neighbour_list(images.points, reach)
            own = (dst < len(ids)).nonzero().flatten()
            found.append((src[own], dst[own]))
            return {}

        agree("neighbours", describe, self.group)
        ((src, dst),) = found
        number = images.ids[src]
        needed = torch.unique(number[images.away[src]])
        keys, row = torch.cat([ids, needed]).sort()
        shift = images.offset[dst] - images.offset[src]
        order = _sorted(dst, number, *shift.unbind(1))
        number, dst, shift = number[order], dst[order], shift[order].double()
        return Neighbours(
            Halo(ids, needed, self.group), row[torch.searchsorted(keys, number)], dst, shift
        )


class _Images(NamedTuple):
    """Own atoms, then images of own and others' within reach of them."""

    points: Tensor  # (m, 3) float64
    ids: Tensor  # (m,)
    offset: Tensor  # (m, 3) int64, how many lattice vectors the image is from its atom
    away: Tensor  # (m,) bool, whether the atom is another rank's


def _images(ids: Tensor, system: System, reach: float, group: Group | None) -> _Images:
    """What this rank searches among, by two exchanges: of boxes and of images."""
    rank, size = world(group)
    frame = frame_of(system).to(ids.device)
    places = system.positions @ frame.inverse()
    offset = _nearest_images(places, system.pbc[0].to(ids.device))
    places = places + offset
    boxes = exchange(_box(places).expand(size, 6).contiguous(), [1] * size, [1] * size, group)
    margin = (reach * frame.inverse().norm(dim=0)).tolist()
    to, rows, moves = _near(places, boxes.reshape(-1, 6).tolist(), margin, system, rank)
    sent = torch.cat([ids[rows, None], offset[rows] + moves, _as_bits(system.positions[rows])], 1)
    arrived = sent_to(to, sent, group)
    own = torch.cat([ids[:, None], offset, _as_bits(system.positions)], 1)
    table = torch.cat([own, arrived.rows])
    away = torch.cat([torch.zeros_like(ids, dtype=torch.bool), arrived.sender != rank])
    offset = table[:, 1:4]
    points = table[:, 4:].clone().view(torch.float64) + offset.double() @ frame
    return _Images(points, table[:, 0], offset, away)


def _as_bits(positions: Tensor) -> Tensor:
    return positions.contiguous().view(torch.int64)


def _nearest_images(places: Tensor, repeats: Tensor) -> Tensor:
    """(n, 3) whole numbers that bring atoms together: to within half a cell of their centre.

    The centre of places on a circle is the direction of the sum of their directions.
    """
    turns = 2 * math.pi * places
    centre = torch.atan2(turns.sin().sum(0), turns.cos().sum(0)) / (2 * math.pi)
    return torch.where(repeats, (centre - places).round(), 0).long()


def _box(places: Tensor) -> Tensor:
    """(6,) lowest and highest places; infinite and reversed around no atoms."""
    if not len(places):
        return places.new_tensor([math.inf] * 3 + [-math.inf] * 3)
    return torch.cat([places.amin(0), places.amax(0)])


def _near(
    places: Tensor,
    boxes: Sequence[Sequence[float]],
    margin: Sequence[float],
    system: System,
    rank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(rank, row, offset) of the images of this rank's atoms that are within reach of each box."""
    own, repeats = _box(places).tolist(), system.pbc[0].tolist()
    margins, none = places.new_tensor(margin), places.new_zeros(0).long()
    to, rows, moves = [none], [none], [none.reshape(0, 3)]
    for other, box in enumerate(boxes):
        low, high = torch.split(places.new_tensor(box), 3)
        for move in _moves(own, box, margin, repeats):
            if other == rank and not any(move):
                continue
            moved = places + places.new_tensor(move)
            near = ((moved >= low - margins) & (moved <= high + margins)).all(1).nonzero().flatten()
            to.append(torch.full_like(near, other))
            rows.append(near)
            moves.append(near.new_tensor(move).expand(len(near), 3))
    return torch.cat(to), torch.cat(rows), torch.cat(moves)


def _moves(
    own: Sequence[float], box: Sequence[float], margin: Sequence[float], repeats: Sequence[bool]
) -> Iterator[tuple[int, ...]]:
    """Whole numbers of lattice vectors by which a box of atoms comes within reach of another."""
    if own[0] > own[3] or box[0] > box[3]:  # no atoms
        return iter(())
    spans = []
    for axis in range(3):
        low = math.ceil(box[axis] - margin[axis] - own[axis + 3])
        high = math.floor(box[axis + 3] + margin[axis] - own[axis])
        spans.append(range(low, high + 1) if repeats[axis] else range(int(low > 0 or high < 0), 1))
    return itertools.product(*spans)


def _sorted(*columns: Tensor) -> Tensor:
    """The order by the first column, then by the second, ..."""
    order = torch.arange(len(columns[0]), device=columns[0].device)
    for column in reversed(columns):
        order = order[column[order].argsort(stable=True)]
    return order


def _check_ids(ids: Tensor, positions: Tensor) -> None:
    if ids.dtype != torch.int64:
        raise DTypeError(f"ids is {ids.dtype}: it must be int64. Pass ids.long().")
    if ids.shape != positions.shape[:1]:
        raise ShapeError(
            f"ids is {tuple(ids.shape)} and there are {len(positions)} positions: each atom must "
            f"have a number. Pass ({len(positions)},)."
        )
