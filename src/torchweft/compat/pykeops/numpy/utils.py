"""Kernels as dense arrays, for programs that compare with them."""

from typing import Any

import numpy as np
import torch

from torchweft.compat.lacking import lacking
from torchweft.compat.pykeops.common import dense

__all__ = [
    "IsGpuAvailable",
    "WarmUpGpu",
    "chain_rules",
    "differences",
    "grad_np_kernel",
    "log_np_kernel",
    "log_sum_exp",
    "np_kernel",
    "np_kernel_sphere",
    "squared_distances",
]


def squared_distances(x: Any, y: Any) -> Any:
    """|x_i − y_j|², (M, N), of (M, D) and (N, D)."""
    return dense.squared_distances(np, x, y)


def differences(x: Any, y: Any) -> Any:
    """x_i − y_j, (D, M, N)."""
    return x.T[:, :, None] - y.T[:, None, :]


def np_kernel(x: Any, y: Any, s: float, kernel: str) -> Any:
    """k(x_i, y_j), (M, N): "gaussian", "laplacian", "cauchy" or "inverse_multiquadric"."""
    return dense.kernel(np, x, y, s, kernel)


def log_np_kernel(x: Any, y: Any, s: float, kernel: str) -> Any:
    """log k(x_i, y_j), (M, N)."""
    return dense.log_kernel(np, x, y, s, kernel)


def grad_np_kernel(x: Any, y: Any, s: float, kernel: str) -> Any:
    """∂k / ∂|x_i − y_j|², (M, N)."""
    return dense.slope(np, x, y, s, kernel)


def chain_rules(q: Any, ax: Any, by: Any, Aa: Any, p: Any) -> Any:  # noqa: N803  # pykeops' name
    """Σ_j 2 (x_i − y_j) A_ij (q_i · p_j), (M, D)."""
    weights = 2 * Aa * (q @ p.T)
    return weights.sum(1)[:, None] * ax - weights @ by


def np_kernel_sphere(nalpha: Any, nbeta: Any, s: float, kernel: str) -> Any:
    """Kernels of unit vectors: "binet", "linear", "gaussian_unoriented", "gaussian_oriented"."""
    cosines = nalpha @ nbeta.T
    if kernel in ("binet", "linear"):
        return cosines**2 if kernel == "binet" else cosines
    power = {"gaussian_unoriented": 2, "gaussian_oriented": 1}[kernel]
    return np.exp(2 * (cosines**power - 1) / (s * s))


def log_sum_exp(mat: Any, axis: int = 0) -> Any:
    """log Σ exp over an axis."""
    return np.logaddexp.reduce(mat, axis=axis)


def IsGpuAvailable() -> bool:
    """Whether there is a GPU; pykeops 1 had it here."""
    return torch.cuda.is_available()


def WarmUpGpu() -> None:
    """Start CUDA, if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]


__getattr__ = lacking(__name__, {"numpytools": "Use numpy itself."})
