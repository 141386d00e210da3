"""The operations and reductions of lazy tensors, each by its name in formula strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from torchweft.errors import IndexRangeError, ShapeError

__all__ = ["Operators", "Reducers"]

Number = int | float


def _unary(name: str) -> Callable[[Any], Any]:
    def apply(self: Any) -> Any:
        return self._apply(name)

    apply.__doc__ = f"{name} of formula strings, in each component or of the vector."
    return apply


def _arithmetic(sign: str, reflected: bool) -> Callable[[Any, Any], Any]:
    def apply(self: Any, other: Any) -> Any:
        return self._arithmetic(sign, other, reflected)

    return apply


def _comparison(sign: str) -> Callable[[Any, Any], Any]:
    def apply(self: Any, other: Any) -> Any:
        return self._apply(sign, other)

    return apply


class Operators:
    """What can be done to each pair's vector; dimensions 1 and D broadcast.

    Other operands may be lazy tensors, numbers, lists of numbers, or tensors that a lazy tensor can
    be made of without an axis.
    """

    # numpy's arrays and scalars leave the operation to us
    __array_ufunc__ = None

    __add__, __radd__ = _arithmetic("+", False), _arithmetic("+", True)
    __sub__, __rsub__ = _arithmetic("-", False), _arithmetic("-", True)
    __mul__, __rmul__ = _arithmetic("*", False), _arithmetic("*", True)
    __truediv__, __rtruediv__ = _arithmetic("/", False), _arithmetic("/", True)
    __or__, __ror__ = _comparison("|"), _comparison("|")
    __lt__, __le__ = _comparison("<"), _comparison("<=")
    __gt__, __ge__ = _comparison(">"), _comparison(">=")
    __eq__ = _comparison("==")  # 0 or 1 for each pair
    __ne__ = _comparison("!=")
    __hash__ = None  # type: ignore[assignment]
    __abs__, __neg__ = _unary("Abs"), _unary("Minus")

    abs, exp, log, xlogx = _unary("Abs"), _unary("Exp"), _unary("Log"), _unary("XLogX")
    cos, sin, sinxdivx, sinc = _unary("Cos"), _unary("Sin"), _unary("SinXDivX"), _unary("Sinc")
    asin, acos, atan = _unary("Asin"), _unary("Acos"), _unary("Atan")
    sqrt, rsqrt, square = _unary("Sqrt"), _unary("Rsqrt"), _unary("Square")
    sign, step, relu = _unary("Sign"), _unary("Step"), _unary("ReLU")
    sqnorm2, norm2, normalize = _unary("SqNorm2"), _unary("Norm2"), _unary("Normalize")
    auto_factorize = _unary("AutoFactorize")
    real2complex, imag2complex = _unary("Real2Complex"), _unary("Imag2Complex")
    exp1j = _unary("ComplexExp1j")

    def _apply(self, name: str, *others: Any, data: tuple[Any, ...] = ()) -> Any:
        raise NotImplementedError

    def _wrap(self, value: Any) -> Any:
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """How many components a pair has."""
        raise NotImplementedError

    def dim(self) -> int:
        """How many dimensions there are: of the batch, i, j, components."""
        raise NotImplementedError

    def __pow__(self, exponent: Any) -> Any:
        if isinstance(exponent, int):
            return self._apply("Square") if exponent == 2 else self._apply("Pow", data=(exponent,))
        if isinstance(exponent, float) and exponent in (0.5, -0.5):
            return self._apply("Sqrt" if exponent > 0 else "Rsqrt")
        return self._apply("Powf", exponent)

    def power(self, exponent: Any) -> Any:
        """self ** exponent."""
        return self**exponent

    def atan2(self, other: Any) -> Any:
        """The angle of the point (other, self)."""
        return self._apply("Atan2", other)

    def clamp(self, a: Any, b: Any) -> Any:
        """min(max(self, a), b)."""
        return self._apply("Clamp", a, b)

    def ifelse(self, a: Any, b: Any) -> Any:
        """a where self ≥ 0, else b."""
        return self._apply("IfElse", a, b)

    def mod(self, modulus: Any, offset: Any = 0) -> Any:
        """self − m ⌊(self − d) / m⌋."""
        return self._apply("Mod", modulus, offset)

    def round(self, decimals: int = 0) -> Any:
        """To so many decimals."""
        return self._apply("Round", data=(decimals,))

    def norm(self, dim: int = -1) -> Any:
        """norm2, of the components alone."""
        self._last("norm", dim)
        return self.norm2()

    def sqdist(self, other: Any) -> Any:
        """|self − other|²."""
        return self._apply("SqDist", other)

    def weightedsqnorm(self, s: Any) -> Any:
        """s |x|², Σ s_k x_k² or Σ s_kl x_k x_l, as s has dimension 1, D or D·D."""
        return self._wrap(s)._apply("WeightedSqNorm", self)

    def weightedsqdist(self, other: Any, s: Any) -> Any:
        """The same of self − other."""
        return self._wrap(s)._apply("WeightedSqDist", self, other)

    def elem(self, i: int) -> Any:
        """Component i."""
        return self._apply("Elem", data=(i,))

    def extract(self, i: int, d: int) -> Any:
        """Components i to i + d."""
        return self._apply("Extract", data=(i, d))

    def __getitem__(self, key: Any) -> Any:
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

    def one_hot(self, D: int) -> Any:  # noqa: N803  # pykeops' name
        """The rounded value as one of D components that are 0 or 1."""
        return self._apply("OneHot", data=(D,))

    def bspline(self, x: Any, k: int = 0) -> Any:
        """The B-splines of order k on the knots self, at x."""
        return self._apply("BSpline", x, data=(k,))

    def concat(self, other: Any) -> Any:
        """The components of both, self's first."""
        return self._apply("Concat", other)

    @staticmethod
    def concatenate(tensors: Sequence[Any], axis: int = -1) -> Any:
        """The components of all."""
        if not isinstance(tensors, tuple | list) or not tensors:
            raise ShapeError(
                f"concatenate is given {tensors!r}: it takes a tuple of one lazy tensor or more. "
                "Pass (x, y, …)."
            )
        first, *others = tensors
        first._last("concatenate", axis)
        return first._apply("Concat", *others) if others else first

    @staticmethod
    def cat(tensors: Sequence[Any], dim: int = -1) -> Any:
        """`concatenate`, in torch's words."""
        return Operators.concatenate(tensors, dim)

    def matvecmult(self, other: Any) -> Any:
        """A b, of the matrix self, row after row."""
        return self._apply("MatVecMult", other)

    def vecmatmult(self, other: Any) -> Any:
        """b A, of the vector self and the matrix A, row after row."""
        return self._apply("VecMatMult", other)

    def tensorprod(self, other: Any) -> Any:
        """x_k y_l, row after row."""
        return self._apply("TensorProd", other)

    def keops_tensordot(
        self,
        other: Any,
        dimfa: Sequence[int],
        dimfb: Sequence[int],
        contfa: Sequence[int],
        contfb: Sequence[int],
        *perm: Sequence[int],
    ) -> Any:
        """Tensors of shapes dimfa and dimfb, summed over the axes contfa with contfb, permuted."""
        lists = (dimfa, dimfb, contfa, contfb, *perm)
        return self._apply("TensorDot", other, data=tuple(map(_integers, lists)))

    def keops_kron(self, other: Any, dimfself: Sequence[int], dimfother: Sequence[int]) -> Any:
        """The Kronecker product of tensors of these shapes."""
        return self._apply("Kron", other, data=(_integers(dimfself), _integers(dimfother)))

    def softdtw_sqdist(self, other: Any, gamma: Any) -> Any:
        """Soft dynamic time warping of squared differences, of smoothness γ."""
        return self._apply("SoftDTW_SqDist", other, gamma)

    def grad(self, v: Any, e: Any) -> Any:
        """Σ_k e_k ∂f_k/∂v."""
        return self._apply("Grad", v, e)

    def diff(self, v: Any, e: Any) -> Any:
        """∂f/∂v · e."""
        return self._apply("Diff", v, e)

    def grad_matrix(self, v: Any) -> Any:
        """∂f_k/∂v_l, row after row."""
        return self._apply("GradMatrix", v)

    def divergence(self, v: Any) -> Any:
        """Σ_k ∂f_k/∂v_k."""
        return self._apply("Divergence", v)

    def laplacian(self, v: Any) -> Any:
        """Σ_k ∂²f/∂v_k²."""
        return self._apply("Laplacian", v)

    def trace_operator(self, v: Any) -> Any:
        """The trace of self, linear in the symbolic variable v, which goes."""
        return self._apply("TraceOperator", v)._without(v)

    def factorize(self, g: Any) -> Any:
        """Self: what is equal is computed once anyway."""
        return self._apply("Factorize", g)

    def _without(self, v: Any) -> Self:
        raise NotImplementedError

    def _is_last(self, axis: int | None) -> bool:
        return axis in (-1, self.dim() - 1)

    def _last(self, name: str, axis: int) -> None:
        if not self._is_last(axis):
            raise ShapeError(
                f"{name} is asked for axis {axis} of {self.dim()}: it works on components alone, "
                f"axis {self.dim() - 1}. Pass -1."
            )


def _integers(given: Sequence[int] | int) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(int(k) for k in given)


def _plain(name: str) -> Callable[..., Any]:
    def reduce(self: Any, axis: int | None = None, dim: int | None = None, **options: Any) -> Any:
        return self.reduction(name, axis=axis, dim=dim, **options)

    reduce.__doc__ = f"{name} over axis (or dim) 0 (i) or 1 (j), after the batch dimensions."
    return reduce


def _either(name: str) -> Callable[..., Any]:
    def reduce(
        self: Any, axis: int = -1, dim: int | None = None, *, keepdim: bool = True, **options: Any
    ) -> Any:
        if dim is not None and axis in (-1, dim):
            axis, dim = dim, None
        if dim is None and self._is_last(axis):
            return self._over_components(name)
        return self.reduction(name, axis=axis, dim=dim, **options)

    reduce.__doc__ = (
        f"{name} over axis (or dim) 0 (i) or 1 (j), after the batch dimensions, or of the "
        "components, axis -1, which leaves one: keepdim is always as if true."
    )
    return reduce


def _nearest(name: str) -> Callable[..., Any]:
    def reduce(
        self: Any,
        K: int,  # noqa: N803  # pykeops' name
        axis: int | None = None,
        dim: int | None = None,
        **options: Any,
    ) -> Any:
        return self.reduction(name, opt_arg=K, axis=axis, dim=dim, **options)

    reduce.__doc__ = f"{name}, the K smallest, ascending, padded with +inf and -1."
    return reduce


class Reducers(Operators):
    """R_j f(x_i, y_j) and R_i f(x_i, y_j).

    Every reduction takes the keywords of `Genred` and of its call, `precision`, and `call=False`
    for a callable instead of the result.
    """

    sum, min, max = _either("Sum"), _either("Min"), _either("Max")
    argmin, argmax = _either("ArgMin"), _either("ArgMax")
    min_argmin, max_argmax = _plain("Min_ArgMin"), _plain("Max_ArgMax")
    sum_reduction = _plain("Sum")
    min_reduction, max_reduction = _plain("Min"), _plain("Max")
    argmin_reduction, argmax_reduction = _plain("ArgMin"), _plain("ArgMax")
    min_argmin_reduction, max_argmax_reduction = min_argmin, max_argmax
    Kmin = Kmin_reduction = _nearest("KMin")
    argKmin = argKmin_reduction = _nearest("ArgKMin")  # noqa: N815  # pykeops' name
    Kmin_argKmin = Kmin_argKmin_reduction = _nearest("KMin_ArgKMin")

    def reduction(
        self, reduction_op: str, other: Any = None, opt_arg: Any = None, **options: Any
    ) -> Any:
        """The reduction of Genred's name, with a weight and an argument."""
        raise NotImplementedError

    def _over_components(self, name: str) -> Any:
        return self._apply(name)

    def logsumexp(
        self, axis: int | None = None, dim: int | None = None, weight: Any = None, **options: Any
    ) -> Any:
        """log Σ exp(f) w."""
        weight = options.pop("other", None) if weight is None else weight
        return self.reduction("LogSumExp", other=weight, axis=axis, dim=dim, **options)

    def sumsoftmaxweight(
        self, weight: Any, axis: int | None = None, dim: int | None = None, **options: Any
    ) -> Any:
        """Σ exp(f) w / Σ exp(f)."""
        return self.reduction("SumSoftMaxWeight", other=weight, axis=axis, dim=dim, **options)

    logsumexp_reduction = logsumexp
    sumsoftmaxweight_reduction = sumsoftmaxweight
