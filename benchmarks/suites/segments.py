"""Rows reduced over segments: edges to nodes, in order and not, few channels and many."""

from __future__ import annotations

import functools

import torch

from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.segments import graph_workload, segment_workload

FAMILY = "products"

PHASES = ("forward", "forward+backward")


def _edges(
    name: str, channels: int, ordered: bool, device: torch.device, batch: int | None
) -> Workload:
    rows = batch or 3_200_000
    return segment_workload(name, device, rows, max(rows // 32, 1), channels, ordered)


def _graph(device: torch.device, batch: int | None) -> Workload:
    return graph_workload(device, batch or 100_000, 32, 64)


CASES = [
    *(
        Case(
            f"segment {name} C={channels}{' ordered' * ordered}",
            "any order" if not ordered else "ordered",
            functools.partial(_edges, name, channels, ordered),
            phases=PHASES,
            check_batch=32_000,
        )
        for name in ("sum", "mean", "max", "softmax")
        for channels, ordered in ((64, False), (64, True), (8, False))
    ),
    Case("graph sum", "both shared, segmented", _graph, phases=PHASES, check_batch=1000),
]
