"""Reductions on the CPU: the Gaussian sum of 20,000 points in space, and its neighbours."""

from __future__ import annotations

from benchmarks.workloads.formulas import formula_case

FAMILY = "reductions"
BACKENDS = ("numba", "torch")
BOTH = ("forward", "forward+backward")

CASES = [
    formula_case("gaussian_20k", "gaussian", 20000, 20000, phases=BOTH, backends=BACKENDS),
    formula_case("gaussian_20k_d64", "gaussian", 20000, 20000, 64, backends=("torch",)),
    formula_case("logsumexp_20k", "logsumexp", 20000, 20000, backends=BACKENDS),
]
