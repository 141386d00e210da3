"""Five products from 1 KB to 4 GB of inputs and output together."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.recipes import Random, product_workload

FAMILY = "products"

SIZES = {"1KB": 2**10, "32KB": 2**15, "1MB": 2**20, "32MB": 2**25, "1GB": 2**30, "4GB": 2**32}
CHECKED = 2**24  # bytes of a smaller check


def mul(size: int, device: torch.device) -> Workload:
    """Terms of 32 channels added in uneven segments of 8 on average: 272 bytes a term."""
    segments, random = max(size // (272 * 8), 1), Random(device)
    terms = 8 * segments
    inputs = (random.normal(terms, 32), random.normal(terms, 32))
    seg = random.segments(segments, terms)
    return product_workload("mul", inputs, f"terms={terms} C=32", seg=seg)


def vecsca(size: int, device: torch.device) -> Workload:
    """A graph of uneven degree, 16 on average, 64 channels: 640 bytes a node."""
    nodes, random = max(size // 640, 2), Random(device)
    edges = 16 * nodes
    tables = {"index1": random.index(nodes, edges), "seg": random.segments(nodes, edges)}
    inputs = (random.normal(nodes, 64), random.normal(edges))
    return product_workload("vecsca", inputs, f"nodes={nodes} edges={edges} C=64", **tables)


def outer(size: int, device: torch.device) -> Workload:
    """16 by 16 channels: 1152 bytes a row."""
    rows, random = max(size // 1152, 1), Random(device)
    inputs = (random.normal(rows, 16), random.normal(rows, 16))
    return product_workload("outer", inputs, f"rows={rows} C=16x16")


def inner(size: int, device: torch.device) -> Workload:
    """64 channels: 516 bytes a row."""
    rows, random = max(size // 516, 1), Random(device)
    inputs = (random.normal(rows, 64), random.normal(rows, 64))
    return product_workload("inner", inputs, f"rows={rows} C=64")


def vecmat(size: int, device: torch.device) -> Workload:
    """Four components and two shared matrices of 64 by 64: 2048 bytes a batch entry."""
    n, random = max(size // 2048, 1), Random(device)
    inputs = (random.normal(n, 4, 64), random.normal(2, 64, 64))
    index2 = torch.tensor([0, 1, 1, 1], dtype=torch.int32, device=device)
    return product_workload("vecmat", inputs, f"N={n} components=4 C=64x64", index2=index2)


def _case(op: Callable[[int, torch.device], Workload], name: str, size: int) -> Case:
    @functools.wraps(op)
    def build(device: torch.device, batch: int | None) -> Workload:
        return op(CHECKED if batch else size, device)

    many_terms = op in (vecmat, vecsca) and size > 2**25  # float64 terms would not fit
    return Case(
        f"{op.__name__} {name}",
        "right shared" if op is vecmat else "both shared",
        build,
        phases=("forward", "forward+backward"),
        matrix=op is vecmat,
        check_batch=CHECKED // 2048 if many_terms else None,
    )


CASES = [
    _case(op, name, size)
    for op in (mul, vecsca, outer, inner, vecmat)
    for name, size in SIZES.items()
]
