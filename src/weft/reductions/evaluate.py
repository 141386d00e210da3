"""Formulas in plain torch, on blocks of data that broadcast against each other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weft.reductions.formula import Node, reachable
from weft.reductions.operations import OPERATIONS

__all__ = ["evaluate"]

DIRECT = 8
"""Squared distances of so many components are summed component by component."""


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
    order = reachable(f)
    last = {a: n for n in order for a in n.args}
    found: dict[Node, Tensor] = {}
    for n in order:
        if n.op == "var":
            found[n] = wide[n.data[0]]
        elif n.op == "const":
            found[n] = like.new_full((1,), n.data)
        else:
            args = [found[a] for a in n.args]
            found[n] = _sqdist(*args) if n.op == "sqdist" else OPERATIONS[n.op].value(args, n.data)
            for a in set(n.args):
                if last[a] is n:
                    del found[a]
    return found[f]


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _sqdist(a: Tensor, b: Tensor) -> Tensor:
    """Σ_k (a_k − b_k)², by differences: expanded, far clouds would lose all digits."""
    out = (a[..., :1] - b[..., :1]).square()
    for k in range(1, a.shape[-1]):
        out = out + (a[..., k : k + 1] - b[..., k : k + 1]).square()
    return out
