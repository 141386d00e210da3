"""Message passing on the CPU: rows of nodes and of edges multiplied, then added by node."""

from __future__ import annotations

import torch

from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.recipes import Random, product_workload
from benchmarks.workloads.segments import graph_workload

FAMILY = "products"


def edge_mul(device: torch.device, batch: int | None) -> Workload:
    nodes, edges, channels, random = 50_000, 500_000, 32, Random(device)
    return product_workload(
        "mul",
        (random.normal(nodes, channels), random.normal(edges, channels)),
        f"nodes={nodes} edges={edges} F={channels}",
        index1=random.index(nodes, edges),
        seg=random.segments(nodes, edges),
    )


def graph_sum(device: torch.device, batch: int | None) -> Workload:
    return graph_workload(device, batch or 20_000, 16, 64)


CASES = [
    Case(
        "graph_sum",
        "shared, segmented",
        graph_sum,
        phases=("forward",),
        backends=("numba", "torch"),
    ),
    Case(
        "edge_mul",
        "both shared, segmented",
        edge_mul,
        phases=("forward", "forward+backward"),
        backends=("numba", "torch"),
    ),
]
