"""Formulas in plain torch, on blocks of data that broadcast against each other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchweft.reductions.formula.node import PRIMITIVES, Node, reachable

__all__ = ["evaluate"]


def evaluate(f: Node, values: Mapping[int, Tensor]) -> Tensor:
    """f at all positions, (..., f.dim).

    Where no factor varies with both i and j, products and distances make no tensor of all pairs
    and components.  The result broadcasts: it lacks the dimensions that f is constant along.

    Args:
        f: the formula.
        values: the variables by index, of one dtype: (..., dim), such as (..., I, 1, dim) for i
            and (..., 1, J, dim) for j.  Values of 16 bits are computed in float32, which the
            result has then.
    """
    wide = {index: _wide(value) for index, value in values.items()}
    like = next(iter(wide.values()), torch.zeros(()))
    taped = torch.is_grad_enabled() and any(value.requires_grad for value in wide.values())
    order = reachable(f)
    last = {a: n for n in order for a in n.args}
    found: dict[Node, Tensor] = {}
    free: set[Node] = set()  # whose memory nothing else refers to
    for n in order:
        if n.op == "var":
            found[n] = wide[n.data[0]]
        elif n.op == "const":
            found[n] = like.new_full((1,), n.data)
        else:
            primitive = PRIMITIVES[n.op]
            args = [found[a] for a in n.args]
            done = {a for a in n.args if last[a] is n}
            spare = None if taped or primitive.into is None else _spare(n, free & done, found)
            if primitive.into is not None and spare is not None:
                found[n] = primitive.into(*args, out=spare)
            else:
                data = () if n.data is None else (n.data,)
                found[n] = primitive.value(*args, *data)
            free -= done.union(n.args if primitive.view else ())
            free |= {n} if primitive.pointwise or primitive.fresh else set()
            for a in done:
                del found[a]
    return found[f]


def _spare(n: Node, free: set[Node], found: Mapping[Node, Tensor]) -> Tensor | None:
    """The memory of an argument that is not used again, if the result fits it."""
    if not free:
        return None
    shape = torch.broadcast_shapes(*(found[a].shape for a in n.args))  # type: ignore[no-untyped-call]
    return next((found[a] for a in n.args if a in free and found[a].shape == shape), None)


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
