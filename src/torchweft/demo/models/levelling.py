"""Levelling ground: what stands above the mean is carried to where ground is missing.

    cut  a_i ∝ max(h_i − h̄, 0) at p_i        fill  b_j ∝ max(h̄ − h_j, 0) at p_j

Heights h are over the plane that the points lie along.  The cheapest way is optimal transport from
a to b; the gradient of its cost says where the earth of a point goes, p_i − (∂cost/∂p_i) / a_i.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from torchweft.demo.data.surface import Surface
from torchweft.demo.page.pictures import ACCENT, GREY, height_of, png
from torchweft.reductions import SamplesLoss
from torchweft.reductions.cluster.points import cluster_ranges_centroids, grid_cluster

__all__ = ["Levelling", "arrows", "carried", "heaps", "levelling"]

CELLS = 40  # of the picture, along the longer side
BLUR = 0.02  # of the longer side
COLOURS = ("#b98d5c", "#3f7cac")  # cut, fill
SHOWN = 120  # arrows


class Levelling(NamedTuple):
    """Where earth is and where it is missing, in units of the longer side."""

    cut: Tensor  # (M, 2)
    amount: Tensor  # (M,) share of the earth
    fill: Tensor  # (N, 2)
    room: Tensor  # (N,) share of the room
    side: float  # the longer side, in the surface's unit


def levelling(surface: Surface) -> Levelling:
    """The points of a surface above its mean height, and those below."""
    places, height = _laid_flat(surface)
    side = float((places.amax(0) - places.amin(0)).max())
    places = (places - places.amin(0)) / side
    above = height - height.mean()
    up, down = above > 0, above < 0
    amount, room = (part / part.sum() for part in (above[up], above[down]))
    return Levelling(places[up], amount, places[down], room, side)


def _laid_flat(surface: Surface) -> tuple[Tensor, Tensor]:
    """(N, 2) places and (N,) heights: of a map its own, of a cloud along its axes."""
    if surface.grid:
        return surface.truth[:, :2], surface.truth[:, 2]
    centred = surface.truth - surface.truth.mean(0)
    axes = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)
    turned = centred @ axes
    return turned[:, :2], turned[:, 2]


def carried(ground: Levelling, device: torch.device) -> Tensor:
    """(M, 2) where the earth of each point goes, on average."""
    loss = SamplesLoss(blur=BLUR, debias=False)
    cut, amount, fill, room = (t.to(device) for t in ground[:4])
    cut = cut.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(amount, cut, room, fill), cut)
    return (cut.detach() - gradient / amount.unsqueeze(1)).cpu()


def heaps(values: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """(C, D) means of values under the weights `share`, and (C,) sums of these, by cell.

    The first two columns of values are places; cells are those of the picture.
    """
    labels = grid_cluster(values[:, :2], 1 / CELLS)
    _, means, shares = cluster_ranges_centroids(values, labels, weights=share)
    return means, shares


def arrows(ground: Levelling, aims: Tensor) -> bytes:
    """Earth and room, cell by cell, and the ways of the largest heaps."""
    means, amount = heaps(torch.cat([ground.cut, aims], 1), ground.amount)
    starts, ends = means.tensor_split(2, 1)
    holes, room = heaps(ground.fill, ground.room)
    height = height_of(torch.cat([starts, holes]), most=7.4)
    figure = Figure(figsize=(9.6, height), layout="constrained")
    axis = figure.subplots()
    for places, share, colour, name in (
        (starts, amount, COLOURS[0], "earth to carry away"),
        (holes, room, COLOURS[1], "room to fill"),
    ):
        x, y = places.T.numpy()
        sizes = (60 * share / share.max()).numpy()
        axis.scatter(x, y, s=sizes, color=colour, linewidths=0, alpha=0.55, label=name)
    largest = amount.argsort(descending=True)[:SHOWN]
    starts, ways = starts[largest], (ends - starts)[largest]
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
