"""W5: the fully coupled tensor product of 0e + 1o + 2e + 3o, with one weight a path and channel.

    z[n,k,c] = Σ_{paths p} w[p,c] Σ_{i,j} C_p[i,j,k] x[n,i,c] y[n,j,c]

C_p are Clebsch-Gordan coefficients in the real basis, of unit Frobenius norm.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.case import Workload
from benchmarks.workloads.recipes import Random
from torchweft import constant, products
from torchweft.o3 import wigner_3j
from torchweft.products.reference import indexed_product

__all__ = ["DEGREES", "START", "coefficients", "paths", "uuu_seed"]

DEGREES = (0, 1, 2, 3)
START = {degree: degree**2 for degree in DEGREES}  # first component of a degree


def paths() -> list[tuple[int, int, int]]:
    """(l1, l2, l3) that couple and keep parity: |l1 - l2| ≤ l3 ≤ l1 + l2, l1 + l2 + l3 even."""
    return [
        (l1, l2, l3)
        for l1 in DEGREES
        for l2 in DEGREES
        for l3 in DEGREES
        if abs(l1 - l2) <= l3 <= l1 + l2 and (l1 + l2 + l3) % 2 == 0
    ]


def coefficients(l1: int, l2: int, l3: int) -> np.ndarray:
    """(2l1+1, 2l2+1, 2l3+1) real coupling coefficients, exact zeros where they vanish."""
    return wigner_3j(l1, l2, l3, torch.float64, "cpu").numpy()


def _tables(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tables of the two steps: couple to (path, k) rows, then weigh and add rows of one k.

    Until static tables are printed as code, weights are a step of their own.
    """
    index1, index2, scale, lengths = [], [], [], []
    path_of_row, out_of_row = [], []
    for number, (l1, l2, l3) in enumerate(paths()):
        table = coefficients(l1, l2, l3)
        for k in range(2 * l3 + 1):
            i, j = table[:, :, k].nonzero()
            index1 += (START[l1] + i).tolist()
            index2 += (START[l2] + j).tolist()
            scale += table[i, j, k].tolist()
            lengths.append(len(i))
            path_of_row.append(number)
            out_of_row.append(START[l3] + k)
    order = np.argsort(out_of_row, kind="stable")
    bounds = np.searchsorted(np.sort(out_of_row), np.arange(17))

    def table_of(values: object) -> Tensor:
        return constant(torch.as_tensor(np.asarray(values), dtype=torch.int32, device=device))

    couple = {
        "index1": table_of(index1),
        "index2": table_of(index2),
        "seg": table_of([0, *np.cumsum(lengths)]),
        "scale": torch.tensor(scale, device=device),
    }
    weigh = {
        "index1": table_of(order),
        "index2": table_of(np.asarray(path_of_row)[order]),
        "seg": table_of(bounds),
    }
    return couple, weigh


def uuu_seed(device: torch.device, batch: int | None) -> Workload:
    n, channels, random = batch or 20_000, 128, Random(device)
    couple, weigh = _tables(device)
    inputs = (
        random.normal(n, 16, channels),
        random.normal(n, 16, channels),
        random.normal(len(paths()), channels),
    )

    def function(x: Tensor, y: Tensor, w: Tensor, backend: str | None = None) -> Tensor:
        rows = products.indexed_mul_scale_gather(x, y, **couple, backend=backend)
        return products.indexed_mul_scale_gather(rows, w, **weigh, backend=backend)

    def oracle(x: Tensor, y: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        rows = indexed_product("mul", x, y, **{**couple, "scale": scale})
        return indexed_product("mul", rows, w, **weigh)

    terms, rows = len(couple["scale"]), len(weigh["index1"])
    flops = n * channels * (3 * terms + 2 * rows)
    shape = f"N={n} components=16 C={channels} paths={len(paths())} terms={terms}"
    return Workload("uuu", inputs, couple, function, oracle, flops, inputs[0].nbytes, shape)
