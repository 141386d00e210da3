"""The Triton path of the products: the recipe of a call, and its execution.

A sum over n against an operand that all n share is taken first: the product commutes with it, and
the batched operand is read once instead of once an entry.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from torchweft.core.explain import recording
from torchweft.core.gpu.launcher import current_device
from torchweft.core.tables.plan import Plan
from torchweft.products.forms import PRODUCTS, accumulator, result_channels
from torchweft.products.recipe import Call, Operand, Step, recipe

__all__ = ["product"]

MOST_RECIPES = 256
"""Recipes that a plan keeps, one for each combination of shapes, strides and dtypes."""


def product(
    op: str,
    first: Tensor,
    second: Tensor | None,
    scale: Tensor | None,
    plan: Plan,
    roles: str,
    accumulate: bool,
) -> Tensor:
    """z[n,m] = Σ_{e ∈ segment m} s[t] · first[n,index1[e]] ∘ second[n,index2[e]], e in the table.

    Args:
        op: a key of `PRODUCTS`.
        first: (N, R1, *dims), or (R1, *dims) shared over N; any strides.
        second: likewise; None for "scale".
        scale: (T,), in the inputs' dtype or the one of the sums; None is 1.
        plan: who meets whom.
        roles: what first, second and the result are indexed by.
        accumulate: sum over n as well.

    Returns:
        (N, rows, *dims), without N where nothing has one or it is summed over.
    """
    if not accumulate:
        return _run(op, first, second, scale, plan, roles, False, first.dtype)
    dims = PRODUCTS[op].dims
    has_n = (first.dim() == dims[0] + 2, second is not None and second.dim() == dims[1] + 2)
    x = _sum_over_n(first) if has_n == (True, False) else first
    y = _sum_over_n(second) if has_n == (False, True) and second is not None else second
    return _run(op, x, y, scale, plan, roles, all(has_n), first.dtype)


def _sum_over_n(operand: Tensor) -> Tensor:
    """Σ_n of (N, rows, *dims), in the dtype of sums; a transposed matrix is read as it lies."""
    wide = accumulator(operand.dtype)
    if operand.dim() == 4:
        if operand.stride(2) == 1 != operand.stride(3):
            return _sum_over_n(operand.mT).mT
        rows = operand.flatten(1, 2)
    else:
        rows = operand if operand.dim() == 3 else operand.unsqueeze(1)
    plan = _identity(rows.shape[1], operand.device)
    return _run("scale", rows, None, None, plan, "x_z", True, wide).view(operand.shape[1:])


@functools.lru_cache(maxsize=256)
def _identity(rows: int, device: torch.device) -> Plan:
    """Row i to row i."""
    return Plan({"x": None, "z": None}, {"x": rows, "z": rows}, rows, device)


def _run(
    op: str,
    first: Tensor,
    second: Tensor | None,
    scale: Tensor | None,
    plan: Plan,
    roles: str,
    accumulate: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The product in a dtype, by a recipe that is made at the first call of its kind."""
    tf32 = op in ("vecmat", "outer") and torch.backends.cuda.matmul.fp32_precision == "tf32"
    key = (
        op,
        roles,
        accumulate,
        dtype,
        tf32,
        first.shape,
        first.stride(),
        first.dtype,
        None if second is None else (second.shape, second.stride(), second.dtype),
        None if scale is None else scale.dtype,
    )
    recipes: dict[Any, tuple[Step, ...]] = plan.derived("recipes", dict)
    steps = recipes.get(key)
    if steps is None:
        if len(recipes) >= MOST_RECIPES:
            recipes.clear()
        call = _describe(op, first, second, scale is not None, accumulate, dtype, tf32)
        steps = recipes[key] = recipe(call, plan, roles)
    if scale is not None:
        scale = scale.contiguous()  # kernels read it with stride 1
    with current_device(first):
        return _execute(steps, [first, second, scale])


def _describe(
    op: str,
    first: Tensor,
    second: Tensor | None,
    scaled: bool,
    accumulate: bool,
    dtype: torch.dtype,
    tf32: bool,
) -> Call:
    dims = PRODUCTS[op].dims
    x = Operand(0, first.shape, first.stride(), dims[0], first.dtype)
    y = None
    if second is not None:
        y = Operand(1, second.shape, second.stride(), dims[1], second.dtype)
    batched = x if x.batched else y
    batch = batched.shape[0] if batched is not None and batched.batched else None
    channels = result_channels(op, first, second)
    return Call(op, x, y, scaled, batch, accumulate, channels, dtype, first.device, tf32)


def _execute(steps: tuple[Step, ...], tensors: list[Tensor | None]) -> Tensor:
    """Allocate and fill one tensor after the other."""
    like, last = tensors[0], steps[-1]
    assert like is not None
    for step in steps:
        make = like.new_zeros if step.zeroed else like.new_empty
        out = make(step.shape, dtype=step.dtype)
        if step.launcher is not None:
            operands = [None if r is None else tensors[r] for r in step.reads]
            operands.append(out)
            step.launcher(operands, 0 if step is last or not recording() else out.nbytes)
        tensors.append(out)
    return out
