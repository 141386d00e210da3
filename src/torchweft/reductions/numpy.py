"""The public names for NumPy's arrays, which share memory with torch; results are arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweft.reductions import cluster, genred, lazy, solve

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


def _tensor(x: Any) -> Any:
    """The tensor of an array, or of each array of a tuple; anything else unchanged."""
    if isinstance(x, tuple):
        return tuple(map(_tensor, x))
    if isinstance(x, np.ndarray):
        ascending = all(stride >= 0 for stride in x.strides)
        return torch.from_numpy(x if ascending and x.flags.writeable else x.copy())
    if isinstance(x, np.floating | np.complexfloating | np.integer):
        return x.item()
    return x


def _array(x: Tensor) -> Any:
    return x.numpy()


class LazyTensor(lazy.LazyTensor):
    """`torchweft.reductions.LazyTensor` of NumPy's arrays."""

    @classmethod
    def _tensor(cls, x: Any) -> Any:
        return _tensor(x)

    @classmethod
    def _array(cls, x: Any) -> Any:
        return _array(x)

    @classmethod
    def _is_complex_data(cls, x: Any) -> bool:
        return super()._is_complex_data(_tensor(x))


class ComplexLazyTensor(LazyTensor, lazy.ComplexLazyTensor):
    """`torchweft.reductions.ComplexLazyTensor` of NumPy's arrays."""


LazyTensor.real_class = LazyTensor
LazyTensor.complex_class = ComplexLazyTensor


class Genred(genred.Genred):
    """`torchweft.reductions.Genred` of NumPy's arrays."""

    _tensor, _array = staticmethod(_tensor), staticmethod(_array)


class KernelSolve(solve.KernelSolve):
    """`torchweft.reductions.KernelSolve` of NumPy's arrays."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `torchweft.reductions.KernelSolve`."""
        given = {name: _tensor(value) for name, value in options.items()}
        return _array(super().__call__(*map(_tensor, args), **given))


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
