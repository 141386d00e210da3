"""Formulas at the columns that were found: with these gathered, they vary with i alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchweft.core.operators.operator import constant_when_compiling
from torchweft.reductions.call import Sizes
from torchweft.reductions.engine import formula_keys as keys
from torchweft.reductions.engine import operator
from torchweft.reductions.formula.node import extract, read, substitute, var, variables

__all__ = ["gathered", "values_at"]


def gathered(value: Tensor, index: Tensor) -> Tensor:
    """(B, M, D): rows of the value, (B or 1, N, D), at index, (B, M)."""
    # indexing, since the gradient of a gather adds with atomics on a GPU
    entry = torch.arange(len(index), device=index.device)[:, None]
    return value.expand(len(index), -1, -1)[entry, index]


def values_at(
    text: str,
    tensors: Mapping[int, Tensor],
    index: Tensor,
    how: str,
    chosen: Callable[[Tensor, Tensor], Tensor] = gathered,
) -> Tensor:
    """(B, M, k, D): a formula at the column of each component; at the first where index is −1.

    With the columns gathered, their values vary with i: a sum over one column.

    Args:
        text: of the formula.
        tensors: its variables by number, (B or 1, M or N or 1, D).
        index: (B, M, k, D) columns.
        how: as operators take it.
        chosen: as `Operators.chosen`.
    """
    batch, rows, k, _ = index.shape
    sizes = Sizes(batch, rows * k, 1)
    parts = []
    for component, column in enumerate(index.unbind(-1)):
        key, used, cats = _gathered_key(text, component)
        columns = column.clamp(min=0).reshape(batch, rows * k)
        values = []
        for n, cat in zip(used, cats, strict=True):
            value = tensors[n]
            if cat == 0:
                value = value.repeat_interleave(k, 1)
            values.append(chosen(value, columns) if cat == 1 else value)
        found = operator.sums(values, operator.arguments(key, sizes, how))
        parts.append(found.view(batch, rows, k))
    return torch.stack(parts, -1)


@constant_when_compiling
def _gathered_key(text: str, component: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """A component of the formula with j in the place of i: key, variables and their categories."""
    f = read(text)
    cats = {v.data[0]: v.data[2] for v in variables(f)} or {0: 2}
    of_rows = substitute(f, {v: var(v.data[0], v.dim, 0) for v in variables(f) if v.data[2] == 1})
    key, used = keys.make(str(extract(of_rows, component, 1)))
    return key, used, tuple(cats.get(n, 2) for n in used)
