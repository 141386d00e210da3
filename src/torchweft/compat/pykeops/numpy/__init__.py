"""Lazy tensors, `Genred`, `KernelSolve` and the generic functions, for arrays of NumPy."""

from torchweft.compat.lacking import lacking
from torchweft.compat.pykeops.numpy import cluster, generic, lazytensor, operations, utils
from torchweft.reductions.numpy import (
    ComplexLazyTensor,
    Genred,
    KernelSolve,
    LazyTensor,
    Pm,
    Vi,
    Vj,
    generic_argkmin,
    generic_argmin,
    generic_logsumexp,
    generic_sum,
)

__all__ = [
    "ComplexLazyTensor",
    "Genred",
    "KernelSolve",
    "LazyTensor",
    "Pm",
    "Vi",
    "Vj",
    "cluster",
    "generic",
    "generic_argkmin",
    "generic_argmin",
    "generic_logsumexp",
    "generic_sum",
    "lazytensor",
    "operations",
    "utils",
]

__getattr__ = lacking(__name__, {"GenredR": "Use Genred with axis=0 or 1."})
