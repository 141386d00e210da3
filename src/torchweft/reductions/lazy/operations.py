"""The operations of lazy tensors, each by its name in formula strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeAlias, TypeVar

from torchweft.errors import IndexRangeError, ShapeError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from torchweft.reductions.lazy.tensors import LazyTensor

__all__ = ["HasComplex", "HasReal", "Operand", "Operations"]

Operand: TypeAlias = "LazyTensor | Tensor | np.ndarray[Any, Any] | complex | list[Any]"
"""A lazy tensor, or what one is made of without an axis."""

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
L = TypeVar("L", bound="Operations")


class HasReal(Protocol[A_co]):
    """Lazy tensors, with the class of those of real numbers."""

    def _apply(self, name: str) -> Any: ...

    @property
    def real_class(self) -> type[A_co]:
        """That class."""


class HasComplex(Protocol[A_co]):
    """Lazy tensors, with the class of those of complex numbers."""

    def _apply(self, name: str) -> Any: ...

    @property
    def complex_class(self) -> type[A_co]:
        """That class."""


def _integers(given: Sequence[int] | int) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(int(k) for k in given)


class Operations:
    """Operations on the vector of each pair.

    Dimensions 1 and D broadcast.  Other operands are lazy tensors, numbers, lists of numbers, or
    tensors from which a lazy tensor is made without an axis.
    """

    # arrays and scalars of NumPy leave the operation to lazy tensors
    __array_ufunc__ = None
    __hash__: ClassVar[None]  # type: ignore[assignment]

    if TYPE_CHECKING:  # what LazyTensor defines
        _apply: Callable[..., Any]
        _arithmetic: Callable[..., Any]
        _wrap: Callable[..., Any]
        dim: Callable[[], int]

        @property
        def ndim(self) -> int:
            """The number of components of a pair."""

    # Arithmetic and comparisons

    def __add__(self, other: Operand) -> Self:
        return self._arithmetic("+", other, False)

    def __radd__(self, other: Operand) -> Self:
        return self._arithmetic("+", other, True)

    def __sub__(self, other: Operand) -> Self:
        return self._arithmetic("-", other, False)

    def __rsub__(self, other: Operand) -> Self:
        return self._arithmetic("-", other, True)

    def __mul__(self, other: Operand) -> Self:
        return self._arithmetic("*", other, False)

    def __rmul__(self, other: Operand) -> Self:
        return self._arithmetic("*", other, True)

    def __truediv__(self, other: Operand) -> Self:
        return self._arithmetic("/", other, False)

    def __rtruediv__(self, other: Operand) -> Self:
        return self._arithmetic("/", other, True)

    def __pow__(self, exponent: Operand) -> Self:
        if isinstance(exponent, int):
            return self._apply("Square") if exponent == 2 else self._apply("Pow", data=(exponent,))
        if isinstance(exponent, float) and exponent in (0.5, -0.5):
            return self._apply("Sqrt" if exponent > 0 else "Rsqrt")
        return self._apply("Powf", exponent)

    def __or__(self, other: Operand) -> Self:
        """The scalar product."""
        return self._apply("|", other)

    __ror__ = __or__

    def __lt__(self, other: Operand) -> Self:
        """0 or 1 for each pair."""
        return self._apply("<", other)

    def __le__(self, other: Operand) -> Self:
        """0 or 1 for each pair."""
        return self._apply("<=", other)

    def __gt__(self, other: Operand) -> Self:
        """0 or 1 for each pair."""
        return self._apply(">", other)

    def __ge__(self, other: Operand) -> Self:
        """0 or 1 for each pair."""
        return self._apply(">=", other)

    def __eq__(self, other: Operand) -> Self:  # type: ignore[override]
        """0 or 1 for each pair."""
        return self._apply("==", other)

    def __ne__(self, other: Operand) -> Self:  # type: ignore[override]
        """0 or 1 for each pair."""
        return self._apply("!=", other)

    def __neg__(self) -> Self:
        return self._apply("Minus")

    def __abs__(self: HasReal[A]) -> A:
        return self._apply("Abs")

    # Functions of each component

    def abs(self: HasReal[A]) -> A:
        """|x| of each component x; of complex numbers it is real."""
        return self._apply("Abs")

    def exp(self) -> Self:
        """e to the power of each component."""
        return self._apply("Exp")

    def log(self) -> Self:
        """The natural logarithm of each component."""
        return self._apply("Log")

    def xlogx(self) -> Self:
        """x log x of each component x, 0 at 0."""
        return self._apply("XLogX")

    def cos(self) -> Self:
        """The cosine of each component, in radians."""
        return self._apply("Cos")

    def sin(self) -> Self:
        """The sine of each component, in radians."""
        return self._apply("Sin")

    def sinxdivx(self) -> Self:
        """sin(x) / x of each component x, 1 at 0."""
        return self._apply("SinXDivX")

    def sinc(self) -> Self:
        """sin(πx) / (πx) of each component x, 1 at 0."""
        return self._apply("Sinc")

    def asin(self) -> Self:
        """The inverse sine of each component, in radians."""
        return self._apply("Asin")

    def acos(self) -> Self:
        """The inverse cosine of each component, in radians."""
        return self._apply("Acos")

    def atan(self) -> Self:
        """The inverse tangent of each component, in radians."""
        return self._apply("Atan")

    def sqrt(self) -> Self:
        """√x of each component x."""
        return self._apply("Sqrt")

    def rsqrt(self) -> Self:
        """1 / √x of each component x."""
        return self._apply("Rsqrt")

    def square(self) -> Self:
        """x² of each component x."""
        return self._apply("Square")

    def sign(self) -> Self:
        """-1, 0 or 1: the sign of each component."""
        return self._apply("Sign")

    def step(self) -> Self:
        """0 for negative components, else 1."""
        return self._apply("Step")

    def relu(self) -> Self:
        """max(x, 0) of each component x."""
        return self._apply("ReLU")

    def exp1j(self: HasComplex[A]) -> A:
        """exp(i x) of real components x."""
        return self._apply("ComplexExp1j")

    def real2complex(self: HasComplex[A]) -> A:
        """The complex numbers whose real parts are the components."""
        return self._apply("Real2Complex")

    def imag2complex(self: HasComplex[A]) -> A:
        """The complex numbers whose imaginary parts are the components."""
        return self._apply("Imag2Complex")

    def power(self, other: Operand) -> Self:
        """self ** other."""
        return self**other

    def mod(self, modulus: Operand, offset: Operand = 0) -> Self:
        """self − m ⌊(self − d) / m⌋, in [d, d + m)."""
        return self._apply("Mod", modulus, offset)

    def round(self, other: int = 0) -> Self:
        """Self, rounded to a number of decimals."""
        return self._apply("Round", data=(other,))

    def atan2(self, other: Operand) -> Self:
        """The angle of the point (other, self)."""
        return self._apply("Atan2", other)

    def clamp(self, other1: Operand, other2: Operand) -> Self:
        """min(max(self, other1), other2)."""
        return self._apply("Clamp", other1, other2)

    def ifelse(self, other1: Operand, other2: Operand) -> Self:
        """other1 where self ≥ 0, else other2."""
        return self._apply("IfElse", other1, other2)

    # Functions of the vector of each pair

    def sqnorm2(self) -> Self:
        """|x|², one component."""
        return self._apply("SqNorm2")

    def norm2(self) -> Self:
        """|x|, one component."""
        return self._apply("Norm2")

    def normalize(self) -> Self:
        """x / |x|."""
        return self._apply("Normalize")

    def norm(self, dim: int = -1) -> Self:
        """`norm2` over the components."""
        self._require_last("norm", dim)
        return self.norm2()

    def sqdist(self, other: Operand) -> Self:
        """|self − other|², one component."""
        return self._apply("SqDist", other)

    def weightedsqnorm(self, other: Operand) -> Self:
        """s |x|², Σ s_k x_k² or Σ s_kl x_k x_l, for s = other of dimension 1, D or D·D."""
        return self._wrap(other)._apply("WeightedSqNorm", self)

    def weightedsqdist(self, g: Operand, s: Operand) -> Self:
        """`weightedsqnorm` of self − g, with weight s."""
        return self._wrap(s)._apply("WeightedSqDist", self, g)

    def concat(self, other: Operand) -> Self:
        """The components of both, self's first."""
        return self._apply("Concat", other)

    def matvecmult(self, other: Operand) -> Self:
        """A b, of the matrix A = self, row-major, and the vector b = other."""
        return self._apply("MatVecMult", other)

    def vecmatmult(self, other: Operand) -> Self:
        """b A, of the vector b = self and the matrix A = other, row-major."""
        return self._apply("VecMatMult", other)

    def tensorprod(self, other: Operand) -> Self:
        """x_k y_l, row-major."""
        return self._apply("TensorProd", other)

    def softdtw_sqdist(self, other: Operand, gamma: Operand) -> Self:
        """Soft dynamic time warping of squared differences, of smoothness γ = gamma."""
        return self._apply("SoftDTW_SqDist", other, gamma)

    def elem(self, i: int) -> Self:
        """Component i."""
        return self._apply("Elem", data=(i,))

    def extract(self, i: int, d: int) -> Self:
        """Components i to i + d - 1."""
        return self._apply("Extract", data=(i, d))

    def __getitem__(self, key: Any) -> Self:
        if isinstance(key, tuple):
            *before, key = key
            whole = [k for k in before if k is not Ellipsis]
            full = all(isinstance(k, slice) and k == slice(None) for k in whole)
            if not full or (len(whole) == len(before) and len(before) != self.dim() - 1):
                raise ShapeError(
                    f"a lazy tensor of {self.dim()} dimensions is indexed with {len(before) + 1} "
                    "entries: only the last may be other than a full slice. Index the data."
                )
        if isinstance(key, int):
            if not -self.ndim <= key < self.ndim:
                raise IndexRangeError(
                    f"component {key} is taken of {self.ndim}: it must be in [0, {self.ndim}). "
                    "Change the index."
                )
            return self.elem(key % self.ndim)
        if isinstance(key, slice):
            start, stop, step = key.indices(self.ndim)
            if step == 1:
                return self.extract(start, stop - start)
        raise ShapeError(
            f"components are indexed with {key!r}: it must be an integer or a slice of step 1. "
            "Concatenate single components for others."
        )

    def one_hot(self, D: int) -> Self:  # noqa: N803  # pykeops' name
        """D components, 1 in that of the rounded value, else 0."""
        return self._apply("OneHot", data=(D,))

    def bspline(self, x: Operand, k: int = 0) -> Self:
        """The B-splines of order k on the knots self, at x."""
        return self._apply("BSpline", x, data=(k,))

    @staticmethod
    def concatenate(tuple_of_lt: Sequence[L], axis: int = -1) -> L:
        """The components of all tensors, one tensor after the other."""
        if not isinstance(tuple_of_lt, tuple | list) or not tuple_of_lt:
            raise ShapeError(
                f"concatenate is given {tuple_of_lt!r}: it takes a tuple of one lazy tensor or "
                "more. Pass (x, y, …)."
            )
        first, *others = tuple_of_lt
        first._require_last("concatenate", axis)
        return first._apply("Concat", *others) if others else first

    @staticmethod
    def cat(tuple_of_lt: Sequence[L], dim: int = -1) -> L:
        """`concatenate`, with torch's name."""
        return Operations.concatenate(tuple_of_lt, dim)

    def keops_tensordot(
        self,
        other: Operand,
        dimfa: Sequence[int],
        dimfb: Sequence[int],
        contfa: Sequence[int],
        contfb: Sequence[int],
        *args: Sequence[int],
    ) -> Self:
        """Tensors of shapes dimfa, dimfb, summed over axes contfa with contfb; args permutes."""
        lists = (dimfa, dimfb, contfa, contfb, *args)
        return self._apply("TensorDot", other, data=tuple(map(_integers, lists)))

    def keops_kron(self, other: Operand, dimfself: Sequence[int], dimfother: Sequence[int]) -> Self:
        """The Kronecker product of tensors of these shapes."""
        return self._apply("Kron", other, data=(_integers(dimfself), _integers(dimfother)))

    # Derivatives of formulas, in symbolic variables

    def grad(self, other: LazyTensor, gradin: Operand) -> Self:
        """Σ_k e_k ∂f_k/∂v, of v = other and e = gradin."""
        return self._apply("Grad", other, gradin)

    def diff(self, other: LazyTensor, diffin: Operand) -> Self:
        """∂f/∂v · e, of v = other and e = diffin."""
        return self._apply("Diff", other, diffin)

    def grad_matrix(self, other: LazyTensor) -> Self:
        """∂f_k/∂v_l of v = other, row-major."""
        return self._apply("GradMatrix", other)

    def divergence(self, var: LazyTensor) -> Self:
        """Σ_k ∂f_k/∂v_k, of v = var."""
        return self._apply("Divergence", var)

    def laplacian(self, var: LazyTensor) -> Self:
        """Σ_k ∂²f/∂v_k², of v = var."""
        return self._apply("Laplacian", var)

    def trace_operator(self, var: LazyTensor) -> Self:
        """The trace of self, which is linear in the symbolic variable; the result lacks it."""
        return self._apply("TraceOperator", var)._without(var)

    def factorize(self, other: Operand) -> Self:
        """Self: a common part is computed once anyway."""
        return self._apply("Factorize", other)

    def auto_factorize(self) -> Self:
        """Self: a common part is computed once anyway."""
        return self._apply("AutoFactorize")

    def _is_last(self: Any, axis: int | None) -> bool:
        return axis in (-1, self.dim() - 1)

    def _require_last(self: Any, name: str, axis: int) -> None:
        if not self._is_last(axis):
            raise ShapeError(
                f"{name} is asked for axis {axis} of {self.dim()}: it works on components alone, "
                f"axis {self.dim() - 1}. Pass -1."
            )
