"""Reductions by name, made of three operators: sums, shifted sums and the smallest values.

Sum                Σ_j f
LogSumExp          log Σ_j exp(f) w = m + log s        with m = max_j f, s = Σ_j exp(f − m) w
SumSoftMaxWeight   Σ_j exp(f) w / Σ_j exp(f)
Max_SumShiftExp    [m, s]
Min, KMin          f at the smallest values' indices, so they have gradients of any order
Max                −Min(−f)

A row with NaN has torch's results: sums and exponentials are NaN, and so are Min and Max, at the
first NaN's index.  Among the K smallest NaN counts as +∞: it comes behind every number.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.operators.operator import compiling, constant_when_compiling, watched
from torchweft.core.operators.tensor_list import Rest
from torchweft.errors import ShapeError
from torchweft.reductions.call import (
    Options,
    Signature,
    Sizes,
    TensorLayout,
    kept,
    laid_out,
    signature,
)
from torchweft.reductions.cluster.points import Ranges
from torchweft.reductions.cluster.sparsity import BlockSparsity
from torchweft.reductions.engine import formula_keys as keys
from torchweft.reductions.engine import operator
from torchweft.reductions.engine.whole import Operators, whole
from torchweft.reductions.formula.node import (
    Node,
    const,
    node,
    read,
    swap,
    variables,
)

__all__ = [
    "EXPONENTIAL",
    "KINDS",
    "ReductionPlan",
    "reduce",
    "reduction_plan",
    "run_plan",
]

PLAIN = Options()
ONE = str(const(1))

Result = Tensor | tuple[Tensor, Tensor]

EXPONENTIAL = ("LogSumExp", "SumSoftMaxWeight", "Max_SumShiftExp")
KINDS = (
    *("Sum", *EXPONENTIAL, "Min", "Max", "ArgMin", "ArgMax", "Min_ArgMin", "Max_ArgMax"),
    *("KMin", "ArgKMin", "KMin_ArgKMin"),
)


class ReductionPlan(NamedTuple):
    """What follows from a call of `reduce` but for the numbers and the mask.

    Args:
        kind: a name of KINDS.
        k: number of smallest values.
        axis: 1 reduces over j, 0 over i.
        how: backend, precision and accumulation, as operators take them.
        key: of the formula that operators take, with i and j exchanged for reductions over i.
        used: the variables that operators take.
        cats: (number, category) of all variables.
        compared: text of the formula whose smallest values are wanted.
        layout: what follows from the shapes.
        dtype: of the results.
        rest: non-tensor arguments of operators, where there is no mask.
    """

    kind: str
    k: int
    axis: int
    how: str
    key: keys.Key
    used: tuple[int, ...]
    cats: tuple[tuple[int, int], ...]
    compared: str
    layout: TensorLayout
    dtype: torch.dtype
    rest: Rest


class _Call(NamedTuple):
    """A call of an operator.

    Args:
        plan: the plan of the call.
        tensors: by variable, (B or 1, M or N or 1, D), in float32 instead of 16 bits.
        operands: what operators take: values, then the blocks of rows and of columns, if any.
        rest: their non-tensor arguments.
        sizes: of the operands; with a mask for each entry, the batch is part of the rows.
        operators: what reduces them.
    """

    plan: ReductionPlan
    tensors: dict[int, Tensor]
    operands: list[Tensor]
    rest: Rest
    sizes: Sizes
    operators: Operators


def reduce(
    kind: str,
    f: Node | str,
    tensors: Sequence[Tensor],
    axis: int,
    *,
    weight: Node | str | None = None,
    k: int = 1,
    ranges: Ranges | BlockSparsity | None = None,
    backend: str | None = None,
    options: Options = PLAIN,
) -> Result:
    """out_i = R_j f(x_i, y_j, p), or over i.

    Args:
        kind: a name of KINDS.
        f: the formula, as a node or as its canonical text.
        tensors: its variables by number: (*batch, M, D) of category 0, (*batch, N, D) of 1,
            (*batch, D) of 2; batch dimensions broadcast.
        axis: 1 reduces over j, 0 over i.
        weight: of the exponentials.
        k: number of smallest values.
        ranges: the 6-tuple of arrays of a block-sparse mask, or a BlockSparsity.
        backend: None chooses.
        options: precision and accumulation.

    Returns:
        (*batch, M or N, ·) in the dtype of the tensors, indices in int64; a pair where the name
        says two.  KMin gives (..., K) for a formula of one component, else (..., K, D).

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the formula or each other.

    Cost: M · N evaluations of f, or one for each pair of the mask; memory for the results, and a
    copy in float32 of variables of 16 bits, since results are rounded once at the end.
    """
    given = signature(tensors)
    return run_plan(
        reduction_plan(kind, f, weight, axis, k, backend, options, given), tensors, ranges
    )


@kept
def reduction_plan(
    kind: str,
    f: Node | str,
    weight: Node | str | None,
    axis: int,
    k: int,
    backend: str | None,
    options: Options,
    given: Signature,
) -> ReductionPlan:
    """The plan of a call of `reduce` with tensors of this signature."""
    if kind not in KINDS or axis not in (0, 1):
        raise ShapeError(
            f"the reduction is {kind!r} over axis {axis}: it must be one of {', '.join(KINDS)}, "
            "over axis 0 (i) or 1 (j). Pass one of these names."
        )
    over = "j" if axis == 1 else "i"  # Dynamo may take an integer for a symbol
    other = ONE if weight is None else str(weight)
    key, used, cats, compared = _of_formulas(kind, str(f), other, over)
    how = f"{backend or ''}:{options.precision or ''}:{options.accumulate}"
    layout, dtype = laid_out(kind, cats, given), given[0][1]
    uncached = compiling() or watched()
    rest = (operator.arguments if uncached else operator.cached_arguments)(key, layout.sizes, how)
    return ReductionPlan(kind, k, axis, how, key, used, cats, compared, layout, dtype, rest)


def run_plan(
    plan: ReductionPlan, tensors: Sequence[Tensor], ranges: Ranges | BlockSparsity | None
) -> Result:
    """The reduction of these tensors, which have the signature of the plan."""
    if plan.dtype.itemsize == 2:
        tensors = [t.float() for t in tensors]
    flat, sizes, rest = plan.layout.seen(tensors), plan.layout.sizes, plan.rest
    if isinstance(ranges, BlockSparsity) and ranges.batch is not None:
        flat, sizes = _stacked(flat, plan.cats, sizes)
    operands = [flat[n] for n in plan.used]
    operators, tables = whole().operators(plan, operands, ranges)
    if ranges is not None:
        rest = operator.arguments(plan.key, sizes, plan.how)
    call = _Call(plan, flat, [*operands, *tables], rest, sizes, operators)
    if plan.kind == "Sum":
        return _shaped(call, operators.sums(call.operands, rest))
    return _exponential(call) if plan.kind in EXPONENTIAL else _ranked(call)


@constant_when_compiling
def _of_formulas(kind: str, f: str, weight: str, over: str) -> tuple[Any, ...]:
    """`key`, `used`, `cats` and `compared` of a plan; texts are those of the reduction over j."""
    return _derived(kind, f, weight, over)


@functools.lru_cache(keys.KEPT)
def _derived(kind: str, text: str, weight: str, over: str) -> tuple[Any, ...]:
    f, w = read(text), read(weight)
    f, w = (f, w) if over == "j" else (swap(f), swap(w))
    f = -f if kind.startswith(("Max", "ArgMax")) and kind not in EXPONENTIAL else f
    formulas = [f]
    if kind in EXPONENTIAL:
        formulas.append(node("concat", w, const(1)) if kind == "SumSoftMaxWeight" else w)
    key, used = keys.make(*map(str, formulas))
    found = {v for g in formulas for v in variables(g)}
    cats = tuple(sorted((v.data[0], v.data[2]) for v in found)) or ((0, 2),)
    return key, used, cats, str(f)


def _stacked(
    flat: dict[int, Tensor], cats: Sequence[tuple[int, int]], entry: Sizes
) -> tuple[dict[int, Tensor], Sizes]:
    """The entries of the batch one after the other, as masks for each entry count them."""
    found = {}
    for n, cat in cats:
        t = flat[n]
        if cat == 2 and t.shape[0] != 1:
            raise ShapeError(
                f"parameter {n} differs between {t.shape[0]} entries that have a mask each: it "
                "must be the same for all. Expand it along i and pass it as a Vi."
            )
        found[n] = t if cat == 2 else t.expand(entry.batch, -1, -1).flatten(0, 1)[None]
    return found, Sizes(1, entry.batch * entry.rows, entry.batch * entry.columns)


def _shaped(call: _Call, result: Tensor) -> Tensor:
    """(B, ...) as (*batch, ...) in the dtype of the tensors."""
    dtype, layout = call.plan.dtype, call.plan.layout
    if result.dtype != dtype and result.is_floating_point():
        result = result.to(dtype)
    return result.reshape(*layout.batch, layout.sizes.rows, *result.shape[2:])


def _exponential(call: _Call) -> Tensor:
    kind = call.plan.kind
    m, s = call.operators.shifted_sums(call.operands, call.rest)
    if kind == "Max_SumShiftExp":
        m = torch.where(s.isnan().any(-1, keepdim=True), torch.nan, m)  # kernels pass over NaN
        return _shaped(call, torch.cat([m, s], -1))
    if kind == "SumSoftMaxWeight":
        # the largest of all terms is 1, or there is none
        return _shaped(call, s[..., :-1] / s[..., -1:].clamp(min=0.5))
    # a row with nothing is −inf, and its gradients are 0: the logarithm does not see its 0
    return _shaped(call, (s + (m == -torch.inf)).log() + m)


def _ranked(call: _Call) -> Result:
    kind = call.plan.kind
    largest = kind.startswith(("Max", "ArgMax"))
    wanted = operator.number_wanted(kind, call.plan.k)
    index = call.operators.smallest(call.operands, wanted, call.rest)
    if kind.startswith("Arg"):
        return _listed(call, _own(call, index))
    found = _at(call, index)
    found = -found if largest else found
    if "_" in kind:
        return _listed(call, found), _listed(call, _own(call, index))
    return _listed(call, found)


def _own(call: _Call, index: Tensor) -> Tensor:
    """Column numbers within a row's own entry, where entries stand one after the other."""
    entry = call.plan.layout.sizes
    if call.sizes == entry:
        return index
    entries = torch.arange(entry.batch, device=index.device)
    before = (entries * entry.columns).repeat_interleave(entry.rows)
    return torch.where(index < 0, index, index - before[:, None, None])


def _listed(call: _Call, found: Tensor) -> Tensor:
    """(B, M, k, D) without k where there is no K in the name, else without D where that is 1."""
    if "K" not in call.plan.kind:
        return _shaped(call, found[:, :, 0].contiguous())
    return _shaped(call, found.squeeze(-1))


def _at(call: _Call, index: Tensor) -> Tensor:
    """(B, M, k, D): the formula at the column of each component, +inf for none.

    Among the K smallest NaN is +inf, as which it was compared.
    """
    plan, operators = call.plan, call.operators
    if operators.columns(call.sizes) == 0:
        values = call.operands[: len(plan.used)]
        rest = operator.arguments(plan.key, call.sizes, plan.how)
        zero = operator.sums(values, rest)  # it has the graph
        return torch.where(index < 0, torch.inf, zero[:, :, None])
    found = operators.at(plan.compared, call.tensors, index, plan.how)
    nothing = (index < 0) | found.isnan() if "K" in plan.kind else index < 0
    return torch.where(nothing, torch.inf, found)
