"""Builds the workloads of reductions: points uniform in a cube of side √(6/D), b and h normal.

Block-sparse ones keep pairs of cells of the cube whose centres are near, and take a kernel that is
a quarter of that radius wide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.recipes import Random
from torchweft.reductions import BlockSparsity, Genred
from torchweft.reductions.cluster import cluster_ranges_centroids, grid_cluster, sort_clusters

__all__ = ["FORMULAS", "Formula", "formula_case"]

CHECKED = 4096
"""Rows and columns of the check, whose oracle is the dense matrix in float64."""

CHECKED_NUMBERS = 2**29
"""Differences of coordinates in the check of nearest neighbours, in float64."""

CHECKED_BATCH = 4
"""Entries of a batch in the check."""

RADIUS = 0.21
"""Within which the centres of cells of the unit cube meet."""


class Formula(NamedTuple):
    """A reduction over j of a formula of x (i), y (j) and b (j), for KeOps' names and for torch.

    `dense` takes (*batch, M, 1, D), (*batch, 1, N, D), (*batch, 1, N, 1) and, for a sum, what each
    pair is weighed by.
    """

    kind: str
    text: str
    dense: Callable[..., Tensor]
    k: int = 1


def _sqdist(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum(-1)


FORMULAS = {
    "gaussian": Formula(
        "Sum",
        "Exp(-SqDist(x, y)) * b",
        lambda x, y, b, kept=1: ((-_sqdist(x, y)).exp() * b[..., 0] * kept).sum(-1, keepdim=True),
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


class Size(NamedTuple):
    """Of a workload: rows, columns, dimension, entries of the batch, cells along the unit cube."""

    rows: int
    columns: int
    dim: int
    batch: int | None
    cells: int | None


def formula_case(
    name: str,
    formula: str,
    rows: int,
    columns: int,
    dim: int = 3,
    *,
    batch: int | None = None,
    cells: int | None = None,
    phases: tuple[str, ...] = ("forward",),
    tf32: bool = False,
    backends: tuple[str | None, ...] = (None,),
) -> Case:
    """A reduction of a formula over all pairs of two clouds, or over blocks of pairs.

    With tf32 the factors of products are rounded to TF32, also by torchweft.
    """
    size, precision = Size(rows, columns, dim, batch, cells), "tf32" if tf32 else None
    kind = FORMULAS[formula].kind
    few = max(1, CHECKED_NUMBERS // (columns * dim))  # with all columns
    return Case(
        name,
        kind,
        functools.partial(_workload, formula, size, precision),
        phases=phases,
        tf32=tf32,
        check_batch=few if kind == "KMin" else CHECKED,
        backends=backends,
    )


def _workload(
    formula: str,
    full: Size,
    precision: str | None,
    device: torch.device,
    check_batch: int | None,
) -> Workload:
    of, size = FORMULAS[formula], full
    if check_batch is not None:
        size = _reduced(full, check_batch, all_columns=of.kind == "KMin")
    x, y, b = _inputs(size, device)
    mask = _mask(x, y, size.cells) if size.cells else None
    aliases = [f"x = Vi(0, {size.dim})", f"y = Vj(1, {size.dim})", "b = Vj(2, 1)"]
    reduction = Genred(of.text, aliases, of.kind, axis=1, opt_arg=of.k, precision=precision)
    ranges = mask and mask.blocks.ranges

    def function(x: Tensor, y: Tensor, b: Tensor, backend: str | None = None) -> Tensor:
        found = reduction(x, y, b, backend=backend or "auto", ranges=ranges)
        assert isinstance(found, Tensor)
        return found

    def oracle(x: Tensor, y: Tensor, b: Tensor, scale: None = None) -> Tensor:
        weighed = () if mask is None else (mask.dense().to(x.dtype),)
        return of.dense(x.unsqueeze(-2), y.unsqueeze(-3), b.unsqueeze(-3), *weighed)

    pairs = mask.blocks.num_pairs() if mask else size.rows * size.columns * (size.batch or 1)
    return Workload(
        "reduction",
        (x, y, b),
        {"formula": of, "aliases": aliases, "ranges": ranges} | _neighbours(of),
        function,
        oracle,
        pairs * (3 * size.dim + 3),
        x.shape[:-1].numel() * of.k * x.element_size(),
        " ".join(f"{key}={value}" for key, value in size._asdict().items() if value),
        polynomial=False,
    )


def _reduced(size: Size, most: int, *, all_columns: bool) -> Size:
    """How many neighbours are right depends on how near they lie: their columns are all there."""
    return size._replace(
        rows=min(size.rows, most),
        columns=size.columns if all_columns else min(size.columns, most),
        batch=size.batch and min(size.batch, CHECKED_BATCH),
    )


def _neighbours(of: Formula) -> dict[str, int]:
    """What libraries of neighbours need to know."""
    return {"neighbours": of.k} if of.kind == "KMin" else {}


def _inputs(size: Size, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Two clouds, sorted by cells if there are any, and numbers for the second."""
    random, batch = Random(device), (size.batch,) if size.batch else ()
    side = 4 / (2**0.5 * RADIUS) if size.cells else (6 / size.dim) ** 0.5
    x, y = (
        torch.special.ndtr(random.normal(*batch, n, size.dim)) * side
        for n in (size.rows, size.columns)
    )
    if size.cells:
        x, y = (sort_clusters(p, grid_cluster(p, side / size.cells))[0] for p in (x, y))
    return x, y, random.normal(*batch, size.columns, 1)


class _Mask(NamedTuple):
    blocks: BlockSparsity
    labels_x: Tensor
    labels_y: Tensor
    keep: Tensor

    def dense(self) -> Tensor:
        """(M, N) booleans."""
        return self.keep[self.labels_x][:, self.labels_y]


def _mask(x: Tensor, y: Tensor, cells: int) -> _Mask:
    side = 4 / (2**0.5 * RADIUS)
    labels = [grid_cluster(p, side / cells) for p in (x, y)]
    (ranges_x, centres_x, _), (ranges_y, centres_y, _) = (
        cluster_ranges_centroids(p, lab) for p, lab in zip((x, y), labels, strict=True)
    )
    keep = torch.cdist(centres_x, centres_y) < RADIUS * side
    return _Mask(BlockSparsity.from_matrix(ranges_x, ranges_y, keep), *labels, keep)
