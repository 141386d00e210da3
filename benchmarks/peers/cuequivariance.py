"""cuEquivariance's segmented polynomials; `pip install cuequivariance-torch` and its kernels."""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from torch import Tensor

from benchmarks.suites.uuu import START, coefficients, paths
from weft.bench.case import Candidate, Workload

NAME = "cuEquivariance"


def missing() -> str | None:
    if importlib.util.find_spec("cuequivariance_torch") is None:
        return "not installed: pip install cuequivariance-torch"
    if torch.cuda.is_available() and importlib.util.find_spec("cuequivariance_ops_torch") is None:
        return "its kernels are not installed: pip install cuequivariance-ops-torch-cu13"
    return None


def adapt(workload: Workload) -> Candidate | str:
    if workload.op != "uuu":
        return f"{workload.op} is no layer of cuEquivariance"
    import cuequivariance as cue
    import cuequivariance_torch as cuet

    x, y, w = workload.inputs
    components, channels = x.shape[1:]
    product = cue.SegmentedTensorProduct.from_subscripts("u,u,u,u")
    for operand, rows in enumerate((len(paths()), components, components, components)):
        product.add_segments(operand, rows * [(channels,)])
    for p, (l1, l2, l3) in enumerate(paths()):
        table = coefficients(l1, l2, l3)
        for i, j, k in np.argwhere(table).tolist():
            product.add_path(p, START[l1] + i, START[l2] + j, START[l3] + k, c=table[i, j, k])
    polynomial = cue.SegmentedPolynomial.eval_last_operand(product)
    layer = cuet.SegmentedPolynomial(polynomial, "uniform_1d" if x.is_cuda else "naive").to(x)

    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return layer([w, x, y])[0]

    def oracle(x: Tensor, y: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        rows = (x.unflatten(1, (components, channels)), y.unflatten(1, (components, channels)))
        weights = w.unflatten(1, (len(paths()), channels)).squeeze(0)
        return workload.oracle(*rows, weights, scale=scale).flatten(1)

    inputs = (x.flatten(1), y.flatten(1), w.flatten().unsqueeze(0))
    return Candidate(NAME, "cuda" if x.is_cuda else "torch", function, inputs, oracle)
