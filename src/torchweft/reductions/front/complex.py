"""ComplexLazyTensor: lazy tensors of complex numbers, kept as pairs of components."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchweft.errors import DTypeError
from torchweft.reductions.front.lazy import LazyTensor
from torchweft.reductions.front.variables import REAL

__all__ = ["ComplexLazyTensor"]

_TO_REAL = ("ComplexReal", "ComplexImag", "ComplexAngle", "ComplexAbs")
_ARITHMETIC = {
    "+": "ComplexAdd",
    "-": "ComplexSubtract",
    "*": "ComplexMult",
    "/": "ComplexDivide",
}
_SAME = {"Abs": "ComplexAbs", "Exp": "ComplexExp", "Sum": "ComplexSum", "Minus": "Minus"}


class ComplexLazyTensor(LazyTensor):
    """Complex f(x_i, y_j, p) for all pairs; see `LazyTensor`.

    + - * / with real and complex operands, exp, abs, conj, angle, real, imag, and sums.
    """

    is_complex = True

    def __init__(self, x: Any = None, axis: int | None = None, is_complex: bool = True) -> None:
        self._set_variable(self._constant_or_variable(self._pairs(x), axis))

    @classmethod
    def _pairs(cls, x: Any) -> Any:
        """Real and imaginary parts, one after the other."""
        x = cls._tensor(x)
        if isinstance(x, Tensor):
            x = x if x.is_complex() else torch.complex(x, torch.zeros_like(x))
            return torch.view_as_real(x).flatten(-2)
        if isinstance(x, list | int | float | complex):
            numbers = map(complex, x if isinstance(x, list) else [x])
            return [part for z in numbers for part in (z.real, z.imag)]
        return x

    @classmethod
    def _target(cls, out: Any) -> Any:
        return cls._pairs(out)

    @property
    def _components(self) -> int:
        return self.ndim // 2

    @property
    def dtype(self) -> str | None:
        """The name of the complex dtype."""
        real = self._extent.dtype
        return None if real is None else _COMPLEX_NAMES.get(REAL[real], REAL[real])

    @property
    def real(self) -> Any:
        """The real part."""
        return self._named("ComplexReal")

    @property
    def imag(self) -> Any:
        """The imaginary part."""
        return self._named("ComplexImag")

    def angle(self) -> Any:
        """The argument, in (−π, π]."""
        return self._named("ComplexAngle")

    def conj(self) -> Any:
        """The complex conjugate."""
        return self._named("Conj")

    def _apply(self, name: str, *others: Any, data: tuple[Any, ...] = ()) -> Any:
        if name not in _SAME:
            raise DTypeError(
                f"{name} is applied to a ComplexLazyTensor: it needs a real one. Take real, "
                "imag, abs or angle first."
            )
        return self._named(_SAME[name], *others, data=data)

    def _named(self, name: str, *others: Any, data: tuple[Any, ...] = ()) -> Any:
        return super()._apply(name, *others, data=data)

    def _class_of(self, name: str) -> type[LazyTensor]:
        return self.real_class if name in _TO_REAL else self.complex_class

    def _arithmetic(self, sign: str, other: Any, reflected: bool) -> Any:
        other = self._wrap(other)
        if sign == "*" and not other.is_complex and other.ndim == 1:
            return self._named("ComplexRealScal", other)
        other = other if other.is_complex else other.real2complex()
        a, b = (other, self) if reflected else (self, other)
        return a._named(_ARITHMETIC[sign], b)

    def reduction(self, reduction_op: str, *args: Any, **options: Any) -> Any:
        """The sum: no other reduction orders or exponentiates complex numbers."""
        if reduction_op != "Sum":
            raise DTypeError(
                f"{reduction_op} is asked of a ComplexLazyTensor: it is defined for real ones. "
                "Take real, imag, abs or angle first."
            )
        return super().reduction(reduction_op, *args, **options)

    def _finished(self, result: Any) -> Any:
        return self._array(torch.view_as_complex(result.unflatten(-1, (-1, 2)).contiguous()))


_COMPLEX_NAMES = {"float32": "complex64", "float64": "complex128", "float16": "complex32"}

LazyTensor.real_class = LazyTensor
LazyTensor.complex_class = ComplexLazyTensor
