"""Reductions of formulas over all pairs, or blocks of pairs: out_i = R_j f(x_i, y_j, p).

The matrix of the pairs is never stored.  See docs/families/reductions.md.
"""

from weft.reductions.complex import ComplexLazyTensor
from weft.reductions.generic import (
    generic_argkmin,
    generic_argmin,
    generic_logsumexp,
    generic_sum,
)
from weft.reductions.genred import Genred
from weft.reductions.lazy import LazyTensor, Pm, Var, Vi, Vj
from weft.reductions.solve import KernelSolve
from weft.reductions.sparsity import BlockSparsity

__all__ = [
    "BlockSparsity",
    "ComplexLazyTensor",
    "Genred",
    "KernelSolve",
    "LazyTensor",
    "Pm",
    "Var",
    "Vi",
    "Vj",
    "generic_argkmin",
    "generic_argmin",
    "generic_logsumexp",
    "generic_sum",
]
