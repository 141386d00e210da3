"""Linear systems of kernels, for tensors of torch."""

from torchweft.compat.lacking import lacking
from torchweft.reductions import KernelSolve

__all__ = ["KernelSolve"]

__getattr__ = lacking(__name__, {"KernelSolveAutograd": "Call KernelSolve: it is differentiable."})
