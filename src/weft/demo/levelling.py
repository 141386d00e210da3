"""Levelling ground: what stands above the mean is carried to where ground is missing.

    cut  a_i ∝ max(h_i − h̄, 0) at p_i        fill  b_j ∝ max(h̄ − h_j, 0) at p_j

Heights h are over the plane that the points lie along.  The cheapest way is optimal transport from
a to b; the gradient of its cost says where each heap goes, p_i − (∂cost/∂p_i) / a_i.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from weft.demo.pictures import ACCENT, GREY, height_of, png
from weft.demo.surface import Surface
from weft.reductions import SamplesLoss
from weft.reductions.cluster import cluster_ranges_centroids, grid_cluster

__all__ = ["Levelling", "arrows", "carried", "levelling"]

HEAPS = 40  # along the longer side
BLUR = 0.02  # of the longer side
COLOURS = ("#b98d5c", "#3f7cac")  # cut, fill
SHOWN = 120  # arrows


class Levelling(NamedTuple):
    """Heaps and hollows, in units of the longer side."""

    heap: Tensor  # (M, 2)
    amount: Tensor  # (M,) share of the earth
    hollow: Tensor  # (N, 2)
    room: Tensor  # (N,) share of the room
    side: float  # the longer side, in the surface's unit


def levelling(surface: Surface) -> Levelling:
    """Cells of the surface, each a heap or a hollow."""
    places, height = _laid_flat(surface)
    side = float((places.amax(0) - places.amin(0)).max())
    places = (places - places.amin(0)) / side
    labels = grid_cluster(places, 1 / HEAPS)
    values = torch.cat([places, height.unsqueeze(1)], 1)
    _, means, count = cluster_ranges_centroids(values, labels)
    above = count * (means[:, 2] - height.mean())
    up, down = above > 0, above < 0
    share = [above[up] / above[up].sum(), above[down] / above[down].sum()]
    return Levelling(means[up, :2], share[0], means[down, :2], share[1], side)


def _laid_flat(surface: Surface) -> tuple[Tensor, Tensor]:
    """(N, 2) places and (N,) heights: of a map its own, of a cloud along its axes."""
    if surface.grid:
        return surface.truth[:, :2], surface.truth[:, 2]
    centred = surface.truth - surface.truth.mean(0)
    axes = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)
    turned = centred @ axes
    return turned[:, :2], turned[:, 2]


def carried(ground: Levelling, device: torch.device) -> Tensor:
    """(M, 2) where the earth of each heap goes, on average."""
    loss = SamplesLoss(blur=BLUR, debias=False)
    heap, amount, hollow, room = (t.to(device) for t in ground[:4])
    heap = heap.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(amount, heap, room, hollow), heap)
    return (heap.detach() - gradient / amount.unsqueeze(1)).cpu()


def arrows(ground: Levelling, aims: Tensor) -> bytes:
    """Heaps, hollows, and the ways of the largest heaps."""
    height = height_of(torch.cat([ground.heap, ground.hollow]), most=7.4)
    figure = Figure(figsize=(9.6, height), layout="constrained")
    axis = figure.subplots()
    for places, share, colour, name in (
        (ground.heap, ground.amount, COLOURS[0], "earth to carry away"),
        (ground.hollow, ground.room, COLOURS[1], "room to fill"),
    ):
        x, y = places.T.numpy()
        sizes = (60 * share / share.max()).numpy()
        axis.scatter(x, y, s=sizes, color=colour, linewidths=0, alpha=0.55, label=name)
    largest = ground.amount.argsort(descending=True)[:SHOWN]
    starts, ways = ground.heap[largest], (aims - ground.heap)[largest]
    axis.quiver(
        *starts.T.numpy(),
        *ways.T.numpy(),
        angles="xy",
        scale_units="xy",
        scale=1,
        width=0.0026,
        color=ACCENT,
        zorder=2,
    )
    axis.set_aspect("equal")
    axis.set_axis_off()
    figure.legend(loc="outside lower center", ncols=2, frameon=False, labelcolor=GREY)
    return png(figure)
