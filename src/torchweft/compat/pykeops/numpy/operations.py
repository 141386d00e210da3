"""Linear systems of kernels, for arrays of NumPy."""

from torchweft.reductions.numpy import KernelSolve

__all__ = ["KernelSolve"]
