"""Builds the workloads of reductions: points uniform in a cube of side √(6/D), b and h normal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.suites.recipes import Random
from weft.bench.case import Case, Workload
from weft.reductions import Genred

__all__ = ["FORMULAS", "Formula", "formula_case"]

CHECKED = 4096
"""Rows and columns of the check, whose oracle is the dense matrix in float64."""


class Formula(NamedTuple):
    """A reduction over j of a formula of x (i), y (j) and b (j), for KeOps' names and for torch.

    `dense` takes (M, 1, D), (1, N, D) and (1, N, 1).
    """

    kind: str
    text: str
    dense: Callable[[Tensor, Tensor, Tensor], Tensor]
    k: int = 1


def _sqdist(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum(-1)


FORMULAS = {
    "gaussian": Formula(
        "Sum",
        "Exp(-SqDist(x, y)) * b",
        lambda x, y, b: ((-_sqdist(x, y)).exp() * b[..., 0]).sum(1, keepdim=True),
    ),
    "logsumexp": Formula(
        "LogSumExp",
        "b - IntCst(50) * SqDist(x, y)",
        lambda x, y, b: (b[..., 0] - 50 * _sqdist(x, y)).logsumexp(1, keepdim=True),
    ),
    "nearest": Formula(
        "KMin",
        "SqDist(x, y) + IntCst(0) * b",
        lambda x, y, b: (_sqdist(x, y) + 0 * b[..., 0]).sort(1).values[:, :10],
        k=10,
    ),
}


def formula_case(
    name: str,
    formula: str,
    rows: int,
    columns: int,
    dim: int = 3,
    phases: tuple[str, ...] = ("forward",),
    tf32: bool = False,
    backends: tuple[str | None, ...] = (None,),
) -> Case:
    """A reduction of a formula over all pairs of two clouds."""
    return Case(
        name,
        FORMULAS[formula].kind,
        functools.partial(_workload, formula, rows, columns, dim),
        phases=phases,
        tf32=tf32,
        check_batch=CHECKED,
        backends=backends,
    )


def _workload(
    formula: str, rows: int, columns: int, dim: int, device: torch.device, batch: int | None
) -> Workload:
    of = FORMULAS[formula]
    rows, columns = (n if batch is None else min(n, batch) for n in (rows, columns))
    random = Random(device)
    side = (6 / dim) ** 0.5
    x, y = (torch.special.ndtr(random.normal(n, dim)) * side for n in (rows, columns))
    b = random.normal(columns, 1)
    aliases = [f"x = Vi(0, {dim})", f"y = Vj(1, {dim})", "b = Vj(2, 1)"]
    reduction = Genred(of.text, aliases, of.kind, axis=1, opt_arg=of.k)

    def function(x: Tensor, y: Tensor, b: Tensor, backend: str | None = None) -> Tensor:
        found = reduction(x, y, b, backend=backend or "auto")
        assert isinstance(found, Tensor)
        return found

    def oracle(x: Tensor, y: Tensor, b: Tensor, scale: None = None) -> Tensor:
        return of.dense(x[:, None], y[None], b[None])

    return Workload(
        "reduction",
        (x, y, b),
        {"formula": of, "aliases": aliases},
        function,
        oracle,
        rows * columns * (3 * dim + 3),
        rows * of.k * x.element_size(),
        f"M={rows} N={columns} D={dim}",
        polynomial=False,
    )
