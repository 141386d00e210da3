"""Block-sparse masks of reductions over ranks: each rank has its rows and the columns of all.

A rank knows the pairs of its rows i.  Those of its columns j with rows of others are known there:
each rank cuts its mask along j, keeps the pairs of its rows with the columns of each rank, and
sends each the pairs of that one's columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchweft.core.collectives import Group, exchange, world
from torchweft.reductions.call import Blocks
from torchweft.reductions.cluster.points import Ranges
from torchweft.reductions.cluster.sparsity import BlockSparsity, blocks_of

__all__ = ["split"]

Halves = tuple[list[Blocks], list[Blocks]]


def split(ranges: Ranges | BlockSparsity, columns: Sequence[int], group: Group | None) -> Halves:
    """The masks of this rank's rows with the columns of each, and of its columns with their rows.

    Args:
        ranges: of this rank's rows i and of all columns j, in the order of the ranks.
        columns: number of columns of each rank.
        group: the ranks.

    Returns:
        Blocks of rows and of columns by rank, numbered from the first of each rank.
    """
    bounds = list(itertools.pairwise(itertools.accumulate(columns, initial=0)))
    own = [_of_columns(blocks_of(ranges, 1), *bound) for bound in bounds]
    sent = [_of_rows(blocks_of(ranges, 0), *bound) for bound in bounds]
    return own, _exchanged(sent, group)


def _of_columns(blocks: Blocks, low: int, high: int) -> Blocks:
    """The columns low ≤ j < high, numbered from low."""
    starts, ends = (t.clamp(low, high) - low for t in (blocks.j_starts, blocks.j_ends))
    kept = ends > starts
    indptr = torch.nn.functional.pad(kept.cumsum(0), (1, 0))[blocks.indptr]
    return Blocks(blocks.starts, blocks.ends, indptr, starts[kept], ends[kept])


def _of_rows(blocks: Blocks, low: int, high: int) -> Blocks:
    """The rows low ≤ i < high, numbered from low."""
    starts, ends = (t.clamp(low, high) - low for t in (blocks.starts, blocks.ends))
    kept = ends > starts
    lengths = blocks.indptr.diff()
    listed = kept.repeat_interleave(lengths)
    indptr = torch.nn.functional.pad(lengths[kept].cumsum(0), (1, 0))
    lists = blocks.j_starts[listed], blocks.j_ends[listed]
    return Blocks(starts[kept], ends[kept], indptr, *lists)


def _exchanged(sent: Sequence[Blocks], group: Group | None) -> list[Blocks]:
    """The blocks that each rank has for this one."""
    size = world(group)[1]
    device = sent[0].starts.device
    sizes = torch.tensor([[len(b.starts), len(b.j_starts)] for b in sent], device=device)
    arriving: list[list[int]] = exchange(sizes, [1] * size, [1] * size, group).tolist()
    lengths = [sum(map(len, blocks)) for blocks in sent]
    lengths_arriving = [3 * rows + 1 + 2 * lists for rows, lists in arriving]
    tables = torch.cat([t for blocks in sent for t in blocks])
    received = exchange(tables, lengths, lengths_arriving, group)
    return [
        _read(table, rows, lists)
        for table, (rows, lists) in zip(
            torch.split(received, lengths_arriving), arriving, strict=True
        )
    ]


def _read(table: Tensor, rows: int, lists: int) -> Blocks:
    parts = torch.split(table, [rows, rows, rows + 1, lists, lists])
    return Blocks(*(part.clone() for part in parts))
