"""Where torch_scatter's tensors lie: an index or indptr of some dimensions, as one table of rows.

Reductions of torchweft.products have one table for rows (T, …).  An index that varies with other
dimensions becomes one table of all rows, or of all numbers, made once for each index.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft import products
from torchweft.core.table_copies import copies_of, mark_constant
from torchweft.core.tables import TensorCache
from torchweft.errors import ShapeError

__all__ = ["Layout", "between", "broadcast", "of_index", "spread"]

_tables: TensorCache[Tensor] = TensorCache()


class Layout(NamedTuple):
    """How (…, T, …) lies in the rows of a reduction, and its result in (…, M, …)."""

    shape: tuple[int, ...]  # of what is reduced
    dim: int
    size: int | None  # M; None: as many as the reduction finds
    kind: str  # "shared": one table for all; "lead": for each of the dimensions before; "each"
    table: Tensor | None  # index
    indptr: Tensor | None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of a reduction behind its rows."""
        number = None if self.indptr is not None else self.size
        if number is not None and self.kind != "shared":
            number *= math.prod(self.shape[: self.dim]) * self.inner
        return {"index": self.table, "indptr": self.indptr, "num_segments": number}

    @property
    def inner(self) -> int:
        """Segments beside each other that belong to one place of the index."""
        return math.prod(self.shape[self.dim + 1 :]) if self.kind == "each" else 1

    def rows(self, src: Tensor) -> Tensor:
        """The rows of a reduction."""
        if self.kind == "shared":
            return src.movedim(self.dim, 0)
        if self.kind == "each":
            return src.reshape(-1)
        return src.reshape(math.prod(self.shape[: self.dim + 1]), *self.shape[self.dim + 1 :])

    def result(self, z: Tensor) -> Tensor:
        """The result of a reduction, (…, M, …)."""
        if self.kind == "shared":
            return z.movedim(0, self.dim)
        assert self.size is not None
        lead, rest = self.shape[: self.dim], self.shape[self.dim + 1 :]
        if self.indptr is None:
            return z.reshape(*lead, self.size, *rest)
        # with what lies between two lists of bounds
        z = torch.cat([z, z.new_zeros(1, *z.shape[1:])])
        return z.reshape(*lead, self.size + 1, *rest).narrow(self.dim, 0, self.size)

    def restored(self, rows: Tensor) -> Tensor:
        """Rows as they were given, (…, T, …)."""
        return rows.movedim(0, self.dim) if self.kind == "shared" else rows.reshape(self.shape)

    def places(self, place: Tensor) -> Tensor:
        """Numbers of rows as places along the dimension; T where there is none."""
        count = self.shape[self.dim]
        total = math.prod(self.shape[: self.dim + 1]) if self.kind != "shared" else count
        none = place == total * self.inner
        return self.result((place // self.inner % max(count, 1)).masked_fill(none, count))


def of_index(shape: tuple[int, ...], index: Tensor, dim: int, size: int | None) -> Layout:
    """The layout of rows in a tensor of this shape that an index adds to `size` places along dim.

    Raises:
        ShapeError: the index does not fit.
    """
    dim %= max(len(shape), 1)
    full = broadcast(index, shape, dim)
    before, after = range(dim), range(dim + 1, len(shape))
    shared = _is_shared(full, after)
    if shared and _is_shared(full, before):
        table = index.reshape(-1)[: shape[dim]] if 0 in shape else _first(full, (*before, *after))
        return Layout(shape, dim, size, "shared", table, None)
    if size is None:
        size = int(index.max()) + 1 if index.numel() else 0
    (copy,) = copies_of((_first(full, tuple(after)) if shared and 0 not in shape else full,))
    assert copy is not None
    table = _tables.get((copy,), (shape, dim, size), lambda: _joined(copy, dim, size))
    return Layout(shape, dim, size, "lead" if shared else "each", table, None)


def _first(full: Tensor, dims: tuple[int, ...]) -> Tensor:
    """What does not vary with some dimensions, without them."""
    for d in reversed(dims):
        full = full.select(d, 0)
    return full


def broadcast(index: Tensor, shape: tuple[int, ...], dim: int) -> Tensor:
    """The index as a view of this shape; one dimension is that of dim."""
    if index.dim() == 1:
        index = index.reshape(*(1,) * dim, -1)
    try:
        return index.reshape(*index.shape, *(1,) * (len(shape) - index.dim())).expand(shape)
    except RuntimeError:
        raise ShapeError(
            f"index is {tuple(index.shape)} and src {shape}: the index must have one dimension, of "
            f"src's length in dim {dim}, or broadcast to src. Pass such an index."
        ) from None


def _is_shared(full: Tensor, dims: range) -> bool:
    """Whether the values are the same along these dimensions."""
    return all(full.stride(d) == 0 or full.shape[d] == 1 for d in dims)


def _joined(index: Tensor, dim: int, size: int) -> Tensor:
    """One table for an index (…, T) or (…, T, …): each list of segments after the other."""
    lead, rest = math.prod(index.shape[:dim]), math.prod(index.shape[dim + 1 :])
    index = index.reshape(lead, index.shape[dim], rest)
    outer = torch.arange(lead, device=index.device).reshape(-1, 1, 1)
    inner = torch.arange(rest, device=index.device)
    table = ((outer * size + index) * rest + inner).reshape(-1)
    mark_constant(table)
    return table


def between(src: Tensor, indptr: Tensor) -> Layout:
    """The layout of rows between the bounds of an indptr (…, M+1), along its last dimension."""
    if not indptr.numel():
        indptr = indptr.new_zeros(*indptr.shape[:-1], 1)
    dim, size = indptr.dim() - 1, indptr.shape[-1] - 1
    if indptr.dim() > src.dim():
        raise ShapeError(
            f"indptr is {tuple(indptr.shape)} and src {tuple(src.shape)}: it must have no more "
            "dimensions than src. Pass bounds along one of src's dimensions."
        )
    shape = tuple(src.shape)
    try:
        full = indptr.expand(*shape[:dim], size + 1)
    except RuntimeError:
        raise ShapeError(
            f"indptr is {tuple(indptr.shape)} and src {shape}: its dimensions before the last must "
            "be src's, or 1. Pass such bounds."
        ) from None
    if _is_shared(full, range(dim)):
        return Layout(shape, dim, size, "shared", None, indptr.reshape(-1)[: size + 1])
    (copy,) = copies_of((full,))
    assert copy is not None
    table = _tables.get((copy,), shape, lambda: _after_each_other(copy, shape[dim]))
    return Layout(shape, dim, size, "lead", None, table)


def _after_each_other(indptr: Tensor, count: int) -> Tensor:
    bounds = indptr.reshape(-1, indptr.shape[-1])
    offsets = torch.arange(len(bounds), device=indptr.device).unsqueeze(1) * count
    table = (bounds + offsets).reshape(-1)
    mark_constant(table)
    return table


def spread(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index[t]] for each t; its gradient is a sum over segments, the same bits every time."""
    if not rows.is_floating_point():
        return rows.index_select(0, index)
    flat = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
    taken = products.sparse_scale(flat, products.SparseScaleInfo(None, index))
    return taken.reshape(index.shape[0], *rows.shape[1:])
