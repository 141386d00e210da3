"""Builds the workloads of clifford: the fused chain, with or without the linear layer before it."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.recipes import NAMES, Random
from torchweft import clifford
from torchweft.clifford import Algebra, reference
from torchweft.clifford.functions import clifford_layer

__all__ = ["ALGEBRAS", "chain_case", "product_workload"]

ALGEBRAS = {
    "cl20": Algebra.cl(2),
    "cl30": Algebra.cl(3),
    "cl301": Algebra.cl(3, 0, 1),
    "cl13": Algebra.cl(1, 3),
    "cl41": Algebra.cl(4, 1),
    "cl50": Algebra.cl(5),
}

CHECKED = 256
"""Rows of the check: the dense oracle in float64 holds every pair of blades."""


def chain_case(
    what: str,
    kind: str,
    algebra: str,
    dtype: torch.dtype = torch.float32,
    rows: int = 4096,
    features: int = 512,
    phases: tuple[str, ...] = ("forward", "forward+backward"),
) -> Case:
    """`{op,layer}-{sgp,fc}-{algebra}-{dtype}-B-F` of the guide's recipe."""
    matrix = kind == "fc" or what == "layer"
    return Case(
        f"{what}-{kind}-{algebra}-{NAMES[dtype]}-B{rows}-F{features}",
        what,
        functools.partial(_chain, what, kind, ALGEBRAS[algebra], dtype, rows, features),
        phases=phases,
        dtype=dtype,
        matrix=matrix,
        tf32=matrix and dtype == torch.float32,
        check_batch=CHECKED,
    )


def _chain(
    what: str,
    kind: str,
    algebra: Algebra,
    dtype: torch.dtype,
    rows: int,
    features: int,
    device: torch.device,
    batch: int | None,
) -> Workload:
    rows, fully_connected, random = batch or rows, kind == "fc", Random(device)
    x, y, _gradient = (random.normal(algebra.num_blades, rows, features) for _ in range(3))
    paths, root = len(algebra.paths), math.sqrt(features)
    weight = (
        random.normal(paths, features, features) / root
        if fully_connected
        else random.normal(features, paths)
    )
    inputs: tuple[Tensor, ...] = (x, y, weight)
    if what == "layer":
        linear = random.normal(algebra.n + 1, features, features) / root
        inputs = (x, weight, linear, torch.zeros(features, device=device))
    inputs = tuple(a.to(dtype) for a in inputs)
    tables = {"algebra": algebra, "kind": kind, "layer": what == "layer"}
    matrices = (_blade_products(algebra) if fully_connected else 0) + (
        algebra.num_blades if what == "layer" else 0
    )
    flops = 2 * rows * features * (matrices * features + len(algebra.terms))
    return Workload(
        f"clifford {what} {kind}",
        inputs,
        tables,
        functools.partial(_function, tables),
        functools.partial(_oracle, tables),
        flops,
        inputs[0].nbytes,
        f"B={rows} F={features} blades={algebra.num_blades} paths={paths}",
        polynomial=False,
        gradients=2 if matrices else None,
    )


def _blade_products(algebra: Algebra) -> int:
    """Matrix products of the fully connected one: the pairs of a path and an output blade."""
    return len({(algebra.path_of[algebra.grades_of(term)], term[1]) for term in algebra.terms})


def _function(tables: dict[str, object], *inputs: Tensor, backend: str | None = None) -> Tensor:
    algebra = tables["algebra"]
    if tables["layer"]:
        x, weight, linear, bias = inputs
        connected = tables["kind"] == "fc"
        return clifford_layer(
            x, linear, bias, weight, algebra, fully_connected=connected, backend=backend
        )
    x, y, weight = inputs
    return clifford.gelu_geometric_product_norm(
        x, y, weight, algebra, fully_connected=tables["kind"] == "fc", backend=backend
    )


def _oracle(tables: dict[str, object], *inputs: Tensor, scale: None) -> Tensor:
    algebra = tables["algebra"]
    if tables["layer"]:
        x, weight, linear, bias = inputs
        y = torch.cat([x[b.start : b.stop] @ linear[g] for g, b in enumerate(algebra.of_grade)])
        y = torch.cat([y[:1] + bias, y[1:]])
    else:
        x, y, weight = inputs
    x, y = reference.gate(x), reference.gate(y)
    if tables["kind"] == "fc":
        out = reference.fully_connected(x, y, weight, algebra)
    else:
        out = reference.product(x, y, algebra, weight)
    return reference.rms_norm(out, algebra)


def product_workload(algebra: Algebra, rows: int, features: int, device: torch.device) -> Workload:
    """x y, all pairs of blades with their signs as the only coefficients."""
    random = Random(device)
    x, y = (random.normal(algebra.num_blades, rows, features) for _ in range(2))
    i, j, k, signs = torch.tensor(algebra.terms, device=device).T

    def function(x: Tensor, y: Tensor, backend: str | None = None) -> Tensor:
        return clifford.geometric_product(x, y, algebra, backend=backend)

    def oracle(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        table = scale.new_zeros(3 * (algebra.num_blades,)).index_put((i, j, k), scale)
        return torch.einsum("ijk,i...f,k...f->j...f", table, x, y)

    return Workload(
        "clifford product",
        (x, y),
        {"algebra": algebra, "scale": signs.to(x)},
        function,
        oracle,
        2 * rows * features * len(algebra.terms),
        x.nbytes,
        f"multivectors={rows * features} blades={algebra.num_blades}",
    )
