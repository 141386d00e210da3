"""Runs: edges of neighbouring rows of z that have their row of x in common.

    part[r] = Σ_{e in run r} what edge e adds to its row of x      x[m] = Σ_{r of m} part[r]

A row of x for each edge, written and read again, is a third of what the gradients of a convolution
move.  Rows of z that are near each other in the graph read much the same rows of x.  So TILE of
them make a tile, the edges of a tile that read one row of x are a run, and their sum leaves the
chip once.  Warps of a program take a run each, of one tile, and share the rows of z in L1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.tables.segments import narrow

__all__ = ["BESIDE", "Runs", "runs_of"]

TILE = 16
"""Rows of z whose edges runs are made of."""

LEVELS = 3
"""Edges along which rows look for the least number: what has it in common is near."""

BITS = 21
"""Of the number of a row, so that those of all levels are one key."""

BESIDE = 4
"""Runs of a program: their count is a multiple of it, the last ones may be empty."""

LEAST = 2**15
"""Edges from which on kernels, not launches, take the time."""

FEW = 1 / 4
"""Runs for each edge up to which they pay: each is begun and stored."""


class Runs(NamedTuple):
    """Run r holds the edges edges[indptr[r]] .. edges[indptr[r+1] − 1].

    In a tile long ones come first, and of one length those that have their rows of z in common.
    """

    indptr: Tensor  # (R + 1,)
    owner: Tensor  # (R,) row of x
    edges: Tensor  # (E,)
    rows: Tensor  # (E,) their rows of z
    bounds: (
        Tensor  # (num_x + 1,) row m of x sums the runs order[bounds[m]] .. order[bounds[m+1] − 1]
    )
    order: Tensor


def runs_of(src: Tensor, dst: Tensor, num_x: int, num_z: int) -> Runs | None:
    """The runs of a graph; None where there are few edges, or nearly as many runs.

    Cost: five sorts, of edges, of rows and of runs, and one number that the host reads.
    """
    count = src.shape[0]
    if count < LEAST:
        return None
    rows = _near(src.long(), dst.long(), num_x, num_z)
    place = torch.empty_like(rows)
    place[rows] = torch.arange(num_z, device=rows.device)
    at = place[dst]
    key, edges = torch.sort((at // TILE * num_x + src) * TILE + at % TILE, stable=True)
    key = key // TILE
    starts = torch.cat([key.new_zeros(1), 1 + key.diff().nonzero().flatten()])
    if starts.shape[0] > FEW * count:
        return None
    lengths = torch.cat([starts, starts.new_full((1,), count)]).diff()
    by = _alike(key[starts] // num_x * (count + 1) - lengths, lengths, place[dst[edges]] % TILE)
    starts, lengths = starts[by], lengths[by]
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    moved = torch.repeat_interleave(starts - indptr[:-1], lengths, output_size=count)
    edges = edges[moved + torch.arange(count, device=moved.device)]
    owner = key[starts] % num_x
    sources, order = torch.sort(owner, stable=True)
    bounds = torch.searchsorted(sources, torch.arange(num_x + 1, device=owner.device))
    missing = -owner.shape[0] % BESIDE
    indptr = torch.cat([indptr, indptr[-1:].expand(missing)])
    owner = torch.cat([owner, owner[-1:].expand(missing)])
    limit = max(num_x, num_z, count) + 1
    found = (indptr, owner, edges, dst[edges], bounds, order)
    return Runs(*(narrow(t, limit) for t in found))


def _alike(key: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
    """The order of runs by a key, then by the rows of their edges, a bit each."""
    runs = torch.arange(key.shape[0], device=key.device)
    run = torch.repeat_interleave(runs, lengths, output_size=rows.shape[0])
    bits = torch.zeros_like(runs).index_add_(0, run, 2 ** (TILE - 1 - rows))
    order = torch.argsort(bits, stable=True)
    return order[torch.argsort(key[order], stable=True)]


def _near(src: Tensor, dst: Tensor, num_x: int, num_z: int) -> Tensor:
    """Rows of z in an order in which neighbours have rows of x in common.

    Every row gets a random number, and takes over the least of those it reads, LEVELS times where x
    and z are of the same rows.  Sorted by the last numbers, then by those before.
    """
    numbers = _hashed(torch.arange(num_x, device=src.device))
    total = torch.zeros(num_z, dtype=torch.int64, device=src.device)
    for level in range(LEVELS if num_x == num_z else 1):
        start = numbers if num_x == num_z else total.new_full((num_z,), 2**BITS - 1)
        numbers = start.scatter_reduce(0, dst, numbers[src], "amin")
        total += numbers << (BITS * level)
    return torch.argsort(total, stable=True)


def _hashed(rows: Tensor) -> Tensor:
    """Numbers of BITS bits in which those of the rows are not seen again."""
    mixed = rows
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 15)) * 0x45D9F3B & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)) >> (32 - BITS)
