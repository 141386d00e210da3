"""FlashSinkhorn's divergence; `pip install flash-sinkhorn`."""

from __future__ import annotations

import importlib.util

from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.workloads.transport import BLUR, SCALING

NAME = "flash-sinkhorn"


def missing() -> str | None:
    if importlib.util.find_spec("flash_sinkhorn") is None:
        return "not installed: pip install flash-sinkhorn"
    return None


def adapt(workload: Workload) -> Candidate | str:
    if workload.op != "transport":
        return f"{workload.op} is no optimal transport"
    from flash_sinkhorn import SamplesLoss

    # its cost is |x - y|² unless halved; by its own default products are TF32
    loss = SamplesLoss("sinkhorn", blur=BLUR, scaling=SCALING, debias=True, half_cost=True)

    def function(*inputs: Tensor) -> Tensor:
        found: Tensor = loss(*inputs)
        return found

    return Candidate(NAME, "triton", function, workload.inputs, workload.oracle)
