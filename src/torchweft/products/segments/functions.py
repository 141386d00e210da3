"""Rows of a tensor reduced over segments: of edges to nodes, of nodes to graphs.

    z[m] = Σ_{t ∈ segment m} x[t],   and mean, maximum, minimum, softmax, log Σ exp

A segment is given by `index`, in any order, or by `indptr`.  Sums are products (see
docs/families/products.md): one plan of the table serves all of them and their gradients.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.expressions.program import accumulator
from torchweft.core.operators.operands import check_tensors, widened
from torchweft.core.operators.operator import below_transforms
from torchweft.core.private import any_autocast
from torchweft.core.table_copies import copies_of, unreadable
from torchweft.core.tables import TensorCache, rows_of
from torchweft.errors import DeviceError, DTypeError, IndexRangeError, ShapeError
from torchweft.products.segments.operator import (
    extreme,
    mean,
    segment_product,
    segment_sizes,
)
from torchweft.products.segments.torch_path import select

__all__ = [
    "segment_logsumexp",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_softmax",
    "segment_sum",
]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def segment_sum(
    x: Tensor,
    index: Tensor | None = None,
    indptr: Tensor | None = None,
    num_segments: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """z[m] = Σ_{t ∈ segment m} x[t]; 0 where a segment has no rows.

    Args:
        x: (T, …) rows of any shape; float64, float32, bfloat16, float16, or integers.
        index: (T,) the segment of each row, in any order, int32 or int64.
        indptr: (M+1,) instead: segment m holds the rows indptr[m] .. indptr[m+1]-1.
        num_segments: M; max(index) + 1 if left out, which is read from the GPU once.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.

    Returns:
        (M, …) in x's dtype.  Sums are formed in float32 (float64 for float64); those of integers
        wrap around, as torch's.

    Raises:
        WeftError: an input or a table that does not fit.  Values of tables are checked on the CPU
            always, on a GPU under TORCHWEFT_CHECK=1.

    Error: |z − z*| ≤ u|z*| + 4√K·u_acc·Σ|x|, K rows a segment, u the dtype's unit round-off, u_acc
    that of the dtype of sums.  Differentiable to any order; the same bits at every call.

    Cost: x is read and z written once.

    Source: torch_scatter's scatter and segment_csr, without atomics.

    Example:
        >>> import torch
        >>> from torchweft import products
        >>> x, index = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 2])
        >>> products.segment_sum(x, index).tolist()
        [2.0, 0.0, 5.0]
        >>> products.segment_sum(x, indptr=torch.tensor([0, 1, 3])).tolist()
        [1.0, 6.0]
    """
    given = _admitted(x, index, indptr, num_segments, _FLOATS + _INTEGERS, backend)
    return given.shaped(given.sum(given.rows))


def segment_mean(
    x: Tensor,
    index: Tensor | None = None,
    indptr: Tensor | None = None,
    num_segments: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """z[m] = Σ_{t ∈ segment m} x[t] / |segment m|; 0 where a segment has no rows.

    Args:
        x: (T, …) rows of any shape; float64, float32, bfloat16 or float16.
        index: (T,) the segment of each row, in any order, int32 or int64.
        indptr: (M+1,) instead: segment m holds the rows indptr[m] .. indptr[m+1]-1.
        num_segments: M; max(index) + 1 if left out, which is read from the GPU once.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.

    Returns:
        (M, …) in x's dtype.  Sums of 16-bit rows are formed in float32, so that none leaves their
        range.

    Raises:
        WeftError: an input or a table that does not fit.  Values of tables are checked on the CPU
            always, on a GPU under TORCHWEFT_CHECK=1.

    Error: that of `segment_sum`, over the number of rows, and one rounding more.  Differentiable to
    any order; the same bits at every call.

    Cost: that of `segment_sum`, in one launch on a GPU; rows are counted once for a table.

    Example:
        >>> import torch
        >>> from torchweft import products
        >>> products.segment_mean(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 2])).tolist()
        [2.0, 0.0, 2.5]
    """
    given = _admitted(x, index, indptr, num_segments, _FLOATS, backend)
    tables = given.indptr, given.owner, given.num_segments
    return given.shaped(mean(given.rows, given.counts(), *tables, given.backend))


def segment_max(
    x: Tensor,
    index: Tensor | None = None,
    indptr: Tensor | None = None,
    num_segments: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """z[m] = max of x[t] over t in segment m; -inf (the least integer) where it has no rows.

    Args:
        x: (T, …) rows of any shape; float64, float32, bfloat16, float16, or integers.
        index: (T,) the segment of each row, in any order, int32 or int64.
        indptr: (M+1,) instead: segment m holds the rows indptr[m] .. indptr[m+1]-1.
        num_segments: M; max(index) + 1 if left out, which is read from the GPU once.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.

    Returns:
        (M, …) in x's dtype.  NaN is the maximum of a segment that holds one, as in torch.amax.

    Raises:
        WeftError: an input or a table that does not fit.  Values of tables are checked on the CPU
            always, on a GPU under TORCHWEFT_CHECK=1.

    Error: none.  The gradient goes to the first of equal rows, so second derivatives are 0 in x and
    those in the gradient exist.

    Cost: x is read once and z written once; with gradients also the row of each maximum.

    Example:
        >>> import torch
        >>> from torchweft import products
        >>> products.segment_max(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 2])).tolist()
        [2.0, -inf, 4.0]
    """
    given = _admitted(x, index, indptr, num_segments, _FLOATS + _INTEGERS, backend)
    return given.shaped(given.extreme(given.rows, True))


def segment_min(
    x: Tensor,
    index: Tensor | None = None,
    indptr: Tensor | None = None,
    num_segments: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """z[m] = min of x[t] over t in segment m; inf (the greatest integer) where it has no rows.

    Args:
        x: (T, …) rows of any shape; float64, float32, bfloat16, float16, or integers.
        index: (T,) the segment of each row, in any order, int32 or int64.
        indptr: (M+1,) instead: segment m holds the rows indptr[m] .. indptr[m+1]-1.
        num_segments: M; max(index) + 1 if left out, which is read from the GPU once.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.

    Returns:
        (M, …) in x's dtype.  NaN is the minimum of a segment that holds one, as in torch.amin.

    Raises:
        WeftError: an input or a table that does not fit.  Values of tables are checked on the CPU
            always, on a GPU under TORCHWEFT_CHECK=1.

    Error: none.  The gradient goes to the first of equal rows, so second derivatives are 0 in x and
    those in the gradient exist.

    Cost: x is read once and z written once; with gradients also the row of each minimum.

    Example:
        >>> import torch
        >>> from torchweft import products
        >>> products.segment_min(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 2])).tolist()
        [2.0, inf, 1.0]
    """
    given = _admitted(x, index, indptr, num_segments, _FLOATS + _INTEGERS, backend)
    return given.shaped(given.extreme(given.rows, False))


def segment_softmax(
    x: Tensor,
    index: Tensor | None = None,
    indptr: Tensor | None = None,
    num_segments: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """p[t] = exp(x[t]) / Σ_{t' ∈ segment of t} exp(x[t']), for each column by itself.

    Args:
        x: (T, …) rows of any shape; float64, float32, bfloat16 or float16.
        index: (T,) the segment of each row, in any order, int32 or int64.
        indptr: (M+1,) instead: segment m holds the rows indptr[m] .. indptr[m+1]-1,
            from 0 to T.
        num_segments: M; max(index) + 1 if left out, which is read from the GPU once.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.

    Returns:
        (T, …) in x's dtype: the rows of a segment add to 1.  Under autocast, 16 bits give float32,
        as in torch.softmax.

    Raises:
        WeftError: an input or a table that does not fit.  Values of tables are checked on the CPU
            always, on a GPU under TORCHWEFT_CHECK=1.

    Error: at most twice that of the same formula in plain PyTorch.  Computed in float32 (float64
    for float64) after the segment's maximum is subtracted.  Differentiable to any order.

    Cost: four passes over x: maxima, powers, their sums and the quotients.

    Example:
        >>> import torch
        >>> from torchweft import products
        >>> x, index = torch.tensor([0.0, 5.0, 0.0]), torch.tensor([2, 0, 2])
        >>> products.segment_softmax(x, index).tolist()
        [0.5, 1.0, 0.5]
    """
    given = _admitted(_widened(x), index, indptr, num_segments, _FLOATS, backend, covered=True)
    dtype = given.rows.dtype
    rows = given.rows.to(accumulator(dtype))
    powers = (rows - given.spread(given.extreme(rows.detach(), True))).exp()
    return given.divided(powers, given.sum(powers)).to(dtype).reshape(x.shape)


def segment_logsumexp(
    x: Tensor,
    index: Tensor | None = None,
    indptr: Tensor | None = None,
    num_segments: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """z[m] = log Σ_{t ∈ segment m} exp(x[t]); -inf where a segment has no rows.

    Args:
        x: (T, …) rows of any shape; float64, float32, bfloat16 or float16.
        index: (T,) the segment of each row, in any order, int32 or int64.
        indptr: (M+1,) instead: segment m holds the rows indptr[m] .. indptr[m+1]-1,
            from 0 to T.
        num_segments: M; max(index) + 1 if left out, which is read from the GPU once.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.

    Returns:
        (M, …) in x's dtype; under autocast, 16 bits give float32.

    Raises:
        WeftError: an input or a table that does not fit.  Values of tables are checked on the CPU
            always, on a GPU under TORCHWEFT_CHECK=1.

    Error: at most twice that of the same formula in plain PyTorch.  Computed in float32 (float64
    for float64) after the segment's maximum is subtracted.  Differentiable to any order: the
    gradient is `segment_softmax`.

    Cost: three passes over x: maxima, powers and their sums.

    Example:
        >>> import torch
        >>> from torchweft import products
        >>> products.segment_logsumexp(torch.zeros(3), torch.tensor([2, 0, 2])).exp().tolist()
        [1.0, 0.0, 2.0]
    """
    given = _admitted(_widened(x), index, indptr, num_segments, _FLOATS, backend, covered=True)
    dtype = given.rows.dtype
    rows = given.rows.to(accumulator(dtype))
    top = given.extreme(rows.detach(), True)
    top = top.masked_fill(top.isinf(), 0)
    total = given.sum((rows - given.spread(top)).exp())
    empty = total == 0
    logarithm = total.masked_fill(empty, 1).log().masked_fill(empty, -math.inf)
    return given.shaped((logarithm + top).to(dtype))


def segment_extreme(
    x: Tensor,
    index: Tensor | None = None,
    indptr: Tensor | None = None,
    num_segments: int | None = None,
    *,
    largest: bool,
) -> tuple[Tensor, Tensor]:
    """`segment_max` or `segment_min`, and the row of each: (M, …) int64, T where there is none."""
    given = _admitted(x, index, indptr, num_segments, _FLOATS + _INTEGERS, None)
    place = given.places(largest)
    return given.shaped(select(given.rows, place, largest)), given.shaped(place)


class Segments(NamedTuple):
    """Rows (T, C), their segments as private tables, and what is computed of them."""

    rows: Tensor
    indptr: Tensor | None
    owner: Tensor | None  # index
    num_segments: int
    channels: tuple[int, ...]  # of a row, as the caller gave it
    backend: str | None

    def shaped(self, z: Tensor) -> Tensor:
        """(M, C) as (M, …)."""
        return z.reshape(self.num_segments, *self.channels)

    def sum(self, rows: Tensor) -> Tensor:
        """(T, C) → (M, C)."""
        if rows.is_floating_point():
            return self._product(rows, None, "scale", "x_z")
        owner = self.owner
        if owner is None:
            assert self.indptr is not None
            owner = rows_of(self.indptr.contiguous(), rows.shape[0])
        zeros = rows.new_zeros(self.num_segments + 1, rows.shape[1])
        return zeros.index_add(0, owner, rows)[:-1]  # exact, so atomics are repeatable

    def spread(self, z: Tensor) -> Tensor:
        """(M, C) → (T, C): for each row what its segment has."""
        return self._product(z, None, "scale", "z_x")

    def divided(self, rows: Tensor, z: Tensor) -> Tensor:
        """(T, C), (M, C) → (T, C): each row over what its segment has."""
        return self._product(rows, 1 / z, "mul", "xzx")

    def extreme(self, rows: Tensor, largest: bool) -> Tensor:
        """(T, C) → (M, C): maxima or minima."""
        return extreme(rows, self.indptr, self.owner, self.num_segments, largest, self.backend)

    def places(self, largest: bool) -> Tensor:
        """(M, C): the first row of each maximum or minimum; T where there is none."""
        given = self.rows.detach(), self.indptr, self.owner, self.num_segments
        return extreme.run(*given, largest, self.backend)[1]

    def counts(self) -> Tensor:
        """(M, 1) rows of each segment, at least 1, in the dtype of sums."""
        if torch.compiler.is_compiling():
            return self._count()
        key = self.num_segments, self.rows.shape[0], accumulator(self.rows.dtype)
        return _kept.get((self.indptr, self.owner), key, lambda: _counted(self))

    def _count(self) -> Tensor:
        dtype, device = accumulator(self.rows.dtype), self.rows.device
        return self.sum(torch.ones(self.rows.shape[0], 1, dtype=dtype, device=device)).clamp(min=1)

    def _product(self, first: Tensor, second: Tensor | None, op: str, roles: str) -> Tensor:
        sizes = segment_sizes(self.rows.shape[0], self.num_segments)
        tables = self.indptr, self.owner
        return segment_product(first, second, *tables, sizes, op, roles, self.backend)


def _widened(x: Tensor) -> Tensor:
    return widened(x) if any_autocast() else x


_counted = below_transforms(Segments._count)
_kept: TensorCache[Tensor] = TensorCache()
_known: TensorCache[tuple[int, ...]] = TensorCache()


def _admitted(
    x: Tensor,
    index: Tensor | None,
    indptr: Tensor | None,
    num_segments: int | None,
    dtypes: tuple[torch.dtype, ...],
    backend: str | None,
    covered: bool = False,
) -> Segments:
    """The arguments of a call, checked; covered: every row is of a segment."""
    check_tensors(x=x)
    if not x.dim():
        raise ShapeError("x is a number: it must be (T, …) rows. Pass x.unsqueeze(0) for one row.")
    if x.dtype not in dtypes:
        raise DTypeError(
            f"x is {x.dtype}: it must be {', '.join(str(d)[6:] for d in dtypes)}. "
            "Convert it, e.g. x.float()."
        )
    if index is not None and indptr is None:
        _check_table("index", index, x)
        count, table = _segments_of(x, index, num_segments)
    elif indptr is not None and index is None:
        _check_table("indptr", indptr, x)
        count, table = _segments_between(x, indptr, num_segments, covered)
    else:
        what = "index and indptr are both None" if index is None else "index and indptr were given"
        raise ShapeError(f"{what}: one of them says which rows form a segment. Pass one.")
    channels = tuple(x.shape[1:])
    rows = x.reshape(x.shape[0], math.prod(channels))
    bounds, owner = (table, None) if index is None else (None, table)
    return Segments(rows, bounds, owner, count, channels, backend)


def _check_table(name: str, table: Tensor, x: Tensor) -> None:
    check_tensors(**{name: table})
    if table.dtype not in (torch.int64, torch.int32):
        raise DTypeError(
            f"{name} is {table.dtype}: it must be int64 or int32. Convert it: {name}.long()."
        )
    if table.device != x.device:
        raise DeviceError(
            f"{name} is on {table.device} and x on {x.device}: both must be on one device. "
            f"Pass {name}.to({str(x.device)!r})."
        )
    if table.dim() != 1:
        raise ShapeError(
            f"{name} is {tuple(table.shape)}: it must have one dimension. Pass one table for all "
            f"columns; torchweft.compat.torch_scatter takes an index of x's shape."
        )
    if name == "index" and table.shape[0] != x.shape[0]:
        raise ShapeError(
            f"index has {table.shape[0]} entries and x {x.shape[0]} rows: there must be one for "
            "each row. Pass the segment of every row, or indptr."
        )
    if name == "indptr" and not table.shape[0]:
        raise ShapeError(
            "indptr is empty: it must have M+1 bounds, one for no segments. Pass torch.tensor([0])."
        )


def _segments_of(x: Tensor, index: Tensor, num_segments: int | None) -> tuple[int, Tensor]:
    """M, and the private copy of index."""
    (copy,) = copies_of((index,))
    assert copy is not None
    hidden = torch.compiler.is_compiling() or unreadable(copy)
    if hidden or (num_segments is not None and not _checks(x)):
        if num_segments is None:
            raise ShapeError(
                "num_segments is None inside torch.compile, export or a function of "
                "torchweft.capture: the number of rows must not depend on values there. Pass "
                "num_segments."
            )
        return _not_negative(num_segments), copy
    low, high = _known.get((copy,), "range", lambda: _range(copy))
    count = high + 1 if num_segments is None else _not_negative(num_segments)
    if _checks(x) and (low < 0 or high >= count):
        value = low if low < 0 else high
        where = int((copy == value).nonzero()[0, 0])
        raise IndexRangeError(
            f"index[{where}] is {value} but there are {count} segments: it must lie in "
            f"0..{count - 1}. Correct index, or pass a larger num_segments."
        )
    return count, copy


def _segments_between(
    x: Tensor, indptr: Tensor, num_segments: int | None, covered: bool
) -> tuple[int, Tensor]:
    """M, and the private copy of indptr."""
    count, terms = indptr.shape[0] - 1, x.shape[0]
    if num_segments not in (None, count):
        raise ShapeError(
            f"num_segments is {num_segments} but indptr has bounds of {count} segments: they must "
            "agree. Leave num_segments out."
        )
    (copy,) = copies_of((indptr,))
    assert copy is not None
    if torch.compiler.is_compiling() or unreadable(copy) or not _checks(x):
        return count, copy
    first, last, fault = _known.get((copy,), "bounds", lambda: _bounds(copy))
    if fault >= 0 or first < 0 or last > terms or (covered and last - first < terms):
        given = (
            f"decreases at indptr[{fault + 1}]" if fault >= 0 else f"runs from {first} to {last}"
        )
        needed = f"from 0 to {terms}" if covered else f"within 0..{terms}"
        raise IndexRangeError(
            f"indptr {given} and x has {terms} rows: bounds must not decrease and lie {needed}. "
            "Pass the running count of the rows of each segment, or index."
        )
    return count, copy


def _not_negative(num_segments: int) -> int:
    if num_segments < 0:
        raise ShapeError(
            f"num_segments is {num_segments}: it must be 0 or more. Pass the number of segments."
        )
    return num_segments


def _checks(x: Tensor) -> bool:
    """Whether values of tables are checked."""
    return x.device.type == "cpu" or os.environ.get("TORCHWEFT_CHECK") == "1"


def _range(index: Tensor) -> tuple[int, ...]:
    """The least and the largest value; 0 and -1 where there is none."""
    return tuple(int(v) for v in index.aminmax()) if index.numel() else (0, -1)


def _bounds(indptr: Tensor) -> tuple[int, ...]:
    """The first and the last bound, and where they decrease, -1 if nowhere."""
    fault = (indptr.diff() < 0).nonzero()
    return int(indptr[0]), int(indptr[-1]), int(fault[0, 0]) if fault.numel() else -1
