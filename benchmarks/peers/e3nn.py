"""e3nn's TensorProduct, in its own layout; `pip install e3nn`."""

from __future__ import annotations

import importlib.util

from torch import Tensor

from benchmarks.peers.layouts import from_mul_ir, to_mul_ir
from benchmarks.suites.uuu import DEGREES, paths
from weft.bench.case import Candidate, Workload

NAME = "e3nn"


def missing() -> str | None:
    return None if importlib.util.find_spec("e3nn") else "not installed: pip install e3nn"


def adapt(workload: Workload) -> Candidate | str:
    if workload.op != "uuu":
        return f"{workload.op} is no layer of e3nn"
    from e3nn import o3

    x, y, w = workload.inputs
    channels = x.shape[2]
    irreps = "+".join(f"{channels}x{degree}{'eo'[degree % 2]}" for degree in DEGREES)
    layer = o3.TensorProduct(
        irreps,
        irreps,
        irreps,
        [(*path, "uuu", True) for path in paths()],
        irrep_normalization="none",
        path_normalization="none",
        internal_weights=False,
        shared_weights=True,
    ).to(x)

    def oracle(x: Tensor, y: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        weights = w.unflatten(0, (len(paths()), channels))
        return to_mul_ir(workload.oracle(from_mul_ir(x), from_mul_ir(y), weights, scale=scale))

    inputs = (to_mul_ir(x), to_mul_ir(y), w.flatten())
    return Candidate(NAME, "torch", layer, inputs, oracle)
