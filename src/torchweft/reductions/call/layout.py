"""Tensors of a call: their signature, options of a reduction, and how variables lie in a batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchweft.core.operators.operator import compiling, watched
from torchweft.errors import DeviceError, DTypeError, ShapeError

__all__ = [
    "KEPT",
    "Blocks",
    "Kind",
    "Layout",
    "Options",
    "Signature",
    "Sizes",
    "kept",
    "laid_out",
    "signature",
]


class Sizes(NamedTuple):
    """B entries of a batch, M rows of the result, N columns that are reduced over."""

    batch: int
    rows: int
    columns: int


class Blocks(NamedTuple):
    """Which pairs there are: blocks of rows, each with its intervals of columns.

    Row block c is starts[c] ≤ i < ends[c]; it reduces over the intervals of numbers indptr[c] to
    indptr[c + 1]; interval q is j_starts[q] ≤ j < j_ends[q].  All are int64.  Rows of no block have
    no pairs; a column that two intervals of a block hold counts twice.
    """

    starts: Tensor
    ends: Tensor
    indptr: Tensor
    j_starts: Tensor
    j_ends: Tensor


class Options(NamedTuple):
    """How numbers are computed.

    Args:
        precision: of products on tensor cores, "ieee", "tf32x3", "tf32" or "bf16"; None takes
            tensor cores only where a bound shows the error of float32.
        accumulate: "auto", "kahan" or "float64".
    """

    precision: str | None = None
    accumulate: str = "auto"


F = TypeVar("F", bound=Callable[..., Any])

KEPT = 4096
"""Answers that each function keeps."""

Kind = tuple[torch.Size, torch.dtype, torch.device]
"""Of a tensor."""

Signature = tuple[Kind, ...]


def signature(tensors: Sequence[Tensor]) -> Signature:
    """The kind of each tensor."""
    return tuple([(t.shape, t.dtype, t.device) for t in tensors])


def kept(function: F) -> F:
    """Keep what a function says of signatures.

    Not where sizes may be symbols: while torch traces, and under its dispatch modes.
    """
    answers = functools.lru_cache(KEPT)(function)

    @functools.wraps(function)
    def ask(*given: Any) -> Any:
        return function(*given) if compiling() or watched() else answers(*given)

    return ask  # type: ignore[return-value]


class _View(NamedTuple):
    """One variable with one batch dimension.

    Args:
        number: of the variable.
        broadcast: its shape with rows, and with all batch dimensions; None if it needs no copies.
        shape: (B or 1, M or N or 1, D); None if a dimension in front makes it so.
    """

    number: int
    broadcast: tuple[Sequence[int], Sequence[int]] | None
    shape: tuple[int, int, int] | None


class Layout(NamedTuple):
    """What follows from the shapes of a call.

    Args:
        sizes: B entries of M × N pairs.
        batch: the dimensions that B stands for.
        views: how each variable is seen.
    """

    sizes: Sizes
    batch: tuple[int, ...]
    views: tuple[_View, ...]

    def seen(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """The variables with one batch dimension, by number."""
        found = {}
        for number, broadcast, shape in self.views:
            t = tensors[number]
            if broadcast is not None:
                t = t.reshape(broadcast[0]).expand(broadcast[1])
            found[number] = t[None] if shape is None else t.reshape(shape)
        return found


def laid_out(kind: str, cats: Sequence[tuple[int, int]], given: Signature) -> Layout:
    """The layout of tensors that are (*batch, M, D), (*batch, N, D) or (*batch, D) by category.

    Args:
        kind: the reduction, which errors name.
        cats: (number, category) of the variables.
        given: all tensors, by number.
    """
    _require_alike(kind, given)
    # (*batch, rows, D), a parameter with one row
    shapes = {n: (*s[:-1], 1, s[-1]) if cat == 2 else s for n, cat in cats for s in [given[n][0]]}
    leading = [shape[:-2] for shape in shapes.values()]
    batch: tuple[int, ...] = ()
    if any(leading):  # torch's way to broadcast shapes is slow
        batch = tuple(torch.broadcast_shapes(*leading))  # type: ignore[no-untyped-call]
    count = math.prod(batch)
    lengths: dict[int, int] = {}
    for n, cat in cats:
        length = shapes[n][-2]
        if cat != 2 and lengths.setdefault(cat, length) != length:
            raise ShapeError(
                f"variable {n} has {length} {'ij'[cat]} entries, an earlier one "
                f"{lengths[cat]}: variables of one category must have as many. Check which of "
                "them are Vi and which are Vj."
            )
    views = tuple([_view(n, given[n][0], shapes[n], batch, count) for n in shapes])
    return Layout(Sizes(count, lengths.get(0, 1), lengths.get(1, 1)), batch, views)


def _view(
    n: int, own: Sequence[int], shape: Sequence[int], batch: tuple[int, ...], count: int
) -> _View:
    *leading, rows, dim = shape
    if count and all(size == 1 for size in leading):
        return _View(n, None, (1, rows, dim) if len(own) != 2 or leading else None)
    return _View(n, (shape, (*batch, rows, dim)), (count, rows, dim))


def _require_alike(kind: str, given: Signature) -> None:
    _, dtype, device = given[0]
    for n, (_, own, where) in enumerate(given):
        if not own.is_floating_point or own != dtype:
            raise DTypeError(
                f"{kind} is given variable 0 of {dtype} and variable {n} of {own}: all must be of "
                f"one real floating type. Convert them with .to({dtype})."
            )
        if where != device:
            raise DeviceError(
                f"{kind} is given variable 0 on {device} and variable {n} on {where}: all must be "
                f"on one device. Move them with .to({str(device)!r})."
            )
