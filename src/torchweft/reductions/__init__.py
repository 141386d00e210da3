"""Reductions of formulas over all pairs, or blocks of pairs: out_i = R_j f(x_i, y_j, p).

The matrix of the pairs is never stored.  See docs/families/reductions.md.
"""

from typing import TYPE_CHECKING, Any

from torchweft.reductions import cluster
from torchweft.reductions.cluster.sparsity import BlockSparsity
from torchweft.reductions.engine.nearest import nearest
from torchweft.reductions.generic import (
    generic_argkmin,
    generic_argmin,
    generic_logsumexp,
    generic_sum,
)
from torchweft.reductions.genred import Genred
from torchweft.reductions.lazy import ComplexLazyTensor, LazyTensor, Pm, Var, Vi, Vj
from torchweft.reductions.solve import KernelSolve, conjugate_gradient
from torchweft.reductions.transport.samples_loss import SamplesLoss
from torchweft.reductions.transport.sinkhorn import sinkhorn_divergence

if TYPE_CHECKING:
    from torchweft.reductions.gpu.launch import source

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

if not TYPE_CHECKING:  # type checkers know the names above, and no others

    def __getattr__(name: str) -> Any:
        """`source` prints kernels: it is loaded when first used, since it imports triton."""
        if name == "source":
            from torchweft.reductions.gpu.launch import source

            return source
        raise AttributeError(f"module 'torchweft.reductions' has no attribute {name!r}")
