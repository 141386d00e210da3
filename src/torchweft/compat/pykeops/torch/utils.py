"""Kernels as dense tensors, for programs that compare with them."""

import torch
from torch import Tensor

from torchweft.compat.lacking import lacking
from torchweft.compat.pykeops.common import dense

__all__ = ["squared_distances", "torch_kernel"]


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """|x_i − y_j|², (M, N), of (M, D) and (N, D)."""
    found: Tensor = dense.squared_distances(torch, x, y)
    return found


def torch_kernel(x: Tensor, y: Tensor, s: float, kernel: str) -> Tensor:
    """k(x_i, y_j), (M, N): "gaussian", "laplacian", "cauchy" or "inverse_multiquadric"."""
    found: Tensor = dense.kernel(torch, x, y, s, kernel)
    return found


__getattr__ = lacking(
    __name__,
    {
        "is_on_device": "Read x.is_cuda.",
        "torchsolve": "Use torch.linalg.solve.",
        "torchtools": "Use torch itself.",
    },
)
