"""The geometric layers in plain torch: dense for eager calls, pair by pair for a compiler."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness.case import Workload
from torchweft.clifford import Algebra
from torchweft.clifford.reference import tables

__all__ = ["dense", "pairwise"]

Product = Callable[..., Tensor]


def dense(workload: Workload) -> Product:
    """One einsum with the whole Cayley table, weighted first; fully connected path by path."""
    algebra, like = workload.tables["algebra"], workload.inputs[0]
    if workload.op == "clifford product":
        table = algebra.cayley(like.dtype).to(like.device)
        return lambda x, y: torch.einsum("i...f,ijk,k...f->j...f", x, table, y)
    if workload.tables["kind"] == "fc":
        return _chain(workload, _blocks(algebra))
    paths = tables(algebra, like.dtype).to(like.device)

    def product(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        weighted = torch.einsum("pijk,fp->fijk", paths, weight)
        return torch.einsum("i...f,fijk,k...f->j...f", x, weighted, y)

    return _chain(workload, product)


def pairwise(workload: Workload) -> Product:
    """Every pair of blades as one multiplication, which Inductor fuses into one kernel."""
    algebra = workload.tables["algebra"]
    if workload.op == "clifford product":
        return lambda x, y: _pairs(algebra, x, y, None)
    if workload.tables["kind"] == "fc":
        return _chain(workload, _blocks(algebra))
    return _chain(workload, lambda x, y, weight: _pairs(algebra, x, y, weight))


def _pairs(algebra: Algebra, x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    out: list[Tensor | None] = [None] * algebra.num_blades
    for term in algebra.terms:
        i, j, k, sign = term
        value = x[i] * y[k]
        if weight is not None:
            value = value * weight[:, algebra.path_of[algebra.grades_of(term)]]
        value = value if sign > 0 else -value
        out[j] = value if out[j] is None else out[j] + value
    return torch.stack(out)  # type: ignore[arg-type]


def _blocks(algebra: Algebra) -> Product:
    """The pairs of each path as one left factor, its matrix, and the sums by blade."""
    paths: dict[int, dict[int, list[tuple[int, int, int]]]] = {}
    for term in algebra.terms:
        i, j, k, sign = term
        blades = paths.setdefault(algebra.path_of[algebra.grades_of(term)], {})
        blades.setdefault(j, []).append((sign, i, k))

    def product(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        out: dict[int, Tensor] = {}
        for p, blades in paths.items():
            pairs = [sum(sign * x[i] * y[k] for sign, i, k in terms) for terms in blades.values()]
            for j, part in zip(blades, torch.stack(pairs) @ weight[p], strict=True):  # type: ignore[arg-type]
                out[j] = out[j] + part if j in out else part
        return torch.stack([out[j] for j in range(algebra.num_blades)])

    return product


def _chain(workload: Workload, product: Product) -> Product:
    """Gates, the product and the norm, after the linear layer if there is one."""
    algebra, layer = workload.tables["algebra"], workload.tables["layer"]
    grades = [slice(b.start, b.stop) for b in algebra.of_grade]

    def gate(x: Tensor) -> Tensor:
        return x * (0.5 * (1 + torch.erf(x[:1] * math.sqrt(0.5))))

    def norm(part: Tensor) -> Tensor:
        return part / (part.square().sum(0, keepdim=True).mean(-1, keepdim=True) + 1e-6).sqrt()

    def function(x: Tensor, *rest: Tensor) -> Tensor:
        if layer:
            weight, linear, bias = rest
            y = torch.cat(
                [x[s] @ linear[g] + (bias if g == 0 else 0) for g, s in enumerate(grades)]
            )
        else:
            y, weight = rest
        out = product(gate(x), gate(y), weight)
        return torch.cat([norm(out[s]) for s in grades])

    return function
