"""FlashLib's nearest neighbours by all pairs; `pip install flashlib`.

float32 points are multiplied in TF32 there, for which it has no switch: a part of its neighbours
is wrong, and rows say how many are right.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload

NAME = "FlashLib"


def missing() -> str | None:
    if importlib.util.find_spec("flashlib") is None:
        return "not installed: pip install flashlib"
    if not torch.cuda.is_available():
        return "its kernels are for GPUs"
    return None


def adapt(workload: Workload) -> Candidate | str:
    if (k := workload.tables.get("neighbours")) is None:
        return f"{workload.op} finds no neighbours"
    from flashlib import flash_knn

    def function(x: Tensor, y: Tensor, *rest: Tensor) -> Tensor:
        found: Tensor = flash_knn(x, y, k)[0]
        return found.sort(-1).values  # its order is that of its scores, which are rounded more

    return Candidate(NAME, "triton", function, workload.inputs, workload.oracle)
