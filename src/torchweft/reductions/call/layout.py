"""How the tensors of a call lie: sizes, and each variable as (B or 1, M or N or 1, D)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.errors import DeviceError, DTypeError, ShapeError
from torchweft.reductions.call.options import Sizes
from torchweft.reductions.call.signature import Signature

__all__ = ["Layout", "laid_out"]


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
