"""Symmetric contractions as in MACE: polynomials of a channel's irreps, weights by element.

z[n, L] = Σ_ν Σ_k w[element n, k] f_νk(x[n])_L,    f_νk: ν factors x coupled from the left
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.equivariant import blocks
from benchmarks.workloads.recipes import Random
from tests.cases.symmetric import couplings
from torchweft import constant
from torchweft.o3 import Irrep, Irreps, SymmetricContraction, wigner_3j
from torchweft.o3.symmetric.program import symmetric_basis

__all__ = ["OP", "contraction_case"]

OP = "symmetric contraction"


def contraction_case(
    name: str, irreps: str, out: str, correlation: int, elements: int, rows: int
) -> Case:
    """Weights are (elements, couplings, C): of each item of `out`, the highest degree first."""
    build = functools.partial(_workload, Irreps(irreps), Irreps(out), correlation, elements, rows)
    return Case(name, "batch", build, check_batch=8)


def _workload(
    irreps: Irreps,
    out: Irreps,
    correlation: int,
    elements: int,
    rows: int,
    device: torch.device,
    batch: int | None,
) -> Workload:
    random, rows = Random(device), batch or rows
    element = constant(random.index(elements, rows).long())

    @functools.cache
    def layer_on(backend: str | None) -> SymmetricContraction:
        layer = SymmetricContraction(
            irreps, out, correlation, elements, layout="ir_mul", backend=backend
        )
        return layer.to(device)

    shapes = [p.shape for p in layer_on(None).parameters()]
    counts = [shape[1] for shape in shapes]
    inputs = (
        random.normal(rows, irreps.dim),
        random.normal(elements, sum(counts), shapes[0][2]) / correlation,
    )

    def function(x: Tensor, w: Tensor, backend: str | None = None) -> Tensor:
        layer = layer_on(backend)
        names = [name for name, _ in layer.named_parameters()]
        given = dict(zip(names, w.split(counts, 1), strict=True))
        return torch.func.functional_call(layer, given, (x, element))

    def oracle(x: Tensor, w: Tensor, scale: None = None) -> Tensor:
        weights, parts = iter(w.index_select(0, element).split(counts, 1)), []
        pairs = zip(irreps, blocks(irreps, x), strict=True)
        powers = list(couplings([(item.ir, block.mT) for item, block in pairs], correlation))
        for _, ir in out:
            total = x.new_zeros(rows, shapes[0][2], ir.dim)
            for functions in reversed(powers):
                found = [value for other, value in functions if other == ir]
                total = total + torch.einsum("nkc,kncm->ncm", next(weights), torch.stack(found))
            parts.append(total.mT.flatten(1))
        return torch.cat(parts, 1)

    tables = {
        "irreps": irreps, "out": out, "correlation": correlation, "elements": elements,
        "element": element,
    }  # fmt: skip
    shape = f"N={rows} {irreps} -> {out} correlation={correlation} elements={elements}"
    flops = rows * shapes[0][2] * _flops(irreps, out, correlation)
    return Workload(
        OP, inputs, tables, function, oracle, flops, rows * out.dim * inputs[0].element_size(),
        shape, polynomial=False,
    )  # fmt: skip


def _flops(irreps: Irreps, out: Irreps, correlation: int) -> int:
    """Of one channel: two products and a sum for each coefficient, functions of x made once."""
    items = tuple(item.ir for item in irreps)
    basis = symmetric_basis(items, tuple(item.ir for item in out), correlation)
    below: list[Irrep] = [Irrep("0e")]
    total = 0
    for degree, outputs in enumerate(basis.outputs, 1):
        level = basis.levels[degree - 2] if 1 < degree <= len(basis.levels) + 1 else ()
        for product in (*level, *(p for output in outputs for p in output.products)):
            met = (items[product.item].l, below[product.left].l, product.ir.l)
            total += 3 * int((wigner_3j(*met) != 0).sum())
        below = list(items) if degree == 1 else [product.ir for product in level]
    return total
