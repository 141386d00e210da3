"""Solvers and layouts below pykeops' public functions, which are told by name."""

from torchweft.compat.lacking import lacking

_SOLVER = "Use torchweft.reductions.conjugate_gradient, or the method solve of a lazy tensor."
_LAYOUT = "Reductions return their final layout."

__getattr__ = lacking(
    __name__,
    {
        "ConjugateGradientSolver": _SOLVER,
        "KernelLinearSolver": _SOLVER,
        "postprocess": _LAYOUT,
        "preprocess": _LAYOUT,
    },
)
