"""The registered ops `torchweft::segment_extreme` and `torchweft::segment_mean`.

Extremes are maxima or minima of segments, and their places:

    value[m,c] = max or min of x[t,c] over t in segment m;  place[m,c] = the first such t

A segment without rows has what `fill_of` says, and the place T.  NaN is more than every number, and
less, as for torch.amax and torch.amin.  The gradient goes to the place.
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
from torchweft.core.operators.operator import FusedOperator
from torchweft.core.tables import Plan, rows_of
from torchweft.products.infos import Sizes, product_plan
from torchweft.products.operator import product
from torchweft.products.segments.torch_path import extreme_torch, places, select

__all__ = ["extreme", "mean", "segment_product", "segment_sizes"]

_SCHEMA = "Tensor x, Tensor? indptr, Tensor? index, SymInt num_segments, bool largest, str? backend"

Body = Callable[[Tensor, Plan, bool, bool], list[Tensor]]


def segment_sizes(num_rows: int, num_segments: int) -> Sizes:
    """The sizes of a sum over segments, whose rows are its terms."""
    return Sizes(num_rows, 0, num_segments, num_rows, num_rows)


def segment_product(
    first: Tensor,
    second: Tensor | None,
    indptr: Tensor | None,
    index: Tensor | None,
    sizes: Sizes,
    op: str,
    roles: str,
    backend: str | None,
) -> Tensor:
    """A product whose terms are rows of segments."""
    # torch.compile needs a list; a tuple is hashable
    every = list(sizes) if torch.compiler.is_compiling() else sizes
    tables = (None, None, indptr, None, index)
    return product(first, second, None, *tables, every, op, roles, False, backend)


@functools.cache
def _body(name: str) -> Body:
    """The body of a backend, which is imported when it first serves."""
    module = "launch" if name == "triton" else "numba_path"
    body: Body = getattr(
        importlib.import_module(f"torchweft.products.segments.{module}"), f"extreme_{name}"
    )
    return body


def _forward(
    x: Tensor,
    indptr: Tensor | None,
    index: Tensor | None,
    num_segments: int,
    largest: bool,
    backend: str | None,
    *,
    places: bool = True,
) -> list[Tensor]:
    name = choose(backend, x.device.type)
    if name == "torch":
        found = extreme_torch(x, _rows(x, indptr, index), num_segments, largest)
    else:
        sizes = segment_sizes(x.shape[0], num_segments)
        plan = product_plan((None, None, indptr, None, index), sizes, x.device)
        found = _body(name)(x, plan, largest, places)
    if recording():
        tensors = [t for t in (x, indptr, index, *found) if t is not None]
        record_cost(sum(t.nbytes for t in tensors), 2 * x.numel())
    return found


def _values(*args: Any) -> Tensor:
    return _forward(*args, places=False)[0]


def _rows(x: Tensor, indptr: Tensor | None, index: Tensor | None) -> Tensor:
    """The segment of each row of x; the number of segments for a row of none."""
    if index is not None:
        return index.long()
    assert indptr is not None
    return rows_of(indptr.long().contiguous(), x.shape[0])


def _composition(
    x: Tensor,
    indptr: Tensor | None,
    index: Tensor | None,
    num_segments: int,
    largest: bool,
    backend: str | None,
) -> Tensor:
    rows = _rows(x, indptr, index)
    return select(x, places(x.detach(), rows, num_segments, largest), largest)


def _backward(
    args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    x, (place,) = args[0], saved
    # rows of places differ within a column, but for T
    given = grad.new_zeros(x.shape[0] + 1, x.shape[1]).scatter_(0, place, grad)
    return given[:-1], None, None


def _fake(x: Tensor, indptr: Any, index: Any, num_segments: int, *rest: Any) -> list[Tensor]:
    values = x.new_empty(num_segments, x.shape[1])
    return [values, torch.empty_like(values, dtype=torch.int64)]


extreme = FusedOperator(
    "segment_extreme", _SCHEMA, 3, _forward, _backward, _fake, _composition, alone=_values
)
"""extreme(x, indptr, index, num_segments, largest, backend): the values."""


_MEAN = "Tensor x, Tensor counts, Tensor? indptr, Tensor? index, SymInt num_segments, str? backend"


def _mean(
    x: Tensor,
    counts: Tensor,
    indptr: Tensor | None,
    index: Tensor | None,
    num_segments: int,
    backend: str | None,
) -> list[Tensor]:
    if choose(backend, x.device.type) != "triton":
        return [_mean_composition(x, counts, indptr, index, num_segments, backend)]
    from torchweft.products.launch import mean as mean_triton  # triton need not be installed

    sizes = segment_sizes(x.shape[0], num_segments)
    found = mean_triton(x, product_plan((None, None, indptr, None, index), sizes, x.device), counts)
    if recording():
        tensors = [t for t in (x, indptr, index, found) if t is not None]
        record_cost(sum(t.nbytes for t in tensors), x.numel())
    return [found]


def _mean_composition(
    x: Tensor,
    counts: Tensor,
    indptr: Tensor | None,
    index: Tensor | None,
    num_segments: int,
    backend: str | None,
) -> Tensor:
    rows = x.to(counts.dtype)  # no sum leaves the range of 16 bits
    sizes = segment_sizes(x.shape[0], num_segments)
    total = segment_product(rows, None, indptr, index, sizes, "scale", "x_z", backend)
    return (total / counts).to(x.dtype)


def _mean_backward(
    args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    x, counts, indptr, index, num_segments, backend = args
    each, sizes = grad / counts, segment_sizes(x.shape[0], num_segments)
    rows = by_counts = None
    if needed[0]:
        given = each.to(x.dtype), None, indptr, index
        rows = segment_product(*given, sizes, "scale", "z_x", backend)
    if needed[1]:
        mean = _mean_composition(x, counts, indptr, index, num_segments, backend)
        by_counts = -(each * mean).sum(1, keepdim=True)
    return rows, by_counts, None, None


def _mean_fake(
    x: Tensor, counts: Tensor, indptr: Any, index: Any, num_segments: int, *rest: Any
) -> list[Tensor]:
    return [x.new_empty(num_segments, x.shape[1])]


mean = FusedOperator("segment_mean", _MEAN, 4, _mean, _mean_backward, _mean_fake, _mean_composition)
"""mean(x, counts, indptr, index, num_segments, backend); counts: (M, 1), at least 1."""
