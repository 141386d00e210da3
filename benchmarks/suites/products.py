"""The named workloads of the products: see section "goals" of docs/performance.md."""

from __future__ import annotations

import torch

from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.recipes import Random, indptr, product_workload
from benchmarks.workloads.uuu import uuu_seed

FAMILY = "products"

DEGREES = (0, 1, 2)  # irreps 0e + 1o + 2e: 9 components
LENGTHS = [2 * degree + 1 for degree in DEGREES]


def _irrep_index(device: torch.device) -> torch.Tensor:
    lengths = torch.tensor(LENGTHS, device=device)
    return torch.repeat_interleave(lengths).int()


def irrep_wise(device: torch.device, batch: int | None) -> Workload:
    n, random = batch or 100_000, Random(device)
    inputs = (random.normal(n, 9, 128), random.normal(3, 128, 128))
    shape = f"N={n} components=9 matrices=3 C=128x128"
    return product_workload("vecmat", inputs, shape, index2=_irrep_index(device))


def graph_sum(device: torch.device, batch: int | None) -> Workload:
    nodes, degree, random = batch or 100_000, 32, Random(device)
    edges = nodes * degree
    return product_workload(
        "vecsca",
        (random.normal(nodes, 64), random.normal(edges)),
        f"nodes={nodes} edges={edges} C=64",
        index1=random.index(nodes, edges),
        seg=torch.arange(0, edges + 1, degree, dtype=torch.int32, device=device),
    )


def tensor_dot(device: torch.device, batch: int | None) -> Workload:
    n, random = batch or 100_000, Random(device)
    inputs = (random.normal(n, 16, 128), random.normal(n, 16, 128))
    return product_workload(
        "mul", inputs, f"N={n} components=16 C=128", seg=indptr([1, 3, 5, 7], device)
    )


def weight_grad(device: torch.device, batch: int | None) -> Workload:
    n, random = batch or 100_000, Random(device)
    inputs = (random.normal(n, 9, 128), random.normal(n, 9, 128))
    shape = f"N={n} components=9 matrices=3 C=128x128"
    return product_workload(
        "outer", inputs, shape, seg=indptr(LENGTHS, device), out_accumulated=True
    )


def own_matrices(device: torch.device, batch: int | None) -> Workload:
    n, random = batch or 20_000, Random(device)
    inputs = (random.normal(n, 9, 64), random.normal(n, 3, 64, 64))
    shape = f"N={n} components=9 matrices=3N C=64x64"
    return product_workload("vecmat", inputs, shape, index2=_irrep_index(device))


def small(device: torch.device, batch: int | None) -> Workload:
    random = Random(device)
    n = batch or 64
    inputs = (random.normal(n, 20, 32), random.normal(n, 20, 32))
    index1, index2 = random.index(20, 50), random.index(20, 50)
    return product_workload("mul", inputs, f"N={n} T=50 C=32", index1=index1, index2=index2)


CASES = [
    Case("W5 uuu_seed", "batched, shared weights", uuu_seed, check_batch=500),
    Case("W4l irrep_wise", "right shared", irrep_wise, matrix=True, check_batch=1000),
    Case("P1 graph_sum", "both shared, segmented", graph_sum),
    Case("P2 tensor_dot", "batched, segmented", tensor_dot),
    Case(
        "P3 weight_grad",
        "batched, segmented, accumulated",
        weight_grad,
        phases=("forward",),
        matrix=True,
        check_batch=2000,
    ),
    Case("P4 own_matrices", "batched", own_matrices, matrix=True, check_batch=2000),
    Case("P5 small", "batched", small, phases=("forward", "recorded", "forward+backward")),
]
