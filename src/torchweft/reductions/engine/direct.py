"""Calls that are not differentiated, mapped, traced or watched: they only allocate and launch.

Such a call needs no entry of an operator: kernels write its result as the caller gets it, log Σ exp
or a softmax in their last step, the smallest values beside their indices.  Everything else follows
from the signature of the call and is cached at its first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from torchweft.core.explain import recording as explaining
from torchweft.core.operators import call_cache
from torchweft.core.operators.operator import forward_level, recording, transformed
from torchweft.reductions.call import Wanted
from torchweft.reductions.engine import operator, whole
from torchweft.reductions.engine.reduction import ReductionPlan, Result
from torchweft.reductions.formula.node import Node

__all__ = ["Body", "body", "kinds"]

Body = Callable[[Sequence[Tensor]], Result]

SUMS = {
    "Sum": ("sums", ""),
    "LogSumExp": ("shifted", "log"),
    "SumSoftMaxWeight": ("shifted", "mean"),
}
VALUES = ("Min", "Max", "KMin")


def kinds(
    tensors: Sequence[Any], kind: str, backend: str | None, device_id: int
) -> tuple[Any, ...] | None:
    """The signature of a call, beside its reduction; None where it needs an operator's entry."""
    found = call_cache.signature(tensors)
    spread = whole.current.spread  # a call of `whole` would take longer
    if found is None or spread or transformed() or forward_level() >= 0 or explaining():
        return None
    graded = recording() and not kind.startswith("Arg")
    for tensor in tensors:
        if tensor.is_neg() or (graded and tensor.requires_grad):
            return None
    return (backend, device_id, *found)


def body(plan: ReductionPlan, tensors: Sequence[Tensor]) -> Body | None:
    """The reduction of tensors of this signature; None where it takes more than launches.

    That is where tensors are broadcast or converted, and for results that kernels of all pairs
    cannot finish.
    """
    used = plan.used
    flat = plan.layout.seen(tensors)
    broadcast = any(flat[n].numel() != tensors[n].numel() for n in used)
    if broadcast or plan.dtype.itemsize == 2 or plan.kind == "Max_SumShiftExp":
        return None
    if plan.how.endswith("float64") and plan.kind != "Sum":  # m and s are of another dtype
        return None
    rest = operator.arguments(plan.key, plan.layout.sizes, plan.how)
    formulas, data, executor = operator.opened([flat[n] for n in used], rest, plan.k)
    if executor.__name__ == operator.EXECUTORS["torch"]:
        return None
    wanted = _sum(plan, formulas) if plan.kind in SUMS else _smallest(plan, formulas)
    run = executor.prepared(wanted, data, alone=True)
    if run is None:
        return None
    finish = tuple if "_" in plan.kind else itemgetter(0 if plan.kind in VALUES else -1)

    def call(given: Sequence[Tensor]) -> Any:
        return finish(run([given[n].contiguous() for n in used]))

    return call


def _sum(plan: ReductionPlan, formulas: tuple[Node, ...]) -> Wanted:
    kind, ending = SUMS[plan.kind]
    width = formulas[-1].dim - (ending == "mean")
    result = (*plan.layout.batch, plan.layout.sizes.rows, width), plan.dtype
    results = (None, result) if ending else (result,)
    return Wanted(kind, formulas, 0, ending, results)


def _smallest(plan: ReductionPlan, formulas: tuple[Node, ...]) -> Wanted:
    (f,) = formulas
    k = operator.number_wanted(plan.kind, plan.k)
    several = (k,) if k else ()
    components = () if several and f.dim == 1 else (f.dim,)
    shape = (*plan.layout.batch, plan.layout.sizes.rows, *several, *components)
    indices = shape, torch.int64
    if plan.kind.startswith("Arg"):
        return Wanted("smallest", formulas, k, "", (None, indices))
    ending = "negated" if plan.kind.startswith("Max") else "values"
    return Wanted("smallest", formulas, k, ending, ((shape, plan.dtype), indices))
