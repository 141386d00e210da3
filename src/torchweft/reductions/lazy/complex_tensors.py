"""Lazy tensors of complex numbers, whose formulas have two components for each."""

from __future__ import annotations

from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from torchweft.errors import DTypeError, ShapeError
from torchweft.reductions.lazy.operations import HasReal
from torchweft.reductions.lazy.tensors import Data, LazyTensor, with_imaginary_part
from torchweft.reductions.variables import DTYPE_NAMES, require_strided

__all__ = ["ComplexLazyTensor"]

R = TypeVar("R")

_ARITHMETIC = {"+": "ComplexAdd", "-": "ComplexSubtract", "*": "ComplexMult", "/": "ComplexDivide"}
_SAME = {
    "Abs": "ComplexAbs",
    "Exp": "ComplexExp",
    "Sum": "ComplexSum",
    **{name: name for name in ("Minus", "Conj", "ComplexReal", "ComplexImag", "ComplexAngle")},
}


class ComplexLazyTensor(LazyTensor):
    """Complex f(x_i, y_j, p) for all pairs; see `LazyTensor`.

    It has + - * / with real and complex operands, exp, abs, conj, angle, real, imag, and sums.

    Args:
        x: complex data, in the shapes that `LazyTensor` takes; or (index, 2 D, category).
        axis: of a tensor of two dimensions: 0 varies with i, 1 with j.
        is_complex: without effect.

    Raises:
        ShapeError: x has no shape of a variable.
        DTypeError: an operation or a reduction that is defined for real numbers alone.

    Example:
        >>> import torch
        >>> from torchweft.reductions import ComplexLazyTensor
        >>> z = ComplexLazyTensor(torch.tensor([[1j], [2.0]])[:, None])
        >>> z.sum(0).tolist(), z.abs().sum(0).tolist()
        ([[(2+1j)]], [[3.0]])
    """

    is_complex = True

    def __init__(
        self, x: Data | None = None, axis: int | None = None, is_complex: bool = True
    ) -> None:
        super().__init__(self._pairs(x), axis)

    @classmethod
    def _pairs(cls, x: Any) -> Any:
        """Real and imaginary parts as alternating components."""
        x = cls._tensor(x)
        if isinstance(x, Tensor):
            require_strided(x)
            x = x.resolve_conj() if x.is_complex() else with_imaginary_part(x)
            return torch.view_as_real(x.reshape(1) if x.dim() == 0 else x).flatten(-2)
        if isinstance(x, list | int | float | complex):
            numbers = map(complex, x if isinstance(x, list) else [x])
            return [part for z in numbers for part in (z.real, z.imag)]
        return x

    @classmethod
    def _target(cls, out: Any) -> Any:
        out = cls._tensor(out)
        if not out.is_complex() or out.is_conj() or not out.is_contiguous():
            raise ShapeError(
                f"out is {tuple(out.shape)} of {out.dtype} with strides {out.stride()}: a sum of "
                "complex numbers is written to contiguous complex memory. Pass torch.empty of "
                "that shape and a complex dtype."
            )
        return cls._pairs(out)

    @property
    def _components(self) -> int:
        return self.ndim // 2

    @property
    def dtype(self) -> str | None:
        """The name of the complex dtype."""
        real = self._extent.dtype
        return None if real is None else _COMPLEX_NAMES.get(DTYPE_NAMES[real], DTYPE_NAMES[real])

    @property
    def real(self: HasReal[R]) -> R:
        """The real part."""
        return self._apply("ComplexReal")  # type: ignore[no-any-return]

    @property
    def imag(self: HasReal[R]) -> R:
        """The imaginary part."""
        return self._apply("ComplexImag")  # type: ignore[no-any-return]

    def angle(self: HasReal[R]) -> R:
        """The argument, in (−π, π]."""
        return self._apply("ComplexAngle")  # type: ignore[no-any-return]

    def conj(self) -> Self:
        """The complex conjugate."""
        return self._apply("Conj")  # type: ignore[no-any-return]

    def _apply(self, name: str, *others: Any, data: tuple[Any, ...] = ()) -> Any:
        if name not in _SAME:
            raise DTypeError(
                f"{name} is applied to a ComplexLazyTensor: it needs a real one. Take real, "
                "imag, abs or angle first."
            )
        return self._named(_SAME[name], *others, data=data)

    def _named(self, name: str, *others: Any, data: tuple[Any, ...] = ()) -> Any:
        return super()._apply(name, *others, data=data)

    def _arithmetic(self, sign: str, other: Any, reflected: bool) -> Any:
        other = self._wrap(other)
        if sign == "*" and not other.is_complex and other.ndim == 1:
            return self._named("ComplexRealScal", other)
        other = other if other.is_complex else other.real2complex()
        a, b = (other, self) if reflected else (self, other)
        return a._named(_ARITHMETIC[sign], b)

    def reduction(self, reduction_op: str, *args: Any, **options: Any) -> Any:
        """The sum; all other reductions need real numbers."""
        if reduction_op != "Sum":
            raise DTypeError(
                f"{reduction_op} is asked of a ComplexLazyTensor: it is defined for real ones. "
                "Take real, imag, abs or angle first."
            )
        return super().reduction(reduction_op, *args, **options)

    def rmatvec(self, v: Tensor) -> Tensor:
        """The conjugate of K, transposed, @ v, for scipy."""
        return self.conj().T @ v

    def _finished(self, result: Any) -> Any:
        return self._array(torch.view_as_complex(result.unflatten(-1, (-1, 2)).contiguous()))


_COMPLEX_NAMES = {"float32": "complex64", "float64": "complex128", "float16": "complex32"}

LazyTensor.complex_class = ComplexLazyTensor
