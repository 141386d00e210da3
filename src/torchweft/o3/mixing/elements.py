"""Rows of several elements, each with its own weights: their order, and products by torch.

z[b, n, m] = Σ_paths factor Σ_u t[b, u, m] W[element[b], u, n]
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.operators.operator import compiling, unwatched
from torchweft.core.operators.transforms import below_transforms
from torchweft.core.tables.segments import indptr_of, sort_rows
from torchweft.core.tables.tensor_cache import TensorCache
from torchweft.errors import IndexRangeError
from torchweft.o3.mixing.blocks import Block, Mixing

__all__ = ["ElementRows", "by_torch", "rows_of_elements"]


class ElementRows(NamedTuple):
    """Rows sorted by kind: those of kind k are order[starts[k]] .. order[starts[k + 1] - 1].

    Both int32; rows of a kind keep their order.
    """

    order: Tensor  # (rows,)
    starts: Tensor  # (kinds + 1,)


_kept: TensorCache[ElementRows] = TensorCache()


def rows_of_elements(kind: Tensor, count: int) -> ElementRows:
    """The rows of this very tensor (rows,) in its present state, sorted once.

    Raises:
        IndexRangeError: a kind is not in 0..count - 1; on a GPU that is looked at under
            TORCHWEFT_CHECK=1.
    """
    return _sorted(kind, count) if compiling() else _remembered(kind, count)


@below_transforms
def _remembered(kind: Tensor, count: int) -> ElementRows:
    if not unwatched(kind):
        return _sorted(kind, count)
    return _kept.get((kind,), count, lambda: _built(kind, count))


def _built(kind: Tensor, count: int) -> ElementRows:
    if kind.device.type == "cpu" or os.environ.get("TORCHWEFT_CHECK") == "1":
        wrong = ((kind < 0) | (kind >= count)).nonzero().flatten()
        if wrong.numel():
            row = int(wrong[0])
            raise IndexRangeError(
                f"element[{row}] is {int(kind[row])} but there are weights of {count}: every value "
                f"must lie in 0..{count - 1}. Correct element, or build the module with more "
                "num_elements."
            )
    with torch.inference_mode(False):  # autograd keeps tables, which may be made in evaluation
        return _sorted(kind, count)


def _sorted(kind: Tensor, count: int) -> ElementRows:
    order = sort_rows(kind)
    return ElementRows(order.int(), indptr_of(kind.index_select(0, order), count).int())


def by_torch(mixing: Mixing, result: str, a: Tensor, b: Tensor, kinds: ElementRows) -> Tensor:
    """The result z of (t, w), t of (z, w) or w (kinds, width) of (t, z), kind after kind."""
    starts = kinds.starts.tolist()
    rows, count = a.shape[0], len(starts) - 1
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    out = a.new_zeros(count if result == "w" else rows, mixing.width(result))
    for kind, (begin, end) in enumerate(itertools.pairwise(starts)):
        if begin < end:
            own = kinds.order[begin:end].long()
            first = a.index_select(0, own)
            if result == "w":
                _outer(mixing, first, b.index_select(0, own), out[kind])
            else:
                out.index_copy_(0, own, _product(mixing, result, first, b[kind]))
    return out


def _product(mixing: Mixing, result: str, a: Tensor, weight: Tensor) -> Tensor:
    out = a.new_zeros(a.shape[0], mixing.width(result))
    for t, z, matrix, factor in _matrices(mixing, weight):
        if result == "z":
            _parts(out, z).add_(_parts(a, t) @ matrix, alpha=factor)
        else:
            _parts(out, t).add_(_parts(a, z) @ matrix.T, alpha=factor)
    return out


def _outer(mixing: Mixing, a: Tensor, b: Tensor, weight: Tensor) -> None:
    for t, z, matrix, factor in _matrices(mixing, weight):
        left, right = (_parts(x, block).flatten(0, 1) for x, block in ((a, t), (b, z)))
        torch.mul(left.T @ right, factor, out=matrix)


def _matrices(mixing: Mixing, weight: Tensor) -> Iterator[tuple[Block, Block, Tensor, float]]:
    """Each path's blocks, its matrix (copies of t, copies of z) as a view, and its factor."""
    for path in mixing.paths:
        t, z = mixing.t[path.t], mixing.z[path.z]
        matrix = weight[path.weight : path.weight + t.copies * z.copies]
        yield t, z, matrix.view(t.copies, z.copies), path.factor


def _parts(rows: Tensor, block: Block) -> Tensor:
    """(rows, components, copies), a view."""
    shape = (rows.shape[0], block.components, block.copies)
    steps = (rows.shape[1], block.step, block.copy_step)
    return rows.as_strided(shape, steps, rows.storage_offset() + block.offset)
