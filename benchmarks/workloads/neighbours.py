"""Builds the workload of exact nearest neighbours: points uniform in the unit cube."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.recipes import Random
from torchweft.reductions import nearest

__all__ = ["neighbours_case"]

NEIGHBOURS = 10

CHECKED = 256
"""Queries of the check, whose oracle is the dense matrix in float64; all points are there."""


def neighbours_case(name: str, points: int) -> Case:
    """Squared distances to the nearest points, found cell by cell."""
    build = functools.partial(_workload, points)
    return Case(name, "cells", build, phases=("forward",), check_batch=CHECKED)


def _workload(points: int, device: torch.device, check_batch: int | None) -> Workload:
    random, queries = Random(device), check_batch or points
    x, y = (torch.special.ndtr(random.normal(n, 3)) for n in (queries, points))

    def function(x: Tensor, y: Tensor, backend: str | None = None) -> Tensor:
        near = nearest(x, y, NEIGHBOURS)
        return (x.unsqueeze(1) - y[near]).square().sum(-1)

    def oracle(x: Tensor, y: Tensor, scale: None = None) -> Tensor:
        pairs = (x.unsqueeze(1) - y.unsqueeze(0)).square().sum(-1)
        return pairs.sort(1).values[:, :NEIGHBOURS]

    return Workload(
        "nearest neighbours",
        (x, y),
        {"neighbours": NEIGHBOURS},
        function,
        oracle,
        0,
        queries * NEIGHBOURS * x.element_size(),
        f"rows={queries} columns={points} dim=3 k={NEIGHBOURS}",
        polynomial=False,
    )
