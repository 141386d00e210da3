"""Rows reduced over segments, and sums of rows of nodes over the edges of a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.harness.case import Workload
from benchmarks.workloads.recipes import Random
from torchweft import constant, products

__all__ = ["graph_workload", "segment_workload"]

REDUCTIONS = {"sum": "sum", "mean": "mean", "max": "amax"}
"""Of torch.scatter_reduce."""


def plain(name: str, x: Tensor, index: Tensor, size: int) -> Tensor:
    """The reduction by torch's operations on unsorted rows."""
    where = index.unsqueeze(1).expand(x.shape)
    if name != "softmax":
        zeros = x.new_zeros(size, x.shape[1])
        return zeros.scatter_reduce(0, where, x, REDUCTIONS[name], include_self=False)
    top = plain("max", x.detach(), index, size)
    powers = (x - top[index]).exp()
    return powers / plain("sum", powers, index, size)[index]


def segment_workload(
    name: str, device: torch.device, rows: int, segments: int, channels: int, ordered: bool = False
) -> Workload:
    """`segment_{name}` of random rows; ordered: rows of a segment are neighbours."""
    random = Random(device)
    x, index = random.normal(rows, channels), random.index(segments, rows).long()
    index[:segments] = torch.arange(segments, device=device)  # none is empty
    index = constant(index.sort().values if ordered else index)
    public = getattr(products, f"segment_{name}")

    def function(x: Tensor, backend: str | None = None) -> Tensor:
        z: Tensor = public(x, index, num_segments=segments, backend=backend)
        return z

    def oracle(x: Tensor, scale: Tensor | None) -> Tensor:
        return plain(name, x, index, segments)

    tables = {"index": index, "num_segments": segments, "ordered": ordered}
    size = (rows if name == "softmax" else segments) * channels * x.itemsize
    shape = f"rows={rows} segments={segments} C={channels}{' ordered' * ordered}"
    return Workload(
        f"segment {name}", (x,), tables, function, oracle, x.numel(), size, shape, name == "sum"
    )


def graph_workload(device: torch.device, nodes: int, degree: int, channels: int) -> Workload:
    """z[m] = Σ x[src] over the edges to m, which are in order: a matrix of ones times rows."""
    random, edges = Random(device), nodes * degree
    x, src = random.normal(nodes, channels), random.index(nodes, edges)
    bounds = random.segments(nodes, edges)
    info = products.SparseScaleInfo(None, constant(src), constant(bounds))
    dst = torch.repeat_interleave(bounds.long().diff())

    def function(x: Tensor, backend: str | None = None) -> Tensor:
        return products.sparse_scale(x, info, backend=backend)

    def oracle(x: Tensor, scale: Tensor | None) -> Tensor:
        return x.new_zeros(nodes, channels).index_add(0, dst, x[src])

    tables = {"src": src, "indptr": bounds}
    shape = f"nodes={nodes} edges={edges} C={channels}"
    return Workload("graph sum", (x,), tables, function, oracle, edges * channels, x.nbytes, shape)
