"""A message-passing filter for noisy surfaces, in torchweft and in plain torch.

    φ_e = MLP(g_e)                                      what edge e is good for, F numbers
    z_i = Σ_{e ∈ N(i)} φ_e ⊗ x_{j(e)}                   (F, C): a convolution whose kernel is φ
    x_i ← x_i + silu(Σ_f z_if W_f + b)                  three times, from x = 1
    p_i ← p_i + σ·⟨w, x_i⟩·n_i                          the point moves along its normal

g_e = (right, ahead, rise) of neighbour j seen from point i: the rise lets φ distrust outliers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchweft import products
from torchweft.demo.data.neighbours import nearest
from torchweft.demo.data.surface import Surface

__all__ = ["Graph", "PlainFilter", "SurfaceFilter", "graph_of"]

NEIGHBOURS = 8


class Graph(NamedTuple):
    """Some points of a surface, each with its neighbours: edge e goes from src[e] to dst[e]."""

    rows: Tensor  # (N,) rows of the surface
    src: Tensor  # (E,)
    dst: Tensor  # (E,) non-decreasing
    seg: Tensor  # (N + 1,) the edges of point i are seg[i] .. seg[i + 1] - 1
    offset: Tensor  # (E, 3) right, ahead, rise of the neighbour, in units of the spacing
    geometry: Tensor  # (E, 4) what φ sees
    target: Tensor  # (N, 1) how far the point is off along its normal, in units of σ
    matrices: Tensor  # (2,) the one segment of the F matrices of a layer: 0, F

    def to(self, device: torch.device) -> Graph:
        """The same on another device."""
        return Graph(*(t.to(device) for t in self))


def graph_of(surface: Surface, rows: Tensor) -> Graph:
    """The graph of some rows of a surface: each point and its eight nearest."""
    near = nearest(surface.base[rows], NEIGHBOURS)
    src = near.flatten()
    dst = torch.arange(len(rows)).repeat_interleave(NEIGHBOURS)
    points, frames = surface.noisy[rows], surface.frames[rows]
    steps = (points[src] - points[dst]).view(*near.shape, 3)
    offset = (steps @ frames.mT).flatten(0, 1) / surface.spacing
    rise = offset[:, 2:] * surface.spacing / surface.sigma
    error = (surface.truth[rows] - points).unsqueeze(1) @ frames[:, 2:].mT
    return Graph(
        rows=rows,
        src=src,
        dst=dst,
        seg=torch.arange(len(rows) + 1) * NEIGHBOURS,
        offset=offset,
        # bounded, with one scale for noise and one for spikes
        geometry=torch.cat([offset[:, :2], (rise / 2).tanh(), (rise / 8).tanh()], dim=1),
        target=error[:, 0] / surface.sigma,
        matrices=torch.tensor([0, SurfaceFilter.KERNELS]),
    )


class SurfaceFilter(nn.Module):
    """How far each point of a graph is off its surface, in units of σ: (N, 1)."""

    KERNELS, CHANNELS, LAYERS, HIDDEN = 8, 12, 3, 16

    def __init__(self) -> None:
        super().__init__()
        f, c = self.KERNELS, self.CHANNELS
        self.kernel = nn.Sequential(nn.Linear(4, self.HIDDEN), nn.SiLU(), nn.Linear(self.HIDDEN, f))
        widths = [1] + [c] * (self.LAYERS - 1)
        self.weights = nn.ParameterList(torch.randn(f, n, c) / (f * n) ** 0.5 for n in widths)
        self.biases = nn.ParameterList(torch.zeros(c) for _ in widths)
        self.readout = nn.Linear(c, 1)

    def forward(self, graph: Graph) -> Tensor:
        """(N, 1) from the graph alone: it is invariant to where the surface lies."""
        phi = self.kernel(graph.geometry)
        x = phi.new_ones(len(graph.rows), 1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            z = self.gather(phi, x, graph)
            x = x + nn.functional.silu(self.mix(z, weight, graph) + bias)
        amount: Tensor = self.readout(x)
        return amount

    @staticmethod
    def gather(phi: Tensor, x: Tensor, graph: Graph) -> Tensor:
        """z_i = Σ_{e ∈ N(i)} φ_e ⊗ x_{j(e)}: (N, F, C).  No (E, F, C) tensor is ever formed."""
        return products.indexed_outer_segment(phi, x, None, graph.src, graph.seg)

    @staticmethod
    def mix(z: Tensor, weight: Tensor, graph: Graph) -> Tensor:
        """Σ_f z_if W_f: (N, C).  The points are a batch, the F matrices one segment."""
        return products.vecmat_segment(z, weight, graph.matrices).squeeze(1)


class PlainFilter(SurfaceFilter):
    """The same filter in plain torch: index_select, multiply, index_add."""

    @staticmethod
    def gather(phi: Tensor, x: Tensor, graph: Graph) -> Tensor:
        """As above, with one (F, C) block of memory for each edge."""
        terms = phi.unsqueeze(2) * x.index_select(0, graph.src).unsqueeze(1)
        return terms.new_zeros(len(graph.seg) - 1, *terms.shape[1:]).index_add(0, graph.dst, terms)

    @staticmethod
    def mix(z: Tensor, weight: Tensor, graph: Graph) -> Tensor:
        """As above: one matrix product."""
        return z.flatten(1) @ weight.flatten(0, 1)
