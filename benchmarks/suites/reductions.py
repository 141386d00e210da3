"""Reductions of formulas over all pairs: the guide's workloads."""

from __future__ import annotations

from benchmarks.workloads.formulas import formula_case
from benchmarks.workloads.neighbours import neighbours_case
from benchmarks.workloads.transport import transport_case

FAMILY = "reductions"

BOTH = ("forward", "forward+backward")

CASES = [
    formula_case("gaussian_1m", "gaussian", 10**6, 10**6, phases=BOTH),
    formula_case("gaussian_1k_1m", "gaussian", 1024, 10**6),
    formula_case("gaussian_100k", "gaussian", 10**5, 10**5, phases=BOTH),
    formula_case("gaussian_d64", "gaussian", 2**18, 2**18, 64),
    formula_case("gaussian_d64_tf32", "gaussian", 2**18, 2**18, 64, tf32=True),
    formula_case("gaussian_d128", "gaussian", 2**18, 2**18, 128),
    formula_case("gaussian_d128_tf32", "gaussian", 2**18, 2**18, 128, tf32=True),
    formula_case("logsumexp_1m", "logsumexp", 10**6, 10**6),
    formula_case("nearest_1m", "nearest", 10**6, 10**6),
    neighbours_case("nearest_1m_by_cells", 10**6),
    formula_case("nearest_d64", "nearest", 2**18, 2**18, 64),
    formula_case("gaussian_1k_cells", "gaussian", 10**6, 10**6, cells=10, phases=BOTH),
    formula_case("gaussian_8k_cells", "gaussian", 10**6, 10**6, cells=20, phases=BOTH),
    formula_case("gaussian_batch", "gaussian", 2048, 2048, batch=64),
    transport_case("sinkhorn_100k", 10**5),
    transport_case("sinkhorn_100k_multiscale", 10**5, "multiscale"),
]
