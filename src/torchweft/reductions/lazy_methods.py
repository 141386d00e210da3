"""The operations and reductions of lazy tensors, each by its name in formula strings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torchweft.core.operators.call_cache import CallCache
from torchweft.errors import IndexRangeError, ShapeError
from torchweft.reductions.call import signature
from torchweft.reductions.engine import direct
from torchweft.reductions.engine.direct import Body
from torchweft.reductions.engine.whole import together
from torchweft.reductions.genred import (
    CALL_KEYWORDS,
    DEFAULT_OPTIONS,
    ReductionSpec,
    directly,
    reduction_spec,
    require_keywords,
    run,
)
from torchweft.reductions.variables import (
    Extent,
    Formula,
    Variable,
    agree,
    extent_of,
    places,
    require_count,
    require_declared,
    require_tensors,
    values,
)

__all__ = ["Reduced", "Reducers", "direct_result"]


def _operation(name: str, doc: str = "", *parameters: str) -> Callable[..., Any]:
    """The method that applies an operation to self and to the parameters."""

    def apply(self: Any, *others: Any, **named: Any) -> Any:
        if named or len(others) != len(parameters):
            _, *others = inspect.signature(apply).bind(self, *others, **named).args  # type: ignore[assignment]
        return self._apply(name, *others)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(p, kind) for p in ("self", *parameters)])
    apply.__signature__ = signature  # type: ignore[attr-defined]
    apply.__doc__ = doc or f"{name} of formula strings, in each component or of the vector."
    return apply


def _arithmetic(sign: str, reflected: bool) -> Callable[[Any, Any], Any]:
    def apply(self: Any, other: Any) -> Any:
        return self._arithmetic(sign, other, reflected)

    return apply


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
            return self._apply(name)
        return self.reduction(name, axis=axis, dim=dim, **options)

    reduce.__doc__ = (
        f"{name} over axis (or dim) 0 (i) or 1 (j), after the batch dimensions, or over the "
        "components, axis -1, of which one remains: keepdim has no effect."
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


class Reducers:
    """Operations on the vector of each pair, and reductions R_j f(x_i, y_j) and R_i f(x_i, y_j).

    Dimensions 1 and D broadcast.  Other operands are lazy tensors, numbers, lists of numbers, or
    tensors from which a lazy tensor is made without an axis.  Every reduction takes the keywords of
    `Genred` and of its call, `precision`, and `call=False` for a callable instead of the result.
    """

    # arrays and scalars of NumPy leave the operation to lazy tensors
    __array_ufunc__ = None

    __add__, __radd__ = _arithmetic("+", False), _arithmetic("+", True)
    __sub__, __rsub__ = _arithmetic("-", False), _arithmetic("-", True)
    __mul__, __rmul__ = _arithmetic("*", False), _arithmetic("*", True)
    __truediv__, __rtruediv__ = _arithmetic("/", False), _arithmetic("/", True)
    __or__ = __ror__ = _operation("|", "The scalar product.", "other")
    __lt__ = _operation("<", "0 or 1 for each pair.", "other")
    __le__ = _operation("<=", "0 or 1 for each pair.", "other")
    __gt__ = _operation(">", "0 or 1 for each pair.", "other")
    __ge__ = _operation(">=", "0 or 1 for each pair.", "other")
    __eq__ = _operation("==", "0 or 1 for each pair.", "other")
    __ne__ = _operation("!=", "0 or 1 for each pair.", "other")
    __hash__ = None  # type: ignore[assignment]
    __abs__, __neg__ = _operation("Abs"), _operation("Minus")

    abs, exp, log, xlogx = map(_operation, ("Abs", "Exp", "Log", "XLogX"))
    cos, sin, sinxdivx, sinc = map(_operation, ("Cos", "Sin", "SinXDivX", "Sinc"))
    asin, acos, atan = map(_operation, ("Asin", "Acos", "Atan"))
    sqrt, rsqrt, square = map(_operation, ("Sqrt", "Rsqrt", "Square"))
    sign, step, relu = map(_operation, ("Sign", "Step", "ReLU"))
    sqnorm2, norm2, normalize = map(_operation, ("SqNorm2", "Norm2", "Normalize"))
    auto_factorize = _operation("AutoFactorize", "Self: a common part is computed once anyway.")
    real2complex, imag2complex = map(_operation, ("Real2Complex", "Imag2Complex"))
    exp1j = _operation("ComplexExp1j", "exp(i x) of a real x.")

    atan2 = _operation("Atan2", "The angle of the point (other, self).", "other")
    clamp = _operation("Clamp", "min(max(self, other1), other2).", "other1", "other2")
    ifelse = _operation("IfElse", "other1 where self ≥ 0, else other2.", "other1", "other2")
    sqdist = _operation("SqDist", "|self − other|².", "other")
    concat = _operation("Concat", "The components of both, self's first.", "other")
    matvecmult = _operation("MatVecMult", "A b, of the matrix self, row-major.", "other")
    vecmatmult = _operation(
        "VecMatMult", "b A, of the vector self and a row-major matrix.", "other"
    )
    tensorprod = _operation("TensorProd", "x_k y_l, row-major.", "other")
    softdtw_sqdist = _operation(
        "SoftDTW_SqDist",
        "Soft dynamic time warping of squared differences, of smoothness γ.",
        "other",
        "gamma",
    )
    grad = _operation("Grad", "Σ_k e_k ∂f_k/∂v, of v = other and e = gradin.", "other", "gradin")
    diff = _operation("Diff", "∂f/∂v · e, of v = other and e = diffin.", "other", "diffin")
    grad_matrix = _operation("GradMatrix", "∂f_k/∂v_l of v = other, row-major.", "other")
    divergence = _operation("Divergence", "Σ_k ∂f_k/∂v_k, of v = var.", "var")
    laplacian = _operation("Laplacian", "Σ_k ∂²f/∂v_k², of v = var.", "var")
    factorize = _operation("Factorize", "Self: a common part is computed once anyway.", "other")

    def trace_operator(self: Any, var: Any) -> Any:
        """The trace of self, which is linear in the symbolic variable; the result lacks it."""
        return self._apply("TraceOperator", var)._without(var)

    def __pow__(self: Any, exponent: Any) -> Any:
        if isinstance(exponent, int):
            return self._apply("Square") if exponent == 2 else self._apply("Pow", data=(exponent,))
        if isinstance(exponent, float) and exponent in (0.5, -0.5):
            return self._apply("Sqrt" if exponent > 0 else "Rsqrt")
        return self._apply("Powf", exponent)

    def power(self, other: Any) -> Any:
        """self ** other."""
        return self**other

    def mod(self: Any, modulus: Any, offset: Any = 0) -> Any:
        """self − m ⌊(self − d) / m⌋, in [d, d + m)."""
        return self._apply("Mod", modulus, offset)

    def round(self: Any, other: int = 0) -> Any:
        """Self, rounded to a number of decimals."""
        return self._apply("Round", data=(other,))

    def norm(self, dim: int = -1) -> Any:
        """norm2 over the components."""
        self._require_last("norm", dim)
        return self.norm2()

    def weightedsqnorm(self: Any, other: Any) -> Any:
        """s |x|², Σ s_k x_k² or Σ s_kl x_k x_l, for s = other of dimension 1, D or D·D."""
        return self._wrap(other)._apply("WeightedSqNorm", self)

    def weightedsqdist(self: Any, g: Any, s: Any) -> Any:
        """`weightedsqnorm` of self − g, with weight s."""
        return self._wrap(s)._apply("WeightedSqDist", self, g)

    def elem(self: Any, i: int) -> Any:
        """Component i."""
        return self._apply("Elem", data=(i,))

    def extract(self: Any, i: int, d: int) -> Any:
        """Components i to i + d."""
        return self._apply("Extract", data=(i, d))

    def __getitem__(self: Any, key: Any) -> Any:
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

    def one_hot(self: Any, D: int) -> Any:  # noqa: N803  # pykeops' name
        """D components, 1 in that of the rounded value, else 0."""
        return self._apply("OneHot", data=(D,))

    def bspline(self: Any, x: Any, k: int = 0) -> Any:
        """The B-splines of order k on the knots self, at x."""
        return self._apply("BSpline", x, data=(k,))

    @staticmethod
    def concatenate(tuple_of_lt: Sequence[Any], axis: int = -1) -> Any:
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
    def cat(tuple_of_lt: Sequence[Any], dim: int = -1) -> Any:
        """`concatenate`, with torch's name."""
        return Reducers.concatenate(tuple_of_lt, dim)

    def keops_tensordot(
        self: Any,
        other: Any,
        dimfa: Sequence[int],
        dimfb: Sequence[int],
        contfa: Sequence[int],
        contfb: Sequence[int],
        *args: Sequence[int],
    ) -> Any:
        """Tensors of shapes dimfa, dimfb, summed over axes contfa with contfb; args permutes."""
        lists = (dimfa, dimfb, contfa, contfb, *args)
        return self._apply("TensorDot", other, data=tuple(map(_integers, lists)))

    def keops_kron(self: Any, other: Any, dimfself: Sequence[int], dimfother: Sequence[int]) -> Any:
        """The Kronecker product of tensors of these shapes."""
        return self._apply("Kron", other, data=(_integers(dimfself), _integers(dimfother)))

    def _is_last(self: Any, axis: int | None) -> bool:
        return axis in (-1, self.dim() - 1)

    def _require_last(self: Any, name: str, axis: int) -> None:
        if not self._is_last(axis):
            raise ShapeError(
                f"{name} is asked for axis {axis} of {self.dim()}: it works on components alone, "
                f"axis {self.dim() - 1}. Pass -1."
            )

    # Reductions

    sum, min, max = _either("Sum"), _either("Min"), _either("Max")
    argmin, argmax = _either("ArgMin"), _either("ArgMax")
    sum_reduction, min_reduction, max_reduction = _plain("Sum"), _plain("Min"), _plain("Max")
    argmin_reduction, argmax_reduction = _plain("ArgMin"), _plain("ArgMax")
    min_argmin = min_argmin_reduction = _plain("Min_ArgMin")
    max_argmax = max_argmax_reduction = _plain("Max_ArgMax")
    Kmin = Kmin_reduction = _nearest("KMin")
    argKmin = argKmin_reduction = _nearest("ArgKMin")  # noqa: N815  # pykeops' name
    Kmin_argKmin = Kmin_argKmin_reduction = _nearest("KMin_ArgKMin")

    def logsumexp(
        self: Any,
        axis: int | None = None,
        dim: int | None = None,
        weight: Any = None,
        **options: Any,
    ) -> Any:
        """log Σ exp(f) w."""
        weight = options.pop("other", None) if weight is None else weight
        return self.reduction("LogSumExp", other=weight, axis=axis, dim=dim, **options)

    def sumsoftmaxweight(
        self: Any, weight: Any, axis: int | None = None, dim: int | None = None, **options: Any
    ) -> Any:
        """Σ exp(f) w / Σ exp(f)."""
        return self.reduction("SumSoftMaxWeight", other=weight, axis=axis, dim=dim, **options)

    logsumexp_reduction = logsumexp
    sumsoftmaxweight_reduction = sumsoftmaxweight


for _name, _method in vars(Reducers).items():
    if hasattr(_method, "__signature__"):
        _method.__name__, _method.__qualname__ = _name, f"Reducers.{_name}"


_direct: CallCache[Body | Literal[False]] = CallCache()


def direct_result(
    arguments: tuple[str, Formula, Formula | None, Any, int],
    variables: Sequence[Variable],
    known: Extent,
    backend: str | None,
) -> Any:
    """The result of a call that only launches kernels, see `direct`; None for other calls.

    Args:
        arguments: name, formula, weight, K and axis of the reduction.
        variables: the variables of the formulas.
        known: their extent.
        backend: None chooses.
    """
    name, *_, count, _ = arguments
    if count is not None and type(count) is not int:
        return None
    tensors = values(variables, known)
    key = direct.kinds(tensors, name, backend, -1)
    if key is None:
        return None
    key = (*arguments, known, *key)
    at_once = _direct.get(key)
    if at_once is None:
        given = signature(tensors)
        at_once = directly(
            reduction_spec(*arguments, DEFAULT_OPTIONS), tensors, given, known, backend, -1
        )
        _direct.keep(key, at_once)
    return at_once(tensors) if at_once else None


class Reduced:
    """A reduction as a function of its symbolic variables.

    Its call takes one argument for each, by index, and the keywords `backend`, `device_id`,
    `ranges` and `out`.
    """

    def __init__(
        self,
        spec: ReductionSpec,
        variables: tuple[Variable, ...],
        known: Extent,
        options: dict[str, Any],
        origin: Any,
    ) -> None:
        self._spec, self._variables, self._known = spec, variables, known
        self._options, self._origin = options, origin
        self.places = places(variables)

    @property
    def callfun(self) -> Reduced:
        """Self, by pykeops' name."""
        return self

    @together
    def __call__(self, *args: Any, **options: Any) -> Any:
        """The result for these arguments."""
        require_count("reduction", len(args), self.places)
        require_keywords(self._spec.kind, options, CALL_KEYWORDS)
        origin, known = self._origin, self._known
        given = [origin._tensor(a) for a in args]
        require_tensors(given)
        for v in self._variables if given else ():
            if v.place is not None:
                x = given[v.place]
                require_declared(f"argument {v.place}", v.dim, v.cat, x.shape, x.dtype)
                own = extent_of(v.cat, x.shape, x.dtype, x.device)
                known = agree(known, own, _called, v.place, x)
        options = self._options | options
        out = options.pop("out", None)
        ranges = origin._tensor(options.pop("ranges", None))
        tensors = values(self._variables, known, given)
        target = None if out is None else origin._target(out)
        result = run(
            self._spec, tensors, signature(tensors), known, ranges=ranges, out=target, **options
        )
        return origin._finished(result) if out is None else out


def _called(place: int, x: Any) -> str:
    return (
        f"the reduction is called with argument {place} of shape {tuple(x.shape)} beside the others"
    )
