"""The reductions of lazy tensors: computed at once, or called with the symbolic variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeVar, Unpack, overload

from torchweft.core.operators.call_cache import CallCache
from torchweft.reductions.call import signature
from torchweft.reductions.engine import direct
from torchweft.reductions.engine.direct import Body
from torchweft.reductions.engine.whole import together
from torchweft.reductions.genred import ReductionSpec, directly, reduction_spec, run
from torchweft.reductions.keywords import (
    CALL_KEYWORDS,
    DEFAULT_OPTIONS,
    Called,
    CallKeywords,
    Keywords,
    Uncalled,
    require_keywords,
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

if TYPE_CHECKING:
    from torchweft.reductions.lazy.operations import Operand

__all__ = ["HasArrays", "Reduced", "Reductions", "direct_result"]

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


class HasArrays(Protocol[A_co]):
    """Lazy tensors whose results are arrays of a type: torch's or NumPy's."""

    @classmethod
    def _array(cls, x: Any) -> A_co: ...


def _typed_as(example: F) -> Callable[[Callable[..., Any]], F]:
    """A decorator that changes nothing: the function has the types of the example."""
    return lambda function: function  # type: ignore[return-value]


class Reductions:
    """Reductions R_j f(x_i, y_j) and R_i f(x_i, y_j).

    A reduction over i or j has the axis (or dim) 0 or 1 after the batch dimensions, and returns a
    tensor (..., N, E) or (..., M, E), an array for lazy tensors of NumPy's arrays; sum, min, max,
    argmin and argmax over axis -1, the components, return a lazy tensor.  Every reduction takes the
    keywords of `Genred` and of its call, `precision`, and `call=False` for a callable instead of
    the result.  Of symbolic variables the result is a callable in any case: type checkers know it
    from `call=False`.

    Example:
        >>> import torch
        >>> from torchweft.reductions import LazyTensor
        >>> x = LazyTensor(torch.tensor([[0.0], [1.0]])[:, None])  # (M, 1, D)
        >>> y = LazyTensor(torch.tensor([[0.0], [2.0], [3.0]])[None])  # (1, N, D)
        >>> squares = ((x - y) ** 2).sum(-1)  # a lazy tensor: over components
        >>> squares.sum(1).tolist(), squares.argmin(0).tolist()
        ([[13.0], [6.0]], [[0], [1], [1]])
    """

    # Reductions over i, j or the components

    @overload
    def sum(
        self, axis: Literal[-1] = -1, dim: Literal[-1] | None = None, *, keepdim: bool = True
    ) -> Self: ...
    @overload
    def sum(
        self: HasArrays[A],
        axis: Literal[0, 1],
        dim: Literal[0, 1] | None = None,
        *,
        keepdim: bool = True,
        **options: Unpack[Called],
    ) -> A: ...
    @overload
    def sum(
        self: HasArrays[A],
        axis: Literal[-1] = -1,
        *,
        dim: Literal[0, 1],
        keepdim: bool = True,
        **options: Unpack[Called],
    ) -> A: ...
    @overload
    def sum(
        self: HasArrays[A],
        axis: int = -1,
        dim: int | None = None,
        *,
        keepdim: bool = True,
        **options: Unpack[Uncalled],
    ) -> Reduced[A]: ...
    @overload
    def sum(
        self,
        axis: int = -1,
        dim: int | None = None,
        *,
        keepdim: bool = True,
        call: bool = True,
        **options: Unpack[Keywords],
    ) -> Any: ...
    def sum(
        self: Any, axis: int = -1, dim: int | None = None, *, keepdim: bool = True, **options: Any
    ) -> Any:
        """The sum over axis (or dim) 0 (i) or 1 (j), after the batch dimensions, or −1.

        Args:
            axis: −1, the components, of which one remains; 0 or 1, plus the batch dimensions.
            dim: the same.
            keepdim: without effect.
            options: `call`, and the keywords of `Genred` and of its call.

        Returns:
            A lazy tensor for the components; else a tensor (..., N, E) or (..., M, E).  Sums are
            formed in float32 at least.
        """
        return self._either("Sum", axis, dim, options)

    @_typed_as(sum)
    def min(
        self: Any, axis: int = -1, dim: int | None = None, *, keepdim: bool = True, **options: Any
    ) -> Any:
        """The smallest value over i, j or the components; see `sum`."""
        return self._either("Min", axis, dim, options)

    @_typed_as(sum)
    def max(
        self: Any, axis: int = -1, dim: int | None = None, *, keepdim: bool = True, **options: Any
    ) -> Any:
        """The largest value over i, j or the components; see `sum`."""
        return self._either("Max", axis, dim, options)

    @_typed_as(sum)
    def argmin(
        self: Any, axis: int = -1, dim: int | None = None, *, keepdim: bool = True, **options: Any
    ) -> Any:
        """The index of the smallest value over i, j or the components; see `sum`."""
        return self._either("ArgMin", axis, dim, options)

    @_typed_as(sum)
    def argmax(
        self: Any, axis: int = -1, dim: int | None = None, *, keepdim: bool = True, **options: Any
    ) -> Any:
        """The index of the largest value over i, j or the components; see `sum`."""
        return self._either("ArgMax", axis, dim, options)

    def _either(self: Any, name: str, axis: int, dim: int | None, options: dict[str, Any]) -> Any:
        if dim is not None and axis in (-1, dim):
            axis, dim = dim, None
        if dim is None and self._is_last(axis):
            return self._apply(name)
        return self.reduction(name, axis=axis, dim=dim, **options)

    # Reductions over i or j

    @overload
    def sum_reduction(
        self: HasArrays[A],
        axis: int | None = None,
        dim: int | None = None,
        **options: Unpack[Called],
    ) -> A: ...
    @overload
    def sum_reduction(
        self: HasArrays[A],
        axis: int | None = None,
        dim: int | None = None,
        **options: Unpack[Uncalled],
    ) -> Reduced[A]: ...
    def sum_reduction(
        self: Any, axis: int | None = None, dim: int | None = None, **options: Any
    ) -> Any:
        """The sum over axis (or dim) 0 (i) or 1 (j), after the batch dimensions; see `sum`."""
        return self.reduction("Sum", axis=axis, dim=dim, **options)

    @_typed_as(sum_reduction)
    def min_reduction(
        self: Any, axis: int | None = None, dim: int | None = None, **options: Any
    ) -> Any:
        """The smallest value over i or j; see `sum`."""
        return self.reduction("Min", axis=axis, dim=dim, **options)

    @_typed_as(sum_reduction)
    def max_reduction(
        self: Any, axis: int | None = None, dim: int | None = None, **options: Any
    ) -> Any:
        """The largest value over i or j; see `sum`."""
        return self.reduction("Max", axis=axis, dim=dim, **options)

    @_typed_as(sum_reduction)
    def argmin_reduction(
        self: Any, axis: int | None = None, dim: int | None = None, **options: Any
    ) -> Any:
        """The index of the smallest value over i or j; see `sum`."""
        return self.reduction("ArgMin", axis=axis, dim=dim, **options)

    @_typed_as(sum_reduction)
    def argmax_reduction(
        self: Any, axis: int | None = None, dim: int | None = None, **options: Any
    ) -> Any:
        """The index of the largest value over i or j; see `sum`."""
        return self.reduction("ArgMax", axis=axis, dim=dim, **options)

    @overload
    def min_argmin(
        self: HasArrays[A],
        axis: int | None = None,
        dim: int | None = None,
        **options: Unpack[Called],
    ) -> tuple[A, A]: ...
    @overload
    def min_argmin(
        self: HasArrays[A],
        axis: int | None = None,
        dim: int | None = None,
        **options: Unpack[Uncalled],
    ) -> Reduced[tuple[A, A]]: ...
    def min_argmin(
        self: Any, axis: int | None = None, dim: int | None = None, **options: Any
    ) -> Any:
        """The smallest value over i or j, and its index; see `sum`."""
        return self.reduction("Min_ArgMin", axis=axis, dim=dim, **options)

    @_typed_as(min_argmin)
    def max_argmax(
        self: Any, axis: int | None = None, dim: int | None = None, **options: Any
    ) -> Any:
        """The largest value over i or j, and its index; see `sum`."""
        return self.reduction("Max_ArgMax", axis=axis, dim=dim, **options)

    @overload
    def Kmin(
        self: HasArrays[A],
        K: int,
        axis: int | None = None,
        dim: int | None = None,
        **options: Unpack[Called],
    ) -> A: ...
    @overload
    def Kmin(
        self: HasArrays[A],
        K: int,
        axis: int | None = None,
        dim: int | None = None,
        **options: Unpack[Uncalled],
    ) -> Reduced[A]: ...
    def Kmin(
        self: Any, K: int, axis: int | None = None, dim: int | None = None, **options: Any
    ) -> Any:
        """The K smallest values over i or j, ascending, padded with +inf; see `sum`."""
        return self.reduction("KMin", opt_arg=K, axis=axis, dim=dim, **options)

    @_typed_as(Kmin)
    def argKmin(
        self: Any, K: int, axis: int | None = None, dim: int | None = None, **options: Any
    ) -> Any:
        """The indices of the K smallest values over i or j, padded with −1; see `sum`."""
        return self.reduction("ArgKMin", opt_arg=K, axis=axis, dim=dim, **options)

    @overload
    def Kmin_argKmin(
        self: HasArrays[A],
        K: int,
        axis: int | None = None,
        dim: int | None = None,
        **options: Unpack[Called],
    ) -> tuple[A, A]: ...
    @overload
    def Kmin_argKmin(
        self: HasArrays[A],
        K: int,
        axis: int | None = None,
        dim: int | None = None,
        **options: Unpack[Uncalled],
    ) -> Reduced[tuple[A, A]]: ...
    def Kmin_argKmin(
        self: Any, K: int, axis: int | None = None, dim: int | None = None, **options: Any
    ) -> Any:
        """The K smallest values over i or j and their indices, as `Kmin` and `argKmin`."""
        return self.reduction("KMin_ArgKMin", opt_arg=K, axis=axis, dim=dim, **options)

    @overload
    def logsumexp(
        self: HasArrays[A],
        axis: int | None = None,
        dim: int | None = None,
        weight: Operand | None = None,
        *,
        other: Operand | None = None,
        **options: Unpack[Called],
    ) -> A: ...
    @overload
    def logsumexp(
        self: HasArrays[A],
        axis: int | None = None,
        dim: int | None = None,
        weight: Operand | None = None,
        *,
        other: Operand | None = None,
        **options: Unpack[Uncalled],
    ) -> Reduced[A]: ...
    def logsumexp(
        self: Any,
        axis: int | None = None,
        dim: int | None = None,
        weight: Any = None,
        **options: Any,
    ) -> Any:
        """log Σ exp(f) w over i or j, w = weight (or other), 1 if None; see `sum`."""
        weight = options.pop("other", None) if weight is None else weight
        return self.reduction("LogSumExp", other=weight, axis=axis, dim=dim, **options)

    @overload
    def sumsoftmaxweight(
        self: HasArrays[A],
        weight: Operand,
        axis: int | None = None,
        dim: int | None = None,
        **options: Unpack[Called],
    ) -> A: ...
    @overload
    def sumsoftmaxweight(
        self: HasArrays[A],
        weight: Operand,
        axis: int | None = None,
        dim: int | None = None,
        **options: Unpack[Uncalled],
    ) -> Reduced[A]: ...
    def sumsoftmaxweight(
        self: Any, weight: Any, axis: int | None = None, dim: int | None = None, **options: Any
    ) -> Any:
        """Σ exp(f) w / Σ exp(f) over i or j, w = weight; see `sum`."""
        return self.reduction("SumSoftMaxWeight", other=weight, axis=axis, dim=dim, **options)

    min_argmin_reduction, max_argmax_reduction = min_argmin, max_argmax
    Kmin_reduction, argKmin_reduction = Kmin, argKmin
    Kmin_argKmin_reduction = Kmin_argKmin
    logsumexp_reduction, sumsoftmaxweight_reduction = logsumexp, sumsoftmaxweight


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


class Reduced(Generic[R]):
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
    def callfun(self) -> Self:
        """Self, by pykeops' name."""
        return self

    @together
    def __call__(self, *args: Any, **options: Unpack[CallKeywords]) -> R:
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
        settings = {**self._options, **options}
        out = settings.pop("out", None)
        ranges = origin._tensor(settings.pop("ranges", None))
        tensors = values(self._variables, known, given)
        target = None if out is None else origin._target(out)
        result = run(
            self._spec, tensors, signature(tensors), known, ranges=ranges, out=target, **settings
        )
        found: R = origin._finished(result) if out is None else out
        return found


def _called(place: int, x: Any) -> str:
    return (
        f"the reduction is called with argument {place} of shape {tuple(x.shape)} beside the others"
    )
