"""Half a million products of Cl(3,0) on the CPU, beside the einsum over the Cayley table.

The peer's einsum names x before the table, as torch then takes half the time.
"""

from __future__ import annotations

import torch

from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.geometric import ALGEBRAS, chain_case, product_workload

FAMILY = "clifford"
BACKENDS = ("numba", "torch")


def product(device: torch.device, batch: int | None) -> Workload:
    return product_workload(ALGEBRAS["cl30"], 1024, 512, device)


CASES = [
    Case("product-cl30", "op", product, ("forward", "forward+backward"), backends=BACKENDS),
    chain_case("op", "sgp", "cl30", rows=1024)._replace(backends=BACKENDS),
]
