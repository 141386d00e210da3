"""Energies of nodes, shifted and scaled, and their sums over graphs, in one launch each way."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import Kernel, Tile, current_device
from torchweft.core.operators.operator import on_gpu, plain_call
from torchweft.core.printing.modules import written
from torchweft.o3.edge_vectors.operator import totals
from torchweft.o3.graph import Tables

__all__ = ["Energies", "graph_energies", "sums_of_graphs"]

KERNELS = "torchweft.o3.energies.kernels"

NODES_PER_STEP = 512
"""Nodes of a graph that a program adds at a time."""

MOST_NODES = 2**13
"""Nodes up to which one program adds those of a graph."""


class Energies(NamedTuple):
    """Of graphs and nodes."""

    interaction: Tensor  # (graphs,)
    energy: Tensor  # (graphs,) with those of the nodes alone
    nodes: Tensor  # (N,) in float64


def graph_energies(
    parts: Sequence[Tensor], alone: Tensor, scale: Tensor, shift: Tensor, tables: Tables | None
) -> Energies:
    """e[n] = shift + scale Σ_k parts[k][n]; sums of e over the nodes of a graph, and with alone.

    Sums have a fixed order, without atomics.

    Args:
        parts: each (N,).
        alone: (N,), energies of the nodes alone.
        scale: (1,) or (N,).
        shift: (1,) or (N,).
        tables: of `rows_of_totals`; None: all nodes are of one graph.

    Returns:
        Energies of graphs, in the dtype of all, and of nodes.  Differentiable to any order.
    """
    *others, last = parts
    given = (sum(others[1:], others[0]) if others else None, last, alone, scale, shift)
    if _serves(given):
        return Energies(*_OneLaunch.apply(tables, *given))  # type: ignore[no-untyped-call]
    return _composed(given, tables)


Given = tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]


def _serves(given: Given) -> bool:
    """Whether the kernel takes these: on a GPU, of few nodes, where the parts alone vary."""
    first, last, *fixed = given
    scale = fixed[1]
    every = [last, *fixed] if first is None else [first, last, *fixed]
    alike = {t.dtype for t in every} in ({torch.float32}, {torch.float64})
    few = on_gpu(last) and len(last) <= MOST_NODES and scale.numel() == 1
    return few and plain_call(every) and alike and not any(t.requires_grad for t in fixed)


def _composed(given: Given, tables: Tables | None) -> Energies:
    first, last, alone, scale, shift = given
    nodes = torch.addcmul(shift, scale, last if first is None else first + last)
    interaction = sums_of_graphs(nodes, tables)
    return Energies(
        interaction, sums_of_graphs(alone, tables) + interaction, alone.double() + nodes
    )


def sums_of_graphs(x: Tensor, tables: Tables | None) -> Tensor:
    """(graphs, …) of x (N, …): sums over the nodes of each graph, in a fixed order."""
    if tables is None:
        return x.sum(0, keepdim=True)
    width = math.prod(x.shape[1:])  # torch finds no size of an empty tensor
    return totals(x.view(x.shape[0], width), tables).view(tables.num_z, *x.shape[1:])


class _OneLaunch(torch.autograd.Function):
    """The kernel; its gradient is composed of torch's operations, and so differentiable."""

    @staticmethod
    def forward(ctx: Any, tables: Tables | None, *given: Any) -> tuple[Tensor, ...]:
        ctx.tables, ctx.two, ctx.rows = tables, given[0] is not None, len(given[1])
        ctx.save_for_backward(given[3])
        ctx.set_materialize_grads(False)
        return _launched(given, tables)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (scale,), (interaction, energy, nodes) = ctx.saved_tensors, grads
        of_graphs = [g for g in (interaction, energy) if g is not None]
        slope = None
        if of_graphs:
            slope = scale * _spread(sum(of_graphs[1:], of_graphs[0]), ctx.tables, ctx.rows)
        if nodes is not None:
            own = scale * nodes.to(scale.dtype)
            slope = own if slope is None else slope + own
        return None, slope if ctx.two else None, slope, None, None, None


def _spread(x: Tensor, tables: Tables | None, rows: int) -> Tensor:
    """(rows,): the number of each node's graph."""
    if tables is None:
        return x.expand(rows)
    assert tables.dst is not None
    return x.index_select(0, tables.dst)


def _launched(given: Given, tables: Tables | None) -> Energies:
    given = tuple(None if t is None else t.contiguous() for t in given)  # type: ignore[assignment]
    last, graphs = given[1], 1 if tables is None else tables.num_z
    starts, order = (None, None) if tables is None else (tables.z_indptr, tables.z_edges)
    nodes = last.new_empty(len(last), dtype=torch.float64)
    interaction, energy = last.new_empty(graphs), last.new_empty(graphs)
    kernel = _kernel(last.device, last.dtype, given[0] is None, tables is None)
    with current_device(last):
        tensors = (*given, starts, order, nodes, interaction, energy)
        kernel(graphs, tensors, (len(last),))
    return Energies(interaction, energy, nodes)


@functools.lru_cache(maxsize=64)
def _kernel(device: torch.device, dtype: torch.dtype, *absent: bool) -> Kernel:
    """It holds machine code, which depends on all arguments."""
    tile = Tile((NODES_PER_STEP,), 4, 1)
    return Kernel(written(KERNELS, "node_energies"), (), (), tile)
