"""Lazy tensors, `Genred`, `KernelSolve` and the generic functions, for tensors of torch."""

from torchweft.compat.pykeops.torch import cluster, generic, lazytensor, operations, utils
from torchweft.reductions import (
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
