"""Reductions of formulas over all pairs, or blocks of pairs: out_i = R_j f(x_i, y_j, p).

The matrix of the pairs is never stored.  See docs/families/reductions.md.
"""

from typing import TYPE_CHECKING, Any

from weft.reductions import cluster
from weft.reductions.complex import ComplexLazyTensor
from weft.reductions.generic import (
    generic_argkmin,
    generic_argmin,
    generic_logsumexp,
    generic_sum,
)
from weft.reductions.genred import Genred
from weft.reductions.knn import nearest
from weft.reductions.lazy import LazyTensor, Pm, Var, Vi, Vj
from weft.reductions.sinkhorn import SamplesLoss, sinkhorn_divergence
from weft.reductions.solve import KernelSolve, conjugate_gradient
from weft.reductions.sparsity import BlockSparsity

if TYPE_CHECKING:
    from weft.reductions.launch import source

__all__ = [
    "BlockSparsity",
    "ComplexLazyTensor",
    "Genred",
    "KernelSolve",
    "LazyTensor",
    "Pm",
    "SamplesLoss",
    "Var",
    "Vi",
    "Vj",
    "cluster",
    "conjugate_gradient",
    "generic_argkmin",
    "generic_argmin",
    "generic_logsumexp",
    "generic_sum",
    "nearest",
    "sinkhorn_divergence",
    "source",
]


def __getattr__(name: str) -> Any:
    """`source` prints kernels: it is loaded when first used, since it imports triton."""
    if name == "source":
        from weft.reductions.launch import source

        return source
    raise AttributeError(f"module 'weft.reductions' has no attribute {name!r}")
