"""Neighbour lists by brute force, and structures to build them of."""

import itertools

import torch

__all__ = ["brute_force", "rows"]


def brute_force(positions, cutoff, cell, pbc):
    """[(dst, src, *shift)] of |positions[dst] - positions[src] + shift @ cell| < cutoff, sorted.

    In float64, over all images within reach; exact where all numbers are small multiples of 1/8.
    """
    positions, cell = positions.double(), cell.double()
    far = cutoff + float(torch.cdist(positions, positions).max()) if len(positions) else 0.0
    periodic = [vector for vector, repeats in zip(cell, pbc, strict=True) if repeats]
    ranges = [range(1)] * 3
    if periodic:
        # a shift's length along an axis is at most that of the whole shift over the axis' height
        heights = iter(1 / torch.linalg.pinv(torch.stack(periodic)).norm(dim=0))
        ranges = [
            range(-int(far / h) - 1, int(far / h) + 2) if r and (h := float(next(heights))) else one
            for one, r in zip(ranges, pbc, strict=True)
        ]
    shifts = torch.tensor([*itertools.product(*ranges)])
    across = (
        positions[None, :, None] - positions[None, None] + (shifts.double() @ cell)[:, None, None]
    )
    near = across.square().sum(-1) < cutoff**2
    near[~shifts.any(1)] &= ~torch.eye(len(positions), dtype=torch.bool)
    return sorted((i, j, *shifts[s].tolist()) for s, i, j in near.nonzero().tolist())


def rows(edges):
    """[(dst, src, *shift)] of a list, in its order."""
    src, dst, shift = edges
    return [
        (*pair, *map(int, s))
        for *pair, s in zip(*map(torch.Tensor.tolist, (dst, src, shift)), strict=True)
    ]
