"""The public names for NumPy's arrays, which share memory with torch; results are arrays."""

from __future__ import annotations

from typing import Any

from torchweft.reductions import genred, lazy, solve
from torchweft.reductions.arrays import arrays, tensors
from torchweft.reductions.cluster import arrays as cluster

__all__ = [
    "ComplexLazyTensor",
    "Genred",
    "KernelSolve",
    "LazyTensor",
    "Pm",
    "Var",
    "Vi",
    "Vj",
    "cluster",
    "generic_argkmin",
    "generic_argmin",
    "generic_logsumexp",
    "generic_sum",
]


class LazyTensor(lazy.LazyTensor):
    """`torchweft.reductions.LazyTensor` of NumPy's arrays."""

    @classmethod
    def _tensor(cls, x: Any) -> Any:
        return tensors(x)

    @classmethod
    def _array(cls, x: Any) -> Any:
        return arrays(x)

    @classmethod
    def _is_complex_data(cls, x: Any) -> bool:
        return super()._is_complex_data(tensors(x))


class ComplexLazyTensor(LazyTensor, lazy.ComplexLazyTensor):
    """`torchweft.reductions.ComplexLazyTensor` of NumPy's arrays."""


LazyTensor.real_class = LazyTensor
LazyTensor.complex_class = ComplexLazyTensor


class Genred(genred.Genred):
    """`torchweft.reductions.Genred` of NumPy's arrays."""

    _tensor, _array = staticmethod(tensors), staticmethod(arrays)


class KernelSolve(solve.KernelSolve):
    """`torchweft.reductions.KernelSolve` of NumPy's arrays."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `torchweft.reductions.KernelSolve`."""
        given = {name: tensors(value) for name, value in options.items()}
        return arrays(super().__call__(*tensors(args), **given))


def generic_sum(formula: str, output: str, *aliases: str, **options: Any) -> Genred:
    """See `torchweft.reductions.generic_sum`."""
    return genred.generic(Genred, "Sum", formula, output, aliases, options)


def generic_logsumexp(formula: str, output: str, *aliases: str, **options: Any) -> Genred:
    """See `torchweft.reductions.generic_logsumexp`."""
    return genred.generic(Genred, "LogSumExp", formula, output, aliases, options)


def generic_argmin(formula: str, output: str, *aliases: str, **options: Any) -> Genred:
    """See `torchweft.reductions.generic_argmin`."""
    return genred.generic(Genred, "ArgMin", formula, output, aliases, options)


def generic_argkmin(formula: str, output: str, *aliases: str, **options: Any) -> Genred:
    """See `torchweft.reductions.generic_argkmin`."""
    return genred.generic(Genred, "ArgKMin", formula, output, aliases, options)


def Var(x_or_ind: Any, dim: int | None = None, cat: int | None = None) -> Any:  # noqa: N802
    """See `torchweft.reductions.Var`."""
    return LazyTensor._of_category(x_or_ind, dim, cat)


def Vi(x_or_ind: Any, dim: int | None = None) -> Any:  # noqa: N802
    """See `torchweft.reductions.Vi`."""
    return Var(x_or_ind, dim, 0)


def Vj(x_or_ind: Any, dim: int | None = None) -> Any:  # noqa: N802
    """See `torchweft.reductions.Vj`."""
    return Var(x_or_ind, dim, 1)


def Pm(x_or_ind: Any, dim: int | None = None) -> Any:  # noqa: N802
    """See `torchweft.reductions.Pm`."""
    return Var(x_or_ind, dim, 2)
