"""The reductions of lazy tensors: over i or over j, by their names there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchweft.reductions.front.arithmetic import Operators

__all__ = ["Reducers"]


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
