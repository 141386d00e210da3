"""Formulas in plain torch, on blocks of data that broadcast against each other."""

from __future__ import annotations

from collections.abc import Mapping
from types import BuiltinFunctionType

import torch
from torch import Tensor

from torchweft.reductions.formula.node import PRIMITIVES, Node, reachable

__all__ = ["evaluate", "sqdist"]

COMPONENTS_SUBTRACTED = 8
"""Most components whose differences are computed one by one."""

SQUARES_IN_CHAIN = 8
"""Squares that are added one after the other; more are added by halves."""

SMALL_DISTANCE = 2.0**-24
"""Share of the largest |a|² + |b|² below which an expanded distance lacks digits of float32:
float64 gives it an error of about 16 · 2⁻⁵³ of that sum."""


def evaluate(f: Node, values: Mapping[int, Tensor]) -> Tensor:
    """f at all positions, (..., f.dim).

    Where no factor varies with both i and j, products and distances make no tensor of all pairs
    and components.  The result broadcasts: it lacks the dimensions that f is constant along.

    Args:
        f: the formula.
        values: the variables by index, of one dtype: (..., dim), such as (..., I, 1, dim) for i
            and (..., 1, J, dim) for j.  Values of 16 bits are computed in float32, which is then
            the dtype of the result.
    """
    wide = {index: _wide(value) for index, value in values.items()}
    like = next(iter(wide.values()), torch.zeros(()))
    taped = torch.is_grad_enabled() and any(value.requires_grad for value in wide.values())
    order = reachable(f)
    last = {a: n for n in order for a in n.args}
    found: dict[Node, Tensor] = {}
    free: set[Node] = set()  # values whose memory nothing else refers to
    for n in order:
        if n.op == "var":
            found[n] = wide[n.data[0]]
        elif n.op == "const":
            found[n] = like.new_full((1,), n.data)
        else:
            primitive = PRIMITIVES[n.op]
            args = [found[a] for a in n.args] + ([] if n.data is None else [n.data])
            done = {a for a in n.args if last[a] is n}
            # torch's own functions can write over an argument
            writes = isinstance(primitive.value, BuiltinFunctionType) and not taped
            spare = _spare(n, free & done, found) if writes else None
            found[n] = primitive.value(*args, **({} if spare is None else {"out": spare}))
            free -= done.union(n.args if primitive.view else ())
            free |= set() if primitive.view else {n}
            for a in done:
                del found[a]
    return found[f]


def _spare(n: Node, free: set[Node], found: Mapping[Node, Tensor]) -> Tensor | None:
    """The memory of an argument that is not used again and has the shape of the result."""
    if not free:
        return None
    shape = torch.broadcast_shapes(*(found[a].shape for a in n.args))  # type: ignore[no-untyped-call]
    return next((found[a] for a in n.args if a in free and found[a].shape == shape), None)


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def sqdist(a: Tensor, b: Tensor) -> Tensor:
    """Σ_k (a_k − b_k)² over the last dimension, which remains with length 1.

    Distances keep their digits wherever the points lie.  For (..., I, 1, D) and (..., 1, J, D) in
    float32 on a CPU, they are one matrix product in float64 of centred points, and what is small
    beside |a|² + |b|² is computed from differences.
    """
    if a.dim() > 2 and b.dim() > 2 and b.shape[-2] == a.shape[-3] == 1:
        a, b = b, a  # the same bits in either order: gradients repeat what a sum rounded
    pairs = a.dim() > 2 and b.dim() > 2 and a.shape[-2] == b.shape[-3] == 1
    plain = a.dtype == torch.float32 and a.device.type == "cpu"
    taped = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    wide = a.shape[-1] > COMPONENTS_SUBTRACTED
    if pairs and plain and not taped and wide and a.numel() and b.numel():
        return _expanded(a[..., 0, :], b[..., 0, :, :])[..., None]
    return _direct(a, b, taped)


def _direct(a: Tensor, b: Tensor, taped: bool = False) -> Tensor:
    """By differences, a component at a time: no tensor of all pairs and components."""
    a, b = (t.movedim(-1, 0).contiguous() for t in (a, b))
    return _squares(a, b, taped)[..., None]


def _squares(a: Tensor, b: Tensor, taped: bool) -> Tensor:
    """Σ (a − b)² over the first dimension."""
    if len(a) > SQUARES_IN_CHAIN:
        half = len(a) // 2
        first, second = (_squares(a[k], b[k], taped) for k in (slice(half), slice(half, None)))
        return first + second if taped else first.add_(second)
    if taped:
        steps = zip(a, b, strict=True)
        return sum(((x - y).square() for x, y in steps), start=a.new_zeros(()))
    difference = a[0] - b[0]
    out = difference.square()
    for x, y in zip(a[1:], b[1:], strict=True):
        torch.sub(x, y, out=difference)
        out.addcmul_(difference, difference)
    return out


def _expanded(a: Tensor, b: Tensor) -> Tensor:
    """|a|² + |b|² − 2⟨a, b⟩ of centred points, (..., I, J)."""
    wide_b = b.double()
    centre = wide_b.mean(-2, keepdim=True)
    wide_a, wide_b = a.double() - centre, wide_b - centre
    square_a, square_b = (t.square().sum(-1, keepdim=True) for t in (wide_a, wide_b))
    out = torch.matmul(wide_a, wide_b.transpose(-1, -2))
    out.mul_(-2).add_(square_a).add_(square_b.transpose(-1, -2))
    smallest = SMALL_DISTANCE * float(square_a.max() + square_b.max())
    if not float(out.min()) >= smallest:  # or NaN in any point
        near = out < smallest
        if not smallest < torch.inf or int(near.sum()) * COMPONENTS_SUBTRACTED > near.numel():
            wide = _direct(a[..., None, :].double(), b[..., None, :, :].double())
            return wide[..., 0].to(a.dtype)
        *batch, i, j = near.nonzero(as_tuple=True)
        a, b = (t.expand(*out.shape[:-2], *t.shape[-2:]) for t in (a, b))
        found = (a[(*batch, i)].double() - b[(*batch, j)]).square().sum(-1)
        out[(*batch, i, j)] = found
    return out.to(a.dtype)
