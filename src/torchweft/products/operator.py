"""The registered op `torchweft::product`: its bodies, its shape, its derivatives, its vmap rule.

    z[n,m] = Σ_{k: result(k) = m} s[t(k)] · first[n, row(k)] ∘ second[n, row(k)]

One op serves all products and all their gradients: `roles` names what the two operands and the
result are indexed by (see plan.py), e.g. "xyz" forward and "zyx" for a gradient of input1.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core.backend import choose
from torchweft.core.explain import record_cost, recording
from torchweft.core.expressions.program import accumulator
from torchweft.core.operators.operator import Call, Operator
from torchweft.core.private import any_autocast
from torchweft.core.tables import Plan
from torchweft.products.forms import PRODUCTS, batch_of, result_channels
from torchweft.products.infos import ROLES, product_plan

__all__ = ["product"]

_SCHEMA = (
    "Tensor first, Tensor? second, Tensor? scale, Tensor? index1, Tensor? index2, Tensor? seg, "
    "Tensor? gather_index, Tensor? index_out, SymInt[] sizes, str op, str roles, "
    "bool accumulate, str? backend"
)


ProductBody = Callable[[str, Tensor, Tensor | None, Tensor | None, Plan, str, bool], Tensor]


@functools.cache
def _runner(backend: str | None, device: str) -> ProductBody:
    """The body of a backend, which is imported when it first serves."""
    module, name = _BODIES[choose(backend, device)]
    body: ProductBody = getattr(importlib.import_module(f"torchweft.products.{module}"), name)
    return body


_BODIES = {
    "triton": ("launch", "product"),
    "numba": ("numba_path", "product_numba"),
    "torch": ("torch_path", "product_torch"),
}


def _body(
    first: Tensor,
    second: Tensor | None,
    scale: Tensor | None,
    index1: Tensor | None,
    index2: Tensor | None,
    seg: Tensor | None,
    gather_index: Tensor | None,
    index_out: Tensor | None,
    sizes: Sequence[int],
    op: str,
    roles: str,
    accumulate: bool,
    backend: str | None,
) -> Tensor:
    device = first.device
    tables = (index1, index2, seg, gather_index, index_out)
    plan = product_plan(tables, tuple(sizes), device)
    run = _runner(backend, device.type)
    if any_autocast():
        # the inputs have autocast's dtype already; it must not narrow torch's products in a body
        with torch.autocast(device.type, enabled=False):
            out = run(op, first, second, scale, plan, roles, accumulate)
    else:
        out = run(op, first, second, scale, plan, roles, accumulate)
    if recording():
        _record_cost(op, [first, second, scale, *tables], out, plan.num_entries)
    return out


def _record_cost(op: str, inputs: Sequence[Tensor | None], out: Tensor, num_entries: int) -> None:
    """Bytes of each stored element once; two operations for each product of two elements."""
    first, second = inputs[:2]
    tensors = [t for t in (*inputs, out) if t is not None]
    moved = sum(t.untyped_storage().nbytes() if 0 in t.stride() else t.nbytes for t in tensors)
    batch = max(batch_of(op, first) or 1, batch_of(op, second, 1) or 1)
    width = first.shape[-1] if first is not None and first.dim() else 1
    if op in ("outer", "vecmat") and second is not None:
        width *= second.shape[-1]
    record_cost(moved, 2 * batch * num_entries * width)


def _fake(first: Tensor, second: Tensor | None, *rest: Any) -> Tensor:
    sizes, op, roles, accumulate = rest[6:10]
    batches = [batch_of(op, first), batch_of(op, second, 1)]
    known = [n for n in batches if n is not None]
    lead = [] if accumulate or not known else known[:1]
    rows = sizes[ROLES.index(roles[2])]
    return first.new_empty((*lead, rows, *result_channels(op, first, second)))


def _gradients(
    call: Call, args: Sequence[Any], grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The derivatives of forms.py: each is a product over the same plan."""
    return (
        _operand_gradient(call, args, grad, 0) if needed[0] else None,
        _operand_gradient(call, args, grad, 1) if needed[1] else None,
        _scale_gradient(call, args, grad) if needed[2] else None,
    )


@functools.cache
def _turned(op: str, roles: str, slot: int) -> tuple[str, str, str]:
    """(product, roles, letters of its operands) of the derivative in one slot."""
    rule = PRODUCTS[op].second if slot else PRODUCTS[op].first
    assert rule is not None
    name = dict(zip("abc_", (*roles, "_"), strict=True))
    return rule[0], "".join(name[letter.lower()] for letter in rule[1]), rule[1][:2]


def _operand_gradient(call: Call, args: Sequence[Any], grad: Tensor, slot: int) -> Tensor:
    op, roles, letters = _turned(args[9], args[10], slot)
    factors = [_factor(letter, args, grad) for letter in letters]
    operand = args[slot]
    batched = operand.dim() == PRODUCTS[args[9]].dims[slot] + 2
    result = call(*factors, args[2], *args[3:9], op, roles, not batched, args[12])
    if batched and result.dim() < operand.dim():
        # the same for every n: the other operand is shared and the output was summed over n
        result = result.expand(operand.shape[0], *result.shape)
    return result


def _factor(letter: str, args: Sequence[Any], grad: Tensor) -> Tensor | None:
    """The tensor of a letter: a first, b second, c the gradient; capitals are transposed."""
    if letter == "_":
        return None
    factor: Tensor = grad if letter in "cC" else args["ab".index(letter.lower())]
    return factor.mT if letter.isupper() else factor


def _scale_gradient(call: Call, args: Sequence[Any], grad: Tensor) -> Tensor:
    """gs[t] = Σ_n Σ_{k: t(k) = t} ⟨grad[n, result(k)], first ∘ second⟩.

    A product for each entry, then an inner product; the rows between them are stored.
    """
    first, second, scale = args[:3]
    op, (a, b, c) = args[9], args[10]
    wide = accumulator(first.dtype)
    second = None if second is None else second.to(wide)
    terms = call(first.to(wide), second, None, *args[3:9], op, f"{a}{b}k", False, args[12])
    dims = PRODUCTS[op].dims[2]
    terms, grad = (_as_vectors(r, dims) for r in (terms, grad.to(wide)))
    result = call(terms, grad, None, *args[3:9], "inner", f"k{c}t", True, args[12])
    return result.to(scale.dtype)


def _as_vectors(rows: Tensor, dims: int) -> Tensor:
    return rows.unsqueeze(-1) if dims == 0 else rows.flatten(-dims)


def _batch(call: Call, size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> Tensor:
    """The mapped dimension joins N; calls that sum over N or map the scale run one by one."""
    op, accumulate = args[9], args[11]
    mapped = dict(zip(range(3), in_dims[:3], strict=True))
    dims = PRODUCTS[op].dims
    shapes = [_unmapped_shape(args[i], mapped[i]) for i in (0, 1)]
    has_n = [len(shape) == dim + 2 for shape, dim in zip(shapes, dims, strict=False)]
    if mapped[2] is not None or (accumulate and any(has_n)):
        return torch.stack(
            [
                call(*(_select(args[i], mapped[i], j) for i in range(3)), *args[3:])
                for j in range(size)
            ]
        )
    batch = shapes[has_n.index(True)][0] if any(has_n) else None
    folded = [_fold(args[i], mapped[i], has_n[i], size, batch) for i in (0, 1)]
    out = call(*folded, *args[2:11], False, args[12])
    return out if batch is None else out.reshape(size, batch, *out.shape[1:])


def _unmapped_shape(operand: Tensor | None, dim: int | None) -> list[int]:
    """The shape that one of the mapped calls sees."""
    shape = [] if operand is None else list(operand.shape)
    if dim is not None:
        del shape[dim]
    return shape


def _select(operand: Tensor | None, dim: int | None, j: int) -> Tensor | None:
    return operand if operand is None or dim is None else operand.select(dim, j)


def _fold(
    operand: Tensor | None, dim: int | None, has_n: bool, size: int, batch: int | None
) -> Tensor | None:
    """(size, N, ...) as one batch of size·N; operands neither mapped nor batched stay shared."""
    if operand is None or (dim is None and not has_n):
        return operand
    operand = operand.expand(size, *operand.shape) if dim is None else operand.movedim(dim, 0)
    if batch is None:
        return operand
    if not has_n:
        operand = operand.unsqueeze(1).expand(size, batch, *operand.shape[1:])
    return operand.flatten(0, 1)


product = Operator("product", _SCHEMA, 3, 5, _body, _fake, _gradients, _batch)
"""product(first, second, scale, *tables, sizes, op, roles, accumulate, backend)"""
