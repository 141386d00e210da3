"""Calls that nobody differentiates, maps, traces or watches: settled, they allocate and launch.

Such a call needs no door of an operator: kernels write its result as the caller gets it, log Σ exp
or a softmax in their last step, the smallest values beside their indices.  All else is settled by
the kinds of its tensors, at the first call of each.
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
from torchweft.reductions.engine import operator
from torchweft.reductions.engine.reduction import CallCache, Result
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
    """What a call is settled by, beside its reduction; None where it needs a door."""
    found = call_cache.signature(tensors)
    if found is None or transformed() or forward_level() >= 0 or explaining():
        return None
    graded = recording() and not kind.startswith("Arg")
    for tensor in tensors:
        if tensor.is_neg() or (graded and tensor.requires_grad):
            return None
    return (backend, device_id, *found)


def body(plan: CallCache, tensors: Sequence[Tensor]) -> Body | None:
    """The reduction of tensors of these kinds; None where it takes more than launches.

    Those are: to broadcast, to convert, or what kernels of all pairs have no ending for.
    """
    used, sizes = plan.of.used, plan.layout.sizes
    flat = plan.layout.seen(tensors)
    broadcast = any(flat[n].numel() != tensors[n].numel() for n in used)
    if broadcast or plan.dtype.itemsize == 2 or plan.kind == "Max_SumShiftExp":
        return None
    if plan.how.endswith("float64") and plan.kind != "Sum":  # m and s are of another dtype
        return None
    rest = operator.rest_of(plan.of.key, sizes, plan.how)
    formulas, values, _, _, options, executor = operator.opened(
        [flat[n] for n in used], rest, plan.k
    )
    if executor.__name__ != operator.KERNELS:
        return None
    from torchweft.reductions.engine import prepared as ahead

    wanted = _sum(plan, formulas) if plan.kind in SUMS else _smallest(plan, formulas)
    run = ahead.prepared(wanted, values, sizes, options, alone=True)
    if run is None:
        return None
    finish = tuple if "_" in plan.kind else itemgetter(0 if plan.kind in VALUES else -1)

    def call(given: Sequence[Tensor]) -> Any:
        return finish(run([given[n].contiguous() for n in used]))

    return call


def _sum(plan: CallCache, formulas: tuple[Node, ...]) -> Wanted:
    kind, ending = SUMS[plan.kind]
    width = formulas[-1].dim - (ending == "mean")
    result = (*plan.layout.batch, plan.layout.sizes.rows, width), plan.dtype
    results = (None, result) if ending else (result,)
    return Wanted(kind, formulas, 0, ending, results)


def _smallest(plan: CallCache, formulas: tuple[Node, ...]) -> Wanted:
    (f,) = formulas
    several = (plan.k,) if "K" in plan.kind else ()
    components = () if several and f.dim == 1 else (f.dim,)
    shape = (*plan.layout.batch, plan.layout.sizes.rows, *several, *components)
    indices = shape, torch.int64
    if plan.kind.startswith("Arg"):
        return Wanted("smallest", formulas, plan.k, "", (None, indices))
    ending = "negated" if plan.kind.startswith("Max") else "values"
    return Wanted("smallest", formulas, plan.k, ending, ((shape, plan.dtype), indices))
