"""One graph over ranks: each has the edges that add to its rows, and a halo of what they read.

    out[d] = Σ_{e: dst[e] = d} f(x[src[e]], e)      d: own rows,  src[e]: own rows, then the halo's

The owner of a row computes its whole sum, so that one exchange of x before an operation is all
that ranks tell each other, and its gradient is the halo's transpose.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.collectives import Group
from torchweft.distributed.halo import Halo
from torchweft.distributed.owners import by_position, edges_of
from torchweft.errors import IndexRangeError, ShapeError

__all__ = ["Shard", "ShardSize", "shard"]


class ShardSize(NamedTuple):
    """How much of a graph a rank holds, and receives in an exchange of rows, from `Shard.size`.

    Args:
        own_rows: number of rows that the rank owns.
        halo_rows: number of rows of other ranks that it reads.
        edges: number of its edges.
        received_bytes: bytes of one exchange; a gradient sends as many back.

    Example:
        >>> import torch
        >>> from torchweft.distributed import shard
        >>> src, dst = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 3, 0])  # a ring
        >>> shard(src, dst, 4, rank=1, world_size=2).size(channels=64).received_bytes
        256
    """

    own_rows: int
    halo_rows: int
    edges: int
    received_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.own_rows} own rows, {self.halo_rows} of other ranks, {self.edges} edges; "
            f"{self.received_bytes} bytes received an exchange, as many sent back by its gradient"
        )


class Shard(NamedTuple):
    """A rank's part of a graph, from `shard`; rows are numbered own first, then needed ones.

    Args:
        global_ids: (n,) int64, the numbers of the rows that the rank owns, ascending.
        needed: (h,) int64, the numbers of the rows of others that its edges read, by owner.
        src: (e,) int64, the row below n + h that each edge reads.
        dst: (e,) int64, the row below n that it adds to.
        edges: (e,) int64, the places of the edges in the whole list, ascending: the index of
            tensors that belong to edges.

    Example:
        >>> import torch
        >>> from torchweft.distributed import shard
        >>> src, dst = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 3, 0])  # a ring
        >>> part = shard(src, dst, 4, rank=1, world_size=2)
        >>> part.global_ids, part.needed
        (tensor([2, 3]), tensor([1]))
    """

    global_ids: Tensor
    needed: Tensor
    src: Tensor
    dst: Tensor
    edges: Tensor

    def halo(self, group: Group | None = None) -> Halo:
        """The halo of these rows.  Every rank of the group must call it."""
        return Halo(self.global_ids, self.needed, group)

    def size(self, channels: int, dtype: torch.dtype = torch.float32) -> ShardSize:
        """Numbers of rows and edges, and of the bytes of an exchange.

        Args:
            channels: numbers in a row.
            dtype: of a row.
        """
        own, halo = len(self.global_ids), len(self.needed)
        return ShardSize(own, halo, len(self.edges), halo * channels * dtype.itemsize)


def shard(
    src: Tensor,
    dst: Tensor,
    num_nodes: int,
    rank: int,
    world_size: int,
    positions: Tensor | None = None,
    owner: Tensor | None = None,
) -> Shard:
    """A rank's part of a graph: the edges that add to its rows.  Nothing is sent.

    Args:
        src: (E,) the row that each edge reads.
        dst: (E,) the row that it adds to; any multigraph.
        num_nodes: N.
        rank: whose part.
        world_size: number of parts; may exceed N.
        positions: (N, D), by which the rows are cut; None: by their numbers.
        owner: (N,) the rank of each row, such as `by_metis` finds, in place of positions.

    Returns:
        The part.  Without owner, the parts have even numbers of rows and of edges (both within
        1.6 of their mean unless few rows have most of the edges).

    Raises:
        ShapeError, DTypeError, IndexRangeError: edges, positions, owner or rank do not fit.

    Cost: O(N log N + E), and a table of N numbers while it runs.

    Example:
        >>> import torch
        >>> from torchweft.distributed import shard
        >>> src, dst = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 3, 0])  # a ring
        >>> part = shard(src, dst, 4, rank=1, world_size=2)
        >>> part.global_ids, part.needed, part.src, part.dst, part.edges
        (tensor([2, 3]), tensor([1]), tensor([2, 0]), tensor([0, 1]), tensor([1, 2]))
        >>> print(part.size(channels=64))
        2 own rows, 1 of other ranks, 2 edges; 256 bytes received an exchange, as many sent back \
by its gradient
    """
    src, dst = edges_of(src, dst, num_nodes)
    if not 0 <= rank < world_size:
        raise IndexRangeError(
            f"rank is {rank} and world_size is {world_size}: it must lie in 0..{world_size - 1}. "
            "Pass a rank of the group."
        )
    owner = _owner(dst, num_nodes, world_size, positions, owner)
    own = owner == rank
    edges = own[dst].nonzero()[:, 0]
    global_ids = own.nonzero()[:, 0]
    read = src[edges]
    needed = torch.unique(read[~own[read]])
    needed = needed[owner[needed].argsort(stable=True)]
    place = torch.empty_like(owner)
    rows = torch.cat([global_ids, needed])
    place[rows] = torch.arange(len(rows), device=rows.device)
    return Shard(global_ids, needed, place[read], place[dst[edges]], edges)


def _owner(
    dst: Tensor, rows: int, parts: int, positions: Tensor | None, owner: Tensor | None
) -> Tensor:
    """(N,) the rank of each row, as given or by a cut."""
    for name, given in (("positions", positions), ("owner", owner)):
        if given is not None and len(given) != rows:
            raise ShapeError(
                f"{name} has {len(given)} rows and num_nodes is {rows}: it must have a row for "
                f"each. Pass the {name} of all rows, not of a rank's own."
            )
    if owner is None:
        if positions is None:
            positions = torch.arange(rows, device=dst.device)[:, None]
        return by_position(positions, parts, weights=torch.bincount(dst, minlength=rows))
    if positions is not None:
        raise ShapeError(
            "positions and owner were given: one of them says who owns a row. Leave out positions."
        )
    if rows and not (int(owner.min()) >= 0 and int(owner.max()) < parts):
        raise IndexRangeError(
            f"owner holds {int(owner.min())} to {int(owner.max())} for {parts} ranks: each must "
            f"lie in 0..{parts - 1}. Correct owner, or pass its number of ranks as world_size."
        )
    return owner.to(dst.device, torch.int64)
