"""Reductions of formula strings, for tensors that come later: Genred, and generic functions.

A generic function takes its axis from what it returns: "a = Vi(1)" reduces over j.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from torch import Tensor

from torchweft.core.operators.call_cache import CallCache
from torchweft.core.operators.operator import constant_when_compiling
from torchweft.errors import ShapeError
from torchweft.reductions.call.layout import Signature, kept, signature
from torchweft.reductions.engine import direct
from torchweft.reductions.engine.direct import Body
from torchweft.reductions.formula.node import Node
from torchweft.reductions.formula.parse import parse_variable
from torchweft.reductions.front import traced
from torchweft.reductions.front.reduced import accuracy, directly, job, run
from torchweft.reductions.front.variables import (
    NOTHING,
    Extent,
    agree,
    extent_of,
    require_declared,
    require_tensors,
)

__all__ = ["Genred", "generic_argkmin", "generic_argmin", "generic_logsumexp", "generic_sum"]


class Genred:
    """R_j f(x_i, y_j, p), or over i, of a formula such as "Exp(-SqDist(x, y)) * b".

    Args:
        formula: a formula string, or a node.
        aliases: what its names are, as "x = Vi(3)", "x = Vi(0, 3)" or "Var(0, 3, 0)": position
            among the arguments, dimension, category.  Var(position, dim, category) may also stand
            in the formula.
        reduction_op: Sum, LogSumExp, LogSumExpWeight, SumSoftMaxWeight, SoftMax, Min, Max, ArgMin,
            ArgMax, Min_ArgMin, Max_ArgMax, KMin, ArgKMin, KMin_ArgKMin, Max_SumShiftExp or
            Max_SumShiftExpWeight.
        axis: 0 reduces over i, 1 over j.
        dtype, cuda_type, enable_chunks, rec_multVar_highdim, use_fast_math: taken, and change
            nothing.
        opt_arg: K of KMin, ArgKMin and KMin_ArgKMin.
        formula2: the weight of LogSumExp, SumSoftMaxWeight and Max_SumShiftExp.
        dtype_acc, use_double_acc: "float64" accumulates in float64.
        sum_scheme: "kahan_scheme" compensates; the others sum blocks.
        precision: of products on tensor cores, "ieee", "tf32x3", "tf32" or "bf16"; None takes them
            where a bound shows the error of float32.
    """

    def __init__(
        self,
        formula: str | Node,
        aliases: Sequence[str],
        reduction_op: str = "Sum",
        axis: int = 0,
        dtype: Any = None,
        opt_arg: int | None = None,
        formula2: str | None = None,
        cuda_type: Any = None,
        dtype_acc: str = "auto",
        use_double_acc: bool = False,
        sum_scheme: str = "auto",
        enable_chunks: bool = True,
        rec_multVar_highdim: Any = False,  # noqa: N803  # pykeops' name
        use_fast_math: bool = True,
        precision: str | None = None,
    ) -> None:
        given = tuple(aliases)
        f = formula if isinstance(formula, Node) else traced.parsed(formula, given)
        weight = None if formula2 is None else traced.parsed(formula2, given)
        exact = accuracy(
            dtype_acc=dtype_acc,
            use_double_acc=use_double_acc,
            sum_scheme=sum_scheme,
            precision=precision,
        )
        self._job = job(reduction_op, f, weight, opt_arg, axis, exact)
        self._direct: CallCache[Body | Literal[False]] = CallCache()
        texts = [text for text in (formula, formula2) if isinstance(text, str)]
        self._declared = _declared(tuple(texts), given)

    def __call__(
        self,
        *args: Any,
        backend: str | None = "auto",
        device_id: int = -1,
        ranges: Any = None,
        out: Any = None,
    ) -> Any:
        """The reduction of these tensors.

        Args:
            *args: one for each position: (..., M, D) for Vi(D), (..., N, D) for Vj(D), (..., D) for
                Pm(D); leading dimensions broadcast.
            backend: "auto", "CPU", "GPU", "GPU_1D" or "GPU_2D", or ours: "torch", "numba",
                "triton".
            device_id: the GPU that tensors of the CPU are computed on.
            ranges: (ranges_i, slices_i, redranges_j, ranges_j, slices_j, redranges_i), or a
                `BlockSparsity`.
            out: contiguous memory for the result, of its shape and dtype.
        """
        tensors, at_once, key = self._tensor(args), None, None
        if ranges is None and out is None:
            key = direct.kinds(tensors, self._job.kind, backend, device_id)
            at_once = None if key is None else self._direct.get(key)
            if at_once:
                return self._finished(at_once(tensors))
        require_tensors(tensors)
        given = signature(tensors)
        known = _known(type(self).__name__, self._declared, given)
        if key is not None and at_once is None:
            at_once = directly(self._job, tensors, given, known, backend, device_id)
            self._direct.keep(key, at_once)
            if at_once:
                return self._finished(at_once(tensors))
        result = run(
            self._job,
            tensors,
            given,
            known,
            backend=backend,
            device_id=device_id,
            ranges=self._tensor(ranges),
            out=None if out is None else self._tensor(out),
        )
        return self._finished(result) if out is None else out

    def _finished(self, result: Any) -> Any:
        """What the caller gets of a result."""
        if isinstance(result, Tensor):
            return self._array(result)
        return tuple(self._array(r) for r in result)

    @staticmethod
    def _tensor(x: Any) -> Any:
        """The tensor of an array, also of each of a tuple; anything else as it is."""
        return x

    @staticmethod
    def _array(x: Any) -> Any:
        """What a call returns."""
        return x


_VARIABLE = re.compile(r"\b(?:Var|Vi|Vj|Pm)\(\s*\d+\s*,[\d\s,]+\)")


_Declared = tuple[int, str, int, int]
"""(position, name, dimension, category)."""


@constant_when_compiling
def _declared(texts: tuple[str, ...], aliases: tuple[str, ...]) -> tuple[_Declared, ...]:
    """All that aliases and formulas name, by position."""
    found: dict[int, _Declared] = {}
    inside = [declaration for text in texts for declaration in _VARIABLE.findall(text)]
    for place, alias in [*enumerate(aliases), *((0, declaration) for declaration in inside)]:
        v = parse_variable(alias)
        position = place if v.position is None else v.position
        name = f"argument {position}" if v.name is None else v.name
        found.setdefault(position, (position, name, v.dim, v.cat))
    return tuple(found[position] for position in sorted(found))


@kept
def _known(name: str, declared: tuple[_Declared, ...], given: Signature) -> Extent:
    """What the arguments of a call agree on, each as it was declared."""
    count = 1 + declared[-1][0] if declared else 0
    if len(given) != count:
        names = ", ".join(alias for _, alias, _, _ in declared)
        raise ShapeError(
            f"{name} is called with {len(given)} arguments: the formula has {count}, {names}. "
            "Pass one tensor for each, by position."
        )
    known = NOTHING
    for position, alias, dim, cat in declared:
        shape, dtype, device = given[position]
        require_declared(alias, dim, cat, shape, dtype)
        known = agree(known, extent_of(cat, shape, dtype, device), _beside, name, alias, shape)
    return known


def _beside(name: str, alias: str, shape: Sequence[int]) -> str:
    return f"{name} is given {alias} of shape {tuple(shape)} beside the arguments before"


G = TypeVar("G", bound=Genred)


def generic_sum(formula: str, output: str, *aliases: str, **options: Any) -> Genred:
    """Σ f: `Genred` whose axis comes from `output`, as "a = Vi(2)"."""
    return generic(Genred, "Sum", formula, output, aliases, options)


def generic_logsumexp(formula: str, output: str, *aliases: str, **options: Any) -> Genred:
    """log Σ exp(f): `Genred` whose axis comes from `output`, as "a = Vi(1)"."""
    return generic(Genred, "LogSumExp", formula, output, aliases, options)


def generic_argmin(formula: str, output: str, *aliases: str, **options: Any) -> Genred:
    """The index of the smallest f: `Genred` whose axis comes from `output`, as "a = Vi(1)"."""
    return generic(Genred, "ArgMin", formula, output, aliases, options)


def generic_argkmin(formula: str, output: str, *aliases: str, **options: Any) -> Genred:
    """The indices of the K smallest f: axis and K come from `output`, as "a = Vi(K)"."""
    return generic(Genred, "ArgKMin", formula, output, aliases, options)


def generic(
    cls: type[G],
    reduction_op: str,
    formula: str,
    output: str,
    aliases: tuple[str, ...],
    options: dict[str, Any],
) -> G:
    """The reduction whose result is the variable `output`."""
    result = parse_variable(output)
    if result.cat == 2:
        raise ShapeError(
            f"the output is {output!r}: it must be Vi(D), which reduces over j, or Vj(D), over i. "
            "Change it."
        )
    if reduction_op == "ArgKMin":
        options = {"opt_arg": result.dim} | options
    return cls(formula, aliases, reduction_op, axis=1 - result.cat, **options)
